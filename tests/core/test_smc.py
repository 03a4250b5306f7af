"""SMC: evidence and moments against closed forms and quadrature, modes, resampling, refusals.

A population is one sample: means over independent populations are compared with their expectation
at 5 standard errors, see `scenarios`.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from scenarios import (
    NO_DATA,
    LinearGaussian,
    assert_mean,
    coefficients,
    log_noise_density,
    run_chains,
    target_of_prior,
)

from haiku_posteriors.core import smc, tempered_path
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

INPUTS = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
TARGETS = (np.sin(2 * INPUTS[:, :1]) + 0.3 * INPUTS[:, 1:]).astype(np.float32)


def linear_gaussian(temperature):
    return LinearGaussian(INPUTS, TARGETS, noise_std=0.5, prior_std=1.0, temperature=temperature)


def test_the_closed_form_is_the_evidence_at_temperature_one():
    exact = linear_gaussian(1.0)
    assert exact.log_normaliser() == pytest.approx(exact.log_evidence(), rel=1e-10)


@pytest.fixture(scope="module", params=[0.5, 2.0], ids=["cold", "warm"])
def adaptive(request):
    """64 populations of 200 that choose fractions, step size and masses themselves."""
    exact = linear_gaussian(request.param)
    method = smc.smc(exact.log_joint(), num_particles=200, target_ess=0.8, adapt_mass_matrix=True)
    states, _, info = run_chains(method, exact.data(), num_chains=64, num_steps=14)
    return exact, states, info


def test_evidence_of_a_linear_gaussian_network(adaptive):
    """Adaptation adds a bias of order 1 / P, for which 1 / P is allowed beside the 5 errors."""
    exact, states, info = adaptive
    assert np.all(states.fraction == 1)
    np.testing.assert_array_equal(states.log_evidence, info["log_evidence"][:, -1])
    ratios = np.exp(np.asarray(states.log_evidence, float) - exact.log_normaliser())
    error = ratios.std() / np.sqrt(len(ratios))
    assert error < 0.03
    assert abs(ratios.mean() - 1) < 5 * error + 1 / 200


def test_posterior_of_a_linear_gaussian_network(adaptive):
    exact, states, _ = adaptive
    w = coefficients(states.particles)  # (populations, particles, coefficients)
    assert_mean(w.mean(axis=1), exact.mean)
    centred = w - exact.mean
    products = centred[..., :, None] * centred[..., None, :]
    assert_mean(products.mean(axis=1), exact.covariance)


def test_fractions_rise_to_one_and_stay_and_step_size_and_masses_with_them(adaptive):
    exact, states, info = adaptive
    fractions = info["fraction"]
    is_final = fractions == 1
    assert np.all((np.diff(fractions, axis=1) > 0) | is_final[:, 1:])
    before = fractions < 1
    np.testing.assert_allclose(info["relative_ess"][before], 0.8, atol=1e-3)
    arrived = np.argmax(is_final, axis=1)
    for chain, first in enumerate(arrived):
        assert len(np.unique(info["step_size"][chain, first:])) == 1
        assert len(np.unique(info["log_evidence"][chain, first:])) == 1
    np.testing.assert_array_equal(states.num_final_steps, 13 - arrived)
    acceptance = info["acceptance_probability"][np.arange(64), np.minimum(arrived + 1, 13)]
    assert 0.6 < acceptance.mean() < 0.97
    # The masses follow the posterior's variances, in units of the prior's.
    expected = np.diag(exact.covariance)
    learned = coefficients(states.inverse_mass).mean(axis=0)
    np.testing.assert_allclose(np.log(learned), np.log(expected), atol=0.5)


@pytest.mark.slow
def test_with_everything_given_the_evidence_is_unbiased_for_few_particles():
    """Ten particles in each of 4,000 populations; Z itself is right, and log Z too low."""
    exact = linear_gaussian(1.0)
    method = smc.smc(
        exact.log_joint(),
        num_particles=10,
        fractions=(0.01, 0.04, 0.1, 0.2, 0.4, 0.7, 1.0),
        step_size=0.2,
        trajectory_length=0.6,
    )
    states, _, info = run_chains(method, exact.data(), num_chains=4000, num_steps=7)
    np.testing.assert_allclose(info["fraction"][0], [0.01, 0.04, 0.1, 0.2, 0.4, 0.7, 1.0])
    logs = np.asarray(states.log_evidence, float) - exact.log_normaliser()
    assert 0.3 < logs.std() < 1.0  # so that there is a bias of the logarithm to tell from none
    assert_mean(np.exp(logs), 1.0)
    assert logs.mean() < -5 * logs.std() / np.sqrt(len(logs))


def parabola(inputs):
    """y = w^2 + w / 2, whatever the inputs: both roots of y = 1 explain the data."""
    w = hk.get_parameter("w", (), init=jnp.zeros)
    return (w**2 + w / 2) * jnp.ones_like(inputs)


@pytest.fixture(scope="module")
def two_modes():
    """Two parameters, w and the learned noise, on a grid of each; and 48 populations."""
    inputs = np.zeros((6, 1), np.float32)
    targets = np.array([[0.9], [1.1], [1.0], [0.95], [1.05], [1.02]], np.float32)
    likelihood = gaussian(0.1, learn_noise=True)
    log_joint = make_log_joint(parabola, inputs, make_prior(1.0), likelihood)
    w, log_noise = np.linspace(-4, 4, 4001)[:, None], np.linspace(-6, 3, 1201)[None]
    log_density = scipy.stats.norm.logpdf(w) + log_noise_density(log_noise, 0.1)
    for target in targets[:, 0].astype(float):
        log_density += scipy.stats.norm.logpdf(target, w**2 + w / 2, np.exp(log_noise))
    log_density += np.log((8 / 4000) * (9 / 1200))
    method = smc.smc(log_joint, num_particles=300, target_ess=0.8)
    data = jax.tree.map(jnp.asarray, make_data(inputs, targets))
    states, *_ = run_chains(method, data, num_chains=48, num_steps=22)
    return w, log_noise, log_density, states


def test_evidence_and_moments_against_quadrature(two_modes):
    """The prior of the noise is sampled, too: with another start the evidence would be another."""
    _, log_noise, log_density, states = two_modes
    assert np.all(states.fraction == 1)
    log_evidence = scipy.special.logsumexp(log_density)
    ratios = np.exp(np.asarray(states.log_evidence, float) - log_evidence)
    error = ratios.std() / np.sqrt(len(ratios))
    assert error < 0.08
    assert abs(ratios.mean() - 1) < 5 * error + 1 / 300
    density = np.exp(log_density - log_evidence)
    noise = np.asarray(states.particles["likelihood"]["log_noise_std"], float)
    mean = np.sum(density * log_noise)
    assert_mean(noise.mean(axis=1), mean)
    assert_mean(((noise - mean) ** 2).mean(axis=1), np.sum(density * (log_noise - mean) ** 2))


def test_modes_that_no_move_connects_get_their_mass(two_modes):
    w, _, log_density, states = two_modes
    density = np.exp(log_density - scipy.special.logsumexp(log_density)).sum(axis=1)
    mass = density[w[:, 0] > -0.25].sum()
    assert 0.55 < mass < 0.75 and density[np.abs(w[:, 0] + 0.25) < 0.2].sum() < 1e-3
    particles = np.asarray(states.particles["~"]["w"])
    assert_mean((particles > -0.25).mean(axis=1), mass)
    assert np.all((particles > -0.25).std(axis=1) > 0), "every population has both"


def test_without_data_the_evidence_is_one_and_the_draws_are_the_priors():
    prior = make_prior(4.0, "student_t", groups=[("wide", 0.25)])
    zeros = jnp.zeros(40, jnp.float32)
    log_joint = target_of_prior(prior, {"narrow": {"w": zeros}, "wide": {"w": zeros}})
    method = smc.smc(log_joint, num_particles=100)
    states, _, info = run_chains(method, NO_DATA, num_chains=8, num_steps=3)
    assert np.all(info["fraction"] == 1) and np.all(info["log_evidence"] == 0)
    assert np.all(info["num_ancestors"] == 100)
    for group, variance in (("narrow", 0.25), ("wide", 4.0)):
        values = np.asarray(states.particles[group]["w"], float)
        assert_mean(values.mean(axis=(1, 2)), 0)
        inside = scipy.stats.t(5).cdf(np.sqrt(5 / 3)) - scipy.stats.t(5).cdf(-np.sqrt(5 / 3))
        assert_mean((np.abs(values) < np.sqrt(variance)).mean(axis=(1, 2)), inside)


def test_point_estimates_stay_and_given_random_parameters_do_not_matter():
    exact = linear_gaussian(1.0)
    log_joint = exact.log_joint(stochastic_params="/w$")
    method = smc.smc(log_joint, num_particles=6)
    params = {"linear": {"w": jnp.full((2, 1), 9.0), "b": jnp.array([0.7])}}
    key = jax.random.key(0)
    state = method.init(key, params)
    np.testing.assert_array_equal(
        state.particles["linear"]["w"], method.init(key, None).particles["linear"]["w"]
    )
    state, _ = jax.jit(method.step)(key, state, exact.data())
    draws = method.sample(key, state, 13)
    assert np.all(draws["linear"]["b"] == np.float32(0.7))
    w = np.asarray(draws["linear"]["w"])[:, 0, 0]
    values, counts = np.unique(w, return_counts=True)
    assert len(w) == 13 and set(w[:6]) == set(values) and counts.max() - counts.min() <= 1


@pytest.mark.slow  # compiles SMC twice more
def test_particles_in_turn_equal_particles_side_by_side():
    exact = linear_gaussian(1.0)
    states = []
    for at_once in (None, 3, 1):
        method = smc.smc(exact.log_joint(), num_particles=7, particles_at_once=at_once)
        state = method.init(jax.random.key(0), None)
        states.append(jax.jit(method.step)(jax.random.key(1), state, exact.data())[0])
    for other in states[1:]:
        for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_systematic_resampling_rounds_the_expected_numbers():
    log_weights = jnp.log(jnp.array([0.0, 0.3, 0.0, 0.25, 0.449, 0.001], jnp.float32))
    keys = jax.random.split(jax.random.key(0), 4000)
    chosen = np.asarray(
        jax.vmap(lambda key: tempered_path.systematic_indices(key, log_weights))(keys)
    )
    counts = np.stack([(chosen == index).sum(axis=1) for index in range(6)], axis=1)
    expected = 6 * np.exp(np.asarray(log_weights, float))
    assert np.all((counts == np.floor(expected)) | (counts == np.ceil(expected)))
    assert_mean(counts[:, [1, 3, 4, 5]], expected[[1, 3, 4, 5]])


def test_the_increment_keeps_the_effective_sample_size():
    slopes = 1e4 * jax.random.normal(jax.random.key(0), (500,))
    one = jnp.ones((), slopes.dtype)

    def ess(increment, values):
        weights = np.exp(float(increment) * (values - values.max()))
        return weights.sum() ** 2 / np.sum(weights**2) / len(values)

    increment = tempered_path.largest_increment(slopes, one, 0.9)
    assert ess(increment, np.asarray(slopes, float)) == pytest.approx(0.9, abs=1e-3)
    assert tempered_path.largest_increment(slopes, one * 1e-9, 0.9) == np.float32(1e-9)
    assert tempered_path.largest_increment(jnp.full(5, -1e30, jnp.float32), one, 0.9) == 1
    # Slopes that are not finite have no weight, and no say.
    damaged = slopes.at[:100].set(-jnp.inf).at[100].set(jnp.nan)
    increment = tempered_path.largest_increment(damaged, one, 0.9)
    assert ess(increment, np.asarray(slopes[101:], float)) == pytest.approx(0.9, abs=1e-3)


def test_what_cannot_be_is_refused():
    log_joint = linear_gaussian(1.0).log_joint()
    for settings, sentence in (
        ({"num_particles": 1}, "num_particles must be at least 2"),
        ({"target_ess": 1.0}, "target_ess must lie between 0 and 1"),
        ({"num_moves": 0}, "num_moves must be at least 1"),
        ({"particles_at_once": 0}, "particles_at_once must be at least 1"),
        ({"fractions": (0.5, 0.4, 1.0)}, "fractions must rise"),
        ({"fractions": (0.5,)}, "fractions must rise"),
        ({"step_size": -1.0}, "step_size must be positive"),
        ({"trajectory_jitter": 1.0}, "trajectory_jitter must lie in"),
    ):
        with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
            smc.smc(log_joint, **settings)
