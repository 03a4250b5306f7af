"""Full-batch Hamiltonian Monte Carlo: the reference posterior.

python run_hmc.py                                        embedded toy regression, four chains
python run_hmc.py --dataset_name=yacht_0 --data_dir=path/to/data
python run_hmc.py --warm_start_epochs=0                  chains start from the prior
python run_hmc.py --init_checkpoint=runs/sgd/my_ensemble  one chain from each member
"""

import functools
from collections.abc import Sequence

from haiku_posteriors.core import collapse, hmc
from haiku_posteriors.utils import cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.logging_utils import Ticker
from haiku_posteriors.utils.report import chain_diagnostics
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import warm_start

FLAGS = (
    Flag("step_size", "float", None, "Leapfrog step size.", "adapted in burn-in"),
    Flag(
        "trajectory_len",
        "float",
        None,
        "Trajectory length.",
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
    Flag("max_num_leapfrog_steps", "integer", 10_000, "Maximum leapfrog steps per trajectory."),
    Flag("no_mh", "bool", False, "Accept every proposal that does not diverge."),
    Flag("num_chains", "integer", 4, "Number of chains.", lower_bound=1),
    Flag("target_accept", "float", 0.9, "Acceptance that the adapted step size aims at."),
    Flag(
        "adapt_mass_matrix",
        "bool",
        None,
        "Adapt a diagonal mass matrix in burn-in.",
        "where the step size is adapted in a burn-in of 40 or more",
    ),
    Flag(
        "trajectory_jitter",
        "float",
        None,
        "Trajectory lengths vary by up to this fraction.",
        "0.5; 0 with a given step_size",
    ),
    Flag(
        "collapse_output",
        "bool",
        False,
        "Integrate out the output layer and redraw it at each draw; for one Gaussian noise.",
    ),
    Flag("thinning", "integer", 1, "Keep every k-th draw.", lower_bound=1),
    Flag("eval_freq", "integer", 50, "Iterations between evaluations.", lower_bound=1),
    Flag("save_freq", "integer", 50, "Iterations between checkpoints.", lower_bound=1),
)
GROUPS = {**cmd_args_utils.PROBLEM, "HMC": FLAGS}


def run(settings: Settings) -> None:
    """Runs the chains, judges them, and leaves the run in its folder."""
    task = tasks.load_task("hmc", settings)
    settings, log_joint = task.settings, task.log_joint
    starts = warm_start.given_starts(task)
    burn_in, thinning = settings.num_burn_in_iterations, settings.thinning
    length = settings.trajectory_len
    length = hmc.default_length(log_joint) if length is None else length
    rules = chain_diagnostics.ChainRules(burn_in, length)
    ticker = Ticker()
    build = functools.partial(hmc.hmc, log_joint)
    if settings.collapse_output:
        build = functools.partial(collapse.collapsed_hmc, log_joint, task.dataset.x_train)
    method = build(
        step_size=settings.step_size,
        trajectory_length=length,
        num_burn_in=burn_in,
        target_accept=settings.target_accept,
        adapt_mass_matrix=settings.adapt_mass_matrix,
        trajectory_jitter=settings.trajectory_jitter,
        max_num_leapfrog_steps=settings.max_num_leapfrog_steps,
        metropolis=not settings.no_mh,
        progress=ticker,
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
        judge=lambda directory, result: chain_diagnostics.report_chains(
            directory, result, rules, remarks=warm_start.notes(settings, starts)
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
