"""Gaussian variational inference with a covariance of low rank plus a diagonal, over all weights.

    q(w) = N(w; mu, U U^T + S^2),      S = diag(sigma) = diag(softplus(rho)),   U of D x R
    w = mu + U z + S e,                e ~ N(0, I_D),   z ~ N(0, I_R)
    H[q] = sum_i log sigma_i + 1/2 logdet(I_R + V^T V) + D/2 log(2 pi e),      V = S^-1 U

The density takes determinants and inverses of size R alone (Woodbury; Ong, Nott & Smith 2018, arXiv
1701.03208). Given z, q is mean-field: all estimators of `core.vi` take its likelihood, and under a
Gaussian prior E_q[log p(w)] is in closed form, by marginal variances sigma_i^2 + |U_i|^2.

U = diag(u) F with fixed units u, the first sigma, so that a step of an optimizer on F means the
same for every weight. (Units of sigma itself would not do: optima of low rank often have a sigma
near 0, where V would have to grow without end.)

Target: the q of this family with the least KL(q || p_T(w | D)); at T = 1 its ELBO is a lower bound
of log p(D). With R = D - 1 the family has every Gaussian; R = 0 would be mean-field VI.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import ElboTerms
from haiku_posteriors.core.elbo_ascent import elbo_ascent
from haiku_posteriors.core.errors import UserError, check_positive, unknown_name
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.trees import Params


class LowRank(NamedTuple):
    """q.

    Attributes:
      mean: mu, of the random parameters; `None` elsewhere, as `core.trees.partition` leaves it.
      raw_scale: rho, likewise.
      factor: F^T, leaves (R, *shape), likewise.
      unit: u, likewise; fixed.
      point: the other parameters.
    """

    mean: Params
    raw_scale: Params
    factor: Params
    unit: Params
    point: Params


def initial_low_rank(
    rng_key: jax.Array,
    log_joint: LogJoint,
    params: Params,
    rank: int,
    sigma_init: float = 1e-2,
    scale: Params | None = None,
) -> LowRank:
    """q around `params`, its columns of F random and of norm 1 on average.

    F = 0 would be a stationary point. A column of norm 1 costs 1/2 (1 - log 2) nats at most where
    S is as wide as the curvature says, and training turns it to where it pays.

    Args:
      rng_key: of the columns.
      log_joint: the model.
      params: mu and the point estimates.
      rank: R.
      sigma_init: sigma, for every weight, unless
      scale: has it, in the structure of the random parameters.
    """
    mean, point = log_joint.partition(params)
    if scale is None:
        scale = jax.tree.map(lambda leaf: jnp.full_like(leaf, sigma_init), mean)
    raw_scale = jax.tree.map(vi.inverse_softplus, scale)
    stacked = jax.tree.map(lambda leaf: jnp.zeros((rank, *leaf.shape), leaf.dtype), mean)
    share = trees.size(mean) ** -0.5
    factor = jax.tree.map(lambda leaf: share * leaf, trees.normal_like(rng_key, stacked))
    return LowRank(mean, raw_scale, factor, scale, point)


class LowRankFamily(NamedTuple):
    """Gaussians of low rank plus a diagonal, a `core.densities.Family`.

    Attributes:
      log_joint: the model.
      estimator: of the likelihood, one of `vi.ESTIMATORS`.
    """

    log_joint: LogJoint
    estimator: str = "reparameterization"

    def draw(self, rng_key: jax.Array, q: LowRank) -> Params:
        """One draw of all parameters."""
        return self._draw_at(q, self._noise(rng_key, q, 1), 0)[1]

    def log_density(self, q: LowRank, params: Params) -> jax.Array:
        """log q(w) of the random parameters, exact.

        With r = (w - mu) / sigma and a = (I + V^T V)^-1 V^T r, r^T (I + V V^T)^-1 r is
        |r - V a|^2 + |a|^2, which loses no digits where V is large.
        """
        scale = jax.tree.map(jax.nn.softplus, q.raw_scale)
        random = self.log_joint.partition(params)[0]
        residual = jax.tree.map(lambda w, m, s: (w - m) / s, random, q.mean, scale)
        relative = jax.tree.map(jnp.divide, _scaled_factor(q), scale)
        triangle = _triangle(relative)
        projected = _sum(jax.tree.map(lambda f, r: _flat(f) @ r.ravel(), relative, residual))
        found = jax.scipy.linalg.cho_solve((triangle, False), projected)
        rest = jax.tree.map(lambda r, f: r - _combine(found, f), residual, relative)
        squares = trees.total(jax.tree.map(jnp.square, rest)) + jnp.sum(jnp.square(found))
        logs = trees.total(jax.tree.map(jnp.log, scale)) + _half_log_det(triangle)
        return -squares / 2 - logs - 0.5 * math.log(2 * math.pi) * trees.size(random)

    def noise_like(self, q: LowRank) -> tuple[jax.Array, Params]:
        """Shapes of z and e of a draw."""
        rank = jax.tree.leaves(q.factor)[0].shape[0]
        return jnp.zeros(rank, jax.tree.leaves(q.mean)[0].dtype), q.mean

    def transport(self, q: LowRank, noise: tuple[jax.Array, Params]) -> tuple[Params, jax.Array]:
        """w from standard normal x = (z, e), and log N(x; 0, I) - log q(w); x has R more."""
        drawn = self._draw_at(q, jax.tree.map(lambda leaf: leaf[None], noise), 0)[1]
        squares = trees.total(jax.tree.map(jnp.square, noise))
        log_normal = -(squares + trees.size(noise) * math.log(2 * math.pi)) / 2
        return drawn, log_normal - self.log_density(q, drawn)

    def evidence_terms(
        self, rng_key: jax.Array, q: LowRank, data: Data, num_samples: int
    ) -> tuple[ElboTerms, Params]:
        """The ELBO's terms, (num_samples,), differentiable, and the draws of `reparameterization`.

        An even number of draws comes in pairs of opposite (z, e).
        """
        scale = jax.tree.map(jax.nn.softplus, q.raw_scale)
        temperature = self.log_joint.temperature
        factor = _scaled_factor(q)
        deviations = jax.tree.map(
            lambda s, f: jnp.sqrt(jnp.square(s) + jnp.sum(jnp.square(f), axis=0)), scale, factor
        )
        triangle = _triangle(jax.tree.map(jnp.divide, factor, scale))
        entropy = vi.entropy(scale) + _half_log_det(triangle)
        noise_key, layer_key = (jax.random.fold_in(rng_key, index) for index in range(2))
        noise = self._noise(noise_key, q, num_samples)

        def terms(index: jax.Array) -> tuple[ElboTerms, Params]:
            center, drawn = self._draw_at(q, noise, index)
            key = jax.random.fold_in(layer_key, index)
            log_likelihood = noisy_layers.sampled_log_likelihood(
                key, self.log_joint, center, scale, drawn, data, self.estimator
            )
            random = self.log_joint.partition(drawn)[0]
            # Under a correlated prior the expectation is one given z; else all of it is known.
            given_z = self.log_joint.prior.is_correlated
            moments = (center, scale) if given_z else (q.mean, deviations)
            log_prior = self.log_joint.expected_log_prior(*moments, random)
            tempered = (log_likelihood / temperature, log_prior / temperature)
            return ElboTerms(*tempered, entropy), drawn

        return jax.vmap(terms)(jnp.arange(num_samples))

    def align(self, q: LowRank, like: LowRank) -> LowRank:
        """The same Gaussian with F turned to come nearest to another's.

        F and F Q, Q orthogonal, are the same q: nothing but chance decides between them, so that
        iterates are not to be averaged as they are. Q is the polar factor of F^T F' (Schoenemann
        1966).
        """
        products = _sum(jax.tree.map(lambda a, b: _flat(a) @ _flat(b).T, q.factor, like.factor))
        left, _, right = jnp.linalg.svd(products)
        turned = jax.tree.map(lambda f: jnp.tensordot((left @ right).T, f, 1), q.factor)
        return q._replace(factor=turned)

    def _noise(self, rng_key: jax.Array, q: LowRank, count: int) -> tuple[jax.Array, Params]:
        """z (count, R) and e (count, ...), in pairs of opposite sign for an even count."""
        rank = jax.tree.leaves(q.factor)[0].shape[0]
        dtype = jax.tree.leaves(q.mean)[0].dtype
        half = count if count % 2 else count // 2
        like = jax.tree.map(lambda m: jnp.zeros((half, *m.shape), m.dtype), q.mean)
        noise = trees.normal_like(rng_key, (jnp.zeros((half, rank), dtype), like))
        if count % 2:
            return noise
        return jax.tree.map(lambda e: jnp.concatenate([e, -e]), noise)

    def _draw_at(
        self, q: LowRank, noise: tuple[jax.Array, Params], index: jax.Array | int
    ) -> tuple[Params, Params]:
        """mu + U z, the mean given z, and all parameters."""
        z, e = jax.tree.map(lambda leaf: leaf[index], noise)
        scale = jax.tree.map(jax.nn.softplus, q.raw_scale)
        center = jax.tree.map(lambda m, f: m + _combine(z, f), q.mean, _scaled_factor(q))
        drawn = jax.tree.map(lambda c, s, e: c + s * e, center, scale, e)
        return center, trees.merge(drawn, q.point)


def low_rank_vi(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    rank: int = 10,
    sigma_init: float = 1e-2,
    estimator: str = "reparameterization",
    num_samples: int = 1,
) -> Method:
    """Maximises the ELBO; one step is one epoch.

    Args:
      log_joint: the model.
      optimizer: any optax transformation; Adam with a step size of 1e-2 by default.
      batch_size: maximum rows per minibatch.
      rank: R, at most the number of random weights.
      sigma_init: sigma at the start.
      estimator: one of `vi.ESTIMATORS`, applied given z.
      num_samples: draws of q per minibatch; an even number comes in pairs of opposite noise.

    Returns:
      The method; `init` also takes a `LowRank`. Infos as in `elbo_ascent`.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = low_rank_vi(log_joint, batch_size=8, rank=2)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    if estimator not in vi.ESTIMATORS:
        raise unknown_name("estimator", estimator, vi.ESTIMATORS)
    check_positive(sigma_init=sigma_init)
    most = trees.size(log_joint.random_shapes)
    if not 1 <= rank <= most:
        raise UserError(f"The rank must be 1 to {most}, the number of random weights, not {rank}.")
    family = LowRankFamily(log_joint, estimator)

    def start(rng_key: jax.Array, params: Params | LowRank | None) -> LowRank:
        if isinstance(params, LowRank):
            return params
        network_key, factor_key = (jax.random.fold_in(rng_key, index) for index in range(2))
        params = log_joint.init(network_key) if params is None else params
        return initial_low_rank(factor_key, log_joint, params, rank, sigma_init)

    def terms(rng_key: jax.Array, q: LowRank, data: Data, num_samples: int) -> ElboTerms:
        return family.evidence_terms(rng_key, q, data, num_samples)[0]

    return elbo_ascent(start, terms, family.draw, optimizer, batch_size, num_samples, family.align)


