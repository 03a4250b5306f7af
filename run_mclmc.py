"""Microcanonical Langevin Monte Carlo: cheap chains with an estimate of their bias, or exact ones.

python run_mclmc.py                                        embedded toy regression, four chains
python run_mclmc.py --adjusted                             with a Metropolis test, and no bias
python run_mclmc.py --dataset_name=boston_0 --data_dir=path/to/data --likelihood=gaussian
python run_mclmc.py --init_checkpoint=runs/sgd/my_ensemble  one chain from each member
"""

from collections.abc import Sequence

from haiku_posteriors.core import mclmc
from haiku_posteriors.core.judging.bias import BiasReport
from haiku_posteriors.utils import chain_runs, cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.logging_utils import Ticker
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import bias
from haiku_posteriors.utils.train_utils import RunResult

FLAGS = (
    *cmd_args_utils.CHAINS,
    Flag("adjusted", "bool", False, "Metropolis test after every trajectory."),
    Flag(
        "energy_variance",
        "float",
        2e-3,
        "Squared energy error per step and dimension that unadjusted steps aim at.",
        above=0,
    ),
    Flag("target_accept", "float", 0.8, "Acceptance that adjusted steps aim at.", above=0, below=1),
    Flag(
        "bias_iterations",
        "integer",
        50,
        "Adjusted transitions from some of the unadjusted draws, to estimate their bias; 0 for no "
        "estimate.",
        lower_bound=0,
    ),
)
GROUPS = {**cmd_args_utils.PROBLEM, "MCLMC": FLAGS}


def run(settings: Settings) -> None:
    """Runs the chains, judges them and their bias, and leaves the run in its folder."""
    task = tasks.load_task("mclmc", settings)
    settings, ticker = task.settings, Ticker()
    limits = {
        "trajectory_length": chain_runs.trajectory_length(task),
        "max_num_leapfrog_steps": settings.max_num_leapfrog_steps,
    }
    method = mclmc.mclmc(
        task.log_joint,
        adjusted=settings.adjusted,
        energy_variance=settings.energy_variance,
        target_accept=settings.target_accept,
        step_size=settings.step_size,
        num_burn_in=settings.num_burn_in_iterations,
        progress=ticker,
        **limits,
    )

    def estimate_bias(result: RunResult) -> BiasReport:
        return bias.estimate(
            task.log_joint,
            task.dataset,
            result,
            seed=settings.seed,
            num_burn_in=settings.num_burn_in_iterations,
            num_iterations=settings.bias_iterations,
            max_seconds=chain_runs.seconds_left(task, result),
            **limits,
        )

    chain_runs.run_chains(
        task, method, ticker, settings.adjusted, None if settings.adjusted else estimate_bias
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
