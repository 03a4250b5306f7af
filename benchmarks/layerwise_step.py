"""Processor seconds, memory and compilation of a step of layerwise VI on large networks.

  python benchmarks/layerwise_step.py lenet5 mlp_400_400 resnet20_frn
  python benchmarks/layerwise_step.py lenet5 --rows=500 --inducing=500 --methods=sgd,shared

One minibatch of random inputs in the shapes of MNIST or CIFAR-10, whose values do not matter; some
of its rows are the inducing inputs. Memory: what the compiled step needs beside its arguments.
Compilation is that of init and step together, without a cache.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from haiku_posteriors.core import sgd, trees, vi
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.implicit import generators, implicit_vi, objectives
from haiku_posteriors.core.layerwise.layerwise_vi import layerwise_vi
from haiku_posteriors.core.likelihoods import categorical
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import models

SAMPLES, STEPS = 2, 3
Make = Callable[[LogJoint, optax.GradientTransformation, jax.Array, int], Method]


def _layerwise(precision: str) -> Make:
    def make(
        log_joint: LogJoint,
        optimizer: optax.GradientTransformation,
        inputs: jax.Array,
        inducing: int,
    ) -> Method:
        return layerwise_vi(
            log_joint,
            optimizer,
            len(inputs),
            inducing_inputs=inputs[:inducing],
            inducing="minibatch",
            precision=precision,
            num_samples=SAMPLES,
        )

    return make


def _mean_field(estimator: str) -> Make:
    return lambda log_joint, optimizer, inputs, inducing: vi.mean_field_vi(
        log_joint, optimizer, len(inputs), num_samples=SAMPLES, estimator=estimator
    )


def _implicit(
    log_joint: LogJoint, optimizer: optax.GradientTransformation, inputs: jax.Array, inducing: int
) -> Method:
    generator = generators.make_generator(
        generators.automatic(log_joint.random_shapes), log_joint.random_shapes
    )
    return implicit_vi.implicit_vi(
        log_joint,
        optimizer,
        len(inputs),
        generator=generator,
        estimator=objectives.Estimator("lanczos", 10),
        num_samples=SAMPLES,
        objective=objectives.Objective("linearised"),
    )


METHODS: dict[str, tuple[str, Make]] = {
    "sgd": (
        "SGD",
        lambda log_joint, optimizer, inputs, _: sgd.sgd(log_joint, optimizer, len(inputs)),
    ),
    "mean_field": ("mean-field VI", _mean_field("reparameterization")),
    "flipout": ("mean-field VI, flipout", _mean_field("flipout")),
    "implicit": ("implicit VI, linearised, Lanczos of 10 steps", _implicit),
    "unit": ("layerwise VI, a precision for each unit", _layerwise("unit")),
    "shared": ("layerwise VI, shared", _layerwise("shared")),
}


def measure(network: str, methods: list[str], num_rows: int, num_inducing: int) -> list[list]:
    """A line for each method."""
    shape = (32, 32, 3) if "resnet" in network else (28, 28, 1)
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(num_rows, *shape)).astype(np.float32)
    data = jax.tree.map(jax.numpy.asarray, make_data(inputs, generator.integers(0, 10, num_rows)))
    likelihood = categorical(10)
    log_joint = make_log_joint(
        models.get_network(network, likelihood.num_outputs), inputs, make_prior(10.0), likelihood
    )
    optimizer = optax.adam(1e-3)
    lines = []
    for title, make in (METHODS[name] for name in methods):
        started = time.process_time()
        method = make(log_joint, optimizer, data.inputs, num_inducing)
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
        lines.append([weights, title, taken, memory, compiling])
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--inducing", type=int, default=100)
    arguments = parser.parse_args()
    lines = [
        line
        for network in arguments.networks
        for line in measure(
            network, arguments.methods.split(","), arguments.rows, arguments.inducing
        )
    ]
    header = ["", "method", "seconds a step", "MB", "compilation, seconds"]
    print(tabulate(lines, header, tablefmt="github", floatfmt=".3g"))


if __name__ == "__main__":
    main()
