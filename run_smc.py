"""Sequential Monte Carlo: particles from the prior to the posterior, and the log-evidence.

python run_smc.py                                        embedded toy regression, four populations
python run_smc.py --num_particles=1000                   a smaller error, at four times the cost
python run_smc.py --dataset_name=wine --model_name=logistic_regression
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from haiku_posteriors.core import smc
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.smc import SMCState
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    devices,
    script_utils,
    tasks,
)
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.logging_utils import Ticker
from haiku_posteriors.utils.report import populations
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    Flag("num_particles", "integer", 250, "Particles of a population.", lower_bound=2),
    Flag("num_chains", "integer", 4, "Independent populations.", lower_bound=1),
    Flag(
        "target_ess",
        "float",
        0.9,
        "Effective sample size that a new temperature leaves, in units of num_particles.",
        above=0,
        below=1,
    ),
    Flag(
        "max_num_temperatures",
        "integer",
        2000,
        "Steps at most, final ones included.",
        lower_bound=1,
    ),
    Flag("num_moves", "integer", 1, "HMC transitions at each temperature.", lower_bound=1),
    Flag("num_final_moves", "integer", 5, "Further ones at the posterior.", lower_bound=0),
    Flag("step_size", "float", None, "Leapfrog step size.", "follows the acceptance", above=0),
    Flag(
        "target_accept",
        "float",
        0.8,
        "Acceptance that the adapted step size aims at.",
        above=0,
        below=1,
    ),
    Flag(
        "trajectory_len",
        "float",
        None,
        "Trajectory length.",
        "pi/2 prior standard deviations",
        above=0,
    ),
    Flag(
        "trajectory_jitter",
        "float",
        0.5,
        "Trajectory lengths vary by up to this fraction.",
        lower_bound=0,
        below=1,
    ),
    Flag(
        "max_num_leapfrog_steps",
        "integer",
        250,
        "Maximum leapfrog steps per trajectory.",
        lower_bound=1,
    ),
    Flag("adapt_mass_matrix", "bool", False, "Masses from the variances over particles."),
    Flag("eval_freq", "integer", 10, "Temperatures between evaluations.", lower_bound=1),
    Flag("save_freq", "integer", 10, "Temperatures between checkpoints.", lower_bound=1),
)
GROUPS = {**cmd_args_utils.PROBLEM, "SMC": FLAGS}


def run(settings: Settings) -> None:
    """Runs the populations, judges them, and leaves the run in its folder."""
    task = tasks.load_task("smc", settings)
    settings, log_joint = task.settings, task.log_joint
    if settings.stochastic_params and settings.init_checkpoint is None:
        raise UserError(
            "SMC keeps the parameters that stochastic_params does not name where they start: give "
            "an init_checkpoint with trained ones."
        )
    ticker, mesh = Ticker(), devices.make_mesh(settings.num_chains)
    in_turn = devices.batches_are_slow(mesh) and mesh.shape["draw"] == 1
    method = smc.smc(
        log_joint,
        num_particles=settings.num_particles,
        target_ess=settings.target_ess,
        num_moves=settings.num_moves,
        step_size=settings.step_size,
        target_accept=settings.target_accept,
        trajectory_length=settings.trajectory_len,
        trajectory_jitter=settings.trajectory_jitter,
        max_num_leapfrog_steps=settings.max_num_leapfrog_steps,
        adapt_mass_matrix=settings.adapt_mass_matrix,
        particles_at_once=1 if in_turn else None,
        place=devices.draw_placement(mesh, settings.num_particles, ("draw",)),
        progress=ticker,
    )
    num_final_steps = -(-settings.num_final_moves // settings.num_moves)

    def is_finished(state: SMCState) -> jax.Array:
        return jnp.all((state.fraction >= 1) & (state.num_final_steps >= num_final_steps))

    starts = checkpoint_utils.load_starts(
        settings.init_checkpoint, log_joint.shapes, settings.num_chains
    )
    tasks.execute(
        task,
        tasks.open_folder(task),
        method,
        num_chains=settings.num_chains,
        num_steps=settings.max_num_temperatures,
        initial_params=starts,
        num_draws=settings.num_particles,
        keep_history=True,
        is_finished=is_finished,
        show=("fraction", "log_evidence"),
        ticker=ticker,
        unit="temperature",
        judge=populations.report_smc,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
