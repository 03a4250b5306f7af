"""Steps of SGLD and SGHMC against bare minibatch gradients and against blackjax's samplers.

All see minibatches of the same size of the same data, which are random numbers in the shape of
digits, MNIST or CIFAR-10. They run in turns, and the quickest of several rounds counts, since other
programs on the machine can only slow a round down. Besides seconds on the wall there are seconds of
processor time, which a busy machine hardly touches and which mean the same if there is one core. A
step is one minibatch gradient and what is done with it:

  bare         a lax.scan of gradient and plain descent, over batches shuffled by the same code
  noise alone  one vector of normal numbers as long as the parameters, in a lax.scan
  blackjax     its kernel with its gradient estimator, jitted and called for one batch after
               another, as its documentation shows; SGHMC with its 10 gradients a call

On a processor without accelerators, one core gives the steadiest numbers:

  taskset -c 1 python benchmarks/sgmcmc_step.py
"""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core import approximate_normals, sgmcmc, trees
from haiku_posteriors.core.data import Data, minibatch_indices, take
from haiku_posteriors.core.likelihoods import categorical
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices, models

STEP_SIZE = 1e-6
NUM_CLASSES = 10
BLACKJAX_GRADIENTS = 10  # a call of its SGHMC, by default


class Case(NamedTuple):
    """A network, the data's shape, and how much of it is run."""

    network: str
    input_shape: tuple[int, ...]
    batch_size: int
    steps_per_epoch: int
    epochs: int
    rounds: int
    blackjax: bool = True


CASES = [  # with blackjax: a multiple of BLACKJAX_GRADIENTS steps
    Case("mlp_20_20", (64,), 80, 20, 10, 15),
    Case("mlp_classification", (64,), 80, 20, 2, 11),
    Case("mlp_classification", (28, 28, 1), 80, 20, 1, 9),
    Case("mlp_classification", (28, 28, 1), 500, 20, 1, 9),
    Case("lenet", (32, 32, 3), 80, 10, 1, 5),
    # The HMC study's network. It compiles too slowly for more competitors.
    Case("resnet20_frn_swish", (32, 32, 3), 80, 2, 1, 3, blackjax=False),
]


def bare_loop(log_joint: LogJoint, batch_size: int, epochs: int) -> Callable[..., Params]:
    """Plain descent: nothing but batches, gradients and a subtraction."""

    @jax.jit
    def run(params: Params, data: Data) -> Params:
        def step(params: Params, batch: tuple) -> tuple[Params, None]:
            gradient = jax.grad(lambda p: -log_joint(p, take(data, *batch)))(params)
            return jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, gradient), None

        def epoch(params: Params, number: jax.Array) -> tuple[Params, None]:
            key = jax.random.fold_in(jax.random.key(0), number)
            batches = minibatch_indices(key, data.num_rows, batch_size, data.weights.dtype)
            return jax.lax.scan(step, params, batches)

        return jax.lax.scan(epoch, params, jnp.arange(epochs))[0]

    return run


def noise_loop(params: Params, steps: int) -> Callable[[], Params]:
    @jax.jit
    def run(params: Params) -> Params:
        def step(total: Params, number: jax.Array) -> tuple[Params, None]:
            numbers = approximate_normals.approximate_normal_like(
                jax.random.fold_in(jax.random.key(0), number), total
            )
            return jax.tree.map(jnp.add, total, numbers), None

        return jax.lax.scan(step, params, jnp.arange(steps))[0]

    return lambda: run(params)


def blackjax_loop(
    sampler: Any, params: Params, data: Data, batch_size: int, calls: int
) -> Callable[[], Params]:
    """One call after another from Python."""
    step = jax.jit(sampler.step)
    inputs, targets = np.asarray(data.inputs), np.asarray(data.targets)
    keys = jax.random.split(jax.random.key(0), calls)

    def run() -> Params:
        generator = np.random.default_rng(0)
        position = sampler.init(params)
        for call in range(calls):
            rows = generator.choice(data.num_rows, batch_size, replace=False)
            position = step(keys[call], position, (inputs[rows], targets[rows]), STEP_SIZE)
        return position

    return run


def blackjax_competitors(
    log_joint: LogJoint, params: Params, data: Data, batch_size: int, steps: int
) -> dict[str, Callable[[], Any]]:
    def log_likelihood(params: Params, datum: tuple[jax.Array, jax.Array]) -> jax.Array:
        return log_joint.log_likelihoods(params, datum[0][None], datum[1][None])[0]

    estimator = blackjax.sgmcmc.gradients.grad_estimator(
        log_joint.log_prior, log_likelihood, data.num_rows
    )
    sgld = blackjax.sgld(estimator)
    sghmc = blackjax.sghmc(estimator, BLACKJAX_GRADIENTS)
    calls = steps // BLACKJAX_GRADIENTS
    return {
        "blackjax SGLD": blackjax_loop(sgld, params, data, batch_size, steps),
        "blackjax SGHMC": blackjax_loop(sghmc, params, data, batch_size, calls),
    }


def compare(case: Case) -> list[list[Any]]:
    """One row a competitor: us a step and speed relative to the bare loop, by both clocks."""
    batch_size, epochs = case.batch_size, case.epochs
    generator = np.random.default_rng(0)
    rows = batch_size * case.steps_per_epoch
    inputs = generator.normal(size=(rows, *case.input_shape)).astype(np.float32)
    log_joint = make_log_joint(
        models.get_network(case.network, NUM_CLASSES),
        inputs,
        make_prior(1.0),
        categorical(NUM_CLASSES),
    )
    mesh = devices.make_mesh(1)
    targets = generator.integers(0, NUM_CLASSES, size=rows).astype(np.int32)
    data = devices.place_data(inputs, targets, mesh)
    params = log_joint.init(jax.random.key(0))
    steps = epochs * case.steps_per_epoch

    def ours(sampler: Any) -> Callable[[], Any]:
        method = sgmcmc.sgmcmc(log_joint, sampler, batch_size)
        program = chains.compile_method(method, 0, 1, mesh)
        state = jax.tree.map(lambda leaf: leaf[None], method.init(jax.random.key(0), params))
        return lambda: program.run(state, data, 0, epochs)

    bare = bare_loop(log_joint, batch_size, epochs)
    competitors: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(params, data),
        "noise alone": noise_loop(params, steps),
        "SGLD": ours(sgmcmc.sgld(STEP_SIZE)),
        "SGHMC": ours(sgmcmc.sghmc(STEP_SIZE, 0.9)),
        "SGHMC, RMSprop": ours(sgmcmc.sghmc(STEP_SIZE, 0.9, sgmcmc.rmsprop())),
    }
    if case.blackjax:
        competitors |= blackjax_competitors(log_joint, params, data, batch_size, steps)
    for run in competitors.values():
        jax.block_until_ready(run())
    rounds = [{name: seconds(run) for name, run in competitors.items()} for _ in range(case.rounds)]
    quickest = {name: np.min([times[name] for times in rounds], axis=0) for name in competitors}
    shape = "x".join(str(size) for size in case.input_shape)
    title = f"{case.network} on {shape}, {trees.size(params):,} parameters, batch {batch_size}"
    return [
        [title, name, *(1e6 * times / steps), *(quickest["bare"] / times)]
        for name, times in quickest.items()
    ]


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """On the wall, and of processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return time.perf_counter() - wall, time.process_time() - processor


if __name__ == "__main__":
    header = ["", "", "us/step", "processor us/step", "speed relative to bare", "processor speed"]
    for case in CASES:
        print(tabulate(compare(case), header, floatfmt=".3g", tablefmt="github"), flush=True)
