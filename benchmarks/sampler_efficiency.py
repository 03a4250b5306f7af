"""Effective draws per gradient and per processor second: our samplers beside those of the peers.

python benchmarks/sampler_efficiency.py [--data_dir=FOLDER with uci/] [--only=NAME,...] [--file=F]

With a file, what is measured is kept there, and a run that was stopped goes on from it.

Three posteriors of different kind: a logistic regression of 25 weights, a homoscedastic network of
one hidden layer (boston_0 where its files are, else diabetes), and the toy regression, whose
posterior is curved and stiff. Every sampler has the same log-joint, four chains, the same trained
starts, and its own adaptation as its authors recommend it; after that, its sampling phase counts.
The measure is the least bulk effective sample size over predictions at test rows, as the verdict of
a run takes it. Unadjusted samplers do not meet the
posterior exactly and no effective sample size shows by how much: the last columns compare the mean
of the log-joint with that of ours, in posterior standard deviations, and say the largest R-hat.

blackjax is a development dependency; numpyro is left out where it is not installed.
"""

import functools
import importlib.util
import json
import operator
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core import hmc, mclmc, sgd
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.utils import chains, data_utils, devices, files, problem
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.problem import Problem

CHAINS, WARM_UP, NUM_DRAWS, TRAINING = 4, 200, 800, 1000
NUTS_WARM_UP = 500
# Steps of blackjax's MCLMC between two kept draws. On the toy regression a transition of HMC takes
# some 2,000 gradients, and so many more steps are given to it, too.
MCLMC_THINNING = {"toy_regression": 100}
OTHER_MCLMC_THINNING = 10
ARGUMENTS = dict(argument[2:].split("=") for argument in sys.argv[1:])
HAS_NUMPYRO = importlib.util.find_spec("numpyro") is not None


class Posterior(NamedTuple):
    """What to sample, and where chains start, leaves (chains, ...)."""

    log_joint: LogJoint
    dataset: Dataset
    starts: Any


class Outcome(NamedTuple):
    """Draws, leaves (chains, draws, ...), and what they cost after adaptation."""

    draws: Any
    num_gradients: int
    processor_seconds: float


