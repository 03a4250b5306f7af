"""Epochs of the loop against a bare lax.scan of value_and_grad and the optax update.

Both sides see the same batches (the same shuffling code) and run in turns, so that a noisy machine
slows them alike; what counts is the median over rounds of the ratio within a round. Also printed:
what a call costs the host, which the loop pays twice a second and at events.

  python benchmarks/sgd_epoch.py
"""

import statistics
import sys
import time

import jax
import optax
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core import sgd
from haiku_posteriors.core.data import minibatch_indices, take
from haiku_posteriors.core.likelihoods import categorical, gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import chains, data_utils, devices, models

ROUNDS = 31
CASES = {  # data set -> (network, batch size, epochs a round)
    "toy_regression": ("mlp_toy", 70, 3000),
    "digits": ("mlp_classification", 80, 10),
}


def seconds(function) -> float:
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


def compare(name: str) -> list:
    network, batch_size, epochs = CASES[name]
    dataset = data_utils.load(name)
    likelihood = gaussian(0.3) if dataset.task == "regression" else categorical(dataset.num_classes)
    log_joint = make_log_joint(
        models.get_network(network, likelihood.num_outputs),
        dataset.x_train,
        make_prior(1.0),
        likelihood,
    )
    optimizer = optax.adam(1e-3)
    mesh = devices.make_mesh(1)
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh)
    program = chains.compile_method(sgd.sgd(log_joint, optimizer, batch_size), 0, 1, mesh)
    state = program.init(None)

    @jax.jit
    def bare(params, optimizer_state, data):
        def update(carry, batch):
            params, optimizer_state = carry
            loss, gradient = jax.value_and_grad(lambda p: -log_joint(p, take(data, *batch)))(params)
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
            return (optax.apply_updates(params, updates), optimizer_state), loss

        def epoch(carry, number):
            if batch_size == data.num_rows:
                return update(carry, (jax.numpy.arange(batch_size), data.weights))
            key = jax.random.fold_in(jax.random.key(0), number)
            batches = minibatch_indices(key, data.num_rows, batch_size, data.weights.dtype)
            return jax.lax.scan(update, carry, batches)

        return jax.lax.scan(epoch, (params, optimizer_state), jax.numpy.arange(epochs))

    params = log_joint.init(jax.random.key(0))
    optimizer_state = optimizer.init(params)

    def ours():
        return program.run(state, data, 0, epochs)

    def theirs():
        return bare(params, optimizer_state, data)

    def host():
        for epoch in range(100):
            program.run(state, data, epoch, epoch)  # no epoch at all: dispatch only
        return state

    for function in (ours, theirs, host):
        function()
    times = [(seconds(ours), seconds(theirs), seconds(host)) for _ in range(ROUNDS)]
    ours_time, bare_time, host_time = (
        statistics.median(column) for column in zip(*times, strict=True)
    )
    return [
        name,
        1e6 * ours_time / epochs,
        1e6 * bare_time / epochs,
        statistics.median(bare_time / ours_time for ours_time, bare_time, _ in times),
        1e6 * host_time / 100,
    ]


if __name__ == "__main__":
    header = ["data", "loop, us/epoch", "bare scan, us/epoch", "bare / loop", "host, us/call"]
    print(tabulate([compare(name) for name in CASES], header, floatfmt=".3g", tablefmt="github"))
