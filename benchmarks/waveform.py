"""Logistic regression on waveform by every objective and family, beside HMC.

22 weights, 400 rows, prior N(0, 100): the log-evidence is known by importance sampling, and HMC's
moments by long chains. For each method: the average posterior standard deviation, the largest
correlation, lower bounds of the log-evidence, and processor seconds of training, without compiling.

  python benchmarks/waveform.py path/to/waveform.npz
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
import scipy.stats
from jax.flatten_util import ravel_pytree
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core import hmc, low_rank, multiplicative_flows, vi
from haiku_posteriors.core.data import Data, make_data
from haiku_posteriors.core.densities import BoundedFamily
from haiku_posteriors.core.implicit import (
    bounds,
    generators,
    implicit_vi,
    objectives,
    semi_implicit,
    unbiased,
)
from haiku_posteriors.core.implicit.samplers import Start
from haiku_posteriors.core.layerwise import layerwise_vi
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.utils.problem import Problem, load_problem

NUM_DRAWS, NUM_SAMPLES, NUM_BOUND_DRAWS, STEP_SIZE = 4000, 16, 1000, 1e-2
INNER, MIXTURE = 100, 1000  # K of the bounds at the end


def train(method: Method, data: Data, num_steps: int, seed: int) -> tuple[Any, float]:
    """The state at the end, and processor seconds."""

    @jax.jit
    def run(key: jax.Array) -> Any:
        def body(number: jax.Array, state: Any) -> Any:
            return method.step(jax.random.fold_in(key, number + 1), state, data)[0]

        return jax.lax.fori_loop(0, num_steps, body, method.init(key, None))

    program = run.lower(jax.random.key(seed)).compile()
    start = time.process_time()
    state = jax.block_until_ready(program(jax.random.key(seed)))
    return state, time.process_time() - start


def sample_hmc(log_joint: LogJoint, data: Data, num_draws: int) -> tuple[np.ndarray, float]:
    """Draws of 4 chains, (draws, D), and processor seconds."""
    method, burn_in = hmc.hmc(log_joint, num_burn_in=300), 300

    @jax.jit
    def run(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 4)

        def one(states: Any, number: jax.Array) -> tuple[Any, jax.Array]:
            own = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
            states, _ = jax.vmap(method.step, (0, 0, None))(own, states, data)
            states = method.pool(states) if method.pool else states
            drawn = jax.vmap(lambda state: method.sample(key, state, 1))(states)
            return states, jax.vmap(lambda w: ravel_pytree(w)[0])(drawn)

        states = jax.vmap(lambda key: method.init(key, None))(keys)
        _, draws = jax.lax.scan(one, states, jnp.arange(1, burn_in + num_draws // 4 + 1))
        return draws[burn_in:].reshape(num_draws, -1)

    program = run.lower(jax.random.key(1)).compile()
    start = time.process_time()
    draws = np.asarray(program(jax.random.key(1)), float)
    return draws, time.process_time() - start


def log_evidence(log_joint: LogJoint, data: Data, draws: np.ndarray) -> tuple[float, float]:
    """By importance sampling from a Student t with the moments of exact draws; and its error."""
    unravel = ravel_pytree(log_joint.init(jax.random.key(0)))[1]
    law = scipy.stats.multivariate_t(draws.mean(axis=0), np.cov(draws.T), df=10, seed=0)
    proposed = law.rvs(50_000)
    values = jax.jit(lambda ws: jax.lax.map(lambda w: log_joint(unravel(w), data), ws))(
        jnp.asarray(proposed, jnp.float32)
    )
    ratios = np.asarray(values, float) - law.logpdf(proposed)
    weights = np.exp(ratios - ratios.max())
    error = weights.std() / weights.mean() / np.sqrt(len(weights))
    return float(scipy.special.logsumexp(ratios) - np.log(len(ratios))), float(error)


def moments(draws: np.ndarray) -> tuple[float, float]:
    """Average standard deviation, and the largest correlation in absolute value."""
    correlations = np.corrcoef(draws.T) - np.eye(draws.shape[1])
    return float(draws.std(axis=0).mean()), float(np.abs(correlations).max())


def with_error(values: jax.Array) -> str:
    """Mean and standard error of a bound."""
    array = np.asarray(values, float)
    return f"{array.mean():.2f} ({array.std() / np.sqrt(len(array)):.2f})"


def families(
    log_joint: LogJoint, data: Data, optimizer: optax.GradientTransformation
) -> dict[str, tuple[Method, BoundedFamily]]:
    """Methods of run_vi.py."""
    rows = data.num_rows
    inducing = data.inputs[:100]
    settings: dict[str, Any] = {"num_samples": NUM_SAMPLES, "sigma_init": 0.1}
    found: dict[str, tuple[Method, BoundedFamily]] = {
        "mean_field": (
            vi.mean_field_vi(log_joint, optimizer, rows, **settings),
            vi.MeanFieldFamily(log_joint),
        ),
        "mnf": (
            multiplicative_flows.multiplicative_flow_vi(log_joint, optimizer, rows, **settings),
            multiplicative_flows.MultiplicativeFamily(log_joint),
        ),
        "layerwise, 100 inducing rows": (
            layerwise_vi.layerwise_vi(
                log_joint, optimizer, rows, inducing_inputs=inducing, **settings
            ),
            layerwise_vi.find_family(log_joint, inducing),
        ),
    }
    for rank in (3, 10, 21):
        method = low_rank.low_rank_vi(log_joint, optimizer, rows, rank=rank, **settings)
        found[f"low_rank, R = {rank}"] = method, low_rank.LowRankFamily(log_joint)
    return found


def recipes(
    log_joint: LogJoint,
    generator: generators.Generator,
    data: Data,
    optimizer: optax.GradientTransformation,
) -> dict[str, Method]:
    """Methods of run_implicit.py."""
    estimators: dict[str, tuple[str, objectives.EntropyEstimator]] = {
        "linearised": ("linearised", objectives.Estimator("exact")),
        "hierarchical": ("hierarchical", None),
        "sivi, K = 50": ("sivi", semi_implicit.Mixture(50)),
        "sivi, K = 500": ("sivi", semi_implicit.Mixture(500)),
        "uivi": ("uivi", unbiased.Unbiased()),
    }
    return {
        name: implicit_vi.implicit_vi(
            log_joint,
            optimizer,
            data.num_rows,
            generator=generator,
            estimator=estimator,
            num_samples=NUM_SAMPLES,
            start=Start("network", 0.1, 0.1),
            objective=objectives.Objective(objective),
        )
        for name, (objective, estimator) in estimators.items()
    }


def main() -> None:
    """The table, line by line and as a whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="waveform.npz")
    parser.add_argument("--num_steps", type=int, default=4000, help="of Adam, on all rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of families and objectives begin with")
    arguments = parser.parse_args()
    only = tuple(arguments.only.split(","))
    _, dataset, log_joint = load_problem(
        Problem(
            dataset_name=arguments.path,
            standardize=False,
            model_name="logistic_regression",
            likelihood="bernoulli",
            weight_decay=0.01,
        )
    )
    data = jax.tree.map(jnp.asarray, make_data(dataset.x_train, dataset.y_train))
    rows: list[list[str]] = []

    def add(name: str, draws: np.ndarray, bound: str, sandwich: str, seconds: float) -> None:
        std, correlation = moments(draws)
        rows.append([name, f"{std:.3f}", f"{correlation:.3f}", bound, sandwich, f"{seconds:.0f}"])
        print(*rows[-1], sep=" | ", flush=True)

    exact, seconds = sample_hmc(log_joint, data, 20_000)
    value, error = log_evidence(log_joint, data, exact)
    add("HMC", exact, f"log p(D) = {value:.3f} ({error:.3f})", "", seconds)
    optimizer = optax.adam(optax.cosine_decay_schedule(STEP_SIZE, arguments.num_steps))
    key = jax.random.key(arguments.seed + 1)

    def draws_of(method: Method, state: Any) -> np.ndarray:
        draws = jax.jit(lambda: method.sample(key, state, NUM_DRAWS))()
        return np.asarray(jax.vmap(lambda w: ravel_pytree(w)[0])(draws), float)

    for name, (method, family) in families(log_joint, data, optimizer).items():
        if not name.startswith(only):
            continue
        state, seconds = train(method, data, arguments.num_steps, arguments.seed)
        evaluate = _bound(family, state[0], data)
        add(name, draws_of(method, state), with_error(evaluate(key)), "", seconds)
    shapes = log_joint.random_shapes
    generator = generators.make_generator(generators.MLP(22, (32,)), shapes)
    reverse = bounds.laplace_reverse(22, jnp.float32)
    for name, method in recipes(log_joint, generator, data, optimizer).items():
        if not name.startswith(only):
            continue
        state, seconds = train(method, data, arguments.num_steps, arguments.seed)
        common = (key, log_joint, generator, state.sampler, data)
        bound = jax.jit(
            lambda common=common: bounds.hierarchical_bound(
                *common, reverse, num_samples=NUM_BOUND_DRAWS, num_inner=INNER
            )
        )()
        both = jax.jit(
            lambda common=common: semi_implicit.sandwich(
                *common, num_samples=NUM_BOUND_DRAWS, counts=(MIXTURE,)
            )
        )()
        sandwich = " to ".join(
            with_error(both.log_joint + part[:, 0]) for part in (both.lower, both.upper)
        )
        add(name, draws_of(method, state), with_error(bound), sandwich, seconds)
    header = ["", "average std", "largest correlation", "lower bound (error)"]
    header += [f"sandwich, K = {MIXTURE}", "seconds"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


def _bound(family: BoundedFamily, q: Any, data: Data) -> Callable[[jax.Array], jax.Array]:
    """Independent estimates of a family's bound, by pairs of draws."""

    @jax.jit
    def evaluate(key: jax.Array) -> jax.Array:
        terms, _ = family.evidence_terms(key, q, data, 2 * NUM_BOUND_DRAWS)
        return jnp.mean(terms.elbo.reshape(2, -1), axis=0)

    return evaluate


if __name__ == "__main__":
    main()
