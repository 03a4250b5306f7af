"""HMC: the integrator, exactness on targets with known moments, adaptation, and what is refused.

Statistical tests compare means with their expectation at 5 Monte Carlo standard errors, see
`scenarios`.
"""

import contextlib
import math

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
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
    target_of_prior,
)

from haiku_posteriors.core import adaptation, trees
from haiku_posteriors.core.adaptation import BurnIn
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.hamiltonian import leapfrog, start, transition
from haiku_posteriors.core.hmc import HMCState, hmc
from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.momenta import Momenta
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.core.trajectories import Trajectory, overdispersed_params

ROWS = 20
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
TARGETS = np.sin(2 * INPUTS[:, :1]) + 0.3 * INPUTS[:, 1:]
NETWORK_DATA = make_data(INPUTS, TARGETS)


def network_log_joint(inputs=INPUTS, **settings):
    arguments = {"prior": make_prior(1.0), "likelihood": gaussian(0.3)} | settings
    return make_log_joint(tanh_mlp, inputs, **arguments)


def both_precisions(test):
    """Runs a test in float32 and in float64, with arrays built under the respective setting."""

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def run(dtype):
        with jax.enable_x64(True) if dtype == np.float64 else contextlib.nullcontext():
            test(dtype)

    return run


def start_of_trajectory():
    """In float64, where rounding errors leave room to see the integrator's own."""
    inputs, targets = INPUTS.astype(float), TARGETS.astype(float)
    log_joint = network_log_joint(inputs)
    params = log_joint.init(jax.random.key(0))
    inverse_mass = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.7), params)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(params))
    return log_joint, make_data(inputs, targets), params, inverse_mass


