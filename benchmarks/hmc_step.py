"""Leapfrog steps of HMC against bare gradients and against the HMC of blackjax and numpyro.

All have the same log-joint, step size and number of leapfrog steps, each is one compiled program,
and they run in turns, so that a noisy machine slows them alike. What counts is the ratio of times,
as a median over rounds of the ratio within a round and as the ratio of the least times; a leapfrog
step is one gradient over all rows and what is done with it:

  bare        a loop of gradient and plain ascent
  leapfrog    core.hamiltonian.leapfrog, the integrator alone
  ours        whole transitions by run_hmc.py's method, in the loop of all methods
  blackjax    its kernel in a lax.scan, no adaptation
  numpyro     its kernel in a lax.fori_loop, no adaptation; left out if it is not installed

The data are random: costs do not depend on the values.

  python benchmarks/hmc_step.py
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import blackjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core import hmc, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.hamiltonian import Position, leapfrog, start
from haiku_posteriors.core.likelihoods import heteroscedastic_gaussian
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.momenta import Momenta
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import devices

ROUNDS = 9
SECONDS_A_TIMING = 0.3
STEP_SIZE = 1e-5
LEAPFROG_STEPS = 100
FEATURES = 10
CASES = [(300, 50), (1000, 50), (300, 400), (3000, 200)]  # rows, width of the hidden layer
ROWS = [100, 300, 1000, 3000, 10_000]
WIDTHS = [10, 200, 1000]
CHAINS = [1, 2, 4, 8]

Contenders = dict[str, Callable[[], Any]]


class Problem(NamedTuple):
    """A network of one hidden layer on random data, and how many transitions to time."""

    log_joint: LogJoint
    data: Data
    params: Params
    transitions: int

    @property
    def steps(self) -> int:
        return self.transitions * LEAPFROG_STEPS


def make_problem(rows: int, width: int) -> Problem:
    """So many transitions that bare gradients alone take SECONDS_A_TIMING."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(rows, FEATURES)).astype(np.float32)
    targets = generator.normal(size=(rows, 1)).astype(np.float32)
    likelihood = heteroscedastic_gaussian(1)
    log_joint = make_log_joint(
        lambda inputs: hk.nets.MLP([width, likelihood.num_outputs])(inputs),
        inputs,
        make_prior(1.0),
        likelihood,
    )
    data = devices.place_data(inputs, targets, devices.make_mesh(1))
    once = Problem(log_joint, data, log_joint.init(jax.random.key(0)), 1)
    run = bare(once)
    jax.block_until_ready(run())
    least = min(seconds(run) for _ in range(3))
    return once._replace(transitions=max(1, round(SECONDS_A_TIMING / least)))


def bare(problem: Problem) -> Callable[[], Any]:
    @jax.jit
    def run(params: Params, data: Data) -> Params:
        gradient = jax.grad(lambda params: problem.log_joint(params, data))

        def step(_: jax.Array, params: Params) -> Params:
            return jax.tree.map(lambda w, g: w + STEP_SIZE**2 * g, params, gradient(params))

        return jax.lax.fori_loop(0, problem.steps, step, params)

    return lambda: run(problem.params, problem.data)


def integrator(problem: Problem) -> Callable[[], Any]:
    """One long trajectory; masses and the number of steps are arguments, as in a run."""

    @jax.jit
    def run(
        params: Params, momentum: Params, data: Data, inverse_mass: Params, num_steps: jax.Array
    ) -> tuple[Position, Params]:
        return leapfrog(
            problem.log_joint,
            start(problem.log_joint, params),
            momentum,
            data,
            step_size=jnp.array(STEP_SIZE),
            momenta=Momenta(inverse_mass),
            num_steps=num_steps,
        )

    inverse_mass = jax.tree.map(lambda leaf: jnp.ones(()), problem.params)
    momentum = jax.tree.map(jnp.zeros_like, problem.params)
    # The first trajectory of L steps takes L + 1 gradients.
    num_steps = jnp.array(problem.steps - 1)
    return lambda: run(problem.params, momentum, problem.data, inverse_mass, num_steps)


def ours(problem: Problem, chains: int = 1) -> Callable[[], Any]:
    method = hmc.hmc(
        problem.log_joint,
        step_size=STEP_SIZE,
        trajectory_length=LEAPFROG_STEPS * STEP_SIZE,
        num_burn_in=0,
    )
    program = chains.compile_method(method, 0, chains, devices.make_mesh(chains))
    state = program.init(jax.tree.map(lambda leaf: jnp.stack([leaf] * chains), problem.params))
    return lambda: program.run(state, problem.data, 0, problem.transitions)