def logistic_regression() -> tuple[Problem, Dataset]:
    """1,000 rows of 24 correlated inputs and a bias: the shape of the German credit data."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(1200, 24)) @ (np.eye(24) + 0.3 * random.normal(size=(24, 24)))
    logits = inputs @ random.normal(size=24) * 0.15 - 0.8
    labels = (random.uniform(size=1200) < 1 / (1 + np.exp(-logits))).astype(int)
    dataset = data_utils.from_arrays(inputs[:1000], labels[:1000], inputs[1000:], labels[1000:])
    return Problem(model_name="logistic_regression", likelihood="bernoulli"), dataset


def load_posteriors() -> dict[str, tuple[Problem, Dataset]]:
    network = Problem("diabetes", likelihood="gaussian")
    if "data_dir" in ARGUMENTS:
        network = Problem(
            "boston_0", data_dir=ARGUMENTS["data_dir"], likelihood="gaussian", weight_decay=30.0
        )
    toy = Problem("toy_regression", weight_decay=1 / 1.5**2, noise_std=0.3, learn_noise=False)
    found = {"logistic regression": logistic_regression()}
    for name, described in ((network.dataset_name, network), (toy.dataset_name, toy)):
        found[name] = (described, problem.load_data(described))
    return found


def run_method(
    posterior: Posterior, method: Method, purposes: chains.Purposes, num_steps: int
) -> Any:
    """The states of a method's chains after some steps in the loop's program."""
    mesh = devices.make_mesh(CHAINS)
    dataset = posterior.dataset
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh)
    program = chains.compile_method(method, 0, CHAINS, mesh, purposes)
    return program.run(program.init(posterior.starts), data, np.int32(0), np.int32(num_steps))[0]


def ours(make: Callable[..., Method], posterior: Posterior, num_draws: int) -> Outcome:
    """One of our methods, with its defaults: burn-in as in a run, then its steps in a scan."""
    method = make(posterior.log_joint, num_burn_in=WARM_UP)
    states = run_method(posterior, method, chains.MAIN, WARM_UP)
    dataset = posterior.dataset
    data = jax.tree.map(jnp.asarray, make_data(dataset.x_train, dataset.y_train))

    def sample(key: jax.Array, state: Any) -> tuple[Any, jax.Array]:
        def step(state: Any, key: jax.Array) -> tuple[Any, Any]:
            state, info = method.step(key, state, data)
            return state, (state.position.params, info["num_leapfrog_steps"])

        _, (draws, steps) = jax.lax.scan(step, state, jax.random.split(key, num_draws))
        return draws, jnp.sum(steps)

    return one_chain_at_a_time(lambda _, state: state, sample, lambda params: params, states)


def flat_log_density(posterior: Posterior) -> tuple[Callable, Callable, jax.Array]:
    """The log-joint of a vector, the way back to parameters, and the starts as vectors."""
    first = jax.tree.map(lambda leaf: leaf[0], posterior.starts)
    unravel = ravel_pytree(first)[1]
    dataset = posterior.dataset
    data = jax.tree.map(jnp.asarray, make_data(dataset.x_train, dataset.y_train))
    starts = jax.vmap(lambda params: ravel_pytree(params)[0])(posterior.starts)
    return lambda vector: posterior.log_joint(unravel(vector), data), unravel, starts


def one_chain_at_a_time(
    adapt: Callable[[jax.Array, Any], Any],
    sample: Callable[[jax.Array, Any], tuple[Any, jax.Array]],
    unravel: Callable,
    starts: Any,
) -> Outcome:
    """adapt: (key, start) -> anything; sample: (key, that) -> positions of draws, gradients.

    All samplers are timed by this, in one compiled scan for a chain; `starts` has a chain axis.
    """
    adapt, sample = jax.jit(adapt), jax.jit(sample)
    positions, num_gradients, seconds = [], 0, 0.0
    for chain in range(CHAINS):
        start = jax.tree.map(operator.itemgetter(chain), starts)
        key = jax.random.fold_in(jax.random.key(0), chain)
        adapted = jax.block_until_ready(adapt(jax.random.fold_in(key, 0), start))
        arguments = (jax.random.fold_in(key, 1), adapted)
        compiled = sample.lower(*arguments).compile()
        started = time.process_time()
        found, gradients = jax.block_until_ready(compiled(*arguments))
        seconds += time.process_time() - started
        positions.append(jax.vmap(unravel)(found))
        num_gradients += int(gradients)
    draws = jax.tree.map(lambda *leaves: np.stack(leaves), *positions)
    return Outcome(draws, num_gradients, seconds)


def blackjax_nuts(posterior: Posterior, num_draws: int) -> Outcome:
    log_density, unravel, starts = flat_log_density(posterior)

    def adapt(key: jax.Array, start: jax.Array) -> Any:
        warm_up = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, parameters), _ = warm_up.run(key, start, num_steps=NUTS_WARM_UP)
        return state, parameters["step_size"], parameters["inverse_mass_matrix"]

    def sample(key: jax.Array, adapted: Any) -> tuple[jax.Array, jax.Array]:
        state, step_size, inverse_mass = adapted
        kernel = blackjax.nuts(log_density, step_size, inverse_mass)

        def step(state: Any, key: jax.Array) -> tuple[Any, Any]:
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps)

        _, (positions, steps) = jax.lax.scan(step, state, jax.random.split(key, num_draws))
        return positions, jnp.sum(steps)

    return one_chain_at_a_time(adapt, sample, unravel, starts)


def blackjax_mclmc(posterior: Posterior, num_draws: int, thinning: int) -> Outcome:
    """Its own tuning of step size, masses and decoherence length, for 10 times the draws."""
    log_density, unravel, starts = flat_log_density(posterior)
    kernel = blackjax.mcmc.mclmc.build_kernel()
    gradients_per_step, count = 2, 10 * num_draws  # of its integrator, McLachlan's

    def adapt(key: jax.Array, start: jax.Array) -> Any:
        state = blackjax.mcmc.mclmc.init(start, log_density, jax.random.fold_in(key, 0))
        state, parameters, _ = blackjax.mclmc_find_L_and_step_size(
            kernel, count * thinning, state, jax.random.fold_in(key, 1), log_density
        )
        return state, parameters.L, parameters.step_size, parameters.inverse_mass_matrix

    def sample(key: jax.Array, adapted: Any) -> tuple[jax.Array, jax.Array]:
        state, length, step_size, inverse_mass = adapted

        def step(state: Any, key: jax.Array) -> tuple[Any, Any]:
            def once(state: Any, key: jax.Array) -> tuple[Any, None]:
                return kernel(key, state, log_density, inverse_mass, length, step_size)[0], None

            state, _ = jax.lax.scan(once, state, jax.random.split(key, thinning))
            return state, state.position

        _, positions = jax.lax.scan(step, state, jax.random.split(key, count))
        return positions, jnp.array(count * thinning * gradients_per_step)

    return one_chain_at_a_time(adapt, sample, unravel, starts)


def numpyro_nuts(posterior: Posterior, num_draws: int) -> Outcome:
    from numpyro.infer import NUTS

    log_density, unravel, starts = flat_log_density(posterior)
    kernel = NUTS(potential_fn=lambda vector: -log_density(vector))

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = kernel.sample(state, (), {})
        return state, (state.z, state.num_steps)

    def adapt(key: jax.Array, start: jax.Array) -> Any:
        state = kernel.init(key, NUTS_WARM_UP, start, (), {})
        return jax.lax.scan(step, state, length=NUTS_WARM_UP)[0]

    def sample(key: jax.Array, state: Any) -> tuple[jax.Array, jax.Array]:
        _, (positions, steps) = jax.lax.scan(step, state, length=num_draws)
        return positions, jnp.sum(steps)

    return one_chain_at_a_time(adapt, sample, unravel, starts)


Sampler = Callable[[Posterior, int], Outcome]


def samplers(name: str) -> dict[str, Sampler]:
    """Ours and the peers', for the posterior of this name."""
    thinning = MCLMC_THINNING.get(name, OTHER_MCLMC_THINNING)
    found: dict[str, Sampler] = {
        "HMC": functools.partial(ours, functools.partial(hmc.hmc, target_accept=0.9)),
        "MCLMC": functools.partial(ours, mclmc.mclmc),
        "MCLMC, adjusted": functools.partial(ours, functools.partial(mclmc.mclmc, adjusted=True)),
        "blackjax NUTS": blackjax_nuts,
        "blackjax MCLMC": functools.partial(blackjax_mclmc, thinning=thinning),
    }
    return found | ({"numpyro NUTS": numpyro_nuts} if HAS_NUMPYRO else {})


