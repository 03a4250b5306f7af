"""Uncorrected Hamiltonian annealing from a posterior with a density: better draws, a tighter bound.

A family's draws are w = T_q(x), x ~ N(0, I). In these coordinates, with v(x) the log of the volume
that T spreads x over, log N(x; 0, I) - log q(T(x)),

    pi(x) = p_T(T(x), D) exp(v(x))          has the normaliser p_T(D) of the weights themselves,

and draws of it are draws T(x) of the posterior. A path leads there in K steps from x_0 ~ N(0, I):

    r_k' = a r_{k-1} + sqrt(1 - a^2) e_k                momenta, refreshed in part
    (x_k, r_k) = half a drift, a kick, half a drift from (x_{k-1}, r_k')
                                                       under N(x)^(1 - b_k) pi(x)^b_k

There is no Metropolis test: as the steps preserve volume and the refreshment leaves N(0, I)
invariant, paths forwards and backwards have the ratio

    log W = log pi(x_K) - log N(x_0) + sum_k ( |r_k'|^2 - |r_k|^2 ) / 2,      E[W] = p_T(D),

so that E[log W] is a lower bound of log p_T(D) (the family's ELBO where steps are 0), whatever the
steps, the damping and b are; these are learned by raising it (Geffner & Domke 2021, arXiv
2107.04150; Zhang et al. 2021, arXiv 2107.10211). All of it needs all rows: with minibatches E[W]
would be another number. A step costs one gradient of log pi.

Learning does not differentiate paths: on a network with ReLU that led from -280 to -270 and then
down to -370. A likely cause is that the force jumps where a unit changes sides, so that x_K is no
continuous function of the step size, and the derivative along a path misses the jumps; smooth
networks were not compared. The schedule has few numbers, so they are moved by what paths of the
same noise give at two opposite perturbations, an unbiased gradient of E[log W] smoothed over
perturbations, but for the limit on differences.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import Family, Posterior
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, optimize
from haiku_posteriors.core.trees import Params

FIRST_STEP, FIRST_DAMPING, FIRST_POWER = 0.02, 0.9, 2.0
PERTURBATION = 0.1  # standard deviation, of logarithms and logits
LIMIT = 20.0  # nats: how much the difference of two paths counts at most
PATHS_AT_ONCE = 8


class Schedule(NamedTuple):
    """What is learned of a path of K steps, with b_k = (k / K)^p and steps h_k = h exp(c b_k).

    Attributes:
      log_step: log h.
      growth: c.
      log_factors: log of a factor on the steps for each leaf of the noise.
      log_power: log p.
      damping: logit of a.
    """

    log_step: jax.Array
    growth: jax.Array
    log_factors: Params
    log_power: jax.Array
    damping: jax.Array

    def exponents(self, num_steps: int) -> jax.Array:
        """b, (K,)."""
        parts = jnp.arange(1, num_steps + 1, dtype=self.log_power.dtype) / num_steps
        return parts ** jnp.exp(self.log_power)


class AnnealedState(NamedTuple):
    """The posterior that paths start from, their schedule, and the optimizer's state."""

    posterior: Posterior
    schedule: Schedule
    optimizer_state: optax.OptState


def initial_schedule(noise_like: Params) -> Schedule:
    """Short steps of one size, exponents that begin slowly."""
    dtype = jax.tree.leaves(noise_like)[0].dtype
    first = (FIRST_STEP, FIRST_POWER, FIRST_DAMPING / (1 - FIRST_DAMPING))
    log_step, log_power, damping = (jnp.asarray(math.log(value), dtype) for value in first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros((), dtype), noise_like)
    return Schedule(log_step, jnp.zeros((), dtype), zeros, log_power, damping)


