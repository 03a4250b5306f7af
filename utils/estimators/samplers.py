"""Plans of stochastic gradient samplers: steps that fit until chains agree, or as asked for."""

from typing import Any

import optax

from haiku_posteriors.core import sgmcmc, trees
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.sgmcmc import Preconditioner
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import settings
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.estimators import forms
from haiku_posteriors.utils.estimators.forms import Diagnose, Plan, Wishes
from haiku_posteriors.utils.report import chain_diagnostics
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import sampler_scales, temperatures
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

SAMPLER_UPDATES = 20_000  # of a given step size, burn-in included
BIAS_TOLERANCE = 0.05  # where steps are fitted, see run_sgmcmc.py


def sghmc(
    log_joint: LogJoint, num_rows: int, wishes: Wishes, momentum_decay: float | None = None
) -> Plan:
    """Steps that fit, until the chains agree; with a number or a size of steps, just these."""
    if wishes.num_steps is None and wishes.step_size is None:
        return _fitted_sampler(log_joint, num_rows, wishes, momentum_decay)
    forms.refuse(wishes, "warm_start_epochs")
    batch_size = min(wishes.batch_size or forms.BATCH_SIZE, num_rows)
    batches = num_minibatches(num_rows, batch_size)
    num_steps = wishes.num_steps or -(-SAMPLER_UPDATES // batches)
    burn_in = forms.find_burn_in(wishes, num_steps, num_steps // 3)
    collects = forms.make_collection(wishes, num_steps, burn_in, default=100)
    preconditioner = sgmcmc.rmsprop(adaptation_steps=max(burn_in * batches, 1))
    decay, options = _momentum_decay(wishes, momentum_decay)
    sampler = _langevin(wishes.step_size or 1e-4, 0.9 if decay is None else decay, preconditioner)
    return Plan(
        sgmcmc.sgmcmc(log_joint, sampler, batch_size, **options),
        wishes.num_chains or 4,
        num_steps,
        collects=collects,
        diagnose=_diagnose_sampler,
    )


def _fitted_sampler(
    log_joint: LogJoint, num_rows: int, wishes: Wishes, momentum_decay: float | None
) -> Plan:
    """SGMCMC with masses and steps from the curvature of its starts, as run_sgmcmc.py has it."""
    size, num_chains = trees.size(log_joint.shapes), wishes.num_chains or 4
    batch_size = min(wishes.batch_size or settings.affordable_rows(size), num_rows)
    batches = num_minibatches(num_rows, batch_size)
    burn_in, period = (
        -(-updates // batches) for updates in (settings.BURN_IN_UPDATES, settings.UPDATES_PER_DRAW)
    )
    burn_in = burn_in if wishes.num_burn_in is None else wishes.num_burn_in
    most = max(1, forms.MAX_DRAW_BYTES // (4 * size * num_chains))
    updates = settings.MAX_CHAIN_UPDATES - settings.BURN_IN_UPDATES
    draws = -(-updates // (batches * period))
    num_steps = burn_in + period * (wishes.num_draws or min(most, draws))
    decay, options = _momentum_decay(wishes, momentum_decay)
    warm_start_epochs = wishes.warm_start_epochs
    if warm_start_epochs is None:
        warm_start_epochs = settings.warm_start_epochs(num_rows)
    elif warm_start_epochs == 0:
        raise UserError("Steps fit the curvature of trained starts: give a step_size without any.")

    def fit(dataset: Dataset, starts: Params, seed: int) -> tuple[Method, Diagnose]:
        values = {"batch_size": batch_size, "momentum_decay": decay, "seed": seed}
        values["bias_tolerance"] = BIAS_TOLERANCE
        task = Task("sgmcmc", Settings(values, {}), dataset, log_joint)
        scales = sampler_scales.fit(task, starts)
        mass = sgmcmc.fixed_mass(scales.mass)
        sampler = _langevin(scales.step_size, scales.momentum_decay, mass)

        def diagnose(result: RunResult) -> dict[str, Any]:
            measured = temperatures.measure(
                task,
                result,
                None,
                scales.step_size,
                scales.momentum_decay,
                lambda state: mass.scale((), state.params),
            )
            return chain_diagnostics.sampler_content(result, measured)

        return sgmcmc.sgmcmc(log_joint, sampler, batch_size, **options), diagnose

    return Plan(
        None,
        num_chains,
        num_steps,
        collects=lambda done: sgmcmc.collects(done, burn_in, period),
        enough=(
            chain_diagnostics.enough_draws(burn_in, period) if wishes.num_draws is None else None
        ),
        warm_start_epochs=warm_start_epochs,
        fit=fit,
    )


def _momentum_decay(wishes: Wishes, default: float | None) -> tuple[float | None, dict[str, Any]]:
    """Momentum decay, None for what fits, and the other options."""
    options = dict(wishes.options or {})
    return options.pop("momentum_decay", default), options


def _langevin(
    step_size: float, momentum_decay: float, preconditioner: Preconditioner
) -> optax.GradientTransformationExtraArgs:
    if momentum_decay == 0:
        return sgmcmc.sgld(step_size, preconditioner)
    return sgmcmc.sghmc(step_size, momentum_decay, preconditioner)


def sgld(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    """The same without momentum."""
    return sghmc(log_joint, num_rows, wishes, momentum_decay=0.0)


def _diagnose_sampler(result: RunResult) -> dict[str, Any]:
    predictions, parameters = chain_diagnostics.diagnose(result)
    return {
        "predictions": forms.extremes(predictions),
        "parameters": forms.extremes(parameters),
    }