def with_blackjax(problem: Problem) -> Callable[[], Any]:
    @jax.jit
    def run(params: Params, data: Data, keys: jax.Array) -> Any:
        sampler = blackjax.hmc(
            lambda params: problem.log_joint(params, data),
            STEP_SIZE,
            jnp.ones(trees.size(params)),
            LEAPFROG_STEPS,
        )

        def transition(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            state, info = sampler.step(key, state)
            return state, info.acceptance_rate

        return jax.lax.scan(transition, sampler.init(params), keys)

    keys = jax.random.split(jax.random.key(0), problem.transitions)
    return lambda: run(problem.params, problem.data, keys)


def with_numpyro(problem: Problem) -> Callable[[], Any]:
    from numpyro.infer.hmc import hmc as numpyro_hmc

    @jax.jit
    def run(params: Params, data: Data) -> Any:
        init, transition = numpyro_hmc(lambda params: -problem.log_joint(params, data), algo="HMC")
        state = init(
            params,
            num_warmup=0,
            step_size=STEP_SIZE,
            inverse_mass_matrix=jnp.ones(trees.size(params)),
            adapt_step_size=False,
            adapt_mass_matrix=False,
            num_steps=LEAPFROG_STEPS,
            trajectory_length=None,
        )
        return jax.lax.fori_loop(0, problem.transitions, lambda _, state: transition(state), state)

    return lambda: run(problem.params, problem.data)


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def time_in_turns(contenders: Contenders) -> dict[str, np.ndarray]:
    """Seconds of each contender, one a round; who is first changes from round to round."""
    for run in contenders.values():
        jax.block_until_ready(run())
    names, times = list(contenders), {name: [] for name in contenders}
    for number in range(ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(seconds(contenders[name]))
    return {name: np.array(values) for name, values in times.items()}


def against(first: np.ndarray, second: np.ndarray) -> str:
    """How many times longer the first takes: median over rounds / of the least times."""
    return f"{statistics.median(first / second):.2f} / {first.min() / second.min():.2f}"


def name_of(problem: Problem) -> str:
    return f"{problem.data.num_rows:,} rows, {trees.size(problem.params):,} parameters"


def compare(rows: int, width: int) -> list[list[Any]]:
    """One row a contender: us a leapfrog step, and its time over that of two others."""
    problem = make_problem(rows, width)
    contenders = {
        "bare": bare(problem),
        "leapfrog": integrator(problem),
        "ours": ours(problem),
        "blackjax": with_blackjax(problem),
    }
    if importlib.util.find_spec("numpyro"):
        contenders["numpyro"] = with_numpyro(problem)
    times = time_in_turns(contenders)
    return [
        [
            name_of(problem),
            name,
            1e6 * statistics.median(taken) / problem.steps,
            against(taken, times["bare"]),
            against(taken, times["ours"]),
        ]
        for name, taken in times.items()
    ]


def compare_chains(rows: int, width: int) -> list[list[Any]]:
    """Chains in one program against as many runs of one chain each."""
    problem = make_problem(rows, width)
    times = time_in_turns({str(chains): ours(problem, chains) for chains in CHAINS})
    return [
        [
            name_of(problem),
            chains,
            1e6 * statistics.median(taken) / problem.steps,
            against(taken, int(chains) * times["1"]),
        ]
        for chains, taken in times.items()
    ]


def compare_sizes(sizes: list[tuple[int, int]]) -> list[list[Any]]:
    """How the cost grows with rows and parameters."""
    problems = {size: make_problem(*size) for size in sizes}
    times = time_in_turns({str(size): ours(problem) for size, problem in problems.items()})
    rows = []
    for size, problem in problems.items():
        cost = statistics.median(times[str(size)]) / problem.steps
        cells = problem.data.num_rows * trees.size(problem.params)
        rows.append([name_of(problem), 1e6 * cost, 1e9 * cost / cells])
    return rows


def show(rows: list[list[Any]], *header: str) -> None:
    print(tabulate(rows, header, floatfmt=".3g", tablefmt="github"), "\n", flush=True)


if __name__ == "__main__":
    if not importlib.util.find_spec("numpyro"):
        print("numpyro is not installed and is left out.")
    for case in CASES:
        show(compare(*case), "", "", "us/step", "time over bare", "time over ours")
    for case in CASES[:2]:
        show(compare_chains(*case), "", "chains", "us/step", "time over separate runs")
    sizes = [(rows, 50) for rows in ROWS] + [(300, width) for width in WIDTHS]
    show(compare_sizes(sizes), "", "us/step", "ns/step/row/parameter")
