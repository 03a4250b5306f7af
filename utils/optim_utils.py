"""Optimizers by name, with the cosine schedule or a step that training itself decreases."""

import math

import numpy as np
import optax

from haiku_posteriors.core import progress
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.progress import Rules
from haiku_posteriors.utils.settings import Settings

OPTIMIZERS = ("SGD", "Adam")
# Nats by which an objective may still rise in a round. A posterior of D parameters lies D / 2 nats
# below its mode: a thousandth of a nat for each is small beside that.
TOLERANCE, TOLERANCE_PER_PARAMETER = 0.2, 1e-3


def optimizer_of(
    settings: Settings, num_rows: int, num_epochs: int | None = None
) -> optax.GradientTransformation:
    """The optimizer that the settings describe.

    With a schedule of `num_epochs` epochs, or else of the run's own; none where the run ends by
    itself, whose steps `core.progress` decreases.
    """
    by_itself = num_epochs is None and settings.until_converged
    epochs = settings.num_epochs if num_epochs is None else num_epochs
    num_steps = max(epochs * num_minibatches(num_rows, settings.batch_size), 1)
    return make_optimizer(
        settings.optimizer,
        settings.init_step_size,
        None if by_itself else num_steps,
        settings.momentum_decay,
    )


def warmed_adam(init_step_size: float, num_steps: int) -> optax.GradientTransformation:
    """Adam with b2 = 0.99, whose step grows over a twentieth of the run before the cosine.

    For objectives whose gradients change by orders of magnitude while precisions are learned.
    """
    num_waiting = num_steps // 20
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, init_step_size, num_waiting, max(num_steps, num_waiting + 1)
    )
    return optax.chain(optax.adam(schedule, b2=0.99), progress.scale_by_step_factor())


def rules_of(settings: Settings, num_rows: int, num_random: int) -> Rules:
    """When training is over, or how it is watched where its length is given.

    Args:
      settings: of a script with the flags `cmd_args_utils.OPTIMIZER`.
      num_rows: training rows.
      num_random: random parameters, on which the tolerance depends.
    """
    named = (settings.values.get(name) for name in ("kl_warmup_epochs", "annealing_epochs"))
    waiting = math.ceil(max(number or 0 for number in named))
    if settings.until_converged:
        batches = num_minibatches(num_rows, settings.batch_size)
        return rules_of_auto(batches, num_random, waiting)
    steps = 1 + np.cos(np.pi * np.arange(settings.num_epochs) / settings.num_epochs)
    ends, start = progress.schedule_ends(steps, min(waiting, settings.num_epochs))
    return Rules(_tolerance(num_random), ends=ends, start=start)


def rules_of_auto(num_batches: int, num_random: int, num_waiting: int = 0) -> Rules:
    """When training that ends by itself is over.

    Args:
      num_batches: minibatches of an epoch.
      num_random: random parameters, on which the tolerance depends.
      num_waiting: epochs in which the objective is still another.
    """
    return Rules(_tolerance(num_random), progress.first_round(num_batches), num_waiting)


def _tolerance(num_random: int) -> float:
    return TOLERANCE + TOLERANCE_PER_PARAMETER * num_random


def make_optimizer(
    name: str, init_step_size: float, num_steps: int | None, momentum_decay: float = 0.9
) -> optax.GradientTransformation:
    """SGD with heavy-ball momentum, or Adam, under a cosine schedule that ends at 0.

    Args:
      name: one of OPTIMIZERS.
      init_step_size: at the first step. It multiplies the gradient of the *summed* log-joint in
        SGD, hence values of order 1 / N; Adam's steps do not depend on the gradient's scale.
      num_steps: the length of the schedule; None for a constant step.
      momentum_decay: b in m <- b m + gradient; SGD only.

    Returns:
      The optimizer, which ends in `progress.scale_by_step_factor`.
    """
    if init_step_size <= 0:
        raise UserError(f"init_step_size must be positive, not {init_step_size}.")
    if not 0 <= momentum_decay < 1:
        raise UserError(f"momentum_decay must be at least 0 and below 1, not {momentum_decay}.")
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    schedule = (
        optax.constant_schedule(init_step_size)
        if num_steps is None
        else optax.cosine_decay_schedule(init_step_size, num_steps)
    )
    optimizer = optax.adam(schedule)
    if name == "SGD":
        optimizer = optax.chain(optax.trace(momentum_decay), optax.scale_by_learning_rate(schedule))
    return optax.chain(optimizer, progress.scale_by_step_factor())
