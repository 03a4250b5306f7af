"""A method over many chains as three compiled functions, and the keys that drive it.

Keys are derived, never carried: fold_in(fold_in(fold_in(key(seed), purpose), epoch), chain).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from core import trees
from core.data import Data
from core.method import Info, Method, State
from core.trees import Params
from utils import parallel_utils

# Purposes of random keys; never renumber, or old runs cannot be repeated.
INIT, STEP, DRAW, EVALUATE = range(4)


def chain_keys(seed: int, purpose: int, epoch: jax.Array | int, num_chains: int) -> jax.Array:
    """Keys of all chains for one purpose at one epoch, each by its global index."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), epoch)
    return jax.vmap(lambda chain: jax.random.fold_in(key, chain))(jnp.arange(num_chains))


class Program(NamedTuple):
    """A method over all chains, compiled.

    Attributes:
      init: (params (chains, ...) or None) -> state.
      run: (state, data, first, last) -> (epochs done, state, info of the last one). Stops early,
        with the state before, at an epoch that is not finite.
      draw: (state, purpose, epoch, num_draws) -> params (chains, num_draws, ...).
    """

    init: Callable[[Params | None], State]
    run: Callable[[State, Data, int, int], tuple[jax.Array, State, Info]]
    draw: Callable[[State, int, int, int], Params]


def compile_method(method: Method, seed: int, num_chains: int, mesh: Mesh) -> Program:
    """Adds the chain axis to a method and compiles its three functions once each."""
    chains, whole = parallel_utils.chain_sharding(mesh), parallel_utils.replicated(mesh)

    def init(params: Params | None) -> State:
        return jax.vmap(method.init)(chain_keys(seed, INIT, 0, num_chains), params)

    def step(state: State, data: Data, epoch: jax.Array) -> tuple[State, Info]:
        keys = chain_keys(seed, STEP, epoch, num_chains)
        return jax.vmap(method.step, in_axes=(0, None, 0))(state, data, keys)

    def run(
        state: State, data: Data, first: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, State, Info]:
        def healthy_and_unfinished(carry: tuple) -> jax.Array:
            epoch, _, _, finite = carry
            return (epoch < last) & finite

        def body(carry: tuple) -> tuple:
            epoch, state, _, _ = carry
            new_state, info = step(state, data, epoch)
            finite = trees.all_finite((new_state, info["log_joint"]))
            state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
            return epoch + finite.astype(epoch.dtype), state, info, finite

        shapes = jax.eval_shape(step, state, data, first)[1]
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        carry = (jnp.asarray(first, jnp.int32), state, empty, jnp.array(True))
        epoch, state, info, _ = jax.lax.while_loop(healthy_and_unfinished, body, carry)
        return epoch, state, info

    def draw(state: State, purpose: int, epoch: jax.Array, num_draws: int) -> Params:
        keys = chain_keys(seed, purpose, epoch, num_chains)
        return jax.vmap(lambda s, key: method.draw(s, key, num_draws))(state, keys)

    return Program(
        jax.jit(init, out_shardings=chains),
        # Pinned, or the compiler may place the outputs otherwise and the next call recompiles.
        jax.jit(run, out_shardings=(whole, chains, whole)),
        jax.jit(draw, static_argnums=(1, 3), out_shardings=chains),
    )
