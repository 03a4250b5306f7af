"""When training no longer pays: the mean log-joint of a window against that of the window before.

With m_k the mean of the log-joint over the k-th window of n epochs, training is over once

    m_k - m_{k-1} < tolerance.

The log-joint of the data that are fitted is watched, never that of test rows. A posterior over D
parameters typically lies D/2 nats below its mode, so that gains of a small part of D per window
are worth less than a sampler's next transitions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOWEST = -1e30  # below every log-joint, and finite, as all of a state has to be


class Plateau(NamedTuple):
    """Scalars of one member.

    Attributes:
      num_epochs: in the current window.
      mean: of the log-joint over them.
      previous: the mean over the window before.
      is_reached: whether training is over; it stays so.
    """

    num_epochs: jax.Array
    mean: jax.Array
    previous: jax.Array
    is_reached: jax.Array


def start(dtype: jnp.dtype) -> Plateau:
    """No epoch yet."""
    return Plateau(
        jnp.zeros((), jnp.int32),
        jnp.zeros((), dtype),
        jnp.full((), LOWEST, dtype),
        jnp.array(False),
    )


def update(plateau: Plateau, log_joint: jax.Array, window: int, tolerance: float) -> Plateau:
    """One more epoch.

    Args:
      plateau: so far.
      log_joint: of this epoch, a scalar.
      window: n, epochs per window.
      tolerance: the least gain, in nats per window, for which training goes on.
    """
    num_epochs = plateau.num_epochs + 1
    mean = plateau.mean + (log_joint - plateau.mean) / num_epochs.astype(plateau.mean.dtype)
    is_full = num_epochs == window
    return Plateau(
        jnp.where(is_full, 0, num_epochs),
        mean,
        jnp.where(is_full, mean, plateau.previous),
        plateau.is_reached | (is_full & (mean - plateau.previous < tolerance)),
    )
