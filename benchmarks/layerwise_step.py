"""Processor seconds, memory and compilation of a step of layerwise VI on large networks.

  python benchmarks/layerwise_step.py lenet5 mlp_400_400 resnet20_frn

One minibatch of random inputs in the shapes of MNIST or CIFAR-10, whose values do not matter; 100
of its rows are the inducing inputs. Memory: what the compiled step needs beside its arguments.
"""

import argparse
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from haiku_posteriors.core import sgd, trees, vi
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.layerwise.layerwise_vi import layerwise_vi
from haiku_posteriors.core.likelihoods import categorical
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import models

ROWS, INDUCING, SAMPLES, STEPS = 200, 100, 2, 3


def measure(network: str) -> list[list]:
    """A line for each method."""
    shape = (32, 32, 3) if "resnet" in network else (28, 28, 1)
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(ROWS, *shape)).astype(np.float32)
    data = jax.tree.map(jax.numpy.asarray, make_data(inputs, generator.integers(0, 10, ROWS)))
    likelihood = categorical(10)
    log_joint = make_log_joint(
        models.get_network(network, likelihood.num_outputs), inputs, make_prior(10.0), likelihood
    )
    optimizer = optax.adam(1e-3)

    def layerwise(precision: str) -> object:
        return layerwise_vi(
            log_joint,
            optimizer,
            ROWS,
            inducing_inputs=data.inputs[:INDUCING],
            inducing="minibatch",
            precision=precision,
            num_samples=SAMPLES,
        )

    methods = {
        "SGD": sgd.sgd(log_joint, optimizer, ROWS),
        "mean-field VI": vi.mean_field_vi(log_joint, optimizer, ROWS, num_samples=SAMPLES),
        "layerwise VI, a precision for each unit": layerwise("unit"),
        "layerwise VI, shared": layerwise("shared"),
    }
    lines = []
    for name, method in methods.items():
        started = time.process_time()
        state = jax.jit(method.init)(jax.random.key(0), log_joint.init(jax.random.key(1)))
        step = jax.jit(method.step).lower(jax.random.key(2), state, data).compile()
        compiling = time.process_time() - started
        jax.block_until_ready(step(jax.random.key(2), state, data))
        started = time.process_time()
        for index in range(STEPS):
            state, _ = jax.block_until_ready(step(jax.random.key(index), state, data))
        taken = (time.process_time() - started) / STEPS
        memory = step.memory_analysis().temp_size_in_bytes / 2**20
        weights = f"{network}, {trees.size(log_joint.shapes):,} weights" if not lines else ""
        lines.append([weights, name, taken, memory, compiling])
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+")
    lines = [line for network in parser.parse_args().networks for line in measure(network)]
    header = ["", "method", "seconds a step", "MB", "compilation, seconds"]
    print(tabulate(lines, header, tablefmt="github", floatfmt=".3g"))


if __name__ == "__main__":
    main()