@pytest.mark.parametrize("weight", [None, 0.0, 0.1])
def test_trajectories_are_reversible(weight):
    with jax.enable_x64(True):
        weight = None if weight is None else jnp.array(weight)
        log_joint, data, params, inverse_mass = start_of_trajectory()
        momentum = trees.normal_like(jax.random.key(1), params)

        @jax.jit
        def integrate(position, momentum):
            return leapfrog(
                log_joint,
                position,
                momentum,
                data,
                step_size=jnp.array(0.02),
                momenta=Momenta(inverse_mass, weight),
                num_steps=jnp.array(40),
            )

        position, momentum_there = integrate(start(log_joint, params), momentum)
        there, gradient = position.params, jax.grad(log_joint)(position.params, data)
        moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), there, params)
        assert min(jax.tree.leaves(moved)) > 0.03
        for a, b in zip(*map(jax.tree.leaves, (position.gradient, gradient)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11)
        # Back with the gradient of the end, and with none.
        turned = jax.tree.map(jnp.negative, momentum_there)
        for begin in (position, start(log_joint, there)):
            back, momentum_back = integrate(begin, turned)
            for a, b in zip(*map(jax.tree.leaves, (back.params, params)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-11)
        for a, b in zip(jax.tree.leaves(momentum_back), jax.tree.leaves(momentum), strict=True):
            np.testing.assert_allclose(-a, b, atol=1e-10)


def test_energy_error_is_of_second_order():
    """Over the same time and from the same momentum, half the step is a quarter of the error."""
    with jax.enable_x64(True):
        log_joint, data, params, inverse_mass = start_of_trajectory()
        kernel = jax.jit(
            lambda step_size, num_steps: transition(
                jax.random.key(3),
                log_joint,
                start(log_joint, params),
                data,
                step_size=step_size,
                inverse_mass=inverse_mass,
                num_steps=num_steps,
            )[1]
        )
        infos = [kernel(0.02 / 2**i, 17 * 2**i) for i in range(4)]
        errors = np.array([info["energy_error"] for info in infos])
        assert abs(errors[0]) > 1e-3 and len({float(info["energy"]) for info in infos}) == 1
        np.testing.assert_allclose(errors[:-1] / errors[1:], 4, rtol=0.1)


def test_float32_resolves_the_energy_error_of_millions_of_parameters(monkeypatch):
    """The kinetic energy alone is about 2 million, where float32 has steps of 0.125."""

    def energy_error(dtype):
        normal = np.random.default_rng(0).normal(size=(2, 4_000_000)).astype(np.float32)
        position, momentum = normal.astype(dtype)
        log_joint = target_of_prior(make_prior(1.0), {"x": {"w": jnp.array(position)}})
        data = jax.tree.map(lambda leaf: leaf.astype(dtype), NO_DATA)

        @jax.jit
        def kernel(params, momentum):
            # In place of a drawn one: the two precisions draw different momenta.
            monkeypatch.setattr(trees, "normal_like", lambda key, tree: momentum)
            return transition(
                jax.random.key(0),
                log_joint,
                start(log_joint, params),
                data,
                step_size=jnp.array(0.1, dtype),
                inverse_mass={"x": {"w": jnp.ones((), dtype)}},
                num_steps=jnp.array(10),
            )

        _, info = kernel(log_joint.init(None), {"x": {"w": momentum}})
        assert info["energy"] > 5e6
        return float(info["energy_error"])

    single = energy_error(np.float32)
    with jax.enable_x64(True):
        double = energy_error(np.float64)
    assert single == pytest.approx(double, abs=0.05)


@pytest.fixture(scope="module")
def skewed_chains():
    """A step so long that about half of the proposals are rejected."""
    method = hmc(
        target_of_density(gumbel, 5),
        step_size=1.1,
        trajectory_length=2.2,
        num_burn_in=0,
    )
    return run_chains(method, NO_DATA, num_chains=8, num_steps=2100)


def test_moments_of_a_skewed_target(skewed_chains):
    _, draws, _ = skewed_chains
    centred = draws["x"]["w"][:, 100:] - np.euler_gamma
    assert_mean_of_chains(centred, 0)
    assert_mean_of_chains(centred**2, math.pi**2 / 6)
    assert_mean_of_chains(centred**3, 2.404114)


def test_rejected_states_count_again(skewed_chains):
    _, draws, info = skewed_chains
    assert 0.3 < info["accepted"].mean() < 0.7
    repeated = np.all(draws["x"]["w"][:, 1:] == draws["x"]["w"][:, :-1], axis=-1)
    np.testing.assert_array_equal(repeated, ~info["accepted"][:, 1:])
    # The moments would tell: without the repeated states, the mean is more than 5 errors away.
    centred = (draws["x"]["w"] - np.euler_gamma).mean(axis=-1)[:, 100:]
    error = standard_errors(centred)
    assert abs(centred[info["accepted"][:, 100:]].mean()) > 5 * error
    # A rejected state keeps its log-joint, and the reported one is that of the draw.
    expected = np.sum(np.asarray(gumbel(draws["x"]["w"].astype(float))), axis=-1)
    np.testing.assert_allclose(info["log_joint"], expected, rtol=1e-3, atol=1e-3)


def test_acceptance_is_what_the_energy_error_says(skewed_chains):
    _, _, info = skewed_chains
    expected = np.minimum(1, np.exp(-info["energy_error"]))
    np.testing.assert_allclose(info["acceptance_probability"], expected, rtol=1e-4, atol=1e-6)
    assert_mean_of_chains(info["accepted"] - info["acceptance_probability"], 0)
    # Jarzynski's identity: over the target and its momenta, E[exp(-energy error)] = 1.
    assert_mean_of_chains(np.exp(-info["energy_error"][:, 100:]), 1)


def test_variance_is_proportional_to_temperature():
    """Two groups of scale 1 and 0.1, hence with different masses; at temperature 2.

    The linear-Gaussian posterior below has a temperature under 1.
    """
    temperature = 2.0
    prior = make_prior(1.0, groups=[("narrow", 100.0)])
    zeros = jnp.zeros(4, jnp.float32)
    log_joint = target_of_prior(prior, {"wide": {"w": zeros}, "narrow": {"w": zeros}}, temperature)
    method = hmc(log_joint, step_size=0.8, trajectory_jitter=0.5, num_burn_in=0)
    _, draws, info = run_chains(method, NO_DATA, num_chains=4, num_steps=1000)
    assert len(np.unique(info["num_leapfrog_steps"])) > 1
    for group, scale in (("wide", 1.0), ("narrow", 0.1)):
        values = draws[group]["w"][:, 20:]
        assert_mean_of_chains(values, 0)
        assert_mean_of_chains(values**2, temperature * scale**2)


def test_posterior_of_a_linear_gaussian_network():
    """Mean and full covariance against the closed form, at temperature 0.7, with adaptation.

    The inputs' scales differ by 30, so that the mass matrix has something to learn.
    """
    inputs = (INPUTS @ np.array([[1.0, 0.4], [0.0, 30.0]])).astype(np.float32)
    exact = LinearGaussian(inputs, TARGETS, noise_std=0.5, prior_std=20**-0.5, temperature=0.7)
    method = hmc(exact.log_joint(), num_burn_in=200, adapt_mass_matrix=True, trajectory_jitter=0.2)
    states, draws, info = run_chains(method, exact.data(), 4, 1000)
    assert np.all(coefficients(states.inverse_mass) == coefficients(states.inverse_mass)[:1])
    w = coefficients(draws)[:, 200:]
    assert_mean_of_chains(w, exact.mean)
    centred = w - exact.mean
    assert_mean_of_chains(centred[..., :, None] * centred[..., None, :], exact.covariance)

    # The masses are the posterior's variances in units of the tempered prior's.
    expected = np.diag(exact.covariance) / (exact.prior_std**2 * exact.temperature)
    learned = coefficients(states.inverse_mass)
    np.testing.assert_allclose(np.log(learned), np.log(np.tile(expected, (4, 1))), atol=1.2)
    # 30 times the scale would be 30 times the steps; what was learned is frozen.
    assert info["num_leapfrog_steps"][:, 130].mean() > 4 * info["num_leapfrog_steps"][:, 250].mean()
    assert np.all(info["step_size"][:, 200:] == info["step_size"][:, 200:201])


def predictive_moments(log_joint, draws):
    """First and second moments of the network at test points; (chains, draws, 2 * points)."""
    points = jnp.linspace(-2, 2, 6, dtype=jnp.float32)[:, None] * jnp.array([[1.0, -0.5]])
    outputs = jax.jit(jax.vmap(jax.vmap(lambda p: log_joint.network(p, points)[:, 0])))(draws)
    return np.concatenate([outputs, outputs**2], axis=-1).astype(float)


@pytest.mark.slow
def test_agrees_with_blackjax_on_a_network():
    """The same steps in both: predictive moments and acceptance differ by less than 5 errors."""
    log_joint, num_chains, num_draws = network_log_joint(), 4, 1000
    step_size, num_steps = 0.05, 25
    method = hmc(
        log_joint,
        step_size=step_size,
        trajectory_length=step_size * num_steps,
        num_burn_in=0,
    )
    _, draws, info = run_chains(method, NETWORK_DATA, num_chains, num_draws)
    assert np.all(info["num_leapfrog_steps"] == num_steps)
    assert 0.4 < info["accepted"].mean() < 0.98

    with jax.numpy_dtype_promotion("standard"):
        data = jax.tree.map(jnp.asarray, NETWORK_DATA)
        mass = jnp.ones(trees.size(log_joint.init(jax.random.key(0))))
        referee = blackjax.hmc(lambda params: log_joint(params, data), step_size, mass, num_steps)

        def iterate(states, iteration):
            keys = chain_keys(jax.random.fold_in(jax.random.key(7), iteration), num_chains)
            states, info = jax.vmap(referee.step)(keys, states)
            return states, (states.position, info.acceptance_rate)

        starts = jax.vmap(log_joint.init)(chain_keys(jax.random.key(8), num_chains))
        run = jax.jit(lambda states: jax.lax.scan(iterate, states, jnp.arange(num_draws))[1])
        positions, acceptance = run(jax.vmap(referee.init)(starts))
    theirs = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), positions)

    def summary(draws, acceptance):
        moments = predictive_moments(log_joint, draws)
        values = np.concatenate([moments, acceptance[..., None]], axis=-1)[:, 100:]
        return values.mean(axis=(0, 1)), standard_errors(values)

    mean, error = summary(draws, info["acceptance_probability"])
    their_mean, their_error = summary(theirs, acceptance.T)
    assert np.all(np.abs(mean - their_mean) < 5 * np.hypot(error, their_error))


