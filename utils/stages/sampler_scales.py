"""Masses and steps of SGMCMC that fit the posterior around its trained starts.

    M = diagonal curvature, on average over the chains' starts
    h = STEP_OVER_STABLE * 2 / sqrt(L)       L the largest eigenvalue of M^-1/2 H M^-1/2, of all
    beta = exp(-f)                           f between 2 / UPDATES_PER_DRAW and h
    eps = (1 + beta) h^2 / 2

Directions of curvature lambda in units of M relax, in numbers of updates, in 2 / f, or where they
are slow, lambda < (f / 2 h)^2, in f / (lambda h^2): less friction f mixes slow directions faster,
and costs the others nothing as long as momenta are forgotten from draw to draw. But it raises the
bias by the noise of minibatch gradients, `sgmcmc.noise_bias`, which is about h^2 C / (2 f M). So f
is the least of these, doubled until the bias is below the tolerance; beyond h, where directions of
curvature 1 become slow themselves, h is halved.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import curvature, sgmcmc
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains
from haiku_posteriors.utils.settings import UPDATES_PER_DRAW
from haiku_posteriors.utils.stages import local_scales
from haiku_posteriors.utils.tasks import Task

STEP_OVER_STABLE = 0.25
LEAST_FRICTION = 2 / UPDATES_PER_DRAW


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
    """Scales from the curvature at `starts`, (chains, ...), within settings.bias_tolerance."""
    settings, log_joint = task.settings, task.log_joint

    def diagonal_and_noise(key: jax.Array, params: Params, data: Data) -> tuple[Params, Params]:
        keys = [jax.random.fold_in(key, number) for number in range(2)]
        diagonal = curvature.diagonal(keys[0], log_joint, params, data)
        noise = curvature.gradient_noise(keys[1], log_joint, params, data, settings.batch_size)
        return diagonal, noise

    found = local_scales.over_members(task, chains.CURVATURE, diagonal_and_noise, starts)
    mass, noise = jax.tree.map(lambda leaf: leaf.mean(axis=0), found)

    def largest(key: jax.Array, params: Params, data: Data) -> jax.Array:
        key = jax.random.fold_in(key, 2)
        return curvature.largest_eigenvalue(key, log_joint, params, data, mass)

    eigenvalue = float(np.max(local_scales.over_members(task, chains.CURVATURE, largest, starts)))
    scale = jax.tree.map(lambda leaf: 1 / jnp.sqrt(leaf), mass)
    for stride, friction in _candidates(STEP_OVER_STABLE * 2 / math.sqrt(eigenvalue)):
        beta = settings.momentum_decay
        beta = math.exp(-friction) if beta is None else beta
        step_size = (1 + beta) * stride**2 / 2
        bias = float(sgmcmc.noise_bias(step_size, beta, noise, scale))
        if bias <= settings.bias_tolerance:
            break
    return Scales(mass, step_size, beta, bias, eigenvalue)


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
        f"SGMCMC: masses from the diagonal curvature of the starts, in which the largest curvature "
        f"is {scales.largest:.3g}; step size {scales.step_size:.3g}, momentum decay "
        f"{scales.momentum_decay:.3g}; batches of {batch_size} rows, whose noise makes variances "
        f"{scales.noise_bias:.1%} too large by formula."
    )
