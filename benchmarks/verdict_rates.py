"""How often verdicts are wrong: runs cut short, run long and run too hot, on a known posterior.

python benchmarks/verdict_rates.py [--seeds=50] [--methods=map,vi,implicit,layerwise,sgmcmc,hmc]

A linear regression of ten weights, whose inputs are correlated and have scales from 0.2 to 5; its
posterior, its mode, its best mean-field approximation and its evidence are known. Every line is
`seeds` runs of one setting. A run of an optimiser has arrived if its objective is within TOLERANCE
nats of the optimum, which of implicit and layerwise VI is the log-evidence. Chains have arrived if
no mean is off by more than 0.25 posterior standard deviations and no standard deviation by more
than 15 %: three times what the effective sample size that the verdict asks for leaves. A false
alarm is a verdict "NOT converged" on a run that has arrived, a miss the verdict "converged" on one
that has not.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tabulate import tabulate

sys.path.insert(0, ".")
sys.path.insert(0, "tests")

from scenarios import LinearGaussian, coefficients

from haiku_posteriors.core import curvature, hmc, progress, sgmcmc, trees
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.implicit import generators, implicit_vi, objectives
from haiku_posteriors.core.judging import diagnostics, temperatures, training
from haiku_posteriors.core.judging.temperatures import Temperatures
from haiku_posteriors.core.judging.trends import Trend
from haiku_posteriors.core.layerwise import layerwise_vi
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.progress import Rules
from haiku_posteriors.core.sgd import sgd
from haiku_posteriors.core.vi import mean_field_vi
from haiku_posteriors.utils import optim_utils
from haiku_posteriors.utils.report.training import training_of
from haiku_posteriors.utils.stages.sampler_scales import LEAST_FRICTION

ARGUMENTS = dict(argument[2:].split("=") for argument in sys.argv[1:])
NUM_SEEDS = int(ARGUMENTS.get("seeds", 50))
ROWS, COLUMNS, TOLERANCE, CHAINS = 200, 10, 0.2, 4
START = 2**31  # the number of the key of a start, which no epoch has
# Epochs at full batch, and whether training ends by itself.
LENGTHS = ((50_000, True), (300, True), (100, False), (20_000, False))
SCHEDULES = ((100, False), (3000, False), (20_000, False))  # of what has no end of its own
NUM_INDUCING = 100
NUM_BOUND_DRAWS = 1000  # of a bound whose draws differ the less the nearer it is to log p(D)
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(ROWS, COLUMNS))
INPUTS[:, 1:] += 0.5 * INPUTS[:, :-1]
INPUTS = (INPUTS * np.geomspace(0.2, 5, COLUMNS)).astype(np.float32)
NOISE = 0.5 * RANDOM.normal(size=(ROWS, 1))
TARGETS = (INPUTS @ RANDOM.normal(size=(COLUMNS, 1)) + NOISE).astype(np.float32)
EXACT = LinearGaussian(INPUTS, TARGETS, noise_std=0.5, prior_std=1.0, with_bias=False)
LOG_JOINT, DATA = EXACT.log_joint(), EXACT.data()
STD = np.sqrt(np.diag(EXACT.covariance))


class Optimiser(NamedTuple):
    """A method that maximises, and what is known of its optimum.

    Attributes:
      name: in the table.
      make: optimizer, batch size -> method.
      below: states of all seeds -> nats by which their objectives are below the optimum, (seeds,).
      num_evaluations: minibatches of an evaluation of the objective.
      lengths: epochs at full batch, and whether training ends by itself.
      batch_sizes: of the lines.
      optimizer: number of updates, or None where training ends by itself -> its optimizer.
    """

    name: str
    make: Callable[[optax.GradientTransformation, int], Method]
    below: Callable[[Any], np.ndarray]
    num_evaluations: int = 32
    lengths: tuple[tuple[int, bool], ...] = LENGTHS
    batch_sizes: tuple[int, ...] = (ROWS, 40)
    optimizer: Callable[[int | None], optax.GradientTransformation] = functools.partial(
        optim_utils.make_optimizer, "Adam", 0.01
    )


def below_mode(state: Any) -> np.ndarray:
    mean = coefficients(state.params) - EXACT.mean
    return 0.5 * np.einsum("si,ij,sj->s", mean, EXACT.precision, mean)


def below_best_mean_field(state: Any) -> np.ndarray:
    mean = coefficients(state.variational.mean) - EXACT.mean
    scale = coefficients(jax.tree.map(jax.nn.softplus, state.variational.raw_scale))
    squares = (scale / EXACT.mean_field_std()) ** 2
    nats = 0.5 * np.einsum("si,ij,sj->s", mean, EXACT.precision, mean)
    return nats + 0.5 * np.sum(squares - 1 - np.log(squares), axis=1)


def below_evidence(bound: Callable[[jax.Array, Any], jax.Array], state: Any) -> np.ndarray:
    """`bound`: key, state of a seed -> estimates of its lower bound of log p(D)."""
    values = jax.jit(lambda states: jax.lax.map(lambda s: bound(jax.random.key(4), s), states))
    return EXACT.log_evidence() - np.mean(np.asarray(values(state), float), axis=1)


def implicit() -> Optimiser:
    """With the generator and the noise that run_implicit.py has for a table."""
    description = generators.automatic(LOG_JOINT.random_shapes)
    generator = generators.make_generator(description, LOG_JOINT.random_shapes)

    def make(optimizer: optax.GradientTransformation, batch_size: int) -> Method:
        return implicit_vi.implicit_vi(
            LOG_JOINT,
            optimizer,
            batch_size,
            generator=generator,
            num_samples=8,
            objective=objectives.Objective("hierarchical"),
            noise="local",
        )

    def bound(key: jax.Array, state: Any) -> jax.Array:
        arguments = (LOG_JOINT, generator, None, state.sampler, DATA, NUM_BOUND_DRAWS)
        return objectives.evidence_terms(key, *arguments)[0].total

    # Without the long schedule, and without minibatches: 50 runs take long.
    below = functools.partial(below_evidence, bound)
    return Optimiser("implicit VI", make, below, lengths=LENGTHS[:3], batch_sizes=(ROWS,))


def layerwise() -> Optimiser:
    """With the steps of run_vi.py, from random networks."""
    inducing = DATA.inputs[:NUM_INDUCING]
    family = layerwise_vi.find_family(LOG_JOINT, inducing)

    def make(optimizer: optax.GradientTransformation, batch_size: int) -> Method:
        settings = {"inducing_inputs": inducing, "rows_per_input": ROWS / NUM_INDUCING}
        return layerwise_vi.layerwise_vi(LOG_JOINT, optimizer, batch_size, **settings)

    def bound(key: jax.Array, state: Any) -> jax.Array:
        return family.evidence_terms(key, state.posterior, DATA, NUM_BOUND_DRAWS)[0].elbo

    return Optimiser(
        "layerwise VI",
        make,
        functools.partial(below_evidence, bound),
        lengths=SCHEDULES,
        optimizer=functools.partial(optim_utils.warmed_adam, 0.03),
    )


OPTIMISERS = {
    "map": lambda: Optimiser("MAP", functools.partial(sgd, LOG_JOINT), below_mode, 1),
    "vi": lambda: Optimiser(
        "mean-field VI", functools.partial(mean_field_vi, LOG_JOINT), below_best_mean_field
    ),
    "implicit": implicit,
    "layerwise": layerwise,
}


def train(optimiser: Optimiser, batch_size: int, num_epochs: int, by_itself: bool) -> Any:
    """The states of all seeds at the end, and the rules."""
    batches = num_minibatches(ROWS, batch_size)
    optimizer = optimiser.optimizer(None if by_itself else num_epochs * batches)
    evaluations = -(-optimiser.num_evaluations // batches)
    rules = Rules(TOLERANCE, progress.first_round(batches), num_evaluations=evaluations)
    if not by_itself:
        steps = 1 + np.cos(np.pi * np.arange(num_epochs) / num_epochs)
        ends, start = progress.schedule_ends(steps)
        rules = rules._replace(ends=ends, start=start)
    method = progress.watch(optimiser.make(optimizer, batch_size), rules)

    def one(key: jax.Array) -> Any:
        def step(carry: tuple) -> tuple:
            state, epoch = carry
            return method.step(jax.random.fold_in(key, epoch), state, DATA)[0], epoch + 1

        def goes_on(carry: tuple) -> jax.Array:
            return (carry[1] < num_epochs) & ~carry[0].progress.is_reached

        start = method.init(jax.random.fold_in(key, START), None)
        return jax.lax.while_loop(goes_on, step, (start, jnp.array(0)))

    states, epochs = jax.jit(lambda keys: jax.lax.map(one, keys))(
        jax.random.split(jax.random.key(1), NUM_SEEDS)
    )
    return states, rules, float(np.mean(epochs))


def judge_training(optimiser: Optimiser, batch_size: int, num_epochs: int, by_itself: bool) -> list:
    states, rules, epochs = train(optimiser, batch_size, num_epochs, by_itself)
    found = training_of(states.progress, rules)
    converged = []
    for seed in range(NUM_SEEDS):
        one = slice(seed, seed + 1)
        reached = None if found.is_reached is None else found.is_reached[one]
        last = Trend(found.last.gain[one], found.last.error[one])
        own = training.Training(last, found.num_epochs[one], reached, found.objectives[one])
        objective = training.Objective("objective", "Draw more")
        converged.append(training.verdict(own, objective, TOLERANCE).converged)
    length = f"auto, at most {num_epochs}" if by_itself else f"cosine, {num_epochs}"
    arrived = optimiser.below(states.state) < TOLERANCE
    return line(optimiser.name, f"batches of {batch_size}, {length}", arrived, converged, epochs)


def judge_chains(batch_size: int, num_updates: int, stretch: float) -> list:
    """SGHMC with masses from the curvature; `stretch` multiplies the stride that fits.

    Friction is that of run_sgmcmc.py: little with all rows, 1 in units of the masses otherwise. As
    there, chains start at the mode, and the first half is burn-in.
    """
    mode = jax.tree.map(jnp.zeros_like, LOG_JOINT.init(jax.random.key(0)))
    mass = curvature.diagonal(jax.random.key(0), LOG_JOINT, mode, DATA)
    largest = curvature.largest_eigenvalue(jax.random.key(0), LOG_JOINT, mode, DATA, mass)
    stride = float(stretch * 0.5 / np.sqrt(largest))
    beta = float(np.exp(-(LEAST_FRICTION if batch_size == ROWS else min(stride, 1.0))))
    sampler = sgmcmc.sghmc((1 + beta) * stride**2 / 2, beta, sgmcmc.fixed_mass(mass))
    method = sgmcmc.sgmcmc(LOG_JOINT, sampler, batch_size)
    batches = num_minibatches(ROWS, batch_size)
    num_draws = 400
    period = max(1, num_updates // (2 * num_draws * batches))
    params = LOG_JOINT.init(jax.random.key(0))
    trained = jax.tree.map(
        lambda leaf: jnp.asarray(EXACT.mean, leaf.dtype).reshape(leaf.shape), params
    )

    def chain(key: jax.Array) -> tuple:
        def draw(carry: tuple, _: None) -> tuple:
            def step(_: int, carry: tuple) -> tuple:
                state, epoch = carry
                return method.step(jax.random.fold_in(key, epoch), state, DATA)[0], epoch + 1

            state, epoch = jax.lax.fori_loop(0, period, step, carry)
            return (state, epoch), state.params

        start = method.init(jax.random.fold_in(key, START), trained)
        draws = jax.lax.scan(draw, (start, jnp.array(0)), None, length=2 * num_draws)[1]
        draws = jax.tree.map(lambda leaf: leaf[num_draws:], draws)
        center = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), draws)

        def virial(params: Any) -> tuple[jax.Array, jax.Array]:
            value, gradient = jax.value_and_grad(LOG_JOINT)(params, DATA)
            products = jax.tree.map(lambda w, c, g: -(w - c) * g, params, center, gradient)
            return trees.total(products) / COLUMNS, value

        return draws, *jax.lax.map(virial, draws)

    keys = jax.random.split(jax.random.key(2), NUM_SEEDS * CHAINS)
    draws, virials, log_joint = jax.jit(lambda keys: jax.lax.map(chain, keys))(keys)
    weights = coefficients(draws).reshape(NUM_SEEDS, CHAINS, num_draws, COLUMNS)
    by_chain = (NUM_SEEDS, CHAINS, num_draws)
    text = f"batches of {batch_size}, stride x {stretch}, {num_updates:,} updates"
    return judge_draws(
        "SGMCMC",
        text,
        weights,
        np.reshape(log_joint, by_chain),
        np.reshape(virials, by_chain),
        2 * period * num_draws,
    )


def judge_hmc(num_burn_in: int, num_draws: int) -> list:
    """Chains of run_hmc.py, which tell each other what they learn, from overdispersed starts."""
    method = hmc.hmc(LOG_JOINT, num_burn_in=num_burn_in)

    def run(key: jax.Array) -> tuple:
        keys = jax.random.split(key, CHAINS)

        def step(states: Any, number: jax.Array) -> tuple:
            own = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
            states, info = jax.vmap(method.step, (0, 0, None))(own, states, DATA)
            states = method.pool(states) if method.pool else states
            return states, (states.position.params, info["log_joint"])

        starts = jax.vmap(lambda key: method.init(jax.random.fold_in(key, START), None))(keys)
        return jax.lax.scan(step, starts, jnp.arange(num_burn_in + num_draws))[1]

    keys = jax.random.split(jax.random.key(3), NUM_SEEDS)
    draws, log_joint = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    # (seeds, transitions, chains) of both.
    draws = jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, num_burn_in:], 1, 2), draws)
    shape = (NUM_SEEDS, CHAINS, num_draws, COLUMNS)
    weights = coefficients(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), draws))
    log_joint = np.moveaxis(np.asarray(log_joint)[:, num_burn_in:], 1, 2)
    text = f"{num_burn_in} transitions of burn-in, {num_draws} after"
    epochs = num_burn_in + num_draws
    return judge_draws("HMC", text, weights.reshape(shape), log_joint, None, epochs)


def judge_draws(
    method: str,
    text: str,
    weights: np.ndarray,
    log_joint: np.ndarray,
    virials: np.ndarray | None,
    epochs: int,
) -> list:
    """A line from (seeds, chains, draws, ...) each; `virials` where a temperature is measured."""
    converged, arrived = [], []
    for seed, values in enumerate(weights):
        verdict = diagnostics.verdict(
            diagnostics.convergence(values @ INPUTS[:50].T.astype(float)),
            num_chains=CHAINS,
            num_divergent=0,
            acceptance=None,
            energy_bfmi=None,
            log_joint=diagnostics.convergence(log_joint[seed][:, :, None]),
        )
        is_right_hot = True
        if virials is not None:
            heat = Temperatures(temperatures.configurational(virials[seed]))
            is_right_hot = not temperatures.problems(heat, "")
        converged.append(verdict.converged and is_right_hot)
        flat = values.reshape(-1, COLUMNS)
        mean_error = np.max(np.abs(flat.mean(axis=0) - EXACT.mean) / STD)
        std_error = np.max(np.abs(np.log(flat.std(axis=0) / STD)))
        arrived.append(mean_error < 0.25 and std_error < np.log(1.15))
    return line(method, text, np.array(arrived), converged, float(epochs))


def line(method: str, text: str, arrived: np.ndarray, converged: list, epochs: float) -> list:
    said = np.array(converged)
    false_alarms, misses = np.sum(arrived & ~said), np.sum(~arrived & said)
    return [
        *(method, text, f"{epochs:.0f}", f"{np.sum(arrived)} of {len(said)}"),
        *(f"{np.sum(said)}", f"{false_alarms}", f"{misses}"),
    ]


def main() -> None:
    rows = []
    methods = ARGUMENTS.get("methods", f"{','.join(OPTIMISERS)},sgmcmc,hmc").split(",")
    for optimiser in [OPTIMISERS[name]() for name in methods if name in OPTIMISERS]:
        for batch_size in optimiser.batch_sizes:
            for num_epochs, by_itself in optimiser.lengths:
                epochs = num_epochs if batch_size == ROWS else num_epochs // 5
                rows.append(judge_training(optimiser, batch_size, epochs, by_itself))
    for batch_size, num_updates, stretch in (
        (ROWS, 20_000, 1.0),
        (ROWS, 1_000, 1.0),
        (40, 20_000, 0.1),
        (40, 20_000, 3.0),
    ):
        if "sgmcmc" in methods:
            rows.append(judge_chains(batch_size, num_updates, stretch))
    for num_burn_in, num_draws in ((200, 800), (10, 40), (200, 100)):
        if "hmc" in methods:
            rows.append(judge_hmc(num_burn_in, num_draws))
    headers = ["method", "setting", "epochs", "arrived", "converged", "false alarms", "misses"]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