@pytest.fixture(scope="module")
def adapted_chains():
    # With more noise than elsewhere, so that nothing diverges once the step size has settled.
    log_joint = network_log_joint(likelihood=gaussian(1.0))
    method = hmc(log_joint, num_burn_in=200, adapt_mass_matrix=False, trajectory_jitter=0.0)
    return run_chains(method, NETWORK_DATA, num_chains=3, num_steps=500)


def test_step_size_adapts_to_the_target_and_is_then_frozen(adapted_chains):
    states, draws, info = adapted_chains
    acceptance = info["acceptance_probability"][:, 200:].mean(axis=1)
    np.testing.assert_allclose(acceptance, 0.8, atol=0.1)
    step_size = info["step_size"]
    np.testing.assert_array_equal(states.step_size, states.step_size[:1].repeat(3))
    assert np.all(step_size[:, 200:] == step_size[:, 200:201])
    np.testing.assert_array_equal(states.step_size, step_size[:, -1])
    assert all(len(np.unique(chain[:200])) > 100 for chain in step_size)
    expected = np.ceil(math.pi / 2 / step_size[:, -1])
    np.testing.assert_array_equal(info["num_leapfrog_steps"][:, -1], expected)
    assert np.all(info["num_leapfrog_steps"][:, 0] == 1)  # the limit grows from one
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(draws))


