"""Optimizers by name, with the cosine schedule."""

import optax

from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.utils.settings import Settings

OPTIMIZERS = ("SGD", "Adam")


def optimizer_of(
    settings: Settings, num_rows: int, num_epochs: int
) -> optax.GradientTransformation:
    """The optimizer that the settings describe, with a schedule of `num_epochs` epochs."""
    num_steps = max(num_epochs * num_minibatches(num_rows, settings.batch_size), 1)
    return make_optimizer(
        settings.optimizer, settings.init_step_size, num_steps, settings.momentum_decay
    )


def warmed_adam(settings: Settings, num_rows: int, num_epochs: int) -> optax.GradientTransformation:
    """Adam with b2 = 0.99, whose step grows over a twentieth of the run before the cosine.

    For objectives whose gradients change by orders of magnitude while precisions are learned.
    """
    num_steps = max(num_epochs * num_minibatches(num_rows, settings.batch_size), 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.init_step_size, num_steps // 20, max(num_steps, num_steps // 20 + 1)
    )
    return optax.adam(schedule, b2=0.99)


def make_optimizer(
    name: str, init_step_size: float, num_steps: int, momentum_decay: float = 0.9
) -> optax.GradientTransformation:
    """SGD with heavy-ball momentum, or Adam, under a cosine schedule that ends at 0.

    Args:
      name: one of OPTIMIZERS.
      init_step_size: at the first step. It multiplies the gradient of the *summed* log-joint in
        SGD, hence values of order 1 / N; Adam's steps do not depend on the gradient's scale.
      num_steps: the length of the schedule.
      momentum_decay: b in m <- b m + gradient; SGD only.

    Returns:
      The optimizer.
    """
    if init_step_size <= 0:
        raise UserError(f"init_step_size must be positive, not {init_step_size}.")
    if not 0 <= momentum_decay < 1:
        raise UserError(f"momentum_decay must be at least 0 and below 1, not {momentum_decay}.")
    schedule = optax.cosine_decay_schedule(init_step_size, num_steps)
    if name == "SGD":
        return optax.chain(optax.trace(momentum_decay), optax.scale_by_learning_rate(schedule))
    if name == "Adam":
        return optax.adam(schedule)
    raise unknown_name("optimizer", name, OPTIMIZERS)
