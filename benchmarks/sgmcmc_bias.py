"""SGMCMC's bias by three roads, and what control variates would do about the noise of gradients.

python benchmarks/sgmcmc_bias.py

First table, logistic regressions with minibatches that are too small for their steps: the excess of
the variance, on average, by the formula of gradient noise, by the configurational temperature of
the run itself, by the difference to a second run with half the stride (extrapolated: the bias is
proportional to the stride), and against a run of all rows. Errors are those between chains.

Second table: the noise of minibatch gradients over the masses, mean_i C_i / M_i, at draws of the
posterior. Control variates subtract from every row's gradient the one at the chain's trained start
(arXiv 1706.05439), at twice the cost; the same cost with twice the rows halves the noise.
"""

import math
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core import curvature, sgd, sgmcmc, trees
from haiku_posteriors.core.data import Data, make_data, minibatch_indices, num_minibatches, take
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils.problem import Problem, load_problem

CHAINS, DRAWS, UPDATES_PER_DRAW, BURN_IN, TRAINING = 16, 200, 100, 2000, 3000
FEW_CHAINS, FEW_DRAWS = 4, 40  # of the second table, which looks at the last draws alone
LOGISTIC = {"model_name": "logistic_regression"}
BIASED = {
    "breast_cancer": Problem("breast_cancer", **LOGISTIC, weight_decay=1.0),
    "wine": Problem("wine", **LOGISTIC, weight_decay=1.0),
}
NOISY = BIASED | {
    "digits": Problem("digits", **LOGISTIC, weight_decay=10.0),
    "diabetes": Problem("diabetes", likelihood="gaussian", weight_decay=10.0),
    "two_moons": Problem("two_moons", model_name="mlp_20_20", weight_decay=1.0),
}


class Posterior(NamedTuple):
    """What is sampled, trained starts (chains, ...), masses, the largest eigenvalue in them."""

    log_joint: LogJoint
    data: Data
    starts: Params
    mass: Params
    largest: float


def load(described: Problem, num_chains: int = CHAINS) -> Posterior:
    _, dataset, log_joint = load_problem(described)
    data = jax.tree.map(jnp.asarray, make_data(dataset.x_train, dataset.y_train))
    method = sgd.sgd(log_joint, optax.adam(0.01), data.num_rows)

    def start(key: jax.Array) -> Params:
        def step(state: Any, number: jax.Array) -> tuple:
            return method.step(jax.random.fold_in(key, number), state, data)[0], None

        return jax.lax.scan(step, method.init(key, None), jnp.arange(TRAINING))[0].params

    keys = jax.random.split(jax.random.key(0), num_chains)
    starts = jax.jit(lambda keys: jax.lax.map(start, keys))(keys)
    diagonals = jax.jit(
        lambda starts: jax.lax.map(
            lambda w: curvature.diagonal(jax.random.key(0), log_joint, w, data), starts
        )
    )(starts)
    mass = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), diagonals)
    first = jax.tree.map(lambda leaf: leaf[0], starts)
    largest = curvature.largest_eigenvalue(jax.random.key(1), log_joint, first, data, mass)
    return Posterior(log_joint, data, starts, mass, float(largest))


