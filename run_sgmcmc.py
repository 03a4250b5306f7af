"""Stochastic gradient MCMC: SGLD, SGHMC, cyclical and preconditioned.

python run_sgmcmc.py                            embedded toy regression, SGHMC
python run_sgmcmc.py --momentum=0               SGLD
python run_sgmcmc.py --step_size_schedule=cyclical --preconditioner=RMSprop
"""

from collections.abc import Sequence

import optax

from haiku_posteriors.core import sgmcmc
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.utils import checkpoint_utils, cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import BY_DATA, Flag
from haiku_posteriors.utils.report import chain_diagnostics
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    Flag(
        "preconditioner",
        "enum",
        None,
        "Preconditioner; it stands still after burn-in.",
        BY_DATA,
        choices=("None", "RMSprop"),
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


def make_sampler(settings: Settings, num_rows: int) -> optax.GradientTransformationExtraArgs:
    """The sampler that the settings describe."""
    check_positive(init_step_size=settings.init_step_size, final_step_size=settings.final_step_size)
    batches = num_minibatches(num_rows, settings.batch_size)
    burn_in = settings.num_burnin_epochs * batches
    if settings.step_size_schedule == "cyclical":
        schedule = sgmcmc.cyclical(
            settings.init_step_size, burn_in, settings.step_size_cycle_length_epochs * batches
        )
    else:
        schedule = sgmcmc.constant_with_burn_in(
            settings.init_step_size, settings.final_step_size, burn_in
        )
    preconditioner = None
    if settings.preconditioner == "RMSprop":
        # Standing still after burn-in, it leaves the target as it is.
        preconditioner = sgmcmc.rmsprop(adaptation_steps=max(burn_in, 1))
    if settings.momentum_decay == 0:
        return sgmcmc.sgld(schedule, preconditioner)
    return sgmcmc.sghmc(schedule, settings.momentum_decay, preconditioner)


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
    sampler = make_sampler(settings, len(task.dataset.y_train))
    starts = checkpoint_utils.load_starts(
        settings.init_checkpoint, log_joint.shapes, settings.num_chains
    )
    tasks.execute(
        task,
        tasks.open_folder(task),
        sgmcmc.sgmcmc(log_joint, sampler, settings.batch_size),
        num_chains=settings.num_chains,
        num_steps=settings.num_epochs,
        initial_params=starts,
        collects=lambda done: sgmcmc.collects(done, burn_in, period),
        judge=chain_diagnostics.report_sampler,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