def test_chains_are_the_same_alone_and_in_lockstep():
    """Chains of different numbers of steps share a loop, and none feels the others."""
    method = hmc(target_of_density(gumbel, 2), step_size=0.2, trajectory_jitter=0.9)
    keys = chain_keys(jax.random.key(1), 3)
    states = jax.vmap(method.init, (0, None))(keys, None)
    states = states._replace(step_size=jnp.array([0.2, 0.1, 0.05], jnp.float32))
    alone = jax.tree.map(lambda leaf: leaf[1], states)
    together, single = jax.jit(jax.vmap(method.step, (0, 0, None))), jax.jit(method.step)
    for iteration in range(6):
        keys = chain_keys(jax.random.fold_in(jax.random.key(0), iteration), 3)
        states, info = together(keys, states, NO_DATA)
        alone, own = single(keys[1], alone, NO_DATA)
        assert len(set(info["num_leapfrog_steps"].tolist())) == 3
        assert own["num_leapfrog_steps"] == info["num_leapfrog_steps"][1]
        np.testing.assert_allclose(
            own["energy_error"], info["energy_error"][1], rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(
            alone.position.params["x"]["w"],
            states.position.params["x"]["w"][1],
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.slow
def test_a_divergence_in_burn_in_halves_the_step_size_of_all_chains():
    """Once, at the end, and only if the step size had settled."""
    burn_in = BurnIn(80, 0.8, 1.0, {"w": 1.0}, 1.0)
    settled = [int(done) for done in range(1, 81) if burn_in.is_settled(jnp.int32(done))]
    assert settled == [*range(31, 61), *range(71, 81)]

    def final_size(diverges_at):
        size = jnp.full((2,), 0.1, jnp.float32)
        zeros = jnp.zeros(2, jnp.float32)
        mass = {"w": jnp.ones(2, jnp.float32)}
        dual = adaptation.start_dual_averaging(size)
        learned = adaptation.Learned(size, mass, dual, None, jnp.zeros(2, jnp.int32))
        for done in range(1, 81):
            divergent = jnp.array([done == diverges_at, False])
            learned = jax.vmap(adaptation.adapt, (None, None, 0, 0, 0, 0))(
                burn_in, jnp.int32(done), learned, {"w": zeros}, zeros + 0.8, divergent
            )
            learned = adaptation.pool(learned)
        return np.asarray(learned.step_size)

    plain = final_size(None)
    np.testing.assert_allclose(final_size(10), plain, rtol=1e-6)  # while it was being found
    np.testing.assert_allclose(final_size(40), 0.5 * plain, rtol=1e-6)


def test_chains_pool_step_sizes_and_variances_within_chains():
    """Means over chains in burn-in; afterwards nothing changes any more."""
    method = hmc(target_of_density(gumbel, 2), num_burn_in=50)
    states = jax.vmap(method.init, (0, None))(chain_keys(jax.random.key(1), 2), None)
    different = states._replace(
        iteration=jnp.array([7, 7], jnp.int32),
        step_size=jnp.array([0.1, 0.4], jnp.float32),
        inverse_mass={"x": {"w": jnp.array([[1.0, 2.0], [3.0, 6.0]], jnp.float32)}},
        dual_averaging=states.dual_averaging._replace(error=jnp.array([0.1, 0.3], jnp.float32)),
    )
    pooled = method.pool(different)
    np.testing.assert_allclose(pooled.step_size, [0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(pooled.inverse_mass["x"]["w"], [[2, 4], [2, 4]], rtol=1e-6)
    np.testing.assert_allclose(pooled.dual_averaging.error, [0.2, 0.2], rtol=1e-6)
    after = different._replace(iteration=jnp.array([51, 51], jnp.int32))
    for a, b in zip(jax.tree.leaves(method.pool(after)), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    assert hmc(target_of_density(gumbel, 2), step_size=0.1).pool is None


def test_jitter_fills_its_range_evenly_and_alike_in_all_chains():
    method = hmc(target_of_density(gumbel, 1), step_size=1e-3, trajectory_jitter=0.5)
    trajectory = Trajectory(1.0, 0.5, 10_000, None)
    steps = jax.vmap(trajectory.num_steps, (None, 0))(
        jnp.float32(1e-3), jnp.arange(10**6, 10**6 + 1000, dtype=jnp.int32)
    )
    counts, _ = np.histogram(steps, bins=10, range=(500, 1500))
    np.testing.assert_allclose(counts, 100, atol=3)
    _, _, info = run_chains(method, NO_DATA, num_chains=2, num_steps=5)
    np.testing.assert_array_equal(*info["num_leapfrog_steps"])


def test_without_jitter_trajectories_resonate():
    """A posterior of a quarter of the prior's deviation: a default trajectory is one whole period.

    Effective draws of 400, by the chains' own autocorrelations.
    """
    scale = np.eye(8, dtype=np.float32) * 15**0.5
    exact = LinearGaussian(scale, scale[:, :1], noise_std=1.0, prior_std=1.0, with_bias=False)
    np.testing.assert_allclose(np.sqrt(np.diag(exact.covariance)), 0.25)

    def effective_draws(jitter):
        method = hmc(exact.log_joint(), step_size=0.05, num_burn_in=0, trajectory_jitter=jitter)
        _, draws, _ = run_chains(method, exact.data(), num_chains=2, num_steps=200)
        return diagnostics.ess(coefficients(draws)).min()

    assert effective_draws(0.0) < 40 and effective_draws(0.5) > 150


def test_nan_never_enters_a_chain():
    """Beyond 1 the density is NaN: what remains is the normal truncated there."""
    log_joint = target_of_density(lambda w: jnp.where(w > 1, jnp.nan, -0.5 * w**2), 1)
    method = hmc(log_joint, num_burn_in=100)
    _, draws, info = run_chains(method, NO_DATA, num_chains=8, num_steps=1500)
    w = draws["x"]["w"]
    assert np.all(w <= 1) and np.all(np.isfinite(info["log_joint"]))
    assert info["divergent"].any() and not np.any(info["divergent"] & info["accepted"])
    assert np.all(info["acceptance_probability"][info["divergent"]] == 0)
    density = scipy.stats.norm.pdf(1) / scipy.stats.norm.cdf(1)
    assert_mean_of_chains(w[:, 100:], -density)
    assert_mean_of_chains(w[:, 100:] ** 2, 1 - density)


def test_a_start_that_is_not_finite_shows():
    log_joint = target_of_density(lambda w: jnp.where(w > 1, jnp.nan, -0.5 * w**2), 1, start=2.0)
    _, _, info = run_chains(hmc(log_joint, step_size=0.1), NO_DATA, 1, 2)
    assert np.all(np.isnan(info["log_joint"])) and not info["accepted"].any()


def test_without_metropolis_all_but_divergences_are_accepted():
    log_joint = target_of_density(lambda w: -0.5 * w**2, 50)
    biased = hmc(log_joint, step_size=1.5, trajectory_length=3.0, num_burn_in=0, metropolis=False)
    _, draws, info = run_chains(biased, NO_DATA, 2, 50)
    assert info["accepted"].all() and info["acceptance_probability"].mean() < 0.9
    unstable = hmc(log_joint, step_size=5.0, trajectory_length=100.0, metropolis=False)
    _, draws, info = run_chains(unstable, NO_DATA, 2, 5)
    assert info["divergent"].all() and not info["accepted"].any()
    assert np.all(draws["x"]["w"] == 0)


def test_point_estimates_stay_and_random_parameters_move():
    log_joint = network_log_joint(stochastic_params="linear_1")
    method = hmc(log_joint, step_size=0.05, trajectory_length=0.5)
    states, draws, _ = run_chains(method, NETWORK_DATA, 2, 10)
    names = ["mlp/~/linear_1/b", "mlp/~/linear_1/w"]
    assert list(trees.named_leaves(states.inverse_mass)) == names
    starts = jax.vmap(method.init, (0, None))(chain_keys(jax.random.key(1), 2), None)
    for name, leaf in trees.named_leaves(draws).items():
        first = np.asarray(trees.named_leaves(starts.position.params)[name])
        # The start was computed by another program, which may round otherwise.
        same = np.all(np.isclose(leaf, first[:, None], rtol=1e-6, atol=0), axis=1)
        assert not same.any() if name in names else same.all()


@both_precisions
def test_state_is_arrays_of_constant_shape_and_dtype(dtype):
    log_joint = network_log_joint(
        INPUTS.astype(dtype), likelihood=gaussian(0.3, learn_noise=True), num_microbatches=2
    )
    data = make_data(INPUTS.astype(dtype), TARGETS.astype(dtype))
    for settings in ({}, {"adapt_mass_matrix": True}, {"step_size": 0.1}):
        method = hmc(log_joint, **settings)
        before = jax.eval_shape(method.init, jax.random.key(0), None)
        after, info = jax.eval_shape(method.step, jax.random.key(0), before, data)
        assert isinstance(before, HMCState) and before == after
        assert {leaf.dtype for leaf in jax.tree.leaves(before)} == {
            np.dtype(dtype),
            np.dtype(np.int32),
            np.dtype(bool),
        }
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
    method = hmc(
        target_of_density(gumbel, 2), step_size=0.5, trajectory_length=0.5, trajectory_jitter=0.1
    )
    state = method.init(jax.random.key(0), None)
    with jax.disable_jit():
        for iteration in range(3):
            key = jax.random.fold_in(jax.random.key(1), iteration)
            state, info = method.step(key, state, NO_DATA)
    assert len(used) == len(set(used)) == 3 * 2 and not set(used) & set(parents)
    monkeypatch.undo()
    step, state = jax.jit(method.step), method.init(jax.random.key(0), None)
    for iteration in range(3):
        state, same = step(jax.random.fold_in(jax.random.key(1), iteration), state, NO_DATA)
    np.testing.assert_allclose(same["energy"], info["energy"], rtol=1e-5)


def test_progress_inside_a_trajectory_is_told_once_for_all_chains():
    told = []
    method = hmc(
        target_of_density(gumbel, 1),
        step_size=0.001,
        trajectory_length=2.5,
        trajectory_jitter=0.1,
        progress=told.append,
    )
    _, _, info = run_chains(method, NO_DATA, num_chains=3, num_steps=1)
    jax.effects_barrier()
    assert np.all(info["num_leapfrog_steps"] == 2250)
    assert sorted(told) == [1000, 2000] and all(type(done) is int for done in told)


def test_default_trajectory_is_a_quarter_period_of_the_tempered_prior():
    """After it, the end point does not depend on where it began."""
    log_joint = target_of_prior(
        make_prior(4.0), {"x": {"w": jnp.zeros(9, jnp.float32)}}, temperature=9.0
    )
    method = hmc(log_joint, step_size=math.pi / 2 * 1.5 / 1000)
    step = jax.jit(method.step)
    starts = [{"x": {"w": jnp.full(9, start, jnp.float32)}} for start in (0.0, 30.0)]
    results = [
        step(jax.random.key(1), method.init(jax.random.key(0), start), NO_DATA) for start in starts
    ]
    (near, info), (far, _) = results
    assert info["num_leapfrog_steps"] == 1000
    assert jnp.max(jnp.abs(near.position.params["x"]["w"])) > 0.5
    ends = (state.position.params["x"]["w"] for state in (near, far))
    np.testing.assert_allclose(*ends, atol=0.01)


def test_overdispersed_starts():
    log_joint = network_log_joint(
        prior=make_prior(4.0, family="laplace"),
        likelihood=gaussian(0.3, learn_noise=True),
        stochastic_params="linear_1|likelihood",
    )
    starts = jax.jit(jax.vmap(lambda key: overdispersed_params(key, log_joint)))(
        chain_keys(jax.random.key(0), 2000)
    )
    leaves = trees.named_leaves(starts)
    assert jax.tree.structure(starts) == jax.tree.structure(log_joint.init(jax.random.key(0)))
    assert np.all(leaves["likelihood/log_noise_std"] == np.float32(math.log(0.3)))
    assert np.all(leaves["mlp/~/linear_0/b"] == 0)  # a point estimate, by Haiku's own init
    weights = np.asarray(leaves["mlp/~/linear_1/w"])
    assert np.max(np.abs(weights)) == 1.5  # three standard deviations
    inside = np.mean(np.abs(weights) < scipy.stats.laplace(scale=0.5 / math.sqrt(2)).ppf(0.75))
    assert inside == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(weights.size))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"step_size": 1e-5}, r"max_num_leapfrog_steps = 10000 .*; raise step_size"),
        ({"step_size": 0.01, "trajectory_jitter": 0.9, "max_num_leapfrog_steps": 160}, "raise"),
        ({"step_size": -1.0}, "step_size must be positive"),
        ({"trajectory_length": 0.0}, "trajectory_length must be positive"),
        ({"max_num_leapfrog_steps": 0}, "max_num_leapfrog_steps must be positive"),
        ({"target_accept": 1.0}, "target_accept"),
        ({"trajectory_jitter": 1.0}, "trajectory_jitter"),
        ({"num_burn_in": 0}, "give a step_size"),
        ({"num_burn_in": 10, "adapt_mass_matrix": True}, "at least 40"),
    ],
)
def test_refusals(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        hmc(network_log_joint(), **settings)


def test_a_step_that_divides_the_trajectory_is_not_refused():
    hmc(network_log_joint(), step_size=1e-4, trajectory_length=1e-3, max_num_leapfrog_steps=10)
