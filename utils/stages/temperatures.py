"""Temperatures of a finished run of SGMCMC: gradients of all data at some of its draws."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import curvature, sgmcmc, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.judging import temperatures
from haiku_posteriors.core.judging.temperatures import Measured, Temperatures
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains
from haiku_posteriors.utils.stages import local_scales
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

NUM_DRAWS = 200  # of each chain, at most
MIN_DRAWS = 8
MAX_VALUES = 2**26  # of draws in memory


def measure(
    task: Task,
    result: RunResult,
    kinetic: float | None,
    step_size: float | None,
    momentum_decay: float,
    scale: Callable[[Any], Params],
) -> Measured | None:
    """Temperatures and log-joints of a run; None where there are too few draws.

    Args:
      task: what was worked on.
      result: of the run.
      kinetic: temperature of the velocities, where there are any.
      step_size: at the draws; None where it varies.
      momentum_decay: of the sampler.
      scale: state of one chain -> M^-1/2.
    """
    num_chains, num_draws = result.test_predictions.outputs.shape[:2]
    most = MAX_VALUES // (num_chains * trees.size(task.log_joint.shapes))
    count = min(num_draws, NUM_DRAWS, most)
    if count < MIN_DRAWS:
        return None
    chosen = np.linspace(0, num_draws - 1, count).astype(int)
    blocks = list(result.store.chosen(chosen))
    draws = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *blocks)

    def values(_: jax.Array, draws: Params, data: Data) -> tuple[jax.Array, jax.Array]:
        # Each half around the mean of the other, which depends on it as little as may be.
        half = count // 2
        first, second = (
            jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), part)
            for part in (
                jax.tree.map(lambda leaf: leaf[:half], draws),
                jax.tree.map(lambda leaf: leaf[half:], draws),
            )
        )

        def at(argument: tuple[Params, jax.Array]) -> tuple[jax.Array, jax.Array]:
            params, number = argument
            center = trees.select(number < half, second, first)
            value, gradient = jax.value_and_grad(task.log_joint)(params, data)
            products = jax.tree.map(lambda w, c, g: -(w - c) * g, params, center, gradient)
            random, _ = task.log_joint.partition(products)
            return trees.total(random) / trees.size(random), value

        return jax.lax.map(at, (draws, jnp.arange(count)))

    virials, log_joint = local_scales.over_members(task, chains.VIRIAL, values, draws)
    bias = None
    if step_size is not None:
        noise_bias = _noise_bias(task, result, step_size, momentum_decay, scale)
        bias = float(np.mean(noise_bias))
    found = Temperatures(temperatures.configurational(virials), kinetic, bias)
    return Measured(found, np.asarray(log_joint))


def _noise_bias(
    task: Task,
    result: RunResult,
    step_size: float,
    momentum_decay: float,
    scale: Callable[[Any], Params],
) -> np.ndarray:
    """At the last position of every chain, (chains,)."""

    def bias(key: jax.Array, state: Any, data: Data) -> jax.Array:
        noise = curvature.gradient_noise(
            key, task.log_joint, state.params, data, task.settings.batch_size
        )
        return sgmcmc.noise_bias(step_size, momentum_decay, noise, scale(state))

    return local_scales.over_members(task, chains.VIRIAL, bias, result.state)
