"""Masses and steps of SGMCMC that fit the posterior where chains from trained starts go.

    M = diagonal curvature, on average over the chains
    h = STEP_OVER_STABLE * 2 / sqrt(L)       L the largest eigenvalue of M^-1/2 H M^-1/2, of all
    beta = exp(-f)                           f between 2 / UPDATES_PER_DRAW and h
    eps = (1 + beta) h^2 / 2

Directions of curvature lambda in units of M relax, in numbers of updates, in 2 / f, or where they
are slow, lambda < (f / 2 h)^2, in f / (lambda h^2): less friction f mixes slow directions faster,
and costs the others nothing as long as momenta are forgotten from draw to draw. But it raises the
bias by the noise of minibatch gradients, `sgmcmc.noise_bias`, which is about h^2 C / (2 f M). So f
is the least of these, doubled until the bias is below the tolerance; beyond h, where directions of
curvature 1 become slow themselves, h is halved.

Curvatures are those of places along a pilot run of the same sampler, which has the scales of the
starts and half their stride: at a mode the curvature is not that of the posterior around it. On
two_moons the draws of a network have L of 280 to 1,700 in masses of its modes, where L is 92.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import curvature, sgmcmc
from haiku_posteriors.core.data import Data, num_minibatches
from haiku_posteriors.core.sgmcmc import SGMCMCState
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains
from haiku_posteriors.utils.settings import UPDATES_PER_DRAW
from haiku_posteriors.utils.stages import local_scales
from haiku_posteriors.utils.tasks import Task

STEP_OVER_STABLE = 0.25
LEAST_FRICTION = 2 / UPDATES_PER_DRAW
PILOT_UPDATES, NUM_POSITIONS = 4000, 5
MAX_HALVINGS = 6  # of a pilot's stride that is unstable


class Scales(NamedTuple):
    """What the sampler is made of.

    Attributes:
      mass: M, a tree like the parameters.
      step_size: eps.
      momentum_decay: beta.
      noise_bias: of them, by formula.
      largest: L.
    """

    mass: Params
    step_size: float
    momentum_decay: float
    noise_bias: float
    largest: float


def fit(task: Task, starts: Params) -> Scales:
    """Scales for chains that start at `starts`, (chains, ...), within settings.bias_tolerance."""
    first = _fit_at(task, jax.tree.map(lambda leaf: leaf[:, None], starts))
    for halvings in range(1, MAX_HALVINGS + 1):
        positions = _pilot(task, starts, first, 0.5**halvings)
        if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(positions)):
            return _fit_at(task, positions)
    return first


def _fit_at(task: Task, positions: Params) -> Scales:
    """Scales from the curvature at `positions`, (chains, positions, ...).

    The masses are those of the last position of every chain; L is the largest of all positions.
    """
    settings, log_joint = task.settings, task.log_joint

    def diagonal_and_noise(key: jax.Array, places: Params, data: Data) -> tuple[Params, Params]:
        keys = [jax.random.fold_in(key, number) for number in range(2)]
        params = jax.tree.map(lambda leaf: leaf[-1], places)
        diagonal = curvature.diagonal(keys[0], log_joint, params, data)
        noise = curvature.gradient_noise(keys[1], log_joint, params, data, settings.batch_size)
        return diagonal, noise

    found = local_scales.over_members(task, chains.CURVATURE, diagonal_and_noise, positions)
    mass, noise = jax.tree.map(lambda leaf: leaf.mean(axis=0), found)

    def largest(key: jax.Array, places: Params, data: Data) -> jax.Array:
        key = jax.random.fold_in(key, 2)
        return jax.lax.map(
            lambda params: curvature.largest_eigenvalue(key, log_joint, params, data, mass), places
        )

    found = local_scales.over_members(task, chains.CURVATURE, largest, positions)
    eigenvalue = float(np.max(found))
    scale = jax.tree.map(lambda leaf: 1 / jnp.sqrt(leaf), mass)
    for stride, friction in _candidates(STEP_OVER_STABLE * 2 / math.sqrt(eigenvalue)):
        beta = settings.momentum_decay
        beta = math.exp(-friction) if beta is None else beta
        step_size = (1 + beta) * stride**2 / 2
        bias = float(sgmcmc.noise_bias(step_size, beta, noise, scale))
        if bias <= settings.bias_tolerance:
            break
    return Scales(mass, step_size, beta, bias, eigenvalue)


def _pilot(task: Task, starts: Params, scales: Scales, factor: float) -> Params:
    """Positions along a short run of the sampler with `factor` of its stride, (chains, NUM, ...).

    From the second half of the run, at equal distances.
    """
    mass = sgmcmc.fixed_mass(scales.mass)
    sampler = sgmcmc.sghmc(scales.step_size * factor**2, scales.momentum_decay, mass)
    batch_size = task.settings.batch_size
    method = sgmcmc.sgmcmc(task.log_joint, sampler, batch_size)
    batches = num_minibatches(len(task.dataset.y_train), batch_size)
    period = -(-PILOT_UPDATES // (2 * NUM_POSITIONS * batches))

    def run(key: jax.Array, start: Params, data: Data) -> Params:
        key = jax.random.fold_in(key, 3)

        def go_on(state: SGMCMCState, number: jax.Array) -> tuple[SGMCMCState, Params]:
            def step(epoch: int, state: SGMCMCState) -> SGMCMCState:
                own = jax.random.fold_in(key, number * period + epoch)
                return method.step(own, state, data)[0]

            state = jax.lax.fori_loop(0, period, step, state)
            return state, state.params

        _, places = jax.lax.scan(go_on, method.init(key, start), jnp.arange(2 * NUM_POSITIONS))
        return jax.tree.map(lambda leaf: leaf[NUM_POSITIONS:], places)

    return local_scales.over_members(task, chains.CURVATURE, run, starts)


def _candidates(stride: float) -> Iterator[tuple[float, float]]:
    """Pairs (h, f) of less and less bias, without end."""
    friction = LEAST_FRICTION
    while friction < stride:
        yield stride, friction
        friction *= 2
    while True:
        yield stride, stride
        stride /= 2


def describe(scales: Scales, batch_size: int) -> str:
    """In a sentence."""
    return (
        f"SGMCMC: masses from the diagonal curvature, in which the largest curvature "
        f"is {scales.largest:.3g}; step size {scales.step_size:.3g}, momentum decay "
        f"{scales.momentum_decay:.3g}; batches of {batch_size} rows, whose noise makes variances "
        f"{scales.noise_bias:.1%} too large by formula."
    )
