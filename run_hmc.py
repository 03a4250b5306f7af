"""Full-batch Hamiltonian Monte Carlo: the reference posterior.

python run_hmc.py                                        embedded toy regression, four chains
python run_hmc.py --dataset_name=yacht_0 --data_dir=path/to/data
python run_hmc.py --warm_start_epochs=0                  chains start from the prior
python run_hmc.py --init_checkpoint=runs/sgd/my_ensemble  one chain from each member
"""

import functools
from collections.abc import Sequence

from haiku_posteriors.core import collapse, hmc
from haiku_posteriors.utils import chain_runs, cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.logging_utils import Ticker
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    *cmd_args_utils.CHAINS,
    Flag("no_mh", "bool", False, "Accept every proposal that does not diverge."),
    Flag(
        "target_accept",
        "float",
        0.9,
        "Acceptance that the adapted step size aims at.",
        above=0,
        below=1,
    ),
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
        lower_bound=0,
        below=1,
    ),
    Flag(
        "collapse_output",
        "bool",
        False,
        "Integrate out the output layer and redraw it at each draw; for one Gaussian noise.",
    ),
)
GROUPS = {**cmd_args_utils.PROBLEM, "HMC": FLAGS}


def run(settings: Settings) -> None:
    """Runs the chains, judges them, and leaves the run in its folder."""
    task = tasks.load_task("hmc", settings)
    settings, ticker = task.settings, Ticker()
    build = functools.partial(hmc.hmc, task.log_joint)
    if settings.collapse_output:
        build = functools.partial(collapse.collapsed, hmc.hmc, task.log_joint, task.dataset.x_train)
    method = build(
        step_size=settings.step_size,
        trajectory_length=chain_runs.trajectory_length(task),
        num_burn_in=settings.num_burn_in_iterations,
        target_accept=settings.target_accept,
        adapt_mass_matrix=settings.adapt_mass_matrix,
        trajectory_jitter=settings.trajectory_jitter,
        max_num_leapfrog_steps=settings.max_num_leapfrog_steps,
        metropolis=not settings.no_mh,
        progress=ticker,
    )
    chain_runs.run_chains(task, method, ticker)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
