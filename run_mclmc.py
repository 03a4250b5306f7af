"""Microcanonical Langevin Monte Carlo: cheap chains with an estimate of their bias, or exact ones.

python run_mclmc.py                                        embedded toy regression, four chains
python run_mclmc.py --adjusted                             with a Metropolis test, and no bias
python run_mclmc.py --dataset_name=boston_0 --data_dir=path/to/data --likelihood=gaussian
python run_mclmc.py --init_checkpoint=runs/sgd/my_ensemble  one chain from each member
"""

import pathlib
from collections.abc import Sequence

from haiku_posteriors.core import hmc, mclmc
from haiku_posteriors.utils import cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.logging_utils import Ticker
from haiku_posteriors.utils.report import chain_diagnostics
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import bias, warm_start
from haiku_posteriors.utils.train_utils import RunResult

FLAGS = (
    Flag("adjusted", "bool", False, "Metropolis test after every trajectory."),
    Flag(
        "energy_variance",
        "float",
        5e-4,
        "Squared energy error per step and dimension that unadjusted steps aim at.",
    ),
    Flag("target_accept", "float", 0.8, "Acceptance that adjusted steps aim at."),
    Flag("step_size", "float", None, "Leapfrog step size.", "adapted in burn-in"),
    Flag(
        "trajectory_len",
        "float",
        None,
        "Length of a transition, and after which a direction is forgotten.",
        "pi/2 prior standard deviations",
    ),
    cmd_args_utils.WARM_START,
    *cmd_args_utils.NUM_ITERATIONS,
    Flag(
        "num_burn_in_iterations",
        "integer",
        None,
        "Transitions that are not kept.",
        "200 or half of num_iterations; none with a given step_size",
        lower_bound=0,
    ),
    Flag("max_num_leapfrog_steps", "integer", 10_000, "Maximum leapfrog steps per transition."),
    Flag("num_chains", "integer", 4, "Number of chains.", lower_bound=1),
    Flag("thinning", "integer", 1, "Keep every k-th draw.", lower_bound=1),
    Flag(
        "bias_iterations",
        "integer",
        50,
        "Adjusted transitions from some of the unadjusted draws, to estimate their bias; 0 for no "
        "estimate.",
        lower_bound=0,
    ),
    Flag("eval_freq", "integer", 50, "Iterations between evaluations.", lower_bound=1),
    Flag("save_freq", "integer", 50, "Iterations between checkpoints.", lower_bound=1),
)
GROUPS = {**cmd_args_utils.PROBLEM, "MCLMC": FLAGS}


def run(settings: Settings) -> None:
    """Runs the chains, judges them and their bias, and leaves the run in its folder."""
    task = tasks.load_task("mclmc", settings)
    settings, log_joint = task.settings, task.log_joint
    starts = warm_start.given_starts(task)
    burn_in, thinning = settings.num_burn_in_iterations, settings.thinning
    length = settings.trajectory_len
    length = hmc.default_length(log_joint) if length is None else length
    limits = {
        "trajectory_length": length,
        "max_num_leapfrog_steps": settings.max_num_leapfrog_steps,
    }
    rules = chain_diagnostics.ChainRules(burn_in, length, settings.adjusted)
    ticker = Ticker()
    method = mclmc.mclmc(
        log_joint,
        adjusted=settings.adjusted,
        energy_variance=settings.energy_variance,
        target_accept=settings.target_accept,
        step_size=settings.step_size,
        num_burn_in=burn_in,
        progress=ticker,
        **limits,
    )

    def judge(directory: pathlib.Path, result: RunResult) -> None:
        found = None
        if not settings.adjusted:
            found = bias.estimate(
                log_joint,
                task.dataset,
                result,
                seed=settings.seed,
                num_burn_in=burn_in,
                num_iterations=settings.bias_iterations,
                **limits,
            )
        chain_diagnostics.report_chains(
            directory, result, rules, found, warm_start.notes(settings, starts)
        )

    directory = tasks.open_folder(task)
    starts = warm_start.train_starts(task, directory, starts)
    tasks.execute(
        task,
        directory,
        method,
        num_chains=settings.num_chains,
        num_steps=settings.num_iterations,
        initial_params=starts,
        collects=lambda done: done > burn_in and (done - burn_in) % thinning == 0,
        keep_history=True,
        enough=rules.enough() if settings.until_converged else None,
        ticker=ticker,
        unit="iteration",
        judge=judge,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
