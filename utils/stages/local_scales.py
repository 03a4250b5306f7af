"""Scales of the posterior around trained networks: what is left to gain, where q begins."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import curvature, densities, local_starts, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import BoundedFamily, Family, Posterior
from haiku_posteriors.core.judging import loo
from haiku_posteriors.core.progress import WatchedState
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices
from haiku_posteriors.utils.report import training
from haiku_posteriors.utils.tasks import Task

# Rows times parameters up to which hundreds of passes over the data are worth their time.
MAX_WORK = 10**9
NUM_IMPORTANCE_DRAWS, DRAWS_AT_ONCE = 1000, 20


def is_affordable(task: Task) -> bool:
    """Whether hundreds of passes over the data are."""
    return len(task.dataset.y_train) * trees.size(task.log_joint.shapes) <= MAX_WORK


def over_members(
    task: Task, purpose: int, function: Callable[[jax.Array, Params, Data], Any], state: Any
) -> Any:
    """function(key, state of a member, training rows), one member after the other, on the host.

    Args:
      task: what is worked on.
      purpose: of the keys.
      function: compiled once.
      state: leaves (members, ...).
    """
    num_members = jax.tree.leaves(state)[0].shape[0]
    mesh = devices.make_mesh(num_members)
    dataset, pieces = task.dataset, task.log_joint.num_microbatches
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh, pieces)

    def run(state: Any, data: Data) -> Any:  # rows of other processes cannot be constants
        def one(argument: tuple[Any, jax.Array]) -> Any:
            state, member = argument
            return function(chains.chain_key(task.settings.seed, purpose, 0, member), state, data)

        return jax.lax.map(one, (state, jnp.arange(num_members)))

    return devices.to_host(jax.jit(run)(state, data))


def remaining_gain(task: Task, params: Params) -> np.ndarray | None:
    """1/2 sum_i g_i^2 / H_ii at point estimates (members, ...): nats that are left to gain.

    By a quadratic of diagonal curvature; None where that would take too long.
    """
    if not is_affordable(task):
        return None

    def gain(key: jax.Array, params: Params, data: Data) -> jax.Array:
        gradient = jax.grad(task.log_joint)(params, data)
        diagonal = curvature.diagonal(key, task.log_joint, params, data)
        return trees.total(jax.tree.map(lambda g, h: g**2 / (2 * h), gradient, diagonal))

    return over_members(task, chains.CURVATURE, gain, params)


def of_point_estimates(task: Task, watched: WatchedState) -> dict[str, Any]:
    """What the verdict on point estimates (members, ...) needs to know, by its argument."""
    num_rows = len(task.dataset.y_train)
    return {
        "remaining": remaining_gain(task, watched.state.params),
        "noise": training.learned_noise(task.log_joint, watched, num_rows),
    }


def curvature_starts(
    task: Task,
    params: Params,
    begin: Callable[[jax.Array, Params, Params], Posterior],
    family: BoundedFamily,
) -> Posterior:
    """q around trained parameters (members, ...), see `core.local_starts`.

    Args:
      task: what is worked on.
      params: leaves (members, ...).
      begin: (rng_key, parameters, sigma of the random ones) -> q.
      family: of q.
    """

    def start(key: jax.Array, params: Params, data: Data) -> Posterior:
        return local_starts.start_around(key, task.log_joint, params, data, begin, family)

    return over_members(task, chains.CURVATURE, start, params)


def pareto_k(task: Task, family: Family, members: Posterior) -> np.ndarray | None:
    """Shape of the importance weights p_T(w, D) / q(w) of draws of q, (members,).

    None where that would take too long.
    """
    if not is_affordable(task):
        return None

    def log_ratios(key: jax.Array, q: Posterior, data: Data) -> jax.Array:
        def some(number: jax.Array) -> jax.Array:
            own = jax.random.fold_in(key, number)
            return densities.log_importance_ratios(
                own, family, task.log_joint, q, data, DRAWS_AT_ONCE
            )

        return jax.lax.map(some, jnp.arange(NUM_IMPORTANCE_DRAWS // DRAWS_AT_ONCE)).ravel()

    found = over_members(task, chains.IMPORTANCE, log_ratios, members)
    return np.array([loo.smooth_weights(values.astype(np.float64))[1] for values in found])
