"""SGMCMC on targets with a known answer.

Statistical tests run many independent chains and look at their last positions only, so that
standard errors are exact. With some 250 comparisons at 5 standard errors (see `scenarios`), the
whole file would fail once in 7,000 choices of the seeds.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
import scipy.special
from scenarios import LinearGaussian, assert_gaussian_moments, coefficients

from haiku_posteriors.core import approximate_normals, trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.sgmcmc import (
    Preconditioner,
    collects,
    constant_with_burn_in,
    cyclical,
    rmsprop,
    sghmc,
    sgld,
    sgmcmc,
)

CHAINS = 20_000
# A correlated Gaussian in three dimensions: scales 1, 1/sqrt(3) and 1/2, roughly.
PRECISION = np.array([[1.0, 0.6, -0.3], [0.6, 3.0, 0.8], [-0.3, 0.8, 4.0]])
MEAN = np.array([1.0, -2.0, 0.5])
# A root of the minibatch gradient's covariance, which is not proportional to the precision, so
# that the two cannot be mistaken for each other.
NOISE_ROOT = np.array([[1.4, 0.0, 0.0], [-0.4, 0.9, 0.0], [0.0, 0.4, 1.7]])
MASS = np.array([0.5, 1.0, 2.0])

FIXED_MASS = Preconditioner(
    lambda params: (),
    lambda state, gradient: jnp.asarray(MASS**-0.5, gradient.dtype),
    lambda state, gradient: state,
)


def simulate(sampler, gradient, position, keys):
    """Last position and sampler state; `keys` (steps, 2), for the gradient and for the sampler."""

    def body(carry, keys):
        position, state = carry
        moves, state = sampler.update(gradient(position, keys[0]), state, rng_key=keys[1])
        return (position + moves, state), None

    return jax.lax.scan(body, (position, sampler.init(position)), keys)[0]


def run(sampler, gradient, position, num_steps):
    """All chains at once, as rows of one leaf."""
    keys = jax.random.split(jax.random.key(0), (num_steps, 2))
    return jax.jit(lambda keys: simulate(sampler, gradient, position, keys))(keys)


def run_separately(sampler, gradient, position, num_steps, num_chains):
    """All chains from one position, each with a leaf of its own and so with a mass of its own."""
    keys = jax.random.split(jax.random.key(0), (num_chains, num_steps, 2))
    return jax.jit(jax.vmap(lambda keys: simulate(sampler, gradient, position, keys)))(keys)


def noisy_gaussian_gradient(noise_root):
    root, precision, mean = (jnp.asarray(x, jnp.float32) for x in (noise_root, PRECISION, MEAN))

    def gradient(position, key):
        noise = jax.random.normal(key, position.shape, position.dtype)
        return (position - mean) @ precision + noise @ root.T

    return gradient


def stationary_covariance(step, beta, mass, noise_root, precision=PRECISION):
    """Of (w, v), from the Lyapunov equation of the linear recursion; beta None for SGLD."""
    identity, scale = np.eye(3), np.diag(mass**-0.5)
    noise = noise_root @ noise_root.T
    if beta is None:
        transition = identity - step * scale @ scale @ precision
        shock = step * scale @ scale
        covariance = shock @ noise @ shock + 2 * step * scale @ scale
        return scipy.linalg.solve_discrete_lyapunov(transition, covariance)
    h = np.sqrt(2 * step / (1 + beta))
    # The three lines of the update as matrices on (w, v), with the gradient's noise entering the
    # first and the sampler's the second.
    kick = np.block([[identity, 0 * identity], [-h * scale @ precision, identity]])
    drift_before = np.block([[identity, h / 2 * scale], [0 * identity, identity]])
    friction = scipy.linalg.block_diag(identity, beta * identity)
    after_kick = drift_before @ friction @ drift_before
    from_gradient = after_kick @ np.vstack([0 * identity, h * scale])
    from_noise = np.sqrt(1 - beta**2) * drift_before @ np.vstack([0 * identity, identity])
    covariance = from_gradient @ noise @ from_gradient.T + from_noise @ from_noise.T
    return scipy.linalg.solve_discrete_lyapunov(after_kick @ kick, covariance)


def make_sampler(step, beta, preconditioner=None):
    if beta is None:
        return sgld(step, preconditioner)
    return sghmc(step, beta, preconditioner)


PLAIN, NOISY = (None, 0 * NOISE_ROOT), (FIXED_MASS, NOISE_ROOT)


@pytest.mark.parametrize(
    ("beta", "preconditioner", "noise_root"),
    [(None, *PLAIN), (0.9, *PLAIN), *((beta, *NOISY) for beta in (None, 0.0, 0.5, 0.9))],
)
def test_bias_at_a_finite_step_is_the_known_one(beta, preconditioner, noise_root):
    """A large step: SGLD's covariance is up to 1.3 times too large, SGHMC's exact without noise."""
    step = {None: 0.15, 0.0: 0.15, 0.5: 0.15, 0.9: 0.05}[beta]
    sampler = make_sampler(step, beta, preconditioner)
    start = jnp.zeros((CHAINS, 3))
    position, state = run(sampler, noisy_gaussian_gradient(noise_root), start, 150)
    mass = np.ones(3) if preconditioner is None else MASS
    expected = stationary_covariance(step, beta, mass, noise_root)
    assert_gaussian_moments(position, MEAN, expected[:3, :3])
    if beta is not None:
        assert_gaussian_moments(state.velocity, np.zeros(3), expected[3:, 3:])
        if not noise_root.any():
            np.testing.assert_allclose(expected[:3, :3], np.linalg.inv(PRECISION), rtol=1e-10)
            np.testing.assert_allclose(expected[3:, 3:], np.eye(3), atol=1e-10)


def test_stated_biases_solve_the_recursions():
    """The formulas at the head of the module, which users are told to rely on."""
    a, noise, step = 2.0, 3.0, 0.1
    settings = np.ones(3), np.sqrt(noise) * np.eye(3), a * np.eye(3)
    variance = stationary_covariance(step, None, *settings)[0, 0]
    assert variance * a == pytest.approx((1 + step * noise / 2) / (1 - step * a / 2))
    for beta in (0.0, 0.5, 0.9):
        variance = stationary_covariance(step, beta, *settings)[0, 0]
        heating = step * noise / (2 * (1 - beta)) / (1 - step * a / (2 + 2 * beta))
        assert variance * a == pytest.approx(1 + heating)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [None, 0.8])
def test_bias_shrinks_with_the_step(beta):
    """Halving the step halves the bias (measured); a small step has none to speak of.

    The ratio of two measured biases lies in [1.6, 2.6]: 5 standard errors and second order.
    """
    covariance = np.linalg.inv(PRECISION)
    size = np.trace(PRECISION @ covariance)
    large = 0.1 if beta is None else 0.05

    def excess(step):
        sampler = make_sampler(step, beta)
        start = jnp.zeros((CHAINS, 3))
        num_steps = int(5 / (0.8 * step / (1 - (beta or 0))))
        position, _ = run(sampler, noisy_gaussian_gradient(NOISE_ROOT), start, num_steps)
        return np.trace(PRECISION @ np.cov(position.T)) / size - 1, position

    (first, _), (second, _), (_, position) = excess(large), excess(large / 2), excess(large / 10)
    assert first > 0.1 and 1.6 < first / second < 2.6, (first, second)
    assert_gaussian_moments(position, MEAN, covariance, allowance=0.03)


@pytest.mark.parametrize(("beta", "preconditioned"), [(None, False), (None, True), (0.9, True)])
def test_skewed_target(beta, preconditioned):
    """U = e^w - k w, the logarithm of a Gamma(k) variable: moments are polygamma functions.

    5 standard errors by the sample's own moments, plus 1 % of a standard deviation for bias.
    """
    shape = 2.0
    step, num_steps = (0.01, 800) if beta is None else (0.02, 200)
    mass = Preconditioner(
        lambda params: (), lambda state, gradient: 0.8, lambda state, gradient: state
    )
    sampler = make_sampler(step, beta, mass if preconditioned else None)
    start = jnp.zeros(CHAINS)
    position, _ = run(sampler, lambda w, key: jnp.exp(w) - shape, start, num_steps)
    position = np.asarray(position, float)
    mean, variance, third = (float(scipy.special.polygamma(n, shape)) for n in range(3))
    centred = (position - mean) / np.sqrt(variance)
    for power, expected in ((1, 0.0), (2, 1.0), (3, third / variance**1.5)):
        values = centred**power
        standard_error = values.std() / np.sqrt(CHAINS)
        assert abs(values.mean() - expected) < 5 * standard_error + 0.01 * power, power
    # The mean drift is 0 in the stationary law whatever the step, so this one has no bias.
    values = np.exp(position)
    assert abs(values.mean() - shape) < 5 * values.std() / np.sqrt(CHAINS)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_velocity_has_unit_variance_where_the_energy_is_flat(beta):
    position, state = run(sghmc(0.3, beta), lambda w, key: 0 * w, jnp.zeros((CHAINS, 3)), 100)
    assert_gaussian_moments(state.velocity, np.zeros(3), np.eye(3))
    # Diffusion like SGLD's with step eps / (1 - beta), up to the momentum's memory.
    diffusion = float(position.var()) / (2 * 0.3 / (1 - beta) * 100)
    assert diffusion == pytest.approx(1, abs=0.25)


ROWS = 20
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
TARGETS = (INPUTS @ np.array([[1.0], [-0.5]]) + 0.3).astype(np.float32)
TARGETS += np.random.default_rng(1).normal(size=(ROWS, 1)).astype(np.float32)


EXACT = LinearGaussian(INPUTS, TARGETS, noise_std=1.0, prior_std=3**-0.5)
DATA = EXACT.data()


def last_states(method, num_epochs, num_chains):
    """As the loop does: vmapped over chains, with a key for each epoch and chain."""

    @jax.jit
    def simulate(state, keys):
        def epoch(state, keys):
            return jax.vmap(method.step, (0, 0, None))(keys, state, DATA)[0], None

        return jax.lax.scan(epoch, state, keys)[0]

    keys = jax.random.split(jax.random.key(0), (num_epochs + 1, num_chains))
    return simulate(jax.vmap(method.init, (0, None))(keys[0], None), keys[1:])


@pytest.mark.parametrize(
    "sampler",
    [
        sgld(2e-2, rmsprop()),
        sghmc(2e-3, 0.9, rmsprop()),
        pytest.param(sghmc(constant_with_burn_in(3e-4, 1e-4, 300), 0.9), marks=pytest.mark.slow),
        pytest.param(sgld(cyclical(2e-3, 240, 150)), marks=pytest.mark.slow),
    ],
    ids=["sgld-rmsprop", "sghmc-rmsprop", "sghmc-burn-in", "sgld-cyclical"],
)
def test_linear_gaussian_network(sampler):
    """Minibatches of 7 of 20 rows, against the closed form; 3 % allowance for minibatch noise."""
    state = last_states(sgmcmc(EXACT.log_joint(), sampler, batch_size=7), 180, 2000)
    draws = coefficients(state.params)
    assert_gaussian_moments(draws, EXACT.mean, EXACT.covariance, allowance=0.03)


@pytest.mark.parametrize(
    ("temperature", "beta", "step"), [(0.1, None, 2e-3), (10.0, None, 2e-3), (0.1, 0.9, 3e-4)]
)
def test_variance_is_proportional_to_temperature(temperature, beta, step):
    """Through the whole method, with the full batch; 3 % allowance for SGLD's bias.

    The energy is divided by the temperature, so the same motion takes step * temperature.
    """
    method = sgmcmc(
        EXACT.log_joint(temperature=temperature), make_sampler(step * temperature, beta), ROWS
    )
    draws = coefficients(last_states(method, 300, 2000).params)
    assert_gaussian_moments(draws, EXACT.mean, temperature * EXACT.covariance, allowance=0.03)


def test_adapting_rmsprop_on_a_gaussian():
    """Each chain has a mass of its own, made from its own noisy gradients.

    While the mass moves, the left-out Gamma term may bias; here it stays within 5 %.
    """
    sampler, start = sghmc(0.01, 0.9, rmsprop()), jnp.asarray(MEAN, jnp.float32)
    gradient = noisy_gaussian_gradient(0.3 * NOISE_ROOT)
    position, state = run_separately(sampler, gradient, start, 400, 5000)
    assert_gaussian_moments(position, MEAN, np.linalg.inv(PRECISION), allowance=0.05)
    # It has adapted: V estimates E[g^2], the precision's diagonal and the gradient's noise.
    expected = np.diag(PRECISION + 0.09 * NOISE_ROOT @ NOISE_ROOT.T)
    second_moment = np.asarray(state.preconditioner_state.second_moment).mean(axis=0)
    np.testing.assert_allclose(second_moment, expected, rtol=0.1)


@pytest.mark.slow
def test_rmsprop_is_right_once_frozen_and_biased_before():
    """The skewed target, whose gradients differ much from place to place, by slow chains.

    The variance with a frozen mass is right to 5 standard errors (by the target's fourth moment)
    and 3 %; the docstring's bias is more than twice that, so that the test can tell.
    """
    shape, start = 2.0, jnp.zeros(4)
    variance, fourth = (float(scipy.special.polygamma(n, shape)) for n in (1, 3))
    num_chains = 2000
    standard_error = np.sqrt((fourth / variance**2 + 2) / (4 * num_chains))

    def gradient(position, key):
        return jnp.exp(position) - shape

    ratios = {}
    for adaptation_steps in (200, None):
        sampler = sgld(0.005, rmsprop(adaptation_steps=adaptation_steps))
        position, _ = run_separately(sampler, gradient, start, 2500, num_chains)
        ratios[adaptation_steps] = float(position.var()) / variance
    assert abs(ratios[200] - 1) < 5 * standard_error + 0.03, ratios
    assert ratios[None] - 1 > 2 * (5 * standard_error + 0.03), ratios


def moves_of(sampler, gradient, state, seed=0, **arguments):
    return sampler.update(gradient, state, rng_key=jax.random.key(seed), **arguments)


@pytest.mark.parametrize("beta", [None, 0.9])
def test_preconditioner_never_sees_the_current_gradient(beta):
    """Given the past, the move is linear in the gradient, and its noise does not depend on it."""
    sampler = make_sampler(1e-2, beta, rmsprop(decay=0.5, epsilon=0.0))
    first, second = jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0])
    moves, state = moves_of(sampler, first, sampler.init(first))
    np.testing.assert_array_equal(moves, 0)  # no gradient before the first: nothing moves
    mass = np.full(2, np.sqrt((9 + 16) / 2))
    for gradient in (second, second, second):
        at_rest, _ = moves_of(sampler, 0 * gradient, state)
        moved, after = moves_of(sampler, gradient, state)
        huge, _ = moves_of(sampler, 1e6 * gradient, state)
        np.testing.assert_allclose(moved - at_rest, -1e-2 * gradient / mass, rtol=1e-4)
        np.testing.assert_allclose(huge, -1e4 * gradient / mass, rtol=1e-4)
        state, mass = after, np.sqrt(0.5 * mass**2 + 0.5 * np.square(gradient))
    xi = approximate_normals.approximate_normal_like(jax.random.key(0), second)
    if beta is None:
        np.testing.assert_allclose(
            moves_of(sampler, 0 * second, state)[0], np.sqrt(2e-2 / mass) * xi, rtol=1e-5
        )


def test_rmsprop_begins_with_the_mean_square_of_all_parameters():
    """A dead unit, with gradient 0 at first, gets the common mass and not epsilon."""
    gradient = {"dead": jnp.zeros(3), "alive": jnp.array([10.0])}
    sampler = sgld(1e-2, rmsprop())
    _, state = moves_of(sampler, gradient, sampler.init(gradient))
    mean_square = 100 / 4
    for leaf in jax.tree.leaves(state.preconditioner_state.second_moment):
        np.testing.assert_allclose(leaf, mean_square)
    moves, _ = moves_of(sampler, gradient, state)
    assert np.abs(moves["dead"]).max() < 5 * np.sqrt(2e-2 / np.sqrt(mean_square))


@pytest.mark.parametrize("beta", [None, 0.0, 0.9])
def test_without_noise_it_is_sgd_with_momentum(beta):
    """Same step size and momentum as in optax, step for step.

    Along a changing schedule too, if there is no momentum: ours keeps a velocity and optax a sum
    of gradients, which a change of step size scales differently.
    """
    schedule = constant_with_burn_in(0.1, 0.1 if beta else 0.01, 3)
    sampler, reference = make_sampler(schedule, beta), optax.sgd(schedule, momentum=beta)
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
    nothing = jax.tree.map(lambda leaf: None, params)
    ours, theirs = (params, sampler.init(params)), (params, reference.init(params))
    for seed in range(6):
        gradient = jax.tree.map(lambda leaf: leaf**3 + 1, ours[0])
        moves, state = moves_of(sampler, gradient, ours[1], seed, random=nothing)
        ours = (optax.apply_updates(ours[0], moves), state)
        gradient = jax.tree.map(lambda leaf: leaf**3 + 1, theirs[0])
        moves, state = reference.update(gradient, theirs[1])
        theirs = (optax.apply_updates(theirs[0], moves), state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours[0], theirs[0])


def test_noise_is_new_for_every_leaf_and_key():
    """Correlations between leaves, keys and neighbouring values are within 5 / sqrt(n) of 0."""
    params = {"a": jnp.zeros(10_000), "b": jnp.zeros(10_000)}
    sampler = sgld(0.5)  # moves are the noise itself where the gradient is 0
    noises = [moves_of(sampler, params, sampler.init(params), seed)[0] for seed in range(3)]
    rows = np.stack([leaf for tree in noises for leaf in jax.tree.leaves(tree)])
    rows = np.concatenate([rows, np.roll(rows[:1], 1)])
    np.testing.assert_allclose(np.corrcoef(rows), np.eye(len(rows)), atol=0.05)
    np.testing.assert_allclose(rows.var(axis=1), 1, atol=5 * np.sqrt(2 / 10_000))


def test_no_key_is_used_twice():
    """A sampler that only notes its keys: all differ, over steps, epochs and chains."""

    def init(params):
        return jnp.zeros((), jnp.int32), jnp.zeros((6, 2), jnp.uint32)

    def update(updates, state, params=None, *, rng_key, random):
        count, keys = state
        keys = keys.at[count].set(jax.random.key_data(rng_key))
        return jax.tree.map(jnp.zeros_like, updates), (count + 1, keys)

    noting = optax.GradientTransformationExtraArgs(init, update)
    state = last_states(sgmcmc(EXACT.log_joint(), noting, batch_size=7), num_epochs=2, num_chains=4)
    keys = np.asarray(state.sampler_state[1]).reshape(-1, 2)
    assert len(keys) == 24 and len(np.unique(keys, axis=0)) == 24


@pytest.mark.parametrize("beta", [None, 0.9])
def test_stochastic_params(beta):
    """One full-batch step: point estimates follow the gradient, random parameters get noise.

    Its standard deviation is 0.007 or more, and its two numbers are seldom both within 1e-5.
    """
    log_joint = EXACT.log_joint(stochastic_params="/w")
    method = sgmcmc(log_joint, make_sampler(1e-3, beta), batch_size=ROWS)
    before = method.init(jax.random.key(0), None)
    gradient = jax.grad(log_joint)(before.params, DATA)["linear"]
    step = jax.jit(method.step)
    after = [step(jax.random.key(seed), before, DATA)[0] for seed in (1, 2)]
    moves = [jax.tree.map(jnp.subtract, a.params, before.params)["linear"] for a in after]
    for move in moves:
        np.testing.assert_allclose(move["b"], 1e-3 * gradient["b"], rtol=1e-3)
        assert np.abs(move["w"] - 1e-3 * gradient["w"]).max() > 1e-5
    assert np.abs(moves[0]["w"] - moves[1]["w"]).max() > 1e-5


@pytest.mark.slow
def test_point_estimates_and_random_parameters_reach_their_laws():
    """With the bias a point estimate, it settles where its gradient vanishes on average.

    That is at the mode here (Gaussian posterior): its mean, without the posterior's spread.
    """
    method = sgmcmc(EXACT.log_joint(stochastic_params="/w"), sghmc(3e-4, 0.9), batch_size=ROWS)
    draws = coefficients(last_states(method, 400, 1000).params)
    precision = EXACT.precision - np.diag([3.0, 0.0, 0.0])  # no prior on the point estimate
    mode = np.linalg.solve(precision, EXACT.design.T @ EXACT.observed)
    standard_errors = draws.std(axis=0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - mode) < 5 * standard_errors)
    assert draws[:, 0].std() < 0.5 * np.sqrt(np.linalg.inv(precision)[0, 0])


def test_constant_schedule_with_cosine_burn_in():
    schedule = constant_with_burn_in(4.0, 2.0, 10)
    values = [float(schedule(jnp.array(count))) for count in (0, 5, 10, 11, 1000)]
    np.testing.assert_allclose(values, [4.0, 3.0, 2.0, 2.0, 2.0], rtol=1e-6)
    assert float(schedule(jnp.array(1))) > 3.9  # a cosine, flat at first
    assert float(constant_with_burn_in(4.0, 2.0, 0)(jnp.array(0))) == 2.0
    tiny = constant_with_burn_in(3e-7, 1e-7, 1000)
    np.testing.assert_allclose([tiny(0), tiny(1000)], [3e-7, 1e-7], rtol=1e-5)


def test_cyclical_schedule():
    schedule = cyclical(2.0, 7, 4)
    values = [float(schedule(jnp.array(count))) for count in range(16)]
    cycle = [2.0, 1 + np.sqrt(0.5), 1.0, 1 - np.sqrt(0.5)]
    np.testing.assert_allclose(values, [2.0] * 7 + cycle + cycle + cycle[:1], rtol=1e-6)
    assert float(cyclical(2.0, 0, 1)(jnp.array(5))) == 2.0


def test_draws_are_taken_where_the_schedule_says():
    every_ten = [epoch for epoch in range(1, 51) if collects(epoch, 25, 10)]
    assert every_ten == [35, 45]
    assert [epoch for epoch in range(1, 6) if collects(epoch, 0, 2)] == [2, 4]
    # At the ends of cycles the next step starts a new one.
    schedule, steps_per_epoch = cyclical(1.0, 3 * 8, 2 * 8), 8
    ends = [epoch for epoch in range(1, 10) if collects(epoch, 3, 2)]
    assert ends == [5, 7, 9]
    for epoch in ends:
        assert float(schedule(epoch * steps_per_epoch - 1)) < 0.01
        assert float(schedule(epoch * steps_per_epoch)) == 1.0


SAMPLERS = {
    "cyclical": sghmc(cyclical(1e-3, 3, 3), 0.9, rmsprop()),
    "clipped": optax.chain(optax.clip(10.0), sgld(constant_with_burn_in(1e-3, 1e-4, 5))),
}


@pytest.mark.parametrize(
    ("name", "float64"),
    [("clipped", False), ("cyclical", True)],  # the default has test_contract.py
)
def test_state_keeps_its_types_and_nothing_recompiles(name, float64):
    dtype = np.float64 if float64 else np.float32
    with jax.enable_x64(float64):
        inputs, targets = INPUTS.astype(dtype), TARGETS.astype(dtype)
        exact = LinearGaussian(inputs, targets, 1.0, 3**-0.5)
        log_joint, data = exact.log_joint(), exact.data()
        method = sgmcmc(log_joint, SAMPLERS[name], batch_size=7)
        step = jax.jit(jax.vmap(method.step, (0, 0, None)))
        state = jax.vmap(method.init, (0, None))(jax.random.split(jax.random.key(0), 2), None)
        types = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
        for epoch in range(3):
            keys = jax.random.split(jax.random.key(epoch), 2)
            state, info = step(keys, state, data)
        assert step._cache_size() == 1
        assert types == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(dtype)}
        assert info["log_joint"].shape == (2, 3) and info["log_joint"].dtype == dtype
        assert bool(trees.all_finite((state, info)))
        draws = method.sample(jax.random.key(0), jax.tree.map(lambda leaf: leaf[0], state), 5)
        assert jax.tree.map(jnp.shape, draws) == {"linear": {"b": (5, 1), "w": (5, 2, 1)}}


@pytest.mark.slow
def test_default_fits_a_nonlinear_network():
    """Out of the box, from the network's initialisers, every chain comes to fit the data."""

    def network(inputs):
        return hk.nets.MLP([8, 1], activation=jnp.tanh)(inputs)

    log_joint = EXACT.log_joint(network)
    method = sgmcmc(log_joint, batch_size=7)
    log_likelihood = jax.vmap(log_joint.log_likelihood, (0, None))
    keys = jax.random.split(jax.random.key(1), 50)
    before = log_likelihood(jax.vmap(log_joint.init)(keys), DATA)
    after = log_likelihood(last_states(method, 250, 50).params, DATA)
    assert np.isfinite(after).all() and after.mean() > before.mean() + 2, (before, after)


def test_refusals():
    with pytest.raises(UserError, match="step_size must be positive"):
        sgld(0.0)
    with pytest.raises(UserError, match="step_size must be positive"):
        sghmc(float("nan"), 0.9)
    with pytest.raises(UserError, match="momentum_decay must be at least 0"):
        sghmc(1e-3, 1.0)
    with pytest.raises(UserError, match="decay must lie between"):
        rmsprop(1.0)
    with pytest.raises(UserError, match="cycle must have at least one step"):
        cyclical(1e-3, 0, 0)
    with pytest.raises(TypeError, match="rng_key"):
        sgld(1e-3).update(jnp.zeros(1), sgld(1e-3).init(jnp.zeros(1)))
