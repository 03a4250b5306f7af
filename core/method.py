"""The interface of an inference method: a few pure functions, the same for all methods."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core.data import Data, minibatch_indices, num_minibatches, spread, take
from haiku_posteriors.core.trees import Params

State = Any  # a pytree of arrays: what the next step needs and no more
Info = dict[str, jax.Array]  # diagnostics by name; scalars, or one value per minibatch


class Method(NamedTuple):
    """An inference method over one log-joint.

    Methods are written for one chain; the loop adds a leading axis of chains (or ensemble members).

    Attributes:
      init: (rng_key, params or None) -> state, at the given parameters or, for None, at the
        method's own starting point. (SMC starts at the prior and takes point estimates alone.)
      step: (rng_key, state, data) -> (state, info). One pass over the data, or one transition.
        `info["log_joint"]` holds the (estimated) log-joint after or along the step; where it is
        not finite, the loop stops and keeps the state before.
      sample: (rng_key, state, num_draws) -> params, stacked along a leading axis: draws from the
        current approximation of the posterior. A sampler returns its current position.
      pool: states of all chains, with a leading chain axis -> the same, after chains have told each
        other what they learned. The loop calls it after every step; None where chains are alone.
      in_minibatches: whether a step draws minibatches of the rows, and does not sum over them all.
      align: (state, another) -> a state of the same approximation whose parameters are nearest to
        the other's, for averages of states; optimizers' states are not looked at. None where other
        parameters are another approximation.
    """

    init: Callable[[jax.Array, Params | None], State]
    step: Callable[[jax.Array, State, Data], tuple[State, Info]]
    sample: Callable[[jax.Array, State, int], Params]
    pool: Callable[[State], State] | None = None
    in_minibatches: bool = False
    align: Callable[[State, State], State] | None = None


def minibatch_epoch(
    rng_key: jax.Array,
    update: Callable[[jax.Array, State, Data], tuple[State, Info]],
    state: State,
    data: Data,
    batch_size: int,
) -> tuple[State, Info]:
    """One pass over the data in minibatches of `core.data.minibatch_indices`, as one scan.

    Args:
      rng_key: the key of this epoch; shuffling and updates use keys derived from it.
      update: (rng_key, state, minibatch) -> (state, info), the update of one minibatch.
      state: passed from update to update.
      data: the whole data set, on the device.
      batch_size: maximum rows per minibatch.

    Returns:
      The last state and each update's info, stacked.
    """
    shuffle_key, update_key = jax.random.fold_in(rng_key, 0), jax.random.fold_in(rng_key, 1)
    if num_minibatches(data.num_rows, batch_size) == 1:  # nothing to shuffle or to copy
        state, info = update(jax.random.fold_in(update_key, 0), state, spread(data))
        return state, jax.tree.map(lambda leaf: leaf[None], info)
    indices, weights = minibatch_indices(shuffle_key, data.num_rows, batch_size, data.weights.dtype)

    def body(state: State, batch: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[State, Info]:
        number, rows, row_weights = batch
        return update(jax.random.fold_in(update_key, number), state, take(data, rows, row_weights))

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