def sample(
    posterior: Posterior, batch_size: int, stride: float, stretch: int = 1, num_draws: int = DRAWS
) -> tuple[Params, np.ndarray]:
    """Draws (chains, draws, ...), `stretch` times as many updates each, and temperatures by chain.

    Each half of a chain is measured around the mean of the other.
    """
    log_joint, data, starts, mass, _ = posterior
    beta = math.exp(-stride)
    sampler = sgmcmc.sghmc((1 + beta) * stride**2 / 2, beta, sgmcmc.fixed_mass(mass))
    method = sgmcmc.sgmcmc(log_joint, sampler, batch_size)
    batches = num_minibatches(data.num_rows, batch_size)
    period = stretch * max(1, UPDATES_PER_DRAW // batches)

    def chain(argument: tuple[jax.Array, Params]) -> tuple[Params, jax.Array]:
        key, start = argument

        def steps(state: Any, first: jax.Array, count: int) -> Any:
            def step(number: int, state: Any) -> Any:
                return method.step(jax.random.fold_in(key, first + number), state, data)[0]

            return jax.lax.fori_loop(0, count, step, state)

        burn_in = stretch * max(1, BURN_IN // batches)
        state = steps(method.init(key, start), jnp.array(0), burn_in)

        def draw(state: Any, number: jax.Array) -> tuple[Any, Params]:
            state = steps(state, burn_in + number * period, period)
            return state, state.params

        draws = jax.lax.scan(draw, state, jnp.arange(num_draws))[1]
        halves = jax.tree.map(lambda leaf: leaf.reshape(2, num_draws // 2, *leaf.shape[1:]), draws)
        others = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=1)[::-1], halves)
        centers = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_draws // 2, axis=0), others)

        def virial(argument: tuple[Params, Params]) -> jax.Array:
            params, center = argument
            gradient = jax.grad(log_joint)(params, data)
            products = jax.tree.map(lambda w, c, g: -(w - c) * g, params, center, gradient)
            return trees.total(products) / trees.size(products)

        return draws, jnp.mean(jax.lax.map(virial, (draws, centers)))

    keys = jax.random.split(jax.random.key(2), len(jax.tree.leaves(starts)[0]))
    draws, found = jax.jit(lambda arguments: jax.lax.map(chain, arguments))((keys, starts))
    return draws, np.asarray(found, float)


def variances(draws: Params) -> np.ndarray:
    """By chain and coordinate."""
    flat = [np.reshape(leaf, (CHAINS, DRAWS, -1)) for leaf in jax.tree.leaves(draws)]
    return np.concatenate(flat, axis=2).astype(float).var(axis=1, ddof=1)


def with_error(values: np.ndarray) -> str:
    return f"{np.mean(values):+.3f} +- {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"


def bias_line(name: str) -> list[str]:
    posterior = load(BIASED[name])
    stride, batch_size = 0.5 / math.sqrt(posterior.largest), posterior.data.num_rows // 12
    noise = curvature.gradient_noise(
        jax.random.key(3),
        posterior.log_joint,
        jax.tree.map(lambda leaf: leaf[0], posterior.starts),
        posterior.data,
        batch_size,
    )
    beta = math.exp(-stride)
    scale = jax.tree.map(jax.lax.rsqrt, posterior.mass)
    formula = float(sgmcmc.noise_bias((1 + beta) * stride**2 / 2, beta, noise, scale))
    draws, heat = sample(posterior, batch_size, stride)
    halved, _ = sample(posterior, batch_size, stride / 2, stretch=2)
    exact, cold = sample(posterior, posterior.data.num_rows, stride)
    whole, half, right = (variances(found) for found in (draws, halved, exact))
    two_steps = 2 * np.mean((whole - half) / right.mean(axis=0), axis=1)
    truth = np.mean(whole / right.mean(axis=0), axis=1) - 1
    return [
        *(name, f"{batch_size} of {posterior.data.num_rows}", f"{formula:+.3f}"),
        *(with_error(heat - 1), with_error(two_steps), with_error(truth), with_error(cold - 1)),
    ]


def noise_line(name: str) -> list[str]:
    posterior = load(NOISY[name], FEW_CHAINS)
    log_joint, data, starts, mass, largest = posterior
    batch_size = max(10, data.num_rows // 20)
    stride = 0.5 / math.sqrt(largest)
    draws, _ = sample(posterior, data.num_rows, stride, num_draws=FEW_DRAWS)
    last = jax.tree.map(lambda leaf: leaf[:, -1], draws)

    def of_chain(argument: tuple[Params, Params]) -> tuple[jax.Array, jax.Array]:
        params, anchor = argument
        indices, weights = minibatch_indices(
            jax.random.key(4), data.num_rows, batch_size, data.weights.dtype
        )
        gradient = jax.grad(log_joint)
        whole = [gradient(point, data) for point in (params, anchor)]

        def of_batch(batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rows = take(data, *batch)
            error, known = (
                jax.tree.map(jnp.subtract, gradient(point, rows), full)
                for point, full in zip((params, anchor), whole, strict=True)
            )
            controlled = jax.tree.map(jnp.subtract, error, known)

            def over_mass(errors: Params) -> jax.Array:
                squares = jax.tree.map(lambda e, m: e**2 / m, errors, mass)
                return trees.total(squares) / trees.size(squares)

            return over_mass(error), over_mass(controlled)

        return jax.tree.map(jnp.mean, jax.lax.map(of_batch, (indices, weights)))

    plain, controlled = jax.jit(lambda pairs: jax.lax.map(of_chain, pairs))((last, starts))
    ratio = float(np.mean(controlled) / np.mean(plain))
    return [
        *(name, f"{trees.size(mass):,}", f"{batch_size} of {data.num_rows}"),
        *(f"{np.mean(plain):.3g}", f"{np.mean(controlled):.3g}", f"{ratio:.2f}"),
    ]


def main() -> None:
    started = time.process_time()
    headers = ["posterior", "rows", "formula", "configurational", "two step sizes", "truth"]
    headers += ["all rows, configurational"]
    print(tabulate([bias_line(name) for name in BIASED], headers, "github"), flush=True)
    headers = ["posterior", "parameters", "rows", "noise", "with control variates", "ratio"]
    rows = [noise_line(name) for name in NOISY]
    print(tabulate(rows, headers, "github", disable_numparse=True))
    print(f"{time.process_time() - started:.0f} processor seconds.")


if __name__ == "__main__":
    main()