def _scaled_factor(q: LowRank) -> Params:
    """U^T, leaves (R, *shape)."""
    return jax.tree.map(lambda u, f: jax.lax.stop_gradient(u) * f, q.unit, q.factor)


def _flat(factor: jax.Array) -> jax.Array:
    return factor.reshape(factor.shape[0], -1)


def _combine(z: jax.Array, factor: jax.Array) -> jax.Array:
    """The columns of a leaf, weighted by z."""
    return jnp.tensordot(z, factor, axes=1)


def _sum(tree: Params) -> jax.Array:
    return functools.reduce(jnp.add, jax.tree.leaves(tree))


def _triangle(relative: Params) -> jax.Array:
    """The upper triangle R of QR = (I; V), with R^T R = I + V^T V.

    Where a sigma is near 0, float32 loses the digits of I in I + V^T V, but not here.
    """
    columns = jnp.concatenate([_flat(leaf) for leaf in jax.tree.leaves(relative)], axis=1).T
    identity = jnp.eye(columns.shape[1], dtype=columns.dtype)
    return jnp.linalg.qr(jnp.concatenate([identity, columns]), mode="r")


def _half_log_det(triangle: jax.Array) -> jax.Array:
    return jnp.sum(jnp.log(jnp.abs(jnp.diagonal(triangle))))
