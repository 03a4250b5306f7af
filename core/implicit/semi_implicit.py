"""Semi-implicit bounds: an implicit posterior's density by a mixture of its own conditionals.

    q(w) = E_z[ q(w | z) ],      q(w | z) = N(w; g(z), diag(s)^2),    z ~ N(0, I_d)

    lower    -E log 1/(K+1) sum_{k=0..K} q(w | z_k)        z_0 made w, z_1 .. z_K are others
    upper    -E log 1/K     sum_{k=1..K} q(w | z_k)

    lower_0 <= lower_1 <= .. <= H[q] <= .. <= upper_2 <= upper_1,      both -> H[q] as K -> infinity

(Yin & Zhou 2018, arXiv 1805.11183; the upper bound: Molchanov et al. 2019, arXiv 1810.02789.)
E[log p_T(w, D)] plus these are bounds of the ELBO, the lower of which is one of log p_T(D), too.
They ask nothing of g or of z's law, so that they judge any sampler, however it was trained. How
many draws they need is another matter: about exp of the mutual information of w and z, which
noise scales s that are small beside g's spread make large. `core.implicit.bounds` needs fewer.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.implicit.bounds import log_standard_normal
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler, normal_latents, weights_at
from haiku_posteriors.core.implicit.whitening import Whitened, whitened_map
from haiku_posteriors.core.log_joint import LogJoint

DRAWS_AT_ONCE = 10


class Mixture(NamedTuple):
    """How the entropy of the objective `sivi` is estimated: the lower bound.

    Attributes:
      num_draws: K, shared by all draws of w of a step, for each of which they are independent.
    """

    num_draws: int = 50


class Sandwich(NamedTuple):
    """Estimates of lower and upper bounds, (draws, numbers K) each, all for the same draws of w.

    Attributes:
      log_joint: log p_T(w, D), (draws,).
      lower, upper: of H[q].
    """

    log_joint: jax.Array
    lower: jax.Array
    upper: jax.Array


def lower_entropies(
    rng_key: jax.Array,
    generator: Generator,
    sampler: Sampler,
    z: jax.Array,
    e: jax.Array,
    num_draws: int,
) -> jax.Array:
    """The lower bound at each draw w = g(z) + s e, (draws,), differentiable by the sampler.

    Args:
      rng_key: of z_1 .. z_K.
      generator: g.
      sampler: its parameters, and s.
      z: z_0, (draws, d).
      e: (draws, D).
      num_draws: K.
    """
    whitened, log_scales = whitened_map(generator, sampler)
    others = jax.vmap(whitened)(_others(rng_key, num_draws, z))

    def lower(z: jax.Array, e: jax.Array) -> jax.Array:
        logs = _log_conditionals(whitened(z) + e, others, log_scales)
        own = log_standard_normal(e) - jnp.sum(log_scales)
        return math.log(num_draws + 1) - jnp.logaddexp(own, jax.nn.logsumexp(logs))

    return jax.vmap(lower)(z, e)


def entropy_sandwich(
    rng_key: jax.Array,
    whitened: Whitened,
    log_scales: jax.Array,
    z: jax.Array,
    e: jax.Array,
    counts: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Lower and upper bound at one draw of w, for each K of `counts`; (counts,) each.

    Args:
      rng_key: of z_1 .. z_K, the first ones the same for all K.
      whitened: g / s.
      log_scales: log s, (D,).
      z: z_0, (d,).
      e: (D,).
      counts: increasing numbers K, at least 1.
    """
    target = whitened(z) + e
    own = log_standard_normal(e) - jnp.sum(log_scales)

    def conditional(z: jax.Array) -> jax.Array:
        return _log_conditionals(target, whitened(z), log_scales)

    logs = jax.lax.map(
        conditional, _others(rng_key, counts[-1], z[None]), batch_size=min(counts[-1], 100)
    )
    sums = jnp.stack([jax.nn.logsumexp(logs[:count]) for count in counts])
    numbers = jnp.asarray(counts, sums.dtype)
    return jnp.log(numbers + 1) - jnp.logaddexp(own, sums), jnp.log(numbers) - sums


def sandwich(
    rng_key: jax.Array,
    log_joint: LogJoint,
    generator: Generator,
    sampler: Sampler,
    data: Data,
    *,
    num_samples: int,
    counts: tuple[int, ...],
) -> Sandwich:
    """Independent estimates on all data; their sums with `log_joint` bound the ELBO.

    Args:
      rng_key: for (z_0, e) and z_1 .. z_K: exactly normal ones, as a bound needs them.
      log_joint: the model.
      generator: g.
      sampler: its parameters, and s.
      data: all rows.
      num_samples: draws of w, each with its own z_1 .. z_K.
      counts: increasing numbers K.
    """
    outer_key, inner_key = (jax.random.fold_in(rng_key, index) for index in range(2))
    z, e = normal_latents(outer_key, generator, sampler, num_samples)
    whitened, log_scales = whitened_map(generator, sampler)

    def value(draw: tuple[jax.Array, jax.Array, jax.Array]) -> Sandwich:
        index, z, e = draw
        _, _, drawn = weights_at(generator, sampler, z, e)
        key = jax.random.fold_in(inner_key, index)
        bounds = entropy_sandwich(key, whitened, log_scales, z, e, counts)
        return Sandwich(log_joint(trees.merge(drawn, sampler.point), data), *bounds)

    draws = (jnp.arange(num_samples), z, e)
    return jax.lax.map(value, draws, batch_size=min(num_samples, DRAWS_AT_ONCE))


def _others(rng_key: jax.Array, num_draws: int, like: jax.Array) -> jax.Array:
    return jax.random.normal(rng_key, (num_draws, like.shape[-1]), like.dtype)


def _log_conditionals(target: jax.Array, means: jax.Array, log_scales: jax.Array) -> jax.Array:
    """log q(w | z_k), for w / s (D,) and g(z_k) / s (..., D); (...)."""
    return log_standard_normal(target - means) - jnp.sum(log_scales)