def measure(posterior: Posterior, outcome: Outcome) -> dict[str, float]:
    """Effective sample sizes of predictions, and mean and deviation of the log-joint."""
    log_joint, dataset = posterior.log_joint, posterior.dataset
    data = jax.tree.map(jnp.asarray, make_data(dataset.x_train, dataset.y_train))
    inputs = jnp.asarray(dataset.x_test)
    both = jax.jit(
        lambda draws: jax.lax.map(
            lambda params: (log_joint.predict(params, inputs).reshape(-1), log_joint(params, data)),
            draws,
        )
    )
    found = [
        both(jax.tree.map(operator.itemgetter(chain), outcome.draws)) for chain in range(CHAINS)
    ]
    predictions = np.stack([np.asarray(part[0]) for part in found])
    values = np.stack([np.asarray(part[1], float) for part in found])
    predictions = predictions[:, :, np.ptp(predictions, axis=(0, 1)) > 0]
    bulk = diagnostics.bulk_ess(predictions)
    return {
        "least": float(np.nanmin(bulk)),
        "median": float(np.nanmedian(bulk)),
        "rhat": float(np.nanmax(diagnostics.rhat(predictions))),
        "mean": float(values.mean()),
        "deviation": float(values.std()),
    }


def main() -> None:
    """Prints one table for each posterior."""
    chosen = ARGUMENTS.get("only", "").split(",")
    file = pathlib.Path(ARGUMENTS["file"]) if "file" in ARGUMENTS else None
    done = json.loads(file.read_text()) if file and file.exists() else {}
    for name, (described, dataset) in load_posteriors().items():
        if chosen != [""] and name not in chosen:
            continue
        log_joint = problem.build_log_joint(problem.complete(described, dataset.form), dataset.form)
        untrained = Posterior(log_joint, dataset, None)
        training = sgd.sgd(log_joint, optax.adam(1e-2), len(dataset.x_train))
        contenders = samplers(name)
        missing = [sampler for sampler in contenders if sampler not in done.setdefault(name, {})]
        if missing:
            state = run_method(untrained, training, chains.WARM_START, TRAINING)
            posterior = Posterior(log_joint, dataset, state.params)
        for sampler in missing:
            outcome = contenders[sampler](posterior, NUM_DRAWS)
            done[name][sampler] = measure(posterior, outcome) | {
                "draws": jax.tree.leaves(outcome.draws)[0].shape[1],
                "gradients": outcome.num_gradients,
                "seconds": outcome.processor_seconds,
            }
            if file:
                files.write_json(file, done)
            print(f"{name}, {sampler}: done", file=sys.stderr, flush=True)
        reference = done[name][next(iter(contenders))]
        rows = [
            [
                sampler,
                1000 * found["least"] / found["gradients"],
                1000 * found["median"] / found["gradients"],
                found["least"] / found["seconds"],
                found["least"],
                found["draws"],
                found["gradients"],
                found["seconds"],
                (found["mean"] - reference["mean"]) / reference["deviation"],
                found["rhat"],
            ]
            for sampler, found in ((sampler, done[name][sampler]) for sampler in contenders)
        ]
        headers = ["", "least ESS / 1,000 gradients", "median", "least ESS / processor s"]
        headers += [
            "least ESS",
            "draws a chain",
            "gradients",
            "processor s",
            "log-joint off by",
            "R-hat",
        ]
        print(f"\n{name}\n{tabulate(rows, headers, floatfmt='.3g')}", flush=True)


if __name__ == "__main__":
    main()
