"""Training that ends by itself: at the optimum of a closed form, and what a round says by hand."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scenarios import LinearGaussian, coefficients

from haiku_posteriors.core import progress, trees
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.judging import trends
from haiku_posteriors.core.progress import Rules
from haiku_posteriors.core.sgd import sgd
from haiku_posteriors.core.vi import mean_field_vi

ROWS = 60
RANDOM = np.random.default_rng(0)
# Scales of inputs that differ by a factor of 10, and are correlated.
INPUTS = (RANDOM.normal(size=(ROWS, 3)) @ np.array([[1, 0.8, 0], [0, 1, 0], [0, 0, 0.1]])).astype(
    np.float32
)
TARGETS = (INPUTS @ np.array([[1.0], [-1.0], [2.0]]) + 0.5 * RANDOM.normal(size=(ROWS, 1))).astype(
    np.float32
)
EXACT = LinearGaussian(INPUTS, TARGETS, noise_std=0.5, prior_std=1.0)
TOLERANCE = 0.2


def train(make, batch_size, num_evaluations=1, step_size=0.05, max_epochs=40_000):
    """The state at which training has ended by itself, and the epochs that it took."""
    optimizer = optax.chain(optax.adam(step_size), progress.scale_by_step_factor())
    rounds = progress.first_round(num_minibatches(ROWS, batch_size), num_updates=500)
    rules = Rules(TOLERANCE, rounds, num_evaluations=num_evaluations)
    method = progress.watch(make(EXACT.log_joint(), optimizer, batch_size), rules)
    data, key = EXACT.data(), jax.random.key(3)

    @jax.jit
    def run(state):
        def step(carry):
            state, epoch = carry
            return method.step(jax.random.fold_in(key, epoch), state, data)[0], epoch + 1

        def goes_on(carry):
            return (carry[1] < max_epochs) & ~carry[0].progress.is_reached

        return jax.lax.while_loop(goes_on, step, (state, jnp.array(0)))

    state, epochs = run(method.init(jax.random.key(0), None))
    return method, state, int(epochs)


def excess(params):
    """By how many nats parameters are below the mode."""
    difference = coefficients(params) - EXACT.mean
    return 0.5 * difference @ EXACT.precision @ difference


@pytest.mark.parametrize("batch_size", [ROWS, 13])
def test_training_ends_at_the_mode(batch_size):
    method, state, epochs = train(sgd, batch_size)
    assert state.progress.is_reached and epochs < 40_000
    assert epochs % trends.NUM_BATCHES == 0
    assert state.progress.num_phases >= 2
    factor = optax.tree.get(state.state.optimizer_state, "step_factor")
    # Rounds in which noise hid the trend have halved it further.
    halvings = np.log2(progress.DECREASE**state.progress.num_phases / factor)
    np.testing.assert_allclose(halvings, np.round(halvings), atol=1e-4)
    assert halvings > -1e-4
    assert excess(state.state.params) < TOLERANCE
    again, _ = method.step(jax.random.key(9), state, EXACT.data())
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_mean_field_ends_at_its_own_optimum():
    make = functools.partial(mean_field_vi, sigma_init=0.5, num_samples=4)
    _, state, epochs = train(make, ROWS, num_evaluations=16)
    assert state.progress.is_reached and epochs < 40_000
    variational = state.state.variational
    scales = coefficients(jax.tree.map(jax.nn.softplus, variational.raw_scale))
    # The ELBO below that of the optimum is KL's excess, in closed form; noise of the end included.
    squares = (scales / EXACT.mean_field_std()) ** 2
    gap = 0.5 * np.sum(squares - 1 - np.log(squares)) + excess(variational.mean)
    assert gap < TOLERANCE


class Counter(NamedTuple):
    """The state of a method that only counts, and whose objective is looked up in the data."""

    params: jax.Array
    value: jax.Array
    number: jax.Array
    optimizer_state: progress.StepFactorState


def counting_method():
    """A method whose objective is what the data say, and whose one parameter counts the epochs."""

    def init(rng_key, params):
        return Counter(
            jnp.zeros(()), jnp.zeros(()), jnp.array(0), progress.StepFactorState(jnp.ones(()))
        )

    def step(rng_key, state, data):
        # With steps of length 0 the objective is that of the iterate.
        is_still = state.optimizer_state.step_factor == 0
        value = jnp.where(is_still, state.value, data[state.number])
        moved = Counter(state.params + 1, value, state.number + 1, state.optimizer_state)
        return moved, {"log_joint": value[None]}

    return progress.Method(init, step, lambda rng_key, state, num_draws: state.params)


@functools.cache
def compiled(rules):
    method = progress.watch(counting_method(), rules)
    return method, jax.jit(method.step)


def run_series(values, rules):
    method, step = compiled(rules)
    state = method.init(jax.random.key(0), None)
    data = jnp.zeros(400).at[: len(values)].set(jnp.array(values))
    for _ in range(len(values)):
        state, _ = step(jax.random.key(0), state, data)
    return state


def test_rounds_by_hand():
    flat = [0.0] * 10
    ramp = [float(value) for value in range(10)]
    # A rising round, and the next twice as long; it is flat, so that the first phase is over.
    state = run_series(ramp + [9.0] * 20, Rules(0.5, 10))
    assert (int(state.progress.num_rounds), int(state.progress.num_phases)) == (2, 1)
    assert int(state.progress.round_length) == 20 and not state.progress.is_reached
    np.testing.assert_allclose(state.state.params, np.mean(np.arange(11, 31)))
    np.testing.assert_allclose(state.progress.previous, 9.0)
    np.testing.assert_allclose(state.state.optimizer_state.step_factor, progress.DECREASE)
    # Another flat phase that gained more than the tolerance, and one that did not.
    assert not run_series([*flat, *([1.0] * 10)], Rules(0.5, 10)).progress.is_reached
    reached = run_series([*flat, *([0.4] * 10)], Rules(0.5, 10))
    assert reached.progress.is_reached
    # A falling round makes the step smaller but is no end.
    falling = run_series([*flat, *(-value for value in ramp)], Rules(0.5, 10))
    assert int(falling.progress.num_phases) == 2 and not falling.progress.is_reached
    # A rise leaves step and iterate alone; noise that hides one halves the step from the average.
    rising = run_series(ramp, Rules(0.5, 10))
    noisy = run_series([5.0, -5.0] * 5, Rules(0.5, 10))
    for state, factor, iterate in ((rising, 1.0, 10.0), (noisy, 0.5, 5.5)):
        assert (int(state.progress.round_length), int(state.progress.num_phases)) == (20, 0)
        np.testing.assert_allclose(state.state.optimizer_state.step_factor, factor)
        np.testing.assert_allclose(state.state.params, iterate)
    # What is waited for does not count.
    waited = run_series([5.0] * 7 + flat, Rules(0.5, 10, num_waiting=7))
    assert int(waited.progress.num_rounds) == 1
    np.testing.assert_allclose(waited.progress.previous, 0.0)


def test_a_schedule_is_watched_along_its_way():
    steps = np.cos(np.linspace(0, np.pi, 401)[:-1]) / 2 + 0.5
    ends, start = progress.schedule_ends(steps)
    way = np.cumsum(steps) / np.sum(steps)
    assert start == np.searchsorted(way, 0.75) + 1 and ends[-1] == 400
    assert np.all(np.diff((start, *ends)) >= 1)
    state = run_series([float(value) for value in range(400)], Rules(0.5, ends=ends, start=start))
    expected = [np.mean(range(a, b)) for a, b in zip((start, *ends), ends, strict=False)]
    np.testing.assert_allclose(state.progress.values, expected, rtol=1e-6)
    assert int(state.progress.num_values) == trends.NUM_BATCHES
    assert trees.all_finite(state)
