"""Unbiased implicit variational inference: the entropy's gradient by draws of q(z | w).

    grad H[q] = -E[ s(w)^T dw / dphi ],      w = g(z) + s * e,
    s(w) = grad_w log q(w) = E_{q(z' | w)}[ grad_w log q(w | z') ] = E[ -(w - g(z')) / s^2 ]

(Titsias & Ruiz 2019, arXiv 1808.02078.) The pair (z, w) is a draw of q(z, w), hence z one of
q(z | w): HMC for z' begins there, in its stationary law, and needs no burn-in. But z' has to be
independent of z given w, which made w: transitions before the ones that count let it forget.
What it remembers is the bias. Here momenta are drawn in the metric of I + B^T B at z = 0, with B
the Jacobian of g / s, in which q(z | w) of a linear g is spherical; the step size is adapted to an
acceptance of TARGET. For latents of more than `encoders.LAPLACE_LIMIT` the metric is I.

The ELBO itself has no such estimate. The value that goes with this gradient is the lower bound of
`core.implicit.bounds`, with r(z | w) half the prior and half a Gaussian of that same metric, around
what a few Newton steps with it from z = 0 find: q(z | w) itself for a linear g. Of K draws of r,
one half makes the bound tight where g is nearly linear, the other as good as a semi-implicit bound
of K / 2 draws where it is bent. The upper bound by the same draws says how far the ELBO may be
above what a run reports, and watches. (Laplace approximations at every w would be tighter, and
would take five times as long as all the rest.)
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import hamiltonian
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.implicit import bounds
from haiku_posteriors.core.implicit.encoders import LAPLACE_LIMIT
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler
from haiku_posteriors.core.implicit.whitening import Whitened, normal_equations, whitened_map

TARGET, RATE = 0.9, 0.02  # of the acceptance, and of the step size's logarithm a minibatch
JITTER = 0.3  # of the step size: no trajectory length is a period for good
FIRST_STEP_SIZE = 0.3
NUM_NEWTON_STEPS = 3  # to where r of the bounds is


class Unbiased(NamedTuple):
    """How the entropy's gradient of the objective `uivi` is estimated.

    Attributes:
      num_forgetting: transitions before the ones that count.
      num_kept: transitions whose draws are averaged.
      num_leapfrog_steps: of each.
      num_draws: K of the bounds that are reported.
    """

    num_forgetting: int = 3
    num_kept: int = 3
    num_leapfrog_steps: int = 5
    num_draws: int = 50


class ReverseTarget(NamedTuple):
    """log q(u | w) up to a constant, z = u transform, as `core.hamiltonian` moves on it.

    Attributes:
      whitened: g / s.
      weights: w / s, (D,).
      transform: (d, d).
    """

    whitened: Whitened
    weights: jax.Array
    transform: jax.Array

    def __call__(self, params: jax.Array, data: Data | None) -> jax.Array:
        """See `hamiltonian.Target`."""
        return -jnp.sum(self._squares(params))

    def difference(self, new: jax.Array, old: jax.Array, data: Data | None) -> jax.Array:
        """See `hamiltonian.Target`."""
        return jnp.sum(self._squares(old) - self._squares(new))

    def partition(self, params: jax.Array) -> tuple[jax.Array, None]:
        """All of it moves."""
        return params, None

    def _squares(self, u: jax.Array) -> jax.Array:
        z = u @ self.transform
        return jnp.concatenate([z**2, (self.weights - self.whitened(z)) ** 2]) / 2


def metric_at_zero(whitened: Whitened, latent_size: int, dtype: jnp.dtype) -> jax.Array:
    """T with z = u T of precision T^-1 T^-T = I + B^T B at z = 0; I for large latents."""
    identity = jnp.eye(latent_size, dtype=dtype)
    if latent_size > LAPLACE_LIMIT:
        return identity
    zero = jnp.zeros(latent_size, dtype)
    squares, axes = jnp.linalg.eigh(normal_equations(whitened, zero, whitened(zero)).gram)
    return axes.T / jnp.sqrt(1 + jnp.maximum(squares, 0))[:, None]


def reverse_draws(
    rng_key: jax.Array,
    whitened: Whitened,
    transform: jax.Array,
    z: jax.Array,
    weights: jax.Array,
    step_size: jax.Array,
    settings: Unbiased,
) -> tuple[jax.Array, jax.Array]:
    """Draws of q(z | w) by HMC from z, (num_kept, d), and the mean acceptance probability.

    Args:
      rng_key: of the chain.
      whitened: g / s.
      transform: of `metric_at_zero`, which knows neither z nor w.
      z: (d,), itself a draw of q(z | w).
      weights: w / s, (D,).
      step_size: before jitter.
      settings: the numbers of transitions.
    """
    target = ReverseTarget(whitened, weights, transform)
    start = hamiltonian.start(target, (transform @ z) / _row_norms(transform))
    ones = jnp.ones_like(z)

    def body(
        position: hamiltonian.Position, number: jax.Array
    ) -> tuple[hamiltonian.Position, tuple[jax.Array, jax.Array]]:
        key = jax.random.fold_in(rng_key, number)
        factor = jax.random.uniform(jax.random.fold_in(key, 2), (), z.dtype, 1 - JITTER, 1 + JITTER)
        position, info = hamiltonian.transition(
            key,
            target,
            position,
            None,  # type: ignore[arg-type]  # w is all the data there is
            step_size=step_size * factor,
            inverse_mass=ones,
            num_steps=jnp.asarray(settings.num_leapfrog_steps),
        )
        return position, (position.params @ transform, info["acceptance_probability"])

    numbers = jnp.arange(settings.num_forgetting + settings.num_kept)
    _, (draws, acceptance) = jax.lax.scan(body, start, numbers)
    return draws[settings.num_forgetting :], jnp.mean(acceptance)


def entropies(
    rng_key: jax.Array,
    generator: Generator,
    sampler: Sampler,
    z: jax.Array,
    e: jax.Array,
    log_step_size: jax.Array,
    settings: Unbiased,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """At each draw a lower bound of H with the gradient of H itself, (draws,).

    Args:
      rng_key: of chains and of the bound.
      generator: g.
      sampler: its parameters, and s.
      z: (draws, d).
      e: (draws, D).
      log_step_size: of HMC.
      settings: the numbers of transitions.

    Returns:
      These, the upper bound less the lower one, (draws,), and the mean acceptance.
    """
    fixed = jax.lax.stop_gradient(sampler)
    whitened, log_scales = whitened_map(generator, fixed)
    transform = metric_at_zero(whitened, generator.latent_size, z.dtype)
    step_size = jnp.exp(log_step_size)

    def score(number: jax.Array, z: jax.Array, e: jax.Array) -> tuple[jax.Array, jax.Array]:
        """-s(w), (D,)."""
        weights = whitened(z) + e
        key = jax.random.fold_in(jax.random.fold_in(rng_key, 0), number)
        draws, acceptance = reverse_draws(key, whitened, transform, z, weights, step_size, settings)
        residual = weights - jnp.mean(jax.vmap(whitened)(draws), axis=0)
        return residual / jnp.exp(log_scales), acceptance

    negative_scores, acceptances = jax.vmap(score)(jnp.arange(len(z)), z, e)
    learned, log_scales_now = whitened_map(generator, sampler)

    def surrogate(negative_score: jax.Array, z: jax.Array, e: jax.Array) -> jax.Array:
        """0, with the gradient -s(w)^T dw / dphi."""
        weights = jnp.exp(log_scales_now) * (learned(z) + e)
        value = jnp.sum(jax.lax.stop_gradient(negative_score) * weights)
        return value - jax.lax.stop_gradient(value)

    make_reverse = reverse_model(transform)

    def interval(number: jax.Array, z: jax.Array, e: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(rng_key, 1), number)
        return bounds.entropy_interval(
            key, whitened, log_scales, z, e, make_reverse, settings.num_draws
        )

    lower, upper = jax.vmap(interval)(jnp.arange(len(z)), z, e)
    values = lower + jax.vmap(surrogate)(negative_scores, z, e)
    return values, upper - lower, jnp.mean(acceptances)


class HalfPrior(NamedTuple):
    """1/2 N(z; 0, I) + 1/2 N(z; m, T^T T), a `bounds.Reverse`.

    Attributes:
      mean: m, (d,).
      transform: T of `metric_at_zero`, (d, d).
    """

    mean: jax.Array
    transform: jax.Array

    def sample(self, rng_key: jax.Array, num_draws: int) -> jax.Array:
        """Independent draws."""
        keys = [jax.random.fold_in(rng_key, index) for index in range(2)]
        noise = jax.random.normal(keys[0], (num_draws, self.mean.size), self.mean.dtype)
        is_prior = jax.random.bernoulli(keys[1], 0.5, (num_draws, 1))
        return jnp.where(is_prior, noise, self.mean + noise @ self.transform)

    def log_density(self, z: jax.Array) -> jax.Array:
        """See `bounds.Reverse`."""
        norms = _row_norms(self.transform)
        there = bounds.log_standard_normal((z - self.mean) @ self.transform.T / norms)
        there -= jnp.sum(jnp.log(norms)) / 2
        return jnp.logaddexp(bounds.log_standard_normal(z), there) - math.log(2)


def reverse_model(transform: jax.Array) -> bounds.MakeReverse:
    """r(z | w) of the bounds; it sees w alone."""

    def make(whitened: Whitened, target: jax.Array) -> bounds.Reverse:
        def energy(z: jax.Array) -> jax.Array:
            return (jnp.sum(z**2) + jnp.sum((target - whitened(z)) ** 2)) / 2

        def step(_: int, z: jax.Array) -> jax.Array:
            value, gradient = jax.value_and_grad(energy)(z)
            proposal = z - (transform @ gradient) @ transform
            return jnp.where(energy(proposal) < value, proposal, z)

        zero = jnp.zeros(len(transform), target.dtype)
        return HalfPrior(jax.lax.fori_loop(0, NUM_NEWTON_STEPS, step, zero), transform)

    return make


def _row_norms(transform: jax.Array) -> jax.Array:
    """Of T, which is diagonal times orthogonal: T^-1 z = T z / norms."""
    return jnp.sum(transform**2, axis=1)


def adapt(log_step_size: jax.Array, acceptance: jax.Array) -> jax.Array:
    """The logarithm of the next minibatch's step size."""
    return log_step_size + RATE * (acceptance - TARGET)
