"""MCLMC: exactness of adjusted transitions, bias of unadjusted ones, tuning, and what is refused.

Statistical tests compare means with their expectation at 5 Monte Carlo standard errors, see
`scenarios`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scenarios import (
    NO_DATA,
    LinearGaussian,
    assert_mean_of_chains,
    chain_keys,
    coefficients,
    gumbel,
    run_chains,
    standard_errors,
    tanh_mlp,
    target_of_density,
)

from haiku_posteriors.core import adaptation, hamiltonian, microcanonical, trees
from haiku_posteriors.core.adaptation import BurnIn
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.hmc import hmc
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.mclmc import MCLMCState, mclmc
from haiku_posteriors.core.priors import make_prior

INPUTS = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
TARGETS = np.sin(2 * INPUTS[:, :1]) + 0.3 * INPUTS[:, 1:]
NETWORK_DATA = make_data(INPUTS, TARGETS)
LOG_JOINT = make_log_joint(tanh_mlp, INPUTS, make_prior(1.0), gaussian(1.0))


def normal(w):
    return -0.5 * w**2


@pytest.fixture(scope="module")
def skewed_chains():
    """A step so long that many proposals are rejected."""
    method = mclmc(
        target_of_density(gumbel, 4), adjusted=True, step_size=0.9, trajectory_length=1.8
    )
    return run_chains(method, NO_DATA, num_chains=8, num_steps=1600)


def test_adjusted_moments_of_a_skewed_target(skewed_chains):
    _, draws, info = skewed_chains
    assert 0.3 < info["accepted"].mean() < 0.9
    assert len(np.unique(info["num_leapfrog_steps"])) > 1
    centred = draws["x"]["w"][:, 100:] - np.euler_gamma
    assert_mean_of_chains(centred, 0)
    assert_mean_of_chains(centred**2, math.pi**2 / 6)
    assert_mean_of_chains(centred**3, 2.404114)


def test_adjusted_acceptance_is_what_the_energy_error_says(skewed_chains):
    _, draws, info = skewed_chains
    expected = np.minimum(1, np.exp(-info["energy_error"]))
    np.testing.assert_allclose(info["acceptance_probability"], expected, rtol=1e-4, atol=1e-6)
    assert_mean_of_chains(info["accepted"] - info["acceptance_probability"], 0)
    # Of a reversible map W and -W have densities p(W) = exp(W) p(-W); E[exp(-W)] = 1 follows, but
    # has heavy tails here. This consequence is bounded.
    error = info["energy_error"][:, 100:].astype(float)
    assert_mean_of_chains(np.where(error > 0, np.exp(-np.abs(error)), -1.0), 0)
    expected = np.sum(np.asarray(gumbel(draws["x"]["w"].astype(float))), axis=-1)
    np.testing.assert_allclose(info["log_joint"], expected, rtol=1e-3, atol=1e-3)
    repeated = np.all(draws["x"]["w"][:, 1:] == draws["x"]["w"][:, :-1], axis=-1)
    np.testing.assert_array_equal(repeated, ~info["accepted"][:, 1:])


@pytest.mark.parametrize("adjusted", [True, False])
def test_posterior_of_a_linear_gaussian_network(adjusted):
    """Mean and covariance against the closed form, at temperature 0.7, with all that is tuned.

    The inputs' scales differ by 30. The unadjusted chains aim at an energy variance of 1e-7, where
    their bias is far below the errors.
    """
    inputs = (INPUTS @ np.array([[1.0, 0.4], [0.0, 30.0]])).astype(np.float32)
    exact = LinearGaussian(inputs, TARGETS, noise_std=0.5, prior_std=20**-0.5, temperature=0.7)
    method = mclmc(exact.log_joint(), num_burn_in=200, adjusted=adjusted, energy_variance=1e-7)
    states, draws, info = run_chains(method, exact.data(), 4, 800)
    w = coefficients(draws)[:, 200:]
    assert_mean_of_chains(w, exact.mean)
    centred = w - exact.mean
    assert_mean_of_chains(centred[..., :, None] * centred[..., None, :], exact.covariance)
    # The masses are the posterior's variances in units of the tempered prior's, of all chains.
    expected = np.diag(exact.covariance) / (exact.prior_std**2 * exact.temperature)
    learned = coefficients(states.inverse_mass)
    np.testing.assert_allclose(np.log(learned), np.log(np.tile(expected, (4, 1))), atol=1.2)
    assert np.all(learned == learned[:1])
    assert np.all(states.step_size == info["step_size"][:, 200:].max())


@pytest.mark.parametrize("length", [1.5, 6.0], ids=["noise at each step", "at every third"])
def test_unadjusted_widths_of_a_gaussian_of_many_scales(length, monkeypatch):
    """Unadjusted, of steps half as long as the stable ones, without adapted masses.

    Deviations are between .5 and 1. A refreshment between two steps, as is common, makes variances
    of the narrowest 1.19 times as large; kicks that are not stretched, 1.06 times (both measured).
    An error of 1 / D is allowed for.
    """
    scales = np.linspace(0.5, 1.0, 50, dtype=np.float32)
    log_joint = target_of_density(lambda w: -0.5 * (w / scales) ** 2, 50)
    monkeypatch.setattr(microcanonical, "REFRESHMENTS", 4)
    method = mclmc(log_joint, step_size=0.5, trajectory_length=length, num_burn_in=0)
    _, draws, info = run_chains(method, NO_DATA, num_chains=20, num_steps=800)
    assert not info["divergent"].any()
    squares = (draws["x"]["w"][:, 50:] / scales) ** 2
    for part in (squares[..., :5], squares):
        values = part.mean(axis=-1)
        assert abs(values.mean() - 1) < 0.01 + 5 * standard_errors(values)


def test_many_steps_share_a_refreshment_of_the_direction():
    """400 of them along L make 32 or more draws of noise; a direction is forgotten as by any."""
    log_joint = target_of_density(lambda w: 0.0 * w, 10)
    start = hamiltonian.start(log_joint, {"x": {"w": jnp.zeros(10, jnp.float32)}})

    def cosine(key):
        """With the velocity before, after a length of L / 2 without any force."""
        velocity = microcanonical.random_velocity(jax.random.fold_in(key, 0), start.params)
        path = microcanonical.trajectory(
            jax.random.fold_in(key, 1),
            log_joint,
            start,
            velocity,
            NO_DATA,
            step_size=jnp.float32(1 / 400),
            inverse_mass={"x": {"w": jnp.ones((), jnp.float32)}},
            num_steps=jnp.int32(200),
            decoherence_length=1.0,
        )
        return jnp.vdot(velocity["x"]["w"], path.velocity["x"]["w"]) / 10

    found = jax.jit(jax.vmap(cosine))(chain_keys(jax.random.key(0), 4000))
    # On a sphere of ten dimensions, noise of 2 f per unit of time shortens the mean by exp(-.9 f),
    # to the first order in what a single refreshment does.
    assert abs(float(found.mean()) - math.exp(-0.9 * 0.5)) < 0.02


@pytest.mark.parametrize("num_steps", [10, 200])  # along L: noise at each, or at every sixth
def test_a_path_that_is_made_again_has_the_same_noise(num_steps):
    """By steps of a half and of an eighth, on a slope. Noise of its own would lead elsewhere."""
    log_joint = target_of_density(lambda w: 0.5 * w, 10)
    start = hamiltonian.start(log_joint, {"x": {"w": jnp.zeros(10, jnp.float32)}})
    velocity = microcanonical.random_velocity(jax.random.key(0), start.params)

    @jax.jit
    def end(parts, finer):
        path = microcanonical.trajectory(
            jax.random.key(1),
            log_joint,
            start,
            velocity,
            NO_DATA,
            step_size=1 / (num_steps * parts.astype(jnp.float32)),
            inverse_mass={"x": {"w": jnp.ones((), jnp.float32)}},
            num_steps=num_steps * parts,
            decoherence_length=1.0,
            finer=finer,
        )
        return path.position.params["x"]["w"]

    coarse = end(jnp.int32(1), jnp.int32(1))
    for parts in (2, 8):
        np.testing.assert_allclose(end(jnp.int32(parts), jnp.int32(parts)), coarse, atol=0.1)
    if num_steps == 10:
        assert np.abs(end(jnp.int32(8), jnp.int32(1)) - coarse).max() > 0.5


@pytest.mark.slow
def test_agrees_with_hmc_on_a_network():
    """Predictive moments of adjusted MCLMC and of HMC, another kernel, at 5 standard errors."""
    points = jnp.linspace(-2, 2, 6, dtype=jnp.float32)[:, None] * jnp.array([[1.0, -0.5]])

    def moments(method):
        _, draws, _ = run_chains(method, NETWORK_DATA, num_chains=4, num_steps=2200)
        network = jax.jit(jax.vmap(jax.vmap(lambda p: LOG_JOINT.network(p, points)[:, 0])))
        outputs = np.asarray(network(draws), float)[:, 200:]
        values = np.concatenate([outputs, outputs**2], axis=-1)
        return values.mean(axis=(0, 1)), standard_errors(values)

    mean, error = moments(mclmc(LOG_JOINT, adjusted=True, num_burn_in=200))
    other_mean, other_error = moments(hmc(LOG_JOINT, num_burn_in=200))
    assert np.all(np.abs(mean - other_mean) < 5 * np.hypot(error, other_error))


@pytest.fixture(scope="module")
def tuned_chains():
    method = mclmc(LOG_JOINT, num_burn_in=400)
    return run_chains(method, NETWORK_DATA, num_chains=4, num_steps=600)


def test_tuning_reaches_its_energy_variance_and_is_then_frozen(tuned_chains):
    """Transitions of large errors are made again with half the step: few, and counted."""
    states, draws, info = tuned_chains
    after = {name: values[:, 400:] for name, values in info.items()}
    assert not after["divergent"].any()
    size = after["step_size"].max()
    assert np.all(states.step_size == size)
    again = after["step_size"] < size
    assert 0 < again.mean() < 1 / adaptation.ROUGH
    assert set(after["step_size"][again]) <= {np.float32(size / 2), np.float32(size / 4)}
    # Within a factor that is 15 % of the step size: variances grow with its sixth power.
    reached = np.where(again, adaptation.ROUGH * 2e-3, after["energy_variance"])
    assert np.all(after["energy_variance"] <= adaptation.ROUGH * 2e-3)
    assert abs(math.log(reached.mean() / 2e-3)) < 6 * math.log(1.15)
    assert len(np.unique(info["step_size"][0, :400])) > 100
    expected = np.ceil(math.pi / 2 / size)
    assert np.all(after["num_leapfrog_steps"][~again] == expected)
    assert np.all(after["num_leapfrog_steps"][again] >= 3 * expected - 1)
    assert np.all(info["num_leapfrog_steps"][:, 0] == 1)
    speed = jax.vmap(lambda v: trees.total(jax.tree.map(jnp.square, v)))(states.velocity)
    np.testing.assert_allclose(speed, trees.size(LOG_JOINT.shapes), rtol=1e-4)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(draws))


@pytest.mark.slow
def test_adjusted_tuning_reaches_its_acceptance():
    method = mclmc(LOG_JOINT, num_burn_in=200, adjusted=True, adapt_mass_matrix=False)
    states, _, info = run_chains(method, NETWORK_DATA, num_chains=3, num_steps=300)
    acceptance = info["acceptance_probability"][:, 200:].mean()
    assert acceptance == pytest.approx(0.8, abs=0.1)
    assert states.velocity is None


def test_what_the_energy_variance_does_to_the_step_size():
    burn_in = BurnIn(80, 0.8, 1.0, {"w": 1.0}, 1.0)

    def follow(done, observed, size=0.01, used=None, before=-math.inf):
        """`before` is the mean of observed / target so far, at the same size."""
        rate = math.log(before) - 6 * math.log(size) if before > 0 else -math.inf
        new, _ = adaptation.follow_energy_variance(
            burn_in,
            jnp.int32(done),
            jnp.float32(rate),
            jnp.float32(size),
            jnp.float32(used or size),
            jnp.float32(observed),
            1e-3,
        )
        return float(new) / size

    assert follow(5, 1e-3 * 1.5**6) == pytest.approx(1 / 1.5, rel=1e-4)
    assert follow(5, 1e9) == pytest.approx(1 / 8, rel=1e-4)
    assert follow(5, 0.0) == pytest.approx(2, rel=1e-4)
    assert follow(21, 1e-3, before=5.0) == pytest.approx(1, rel=1e-4)  # begun anew
    # The tenth since: its weight in the mean is 2 / 11.
    assert follow(30, 1e-3, before=1.0) == pytest.approx(1, rel=1e-4)
    assert follow(30, 0.0, before=1.0) == pytest.approx((9 / 11) ** (-1 / 6), rel=1e-4)
    made_again = (9 / 11 + adaptation.ROUGH * 2 / 11) ** (-1 / 6)
    assert follow(30, 1e-4, used=0.005, before=1.0) == pytest.approx(made_again, rel=1e-4)
    assert follow(30, 1.0, used=0.00125, before=1.0) == pytest.approx(made_again, rel=1e-4)
    # Right after a beginning, a step that is much too long is heard of as it is.
    assert follow(22, 1e-3, used=0.0025, before=1.0) == pytest.approx(1 / 2, rel=1e-4)
    assert follow(61, 0.0, before=1.0) == pytest.approx(2, rel=1e-4)  # the masses are new
    assert follow(5, 0.0, size=1.0) == 1  # the longest step
    assert follow(81, 1.0, size=0.5) == 1  # frozen
    pooled = adaptation.pool_energy_errors(jnp.log(jnp.array([1.0, 3.0], jnp.float32)))
    np.testing.assert_allclose(pooled, math.log(2), rtol=1e-5)
    pooled = adaptation.pool_step_sizes(jnp.array([1e-9, 1.0, 1.0], jnp.float32))
    np.testing.assert_allclose(pooled, 3 ** (1 / 6) * 1e-9, rtol=1e-4)
    pooled = adaptation.pool_step_sizes(jnp.array([0.5, 0.5], jnp.float32))
    np.testing.assert_allclose(pooled, 0.5, rtol=1e-5)


@pytest.mark.parametrize("adjusted", [False, True])
def test_nan_never_enters_a_chain(adjusted):
    """Beyond 1 the density is NaN; every transition that meets it is taken back, and others go on.

    In between, unadjusted chains too: what was taken back is not the end of the chain.
    """
    log_joint = target_of_density(lambda w: jnp.where(w > 1, jnp.nan, -0.5 * w**2), 3)
    method = mclmc(log_joint, step_size=0.2, trajectory_length=0.6, adjusted=adjusted)
    _, draws, info = run_chains(method, NO_DATA, num_chains=4, num_steps=200)
    w = draws["x"]["w"]
    assert np.all(w <= 1) and np.all(np.isfinite(info["log_joint"]))
    assert 0.05 < info["divergent"].mean() < 0.5
    assert not np.any(info["divergent"] & info["accepted"])
    assert np.all(np.ptp(w[:, 100:], axis=1) > 0.5)


@pytest.mark.slow
def test_chains_are_the_same_alone_and_in_lockstep():
    method = mclmc(target_of_density(gumbel, 3), step_size=0.2, trajectory_length=0.6)
    states = jax.vmap(method.init, (0, None))(chain_keys(jax.random.key(1), 3), None)
    states = states._replace(step_size=jnp.array([0.2, 0.1, 0.05], jnp.float32))
    alone = jax.tree.map(lambda leaf: leaf[1], states)
    together, single = jax.jit(jax.vmap(method.step, (0, 0, None))), jax.jit(method.step)
    for iteration in range(6):
        keys = chain_keys(jax.random.fold_in(jax.random.key(0), iteration), 3)
        states, info = together(keys, states, NO_DATA)
        alone, own = single(keys[1], alone, NO_DATA)
        assert info["num_leapfrog_steps"].tolist() == [3, 6, 12]
        for name in ("energy_error", "energy_variance"):
            np.testing.assert_allclose(own[name], info[name][1], rtol=1e-2, atol=1e-5)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(states), strict=True):
        np.testing.assert_allclose(a, b[1], rtol=1e-3, atol=1e-3)


def test_point_estimates_stay_and_random_parameters_move():
    log_joint = make_log_joint(
        tanh_mlp, INPUTS, make_prior(1.0), gaussian(1.0), stochastic_params="linear_1"
    )
    method = mclmc(log_joint, step_size=0.05, trajectory_length=0.5)
    start = log_joint.init(jax.random.key(3))
    state = method.init(jax.random.key(0), start)
    state, _ = jax.jit(method.step)(jax.random.key(1), state, NETWORK_DATA)
    for name, leaf in trees.named_leaves(state.position.params).items():
        same = np.array_equal(leaf, trees.named_leaves(start)[name])
        assert same != ("linear_1" in name)
    assert trees.size(state.velocity) == 5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_state_is_arrays_of_constant_shape_and_dtype(dtype):
    with jax.enable_x64(dtype == np.float64):
        log_joint = make_log_joint(
            tanh_mlp,
            INPUTS.astype(dtype),
            make_prior(1.0),
            gaussian(0.3, learn_noise=True),
            num_microbatches=2,
        )
        data = make_data(INPUTS.astype(dtype), TARGETS.astype(dtype))
        for settings in ({}, {"adjusted": True}, {"step_size": 0.1}):
            method = mclmc(log_joint, **settings)
            before = jax.eval_shape(method.init, jax.random.key(0), None)
            after, info = jax.eval_shape(method.step, jax.random.key(0), before, data)
            assert isinstance(before, MCLMCState) and before == after
            leaves = jax.tree.leaves(method.init(jax.random.key(0), None))
            assert all(np.all(np.isfinite(leaf)) for leaf in leaves)  # or a run refuses to go on
            kinds = {leaf.dtype for leaf in jax.tree.leaves(before)}
            assert kinds == {np.dtype(dtype), np.dtype(np.int32), np.dtype(bool)}
            assert all(value.shape == () for value in info.values())


def test_no_key_is_used_twice(monkeypatch):
    """Neither for two draws, nor for a draw and for deriving other keys."""
    used, parents = [], []
    for name, keys in (("normal", used), ("uniform", used), ("fold_in", parents)):
        function = getattr(jax.random, name)

        def record(key, *arguments, function=function, keys=keys):
            keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
            return function(key, *arguments)

        monkeypatch.setattr(jax.random, name, record)
    method = mclmc(target_of_density(gumbel, 2), step_size=0.5, trajectory_length=1.0)
    state = method.init(jax.random.key(0), None)
    with jax.disable_jit():
        for iteration in range(3):
            key = jax.random.fold_in(jax.random.key(1), iteration)
            state, _ = method.step(key, state, NO_DATA)
    # The first velocity; then a fresh one, a uniform number and two refreshments each.
    assert len(used) == len(set(used)) == 1 + 3 * 4 and not set(used) & set(parents)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"step_size": 1e-5}, "max_num_leapfrog_steps = 10000"),
        ({"energy_variance": 0.0}, "energy_variance must be positive"),
        ({"target_accept": 1.0}, "target_accept"),
        ({"trajectory_length": -1.0}, "trajectory_length must be positive"),
        ({"num_burn_in": 0}, "give a step_size"),
    ],
)
def test_refusals(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        mclmc(LOG_JOINT, **settings)


def test_one_dimension_is_refused():
    with pytest.raises(UserError, match="at least two random parameters"):
        mclmc(target_of_density(gumbel, 1))
