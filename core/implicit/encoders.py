"""Amortised reverse models r(z | w) of an implicit posterior: trained with it, or after it.

    c = g(0),   x = A_0^-1 B_0^T (w - c) / s,   z' = x + h(x)              (h a network, 0 at first)

x is the Gauss-Newton step from z = 0, exact for linear g; B_0 is the Jacobian of g / s at 0 and
A_0 = I + B_0^T B_0. Then r(z | w) is one of

    laplace    N(z; m, A^-1),      A = I + B^T B and B at z',  m one Gauss-Newton step on from z'
    diagonal   N(z; z', diag(p)^-1),   p learned, and x by CG_STEPS steps of conjugate gradients

The first takes d products with B and is exact for linear g, whatever h does. The second takes a
few products alone, and is for latent sizes at which d of them are too many; there it costs what
q(z | w) has of correlations. Both are functions of w alone, which is all that a bound asks of them
(`core.implicit.bounds`); how well they fit decides how tight it is.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core.factors import inverse_factor
from haiku_posteriors.core.implicit.bounds import LOG_2_PI, MakeReverse, Reverse
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler, latents
from haiku_posteriors.core.implicit.whitening import Whitened, normal_equations, whitened_map
from haiku_posteriors.core.method import optimize
from haiku_posteriors.core.trees import Params

LAPLACE_LIMIT = 128  # latent size up to which A is built
HIDDEN_SIZE = 64
CG_STEPS = 10
ROUNDING = 3e-7
FIT_STEPS, FIT_STEP_SIZE, FIT_DRAWS = 500, 2e-2, 32  # of `fit_encoder`


class DiagonalReverse(NamedTuple):
    """N(mean, diag(exp(log_precision))^-1), both (d,)."""

    mean: jax.Array
    log_precision: jax.Array

    def sample(self, rng_key: jax.Array, num_draws: int) -> jax.Array:
        """See `core.implicit.bounds.Reverse`."""
        noise = jax.random.normal(rng_key, (num_draws, self.mean.size), self.mean.dtype)
        return self.mean + noise * jnp.exp(-self.log_precision / 2)

    def log_density(self, z: jax.Array) -> jax.Array:
        """See `core.implicit.bounds.Reverse`."""
        squares = jnp.sum((z - self.mean) ** 2 * jnp.exp(self.log_precision), axis=-1)
        return (jnp.sum(self.log_precision) - squares - z.shape[-1] * LOG_2_PI) / 2


class LaplaceReverse(NamedTuple):
    """N(mean, A^-1).

    Attributes:
      mean: (d,).
      precision: A, (d, d).
      factor: the inverse Cholesky factor G of A, A^-1 = G^T G (`core.factors`), (d, d).
    """

    mean: jax.Array
    precision: jax.Array
    factor: jax.Array

    def sample(self, rng_key: jax.Array, num_draws: int) -> jax.Array:
        """See `core.implicit.bounds.Reverse`."""
        noise = jax.random.normal(rng_key, (num_draws, self.mean.size), self.mean.dtype)
        return self.mean + noise @ self.factor

    def log_density(self, z: jax.Array) -> jax.Array:
        """See `core.implicit.bounds.Reverse`."""
        offset = z - self.mean
        squares = jnp.sum(offset @ self.precision * offset, axis=-1)
        log_det = -2 * jnp.sum(jnp.log(jnp.diagonal(self.factor)))
        return (log_det - squares - z.shape[-1] * LOG_2_PI) / 2


def init_encoder(rng_key: jax.Array, latent_size: int, dtype: jnp.dtype) -> Params:
    """Parameters of h, with h = 0, and log p where it is learned."""
    shape = (latent_size, HIDDEN_SIZE)
    first = jax.random.normal(rng_key, shape, dtype) / math.sqrt(latent_size)
    network = {
        "hidden": {"w": first, "b": jnp.zeros(HIDDEN_SIZE, dtype)},
        "output": {"w": jnp.zeros(shape[::-1], dtype), "b": jnp.zeros(latent_size, dtype)},
    }
    if latent_size <= LAPLACE_LIMIT:
        return network
    return {**network, "precision": {"log": jnp.zeros(latent_size, dtype)}}


def encoded_reverse(encoder: Params, latent_size: int) -> MakeReverse:
    """r(z | w) by an encoder, as `core.implicit.bounds` takes it."""

    def correct(x: jax.Array) -> jax.Array:
        """x + h(x)."""
        hidden = jax.nn.elu(x @ encoder["hidden"]["w"] + encoder["hidden"]["b"])
        return x + hidden @ encoder["output"]["w"] + encoder["output"]["b"]

    def laplace(whitened: Whitened, target: jax.Array) -> Reverse:
        def step(z: jax.Array) -> LaplaceReverse:
            """N(m, A^-1) with A at z, and m by one Gauss-Newton step from there."""
            gram, pulled = normal_equations(whitened, z, target)
            # A little more than A has a factor where rounding errors of a large B^T B exceed I.
            more = 1 + ROUNDING * jnp.trace(gram)
            precision = gram + more * jnp.eye(latent_size, dtype=z.dtype)
            factor = inverse_factor(precision)
            # A^-1 (B^T (w - g(z)) / s + B^T B z): the same as z less the step along the gradient.
            return LaplaceReverse(factor.T @ (factor @ (pulled + gram @ z)), precision, factor)

        first = step(jnp.zeros(latent_size, target.dtype))
        return step(correct(first.mean))

    def diagonal(whitened: Whitened, target: jax.Array) -> Reverse:
        zero = jnp.zeros(latent_size, target.dtype)
        value, push = jax.linearize(whitened, zero)
        transpose = jax.linear_transpose(push, zero)
        right = transpose(target - value)[0]
        found, _ = jax.scipy.sparse.linalg.cg(
            lambda v: v + transpose(push(v))[0], right, maxiter=CG_STEPS, tol=0.0
        )
        return DiagonalReverse(correct(found), encoder["precision"]["log"])

    return laplace if latent_size <= LAPLACE_LIMIT else diagonal


def fit_encoder(rng_key: jax.Array, generator: Generator, sampler: Sampler) -> Params:
    """An encoder of a trained sampler: the most likely one for pairs (z, w) that it makes.

    Maximises E[log r(z | w)] by Adam. The pairs of a bound are to be others.
    """
    whitened, _ = whitened_map(generator, sampler)
    dtype = jax.tree.leaves(sampler.log_scale)[0].dtype
    size = generator.latent_size
    optimizer = optax.adam(optax.cosine_decay_schedule(FIT_STEP_SIZE, FIT_STEPS))

    def loss(encoder: Params, key: jax.Array) -> jax.Array:
        make = encoded_reverse(encoder, size)

        def log_density(z: jax.Array, e: jax.Array) -> jax.Array:
            return make(whitened, whitened(z) + e).log_density(z)

        def normal(like: jax.Array) -> jax.Array:
            return jax.random.normal(key, like.shape, like.dtype)

        return -jnp.mean(jax.vmap(log_density)(*latents(normal, generator, sampler, FIT_DRAWS)))

    def step(carry: tuple[Params, optax.OptState], key: jax.Array) -> tuple[tuple, None]:
        encoder, state = carry
        gradient = jax.grad(loss)(encoder, key)
        encoder, state = optimize(optimizer, gradient, state, encoder)
        return (encoder, state), None

    first = init_encoder(jax.random.fold_in(rng_key, 0), size, dtype)
    keys = jax.random.split(jax.random.fold_in(rng_key, 1), FIT_STEPS)
    (encoder, _), _ = jax.lax.scan(step, (first, optimizer.init(first)), keys)
    return encoder
