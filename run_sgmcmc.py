"""Stochastic gradient MCMC: SGLD, SGHMC, cyclical and preconditioned.

python run_sgmcmc.py                            embedded toy regression, SGHMC
python run_sgmcmc.py --momentum=0               SGLD
python run_sgmcmc.py --step_size_schedule=cyclical --preconditioner=RMSprop
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import sgmcmc
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.sgmcmc import Preconditioner, SGMCMCState
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import BY_DATA, Flag
from haiku_posteriors.utils.report import chain_diagnostics
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import sampler_scales, temperatures, warm_start
from haiku_posteriors.utils.stages.sampler_scales import Scales
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

FLAGS = (
    Flag(
        "preconditioner",
        "enum",
        None,
        "Preconditioner; it stands still after burn-in. curvature: that around the trained starts, "
        "and a step size that fits it.",
        BY_DATA,
        choices=("None", "RMSprop", "curvature"),
    ),
    Flag(
        "bias_tolerance",
        "float",
        0.05,
        "Relative error of variances that the noise of gradients may make (curvature).",
        above=0,
    ),
    Flag(
        "warm_start_epochs",
        "integer",
        None,
        "Epochs of Adam, at most, that train one network for each chain to start from.",
        "some 5,000 updates; none where num_epochs or an init_checkpoint is given",
        lower_bound=0,
    ),
    Flag(
        "until_converged",
        "bool",
        None,
        "End as soon as the predictions' R-hat and effective sample size allow it.",
        "unless num_epochs is given",
    ),
    Flag(
        "step_size_schedule",
        "enum",
        "constant",
        "constant: cosine burn-in to final_step_size; cyclical: constant burn-in, then cosine "
        "cycles.",
        choices=("constant", "cyclical"),
    ),
    Flag(
        "num_burnin_epochs",
        "integer",
        None,
        "Epochs before draws are taken.",
        BY_DATA,
        lower_bound=0,
    ),
    Flag(
        "final_step_size",
        "float",
        None,
        "Step size after burn-in (constant schedule).",
        "as init_step_size",
        above=0,
    ),
    Flag(
        "step_size_cycle_length_epochs",
        "integer",
        None,
        "Epochs in a cycle of the step size; a draw is taken at its end (cyclical schedule).",
        BY_DATA,
        lower_bound=1,
    ),
    Flag(
        "ensemble_freq",
        "integer",
        None,
        "Epochs between draws (constant schedule).",
        BY_DATA,
        lower_bound=1,
    ),
    Flag("save_all_ensembled", "bool", True, "Accepted for old commands: draws are always saved."),
    Flag("num_chains", "integer", 4, "Number of chains.", lower_bound=1),
)
GROUPS = {**cmd_args_utils.PROBLEM, "Minibatches": cmd_args_utils.MINIBATCHES, "SGMCMC": FLAGS}


class Sampler(NamedTuple):
    """The sampler, and what its verdict depends on.

    Attributes:
      transformation: see `core.sgmcmc`.
      preconditioner: M.
      final_step_size: at the draws; None where it varies.
      momentum_decay: beta.
    """

    transformation: optax.GradientTransformationExtraArgs
    preconditioner: Preconditioner | None
    final_step_size: float | None
    momentum_decay: float

    def scale(self, state: SGMCMCState) -> Params:
        """M^-1/2 at a state."""
        if self.preconditioner is None:
            return jax.tree.map(jnp.ones_like, state.params)
        return self.preconditioner.scale(state.sampler_state.preconditioner_state, state.params)


def make_sampler(settings: Settings, num_rows: int, scales: Scales | None) -> Sampler:
    """The sampler that the settings describe; `scales` are those of `curvature`."""
    first, final, beta = (
        settings.values[name] for name in ("init_step_size", "final_step_size", "momentum_decay")
    )
    if scales is not None:
        first, beta = scales.step_size if first is None else first, scales.momentum_decay
        final = first if final is None else final
    check_positive(init_step_size=first, final_step_size=final)
    batches = num_minibatches(num_rows, settings.batch_size)
    burn_in = settings.num_burnin_epochs * batches
    is_cyclical = settings.step_size_schedule == "cyclical"
    if is_cyclical:
        schedule = sgmcmc.cyclical(first, burn_in, settings.step_size_cycle_length_epochs * batches)
    else:
        schedule = sgmcmc.constant_with_burn_in(first, final, burn_in)
    preconditioner = None
    if scales is not None:
        preconditioner = sgmcmc.fixed_mass(scales.mass)
    elif settings.preconditioner == "RMSprop":
        # Standing still after burn-in, it leaves the target as it is.
        preconditioner = sgmcmc.rmsprop(adaptation_steps=max(burn_in, 1))
    transformation = (
        sgmcmc.sgld(schedule, preconditioner)
        if beta == 0
        else sgmcmc.sghmc(schedule, beta, preconditioner)
    )
    return Sampler(transformation, preconditioner, None if is_cyclical else final, beta)


def draw_period(settings: Settings) -> int:
    """Epochs between two draws; refuses settings by which there would be none."""
    cyclical = settings.step_size_schedule == "cyclical"
    name = "step_size_cycle_length_epochs" if cyclical else "ensemble_freq"
    period = settings.values[name]
    if settings.num_burnin_epochs + period > settings.num_epochs:
        raise UserError(
            f"There would be no draws: the first comes num_burnin_epochs + {name} = "
            f"{settings.num_burnin_epochs} + {period} epochs from the start, and num_epochs is "
            f"{settings.num_epochs}."
        )
    return period


def run(settings: Settings) -> None:
    """Runs the chains and leaves the run in its folder."""
    task = tasks.load_task("sgmcmc", settings)
    settings, log_joint = task.settings, task.log_joint
    burn_in, period = settings.num_burnin_epochs, draw_period(settings)
    enough = chain_diagnostics.enough_draws(burn_in, period) if settings.until_converged else None
    given = warm_start.given_starts(task, keeps_point_estimates=False)
    if settings.preconditioner == "curvature" and given is None and not settings.warm_start_epochs:
        raise UserError(
            "The curvature is that of trained starts: give warm_start_epochs or an init_checkpoint."
        )
    directory = tasks.open_folder(task)
    starts = warm_start.train_starts(task, directory, given, settings.num_chains)
    scales = find_scales(task, starts)
    sampler = make_sampler(settings, len(task.dataset.y_train), scales)

    def judge(directory: pathlib.Path, result: RunResult) -> None:
        measured = temperatures.measure(
            task,
            result,
            chain_diagnostics.kinetic_temperature(directory, burn_in),
            sampler.final_step_size,
            sampler.momentum_decay,
            sampler.scale,
        )
        notes = warm_start.notes(starts, settings.warm_start_epochs)
        chain_diagnostics.report_sampler(directory, result, measured, notes)

    tasks.execute(
        task,
        directory,
        sgmcmc.sgmcmc(log_joint, sampler.transformation, settings.batch_size),
        num_chains=settings.num_chains,
        num_steps=settings.num_epochs,
        initial_params=starts,
        collects=lambda done: sgmcmc.collects(done, burn_in, period),
        enough=enough,
        judge=judge,
    )


def find_scales(task: Task, starts: Params | None) -> Scales | None:
    """Masses and steps by the curvature of the starts, told; None without that preconditioner."""
    settings = task.settings
    if settings.preconditioner != "curvature":
        return None
    scales = sampler_scales.fit(task, starts)
    print(sampler_scales.describe(scales, settings.batch_size), flush=True)
    return scales


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