def path(
    rng_key: jax.Array,
    log_joint: LogJoint,
    family: Family,
    q: Posterior,
    schedule: Schedule,
    data: Data,
    num_steps: int,
) -> tuple[jax.Array, Params]:
    """log W of a path, a scalar, and T(x_K).

    Args:
      rng_key: of all noise.
      log_joint: the target.
      family, q: where paths start.
      schedule: of its steps.
      data: all rows.
      num_steps: K.
    """
    like = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), family.noise_like(q))

    def normal(index: jax.Array | int) -> Params:
        return trees.normal_like(jax.random.fold_in(rng_key, index), like)

    def log_target(x: Params) -> tuple[jax.Array, Params]:
        params, log_volume = family.transport(q, x)
        return log_joint(params, data) + log_volume, params

    keep = jax.nn.sigmoid(schedule.damping)
    renew = jnp.sqrt(1 - jnp.square(keep))

    def step(carry: tuple, settings: tuple) -> tuple[tuple, None]:
        x, momentum, lost = carry
        index, exponent = settings
        log_step = schedule.log_step + schedule.growth * exponent
        sizes = jax.tree.map(lambda factor: jnp.exp(log_step + factor), schedule.log_factors)

        def drift(x: Params, momentum: Params) -> Params:
            return jax.tree.map(lambda x, h, r: x + h / 2 * r, x, sizes, momentum)

        refreshed = jax.tree.map(lambda r, e: keep * r + renew * e, momentum, normal(index))
        middle = drift(x, refreshed)
        slope, _ = jax.grad(log_target, has_aux=True)(middle)
        momentum = jax.tree.map(
            lambda r, h, s, x: r + h * (exponent * s - (1 - exponent) * x),
            *(refreshed, sizes, slope, middle),
        )
        lost += _half_square(refreshed) - _half_square(momentum)
        return (drift(middle, momentum), momentum, lost), None

    exponents, first = schedule.exponents(num_steps), normal(num_steps)
    start = (first, normal(num_steps + 1), jnp.zeros((), exponents.dtype))
    settings = (jnp.arange(num_steps), exponents)
    (last, _, lost), _ = jax.lax.scan(step, start, settings)
    value, params = log_target(last)
    size = trees.size(first)
    return value + _half_square(first) + size / 2 * math.log(2 * math.pi) + lost, params


def _half_square(tree: Params) -> jax.Array:
    return trees.total(jax.tree.map(jnp.square, tree)) / 2


def paths(
    rng_key: jax.Array,
    log_joint: LogJoint,
    family: Family,
    q: Posterior,
    schedule: Schedule,
    data: Data,
    *,
    num_steps: int,
    num_draws: int,
) -> tuple[jax.Array, Params]:
    """log W of independent paths, (num_draws,), and their ends."""
    return jax.lax.map(
        lambda key: path(key, log_joint, family, q, schedule, data, num_steps),
        jax.random.split(rng_key, num_draws),
        batch_size=min(num_draws, PATHS_AT_ONCE),
    )


def annealing(
    log_joint: LogJoint,
    family: Family,
    num_steps: int,
    optimizer: optax.GradientTransformation | None = None,
    *,
    num_samples: int = 8,
) -> Method:
    """Learns the schedule of paths from a given q, which stays as it is; a step is one update.

    Args:
      log_joint: the model.
      family: of q.
      num_steps: K.
      optimizer: Adam with a step size of 0.05 by default.
      num_samples: perturbations an update, with two paths each.

    Returns:
      The method; its draws are those of q, and annealed ones come from `paths`, which needs the
      data. `init` takes q. Infos: `bound`, the median of log W over perturbed schedules, and the
      same as `log_joint`.
    """
    if num_steps < 1:
        raise UserError(f"The number of annealed steps must be at least 1, not {num_steps}.")
    optimizer = optax.adam(0.05) if optimizer is None else optimizer

    def init(rng_key: jax.Array, q: Posterior) -> AnnealedState:
        schedule = initial_schedule(family.noise_like(q))
        return AnnealedState(q, schedule, optimizer.init(schedule))

    def step(rng_key: jax.Array, state: AnnealedState, data: Data) -> tuple[AnnealedState, Info]:
        q, schedule = state.posterior, state.schedule
        theta, restore = ravel_pytree(schedule)

        def both(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            """A perturbation, and log W at it and at its opposite, of the same noise."""
            direction = jax.random.normal(jax.random.fold_in(key, 0), theta.shape, theta.dtype)
            own = jax.random.fold_in(key, 1)

            def value(sign: jax.Array) -> jax.Array:
                there = restore(theta + sign * PERTURBATION * direction)
                return path(own, log_joint, family, q, there, data, num_steps)[0]

            return direction, jax.vmap(value)(jnp.array([1.0, -1.0], theta.dtype))

        keys = jax.random.split(rng_key, num_samples)
        directions, values = jax.lax.map(both, keys, batch_size=PATHS_AT_ONCE // 2)
        worst = jnp.finfo(values.dtype).min / 4  # of a path that has left the numbers
        values = jnp.where(jnp.isfinite(values), values, worst)
        gains = jnp.clip(values[:, 0] - values[:, 1], -LIMIT, LIMIT) / (2 * PERTURBATION)
        gradient = restore(-gains @ directions / num_samples)
        schedule, optimizer_state = optimize(optimizer, gradient, state.optimizer_state, schedule)
        bound = jnp.median(values)
        return AnnealedState(q, schedule, optimizer_state), {"bound": bound, "log_joint": bound}

    def sample(rng_key: jax.Array, state: AnnealedState, num_draws: int) -> Params:
        q = state.posterior

        def draw(key: jax.Array) -> Params:
            return family.transport(q, trees.normal_like(key, family.noise_like(q)))[0]

        return jax.lax.map(draw, jax.random.split(rng_key, num_draws))

    return Method(init, step, sample)
