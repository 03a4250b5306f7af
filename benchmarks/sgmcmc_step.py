"""Steps of SGLD and SGHMC against bare minibatch gradients and against blackjax's samplers.

All see minibatches of the same size of the same data and run in turns, so that a noisy machine
slows them alike; what counts is the median over rounds of the ratio within a round. A step is one
minibatch gradient and what is done with it:

  bare            a lax.scan of gradient and plain descent, over batches shuffled by the same code
  no noise        that, and optax's momentum: SGD by run_sgd.py's method
  noise alone     one vector of normal numbers as long as the parameters, in a lax.scan
  blackjax        its kernel with its gradient estimator, jitted and called for one batch after
                  another, as its documentation shows; SGHMC with its 10 gradients a call
  blackjax, scan  the same kernel over the bare loop's batches in a lax.scan

  python benchmarks/sgmcmc_step.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from tabulate import tabulate

sys.path.insert(0, ".")

from core import sgd, sgmcmc, trees
from core.data import Data, minibatch_indices, num_minibatches, take
from core.likelihoods import categorical
from core.log_joint import LogJoint, make_log_joint
from core.method import Method
from core.priors import make_prior
from core.trees import Params
from utils import chain_utils, data_utils, models, optim_utils, parallel_utils

ROUNDS = 7
STEP_SIZE = 1e-6
BLACKJAX_GRADIENTS = 10  # a call of its SGHMC, by default
CASES = [  # network, batch size, epochs a round: a multiple of BLACKJAX_GRADIENTS steps
    ("mlp_20_20", 80, 10),
    ("mlp_classification", 80, 5),
    ("mlp_classification", 480, 10),
]


def bare_loop(log_joint: LogJoint, batch_size: int, epochs: int) -> Callable[..., Any]:
    """Plain descent: nothing but batches, gradients and a subtraction."""

    @jax.jit
    def run(params: Params, data: Data) -> Params:
        def step(params: Params, batch: tuple) -> tuple[Params, None]:
            gradient = jax.grad(lambda p: -log_joint(p, take(data, *batch)))(params)
            return jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, gradient), None

        def epoch(params: Params, number: jax.Array) -> tuple[Params, None]:
            key = jax.random.fold_in(jax.random.key(0), number)
            batches = minibatch_indices(data.num_rows, batch_size, key, data.weights.dtype)
            return jax.lax.scan(step, params, batches)

        return jax.lax.scan(epoch, params, jnp.arange(epochs))[0]

    return run


def noise_loop(params: Params, steps: int) -> Callable[[], Params]:
    @jax.jit
    def run(params: Params) -> Params:
        def step(total: Params, number: jax.Array) -> tuple[Params, None]:
            noise = trees.normal_like(jax.random.fold_in(jax.random.key(0), number), total)
            return jax.tree.map(jnp.add, total, noise), None

        return jax.lax.scan(step, params, jnp.arange(steps))[0]

    return lambda: run(params)


def blackjax_loops(
    sampler: Any, params: Params, data: Data, batch_size: int, calls: int
) -> tuple[Callable[[], Params], Callable[[], Params]]:
    """Calls one after another from Python, and the same calls as one program."""
    jitted = jax.jit(sampler.step)
    inputs, targets = np.asarray(data.inputs), np.asarray(data.targets)
    keys = jax.random.split(jax.random.key(0), calls)

    def one_by_one() -> Params:
        generator = np.random.default_rng(0)
        position = sampler.init(params)
        for call in range(calls):
            rows = generator.choice(data.num_rows, batch_size, replace=False)
            position = jitted(keys[call], position, (inputs[rows], targets[rows]), STEP_SIZE)
        return position

    @jax.jit
    def scan(position: Params, data: Data, keys: jax.Array) -> Params:
        epochs = -(-calls // num_minibatches(data.num_rows, batch_size))
        rows = jax.vmap(
            lambda key: minibatch_indices(data.num_rows, batch_size, key, data.weights.dtype)[0]
        )(keys[:epochs])

        def step(position: Params, batch: tuple[jax.Array, jax.Array]) -> tuple[Params, None]:
            key, chosen = batch
            minibatch = (data.inputs[chosen], data.targets[chosen])
            return sampler.step(key, position, minibatch, STEP_SIZE), None

        chosen = rows.reshape(-1, rows.shape[-1])[:calls]
        return jax.lax.scan(step, position, (keys, chosen))[0]

    return one_by_one, lambda: scan(params, data, keys)


def compare(network: str, batch_size: int, epochs: int) -> list[list[Any]]:
    """One row a competitor: its name, us a step, and its speed relative to the bare loop."""
    dataset = data_utils.load("digits")
    likelihood = categorical(dataset.num_classes)
    log_joint = make_log_joint(
        models.get_network(network, likelihood.num_outputs),
        dataset.x_train,
        make_prior(1.0),
        likelihood,
    )
    mesh = parallel_utils.make_mesh(1)
    data = parallel_utils.place_data(dataset.x_train, dataset.y_train, mesh)
    params = log_joint.init(jax.random.key(0))
    steps = epochs * num_minibatches(data.num_rows, batch_size)

    def loop(method: Method) -> Callable[[], Any]:
        program = chain_utils.compile_method(method, 0, 1, mesh)
        state = program.init(None)
        return lambda: program.run(state, data, 0, epochs)

    def ours(sampler: Any) -> Callable[[], Any]:
        return loop(sgmcmc.sgmcmc(log_joint, sampler, batch_size))

    def log_likelihood(params: Params, datum: tuple[jax.Array, jax.Array]) -> jax.Array:
        return log_joint.log_likelihoods(params, datum[0][None], datum[1][None])[0]

    estimator = blackjax.sgmcmc.gradients.grad_estimator(
        log_joint.log_prior, log_likelihood, data.num_rows
    )
    bare = bare_loop(log_joint, batch_size, epochs)
    sgld_calls, sgld_scan = blackjax_loops(
        blackjax.sgld(estimator), params, data, batch_size, steps
    )
    sghmc_calls, sghmc_scan = blackjax_loops(
        blackjax.sghmc(estimator, BLACKJAX_GRADIENTS),
        params,
        data,
        batch_size,
        -(-steps // BLACKJAX_GRADIENTS),
    )
    optimizer = optim_utils.make_optimizer("SGD", STEP_SIZE, steps)
    competitors: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(params, data),
        "no noise": loop(sgd.sgd(log_joint, optimizer, batch_size)),
        "noise alone": noise_loop(params, steps),
        "SGLD": ours(sgmcmc.sgld(STEP_SIZE)),
        "SGHMC": ours(sgmcmc.sghmc(STEP_SIZE, 0.9)),
        "SGHMC, RMSprop": ours(sgmcmc.sghmc(STEP_SIZE, 0.9, sgmcmc.rmsprop())),
        "blackjax SGLD": sgld_calls,
        "blackjax SGLD, scan": sgld_scan,
        "blackjax SGHMC": sghmc_calls,
        "blackjax SGHMC, scan": sghmc_scan,
    }
    for run in competitors.values():
        jax.block_until_ready(run())
    rounds = [{name: seconds(run) for name, run in competitors.items()} for _ in range(ROUNDS)]
    case = f"{network}, {trees.size(params):,} parameters, batch {batch_size}"
    return [
        [
            case,
            name,
            1e6 * statistics.median(times[name] for times in rounds) / steps,
            statistics.median(times["bare"] / times[name] for times in rounds),
        ]
        for name in competitors
    ]


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


if __name__ == "__main__":
    header = ["digits", "", "us/step", "speed relative to bare"]
    for case in CASES:
        print(tabulate(compare(*case), header, floatfmt=".3g", tablefmt="github"), flush=True)
