"""What HMC learns in burn-in: a step size by dual averaging, masses by running variances."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core.trees import Params

MASS_PSEUDO_DRAWS = 5  # weight of the prior's variance, times 1e-3, in an estimated one
# Dual averaging's gamma, t_0 and kappa (Hoffman & Gelman 2014, section 3.2.1). Their gamma is 0.05,
# for NUTS, whose acceptance is a mean over many points; with the one of a trajectory the iterates
# swing so far that their average accepts 0.92 where 0.8 was asked for. With 0.2 it is 0.78 to 0.85,
# on the small tanh network of the tests, where it was chosen.
SHRINKAGE, STABILISATION, DECAY = 0.2, 10.0, 0.75


class DualAveraging(NamedTuple):
    """Scalars by which the log step size is found.

    Attributes:
      average: the averaged iterate, which is the result.
      error: running mean of (target - acceptance probability).
      center: where the log step size is drawn to.
      num_updates: as a float.
    """

    average: jax.Array
    error: jax.Array
    center: jax.Array
    num_updates: jax.Array


class Moments(NamedTuple):
    """Welford's running mean and sum of squared deviations of the random parameters."""

    num_values: jax.Array
    mean: Params
    squares: Params


def start_dual_averaging(step_size: jax.Array) -> DualAveraging:
    """Starts at a step size, drawn to ten times it (section 3.1 there): too large costs less."""
    zero = jnp.zeros_like(step_size)
    return DualAveraging(jnp.log(step_size), zero, jnp.log(10 * step_size), zero)


def update_dual_averaging(
    dual: DualAveraging, acceptance: jax.Array, target: float, longest: float
) -> tuple[jax.Array, DualAveraging]:
    """The next step size to try, within [1e-10, 1] times `longest`, and the new state."""
    count = dual.num_updates + 1
    weight = 1 / (count + STABILISATION)
    error = (1 - weight) * dual.error + weight * (target - acceptance)
    log_size = dual.center - jnp.sqrt(count) / SHRINKAGE * error
    log_size = jnp.clip(log_size, math.log(1e-10 * longest), math.log(longest))
    weight = count**-DECAY
    average = (1 - weight) * dual.average + weight * log_size
    return jnp.exp(log_size), DualAveraging(average, error, dual.center, count)


def add_to_moments(moments: Moments, random: Params) -> Moments:
    """Welford's update by one more value."""
    count = moments.num_values + 1
    mean = jax.tree.map(lambda m, w: m + (w - m) / count.astype(w.dtype), moments.mean, random)
    squares = jax.tree.map(
        lambda s, old, new, w: s + (w - old) * (w - new),
        moments.squares,
        moments.mean,
        mean,
        random,
    )
    return Moments(count, mean, squares)


def relative_variances(moments: Moments, prior_std: Params, unit: float) -> Params:
    """Variances in units of `unit`^2, drawn to 1e-3 of the prior's.

    The pull is downwards because too small an inverse mass makes one parameter slow, while too
    large a one forces small steps on all.
    """

    def relative_variance(squares: jax.Array, std: float) -> jax.Array:
        count = moments.num_values.astype(squares.dtype)
        unbiased = squares / jnp.maximum(count - 1, 1.0)
        pulled = count * unbiased + MASS_PSEUDO_DRAWS * 1e-3 * std**2
        return pulled / ((count + MASS_PSEUDO_DRAWS) * unit**2)

    return jax.tree.map(relative_variance, moments.squares, prior_std)
