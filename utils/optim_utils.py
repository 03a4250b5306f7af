"""Optimizers by name, with the cosine schedule."""

import optax

from haiku_posteriors.core.errors import UserError, unknown_name

OPTIMIZERS = ("SGD", "Adam")


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
