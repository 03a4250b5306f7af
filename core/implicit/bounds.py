"""Lower bounds of log p(D) for an implicit posterior: no linearisation of its entropy.

    q(w, z) = N(z; 0, I_d) N(w; g(z), diag(s)^2)

    L_K = E[ log p_T(w, D) - log 1/(K+1) sum_{k=0..K} q(w, z_k) / r(z_k | w) ],
    (w, z_0) ~ q,   z_1 .. z_K ~ r(. | w)

For every density r(z | w) that is a function of w alone, L_0 <= L_1 <= .. <= ELBO(q) <= log p_T(D)
(K = 0: Ranganath, Tran & Blei 2016, arXiv 1511.02386; K > 0: Sobolev & Vetrov 2019, arXiv
1905.03290), with equality at every K where r is q(z | w). An r that saw z_0 would break this: its
starts never do.

r here is a mixture of Laplace approximations of q(z | w), found by Gauss-Newton from several starts
that are the same for all w, and of the prior N(0, I):

    r(z | w) = e N(z; 0, I) + (1 - e) sum_c pi_c N(z; m_c, A_c^-1),    A = I + B^T B at m_c,

with B = diag(1/s) dg/dz and pi_c in proportion to the mass that each claims, q(w, m_c) |A_c|^-1/2.
For linear g it is q(z | w) but for the prior's share e: with e = 0, L_0 is the ELBO. The prior
keeps q / r within q(w | z) / e where no start has found the mode. All of it costs d products with B
a Gauss-Newton step: for latent sizes of a few hundred at most. `core.implicit.encoders` is for
larger ones.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler, normal_latents, weights_at
from haiku_posteriors.core.implicit.whitening import Whitened, normal_equations, whitened_map
from haiku_posteriors.core.log_joint import LogJoint

PRIOR_SHARE = 0.05
NUM_STARTS, NUM_STEPS = 3, 8  # of Gauss-Newton
DRAWS_AT_ONCE = 10
LOG_2_PI = math.log(2 * math.pi)


class Reverse(Protocol):
    """A density r(z | w), for one w."""

    def sample(self, rng_key: jax.Array, num_draws: int) -> jax.Array:
        """z, (num_draws, d)."""
        ...

    def log_density(self, z: jax.Array) -> jax.Array:
        """log r(z | w) for z (..., d); (...)."""
        ...


# (g / s, w / s) -> r(. | w); it sees nothing else.
MakeReverse = Callable[[Whitened, jax.Array], Reverse]


class LaplaceMixture(NamedTuple):
    """e N(0, I) + (1 - e) sum_c pi_c N(m_c, V_c diag(p_c)^-1 V_c^T).

    Attributes:
      log_weights: log pi, (components,).
      means: m, (components, d).
      axes: V, orthonormal columns, (components, d, d).
      precisions: p, (components, d).
      prior_share: e.
    """

    log_weights: jax.Array
    means: jax.Array
    axes: jax.Array
    precisions: jax.Array
    prior_share: float

    def sample(self, rng_key: jax.Array, num_draws: int) -> jax.Array:
        """Independent draws."""
        keys = [jax.random.fold_in(rng_key, index) for index in range(3)]
        shape = (num_draws, self.means.shape[-1])
        noise = jax.random.normal(keys[0], shape, self.means.dtype)
        chosen = jax.random.categorical(keys[1], self.log_weights, shape=(num_draws,))
        scaled = noise / jnp.sqrt(self.precisions[chosen])
        there = self.means[chosen] + jnp.einsum("nij,nj->ni", self.axes[chosen], scaled)
        is_prior = jax.random.uniform(keys[2], (num_draws, 1)) < self.prior_share
        return jnp.where(is_prior, noise, there)

    def log_density(self, z: jax.Array) -> jax.Array:
        """See `Reverse`."""
        offsets = z[..., None, :] - self.means
        scaled = jnp.einsum("...ci,cij->...cj", offsets, self.axes)
        squares = jnp.sum(scaled**2 * self.precisions, axis=-1)
        constants = self.log_weights + jnp.sum(jnp.log(self.precisions), axis=-1) / 2
        there = jax.nn.logsumexp(constants - squares / 2, axis=-1) - z.shape[-1] / 2 * LOG_2_PI
        if not self.prior_share:
            return there
        prior = math.log(self.prior_share) + log_standard_normal(z)
        return jnp.logaddexp(prior, math.log1p(-self.prior_share) + there)


def laplace_mixture(
    whitened: Whitened,
    target: jax.Array,
    starts: jax.Array,
    *,
    num_steps: int = NUM_STEPS,
    prior_share: float = PRIOR_SHARE,
) -> LaplaceMixture:
    """r(z | w) by damped Gauss-Newton on |z|^2 / 2 + |(w - g(z)) / s|^2 / 2 from every start.

    Args:
      whitened: g / s.
      target: w / s, (D,).
      starts: (components, d), chosen without a look at the z that made w.
      num_steps: of Gauss-Newton; one that would not lower the sum is taken back and damped more.
      prior_share: e.
    """

    def energy(z: jax.Array) -> jax.Array:
        return (jnp.sum(z**2) + jnp.sum((target - whitened(z)) ** 2)) / 2

    def decompose(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Eigenvalues and axes of B^T B at z, and the energy's gradient there."""
        gram, pulled = normal_equations(whitened, z, target)
        squares, axes = jnp.linalg.eigh(gram)
        return jnp.maximum(squares, 0), axes, z - pulled

    def step(_: int, carry: tuple) -> tuple:
        z, lowest, damping = carry
        squares, axes, gradient = decompose(z)
        # Marquardt's damping is relative to the curvature: 1 halves every step.
        curvature = (1 + squares) * (1 + damping)
        proposal = z - axes @ ((gradient @ axes) / curvature)
        there = energy(proposal)
        better = there < lowest
        damping = jnp.where(better, damping / 4, jnp.maximum(4 * damping, 1.0))
        return (
            jnp.where(better, proposal, z),
            jnp.where(better, there, lowest),
            damping,
        )

    def component(start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        first = (start, energy(start), jnp.zeros((), start.dtype))
        z, lowest, _ = jax.lax.fori_loop(0, num_steps, step, first)
        squares, axes, _ = decompose(z)
        precisions = 1 + squares
        return -lowest - jnp.sum(jnp.log(precisions)) / 2, z, axes, precisions

    masses, means, axes, precisions = jax.vmap(component)(starts)
    return LaplaceMixture(jax.nn.log_softmax(masses), means, axes, precisions, prior_share)


def fixed_starts(latent_size: int, num_starts: int, dtype: jnp.dtype) -> jax.Array:
    """z = 0, and draws of N(0, I) that are always the same, with their negatives; (starts, d)."""
    half = jax.random.normal(jax.random.key(0), (num_starts // 2, latent_size), dtype)
    return jnp.concatenate([jnp.zeros((1, latent_size), dtype), half, -half])[:num_starts]


def laplace_reverse(
    latent_size: int,
    dtype: jnp.dtype,
    num_starts: int = NUM_STARTS,
    prior_share: float = PRIOR_SHARE,
) -> MakeReverse:
    """`laplace_mixture` from fixed starts, as `hierarchical_bound` takes it."""
    starts = fixed_starts(latent_size, num_starts, dtype)

    def make(whitened: Whitened, target: jax.Array) -> Reverse:
        return laplace_mixture(whitened, target, starts, prior_share=prior_share)

    return make


def entropy_bound(
    rng_key: jax.Array,
    whitened: Whitened,
    log_scales: jax.Array,
    z: jax.Array,
    noise: jax.Array,
    make_reverse: MakeReverse,
    num_inner: int,
) -> jax.Array:
    """-log 1/(K+1) sum_k q(w, z_k) / r(z_k | w), whose mean over (z_0, e) is at most H[q].

    Args:
      rng_key: of z_1 .. z_K.
      whitened: g / s.
      log_scales: log s, (D,).
      z: z_0, (d,).
      noise: e, (D,), with w = g(z_0) + s * e.
      make_reverse: r.
      num_inner: K.

    Returns:
      A scalar; differentiable if r is.
    """
    ratios = _log_ratios(rng_key, whitened, log_scales, z, noise, make_reverse, num_inner)
    return math.log(num_inner + 1) - jax.nn.logsumexp(ratios)


def entropy_interval(
    rng_key: jax.Array,
    whitened: Whitened,
    log_scales: jax.Array,
    z: jax.Array,
    noise: jax.Array,
    make_reverse: MakeReverse,
    num_inner: int,
) -> tuple[jax.Array, jax.Array]:
    """`entropy_bound`, with its arguments, and a term whose mean over (z_0, e) is at least H[q].

    The upper bound leaves z_0 out: the mean of the K other ratios is q(w) in expectation, and minus
    a logarithm is convex. K >= 1.
    """
    ratios = _log_ratios(rng_key, whitened, log_scales, z, noise, make_reverse, num_inner)
    lower = math.log(num_inner + 1) - jax.nn.logsumexp(ratios)
    return lower, math.log(num_inner) - jax.nn.logsumexp(ratios[1:])


def _log_ratios(
    rng_key: jax.Array,
    whitened: Whitened,
    log_scales: jax.Array,
    z: jax.Array,
    noise: jax.Array,
    make_reverse: MakeReverse,
    num_inner: int,
) -> jax.Array:
    """log q(w, z_k) - log r(z_k | w) of z_0 .. z_K, (K + 1,)."""
    target = whitened(z) + noise  # w / s
    reverse = make_reverse(whitened, target)

    def log_ratio(z: jax.Array, residual: jax.Array) -> jax.Array:
        normal = log_standard_normal(z) + log_standard_normal(residual)
        return normal - jnp.sum(log_scales) - reverse.log_density(z)

    # Of z_0 the residual is e itself, which the difference of two rounded numbers is not.
    ratios = log_ratio(z, noise)[None]
    if num_inner:
        others = reverse.sample(rng_key, num_inner)
        each = jax.vmap(lambda z: log_ratio(z, target - whitened(z)))(others)
        ratios = jnp.concatenate([ratios, each])
    return ratios


def outer_entropy(
    generator: Generator, sampler: Sampler, make_reverse: MakeReverse
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(z_0, e) -> `entropy_bound` with K = 0, which needs no draws of r."""
    whitened, log_scales = whitened_map(generator, sampler)
    unused = jax.random.key(0)

    def entropy(z: jax.Array, noise: jax.Array) -> jax.Array:
        return entropy_bound(unused, whitened, log_scales, z, noise, make_reverse, 0)

    return entropy


def hierarchical_bound(
    rng_key: jax.Array,
    log_joint: LogJoint,
    generator: Generator,
    sampler: Sampler,
    data: Data,
    make_reverse: MakeReverse,
    *,
    num_samples: int,
    num_inner: int,
) -> jax.Array:
    """Independent estimates of L_K on all data, (num_samples,).

    Args:
      rng_key: for (z_0, e) and z_1 .. z_K: exactly normal ones, as a bound needs them.
      log_joint: the model.
      generator: g.
      sampler: its parameters, and s.
      data: all rows.
      make_reverse: r.
      num_samples: of (z_0, e), each with its own inner draws.
      num_inner: K.
    """
    outer_key, inner_key = (jax.random.fold_in(rng_key, index) for index in range(2))
    z, e = normal_latents(outer_key, generator, sampler, num_samples)
    whitened, log_scales = whitened_map(generator, sampler)

    def value(draw: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        index, z, e = draw
        _, _, drawn = weights_at(generator, sampler, z, e)
        entropy = entropy_bound(
            jax.random.fold_in(inner_key, index),
            whitened,
            log_scales,
            z,
            e,
            make_reverse,
            num_inner,
        )
        return log_joint(trees.merge(drawn, sampler.point), data) + entropy

    draws = (jnp.arange(num_samples), z, e)
    return jax.lax.map(value, draws, batch_size=min(num_samples, DRAWS_AT_ONCE))


def log_standard_normal(values: jax.Array) -> jax.Array:
    """Of vectors along the last axis."""
    return -jnp.sum(values**2, axis=-1) / 2 - values.shape[-1] / 2 * LOG_2_PI
