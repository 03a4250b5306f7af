"""The path of densities from the prior to the posterior, and how particles move along it.

    log gamma_b(w) = (1 - b) log p(w) + b log p_T(w, D),        0 <= b <= 1,

with the weights exp(h u), u = log p_T(w, D) - log p(w), that take draws of gamma_b to those of
gamma_{b + h} (Del Moral, Doucet & Jasra 2006, arXiv cond-mat/0212648).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

NUM_BISECTIONS = 60  # halvings of the way that is left: to 1e-18 of it


@dataclasses.dataclass(frozen=True)
class PathTarget:
    """log gamma_b, for `core.hamiltonian`."""

    log_joint: LogJoint
    fraction: jax.Array

    def __call__(self, params: Params, data: Data) -> jax.Array:
        """log gamma_b(w)."""
        log_joint = self.log_joint
        return self._sum(log_joint.log_prior(params), log_joint.log_likelihood(params, data))

    def difference(self, new: Params, old: Params, data: Data) -> jax.Array:
        """log gamma_b(new) - log gamma_b(old), see `LogJoint.difference`."""
        return self._sum(*self.log_joint.term_differences(new, old, data))

    def partition(self, params: Params) -> tuple[Params, Params]:
        """As the log-joint's."""
        return self.log_joint.partition(params)

    def _sum(self, log_prior: jax.Array, log_likelihood: jax.Array) -> jax.Array:
        cold = 1 / self.log_joint.temperature
        # Written so that at T = 1 the prior's factor is 1 and not 1 up to rounding.
        return (1 + self.fraction * (cold - 1)) * log_prior + self.fraction * cold * log_likelihood


def largest_increment(slopes: jax.Array, limit: jax.Array, target_ess: float) -> jax.Array:
    """The largest h <= limit at which weights exp(h u) have the relative effective sample size.

    Particles of a slope that is not finite are not counted: they have no weight at any h > 0.

    Args:
      slopes: u, (P,).
      limit: scalar.
      target_ess: between 0 and 1.
    """
    share = jnp.mean(jnp.isfinite(slopes).astype(slopes.dtype))

    def suffices(increment: jax.Array) -> jax.Array:
        return relative_ess(log_weights(slopes, increment)) >= target_ess * share

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        enough = suffices(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = jax.lax.fori_loop(0, NUM_BISECTIONS, halve, (jnp.zeros_like(limit), limit))
    return jnp.where(suffices(limit), limit, low)


def systematic_indices(rng_key: jax.Array, log_weights: jax.Array) -> jax.Array:
    """Systematic resampling: particle i is drawn floor or ceil of P w_i / sum w times; (P,)."""
    count = log_weights.shape[0]
    dtype = log_weights.dtype
    sums = jnp.cumsum(jax.nn.softmax(log_weights))
    uniform = jax.random.uniform(rng_key, (), dtype)
    positions = (jnp.arange(count, dtype=dtype) + uniform) / count * sums[-1]
    # Right: a particle of weight 0, whose sum is its predecessor's, is never drawn.
    indices = jnp.searchsorted(sums, positions, side="right")
    return jnp.minimum(indices, count - 1).astype(jnp.int32)


def log_weights(slopes: jax.Array, increment: jax.Array) -> jax.Array:
    """h u of each particle; a slope that is not finite has no weight."""
    return jnp.where(jnp.isfinite(slopes), increment * slopes, -jnp.inf)


def log_mean_exp(log_weights: jax.Array) -> jax.Array:
    """log (1/P) sum_i exp(log_weights_i)."""
    return jax.nn.logsumexp(log_weights) - math.log(log_weights.shape[0])


def relative_ess(log_weights: jax.Array) -> jax.Array:
    """(sum w)^2 / (P sum w^2), between 1 / P and 1."""
    weights = jnp.exp(log_weights - jnp.max(log_weights))
    return jnp.sum(weights) ** 2 / (weights.shape[0] * jnp.sum(weights**2))
