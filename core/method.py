"""What an inference method is: three pure functions, the same for all methods."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core.data import Data, minibatch_indices, num_minibatches, take
from haiku_posteriors.core.trees import Params

State = Any  # a pytree of arrays; all that the next step needs, nothing more
Info = dict[str, jax.Array]  # diagnostics by name; scalars, or one value a step


class Method(NamedTuple):
    """An inference method over one log-joint.

    The loop adds a leading chain (or ensemble member) axis to all three by `jax.vmap`.

    Attributes:
      init: (rng_key, params or None) -> state, started at the given parameters, or where the
        method itself would start.
      step: (state, data, rng_key) -> (state, info). One pass over the data, or one transition.
        `info["log_joint"]` holds the (estimated) log-joint after or along the step; where it is
        not finite, the loop stops and keeps the state before.
      draw: (state, rng_key, num_draws) -> params, stacked along a leading axis: draws from the
        current approximation of the posterior. A sampler returns its current position.
    """

    init: Callable[[jax.Array, Params | None], State]
    step: Callable[[State, Data, jax.Array], tuple[State, Info]]
    draw: Callable[[State, jax.Array, int], Params]


def minibatch_epoch(
    update: Callable[[State, Data, jax.Array], tuple[State, Info]],
    state: State,
    data: Data,
    rng_key: jax.Array,
    batch_size: int,
) -> tuple[State, Info]:
    """One pass over the data in minibatches of `core.data.minibatch_indices`, as one scan.

    Args:
      update: (state, minibatch, rng_key) -> (state, info), the update of one minibatch.
      state: passed from update to update.
      data: the whole data set, on the device.
      rng_key: the key of this epoch; shuffling and updates use keys derived from it.
      batch_size: at most so many rows a minibatch.

    Returns:
      The last state and each update's info, stacked.
    """
    shuffle_key, update_key = jax.random.fold_in(rng_key, 0), jax.random.fold_in(rng_key, 1)
    if num_minibatches(data.num_rows, batch_size) == 1:  # nothing to shuffle or to copy
        state, info = update(state, data, jax.random.fold_in(update_key, 0))
        return state, jax.tree.map(lambda leaf: leaf[None], info)
    indices, weights = minibatch_indices(data.num_rows, batch_size, shuffle_key, data.weights.dtype)

    def body(state: State, batch: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[State, Info]:
        number, rows, row_weights = batch
        return update(state, take(data, rows, row_weights), jax.random.fold_in(update_key, number))

    return jax.lax.scan(body, state, (jnp.arange(len(indices)), indices, weights))


def optimize(
    optimizer: optax.GradientTransformation,
    gradient: Params,
    optimizer_state: optax.OptState,
    params: Params,
) -> tuple[Params, optax.OptState]:
    """One step of an optax optimizer downhill: the new parameters and optimizer state."""
    # optax mixes integer counts with floats, which the strict promotion of our tests forbids.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state


def repeat(params: Params, num_draws: int) -> Params:
    """The draws of a point mass: `params` repeated along a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_draws, *leaf.shape)), params)
