"""A method over many chains as three compiled functions, and the keys that drive it.

Keys are derived, never carried: fold_in(fold_in(fold_in(key(seed), purpose), epoch), chain).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import devices
from haiku_posteriors.utils.data_utils import Dataset

# Purposes of random keys; never renumber, or old runs cannot be repeated.
INIT, STEP, DRAW, EVALUATE = range(4)
# Of stages before and after the loop, in scripts that have them.
PRETRAIN_INIT, PRETRAIN, EVIDENCE, MIX, PILOT, REFINE, BIAS = range(4, 11)


class Purposes(NamedTuple):
    """What the keys of one loop are for."""

    init: int = INIT
    step: int = STEP
    draw: int = DRAW
    evaluate: int = EVALUATE


MAIN = Purposes()
WARM_START = Purposes(11, 12, 13, 14)  # a loop before the loop
MEAN_FIELD_START = Purposes(22, 23, 24, 25)  # another, of neural samplers
SIMULATE = 15  # data sets from the prior
PRIOR_PREDICTIVE = 16
REFINEMENT = Purposes(17, REFINE, 18, 19)  # a loop after the loop
ENCODER = 20
INDUCING = 21  # which rows inducing inputs start from
ANNEAL, ANNEALED = 40, 41  # schedules of annealed steps, and draws by them
PRUNING = 50  # draws without some weights
CURVATURE, IMPORTANCE, VIRIAL = 30, 31, 32  # of verdicts, and of starts by the curvature


def chain_key(seed: int, purpose: int, epoch: jax.Array | int, chain: jax.Array) -> jax.Array:
    """The key of one chain, by its global index, for one purpose at one epoch."""
    key = jax.random.fold_in(jax.random.key(seed), purpose)
    return jax.random.fold_in(jax.random.fold_in(key, epoch), chain)


class Program(NamedTuple):
    """A method over all chains, compiled.

    Attributes:
      init: (params (chains, ...) or None) -> state.
      run: (state, data, first, last) -> (state, info of the last epoch, whether all is finite, the
        epoch reached); `last`, or less if the method finished before.
      sample: (state, purpose, step, num_draws, block or None) -> params (chains, num_draws, ...);
        the number of a block where draws are too large to be sampled at once.
    """

    init: jax.stages.Wrapped
    run: jax.stages.Wrapped
    sample: jax.stages.Wrapped


def compile_method(
    method: Method,
    seed: int,
    num_chains: int,
    mesh: Mesh,
    purposes: Purposes = MAIN,
    is_finished: Callable[[State], jax.Array] | None = None,
) -> Program:
    """Adds the chain axis to a method and compiles its three functions once each.

    Args:
      method: for one chain.
      seed: from which every random number derives.
      num_chains: their number.
      mesh: where they run.
      purposes: of the keys.
      is_finished: states of all chains -> a boolean scalar, asked before every step: no further one
        is made where it is true.
    """
    chains, whole = devices.chain_sharding(mesh), devices.replicated(mesh)

    def over_chains(function: Callable, argument: Any) -> Any:
        """function(argument of a chain, index of the chain), for all chains."""
        if num_chains == 1:
            # On a CPU, a matrix product with a batch axis of one is slower than one without.
            result = function(jax.tree.map(lambda leaf: leaf[0], argument), jnp.array(0))
            return jax.tree.map(lambda leaf: leaf[None], result)
        indexed = (argument, jnp.arange(num_chains))
        if devices.chains_take_turns(mesh):
            return jax.lax.map(lambda pair: function(*pair), indexed)
        return jax.vmap(function)(*indexed)

    def init(params: Params | None) -> State:
        return over_chains(
            lambda params, chain: method.init(chain_key(seed, purposes.init, 0, chain), params),
            params,
        )

    def run(
        state: State, data: Data, first: jax.Array, last: jax.Array
    ) -> tuple[State, Info, jax.Array, jax.Array]:
        def step(state: State, epoch: jax.Array, chain: jax.Array) -> tuple[State, Info]:
            return method.step(chain_key(seed, purposes.step, epoch, chain), state, data)

        def repeat(
            step: Callable, goes_on: Callable, state: State
        ) -> tuple[State, Info, jax.Array, jax.Array]:
            def body(carry: tuple) -> tuple:
                state, _, total, epoch = carry
                state, info = step(state, epoch)
                # A sum stays non-finite once it is, and costs less than a test in every epoch.
                return state, info, total + jnp.sum(info["log_joint"]), epoch + 1

            shapes = jax.eval_shape(step, state, first)[1]
            empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            zero = jnp.zeros((), empty["log_joint"].dtype)
            return jax.lax.while_loop(
                lambda carry: (carry[3] < last) & goes_on(carry[0]),
                body,
                (state, empty, zero, jnp.asarray(first)),
            )

        if method.pool is None and is_finished is None:  # chains need not meet after every step
            state, info, total, reached = over_chains(
                lambda state, chain: repeat(
                    lambda state, epoch: step(state, epoch, chain), lambda state: True, state
                ),
                state,
            )
            reached = reached[0]
        else:

            def step_together(state: State, epoch: jax.Array) -> tuple[State, Info]:
                state, info = over_chains(lambda state, chain: step(state, epoch, chain), state)
                return method.pool(state) if method.pool else state, info

            def goes_on(state: State) -> jax.Array | bool:
                return is_finished is None or ~is_finished(state)

            state, info, total, reached = repeat(step_together, goes_on, state)
        return state, info, trees.all_finite((state, total)), reached

    def sample(
        state: State,
        purpose: int,
        step: jax.Array,
        num_draws: int,
        block: jax.Array | None = None,
    ) -> Params:
        def sample_chain(state: State, chain: jax.Array) -> Params:
            key = chain_key(seed, purpose, step, chain)
            key = key if block is None else jax.random.fold_in(key, block)
            return method.sample(key, state, num_draws)

        return over_chains(sample_chain, state)

    cut = mesh.shape["model"] > 1
    states = devices.state_shardings(mesh, jax.eval_shape(init, None)) if cut else chains
    return Program(
        devices.compile_for(mesh, init, out_shardings=states),
        # Pinned, or the compiler may place the outputs otherwise and the next call recompiles.
        devices.compile_for(mesh, run, out_shardings=(states, whole, whole, whole)),
        devices.compile_for(mesh, sample, static_argnums=(1, 3), out_shardings=chains),
    )


def compile_stage(
    log_joint: LogJoint,
    dataset: Dataset,
    method: Method,
    seed: int,
    num_chains: int,
    purpose: int,
) -> tuple[Program, Data]:
    """A method beside the loop, for a stage before or after it, and the training rows in place."""
    mesh = devices.make_mesh(num_chains)
    pieces = log_joint.num_microbatches
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh, pieces, method.in_minibatches)
    return compile_method(method, seed, num_chains, mesh, Purposes(step=purpose)), data
