"""Likelihoods against SciPy, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from scenarios import assert_mean, log_noise_density

from haiku_posteriors.core import likelihoods
from haiku_posteriors.core.errors import UserError

OUTPUTS = np.array([[0.2, -1.0, 3.0], [5.0, 0.0, -2.0]], np.float32)


def test_categorical():
    likelihood = likelihoods.categorical(3)
    ours = likelihood.log_likelihood(jnp.array(OUTPUTS), jnp.array([2, 1]), {})
    expected = scipy.special.log_softmax(OUTPUTS.astype(float), axis=1)[[0, 1], [2, 1]]
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    probabilities = likelihood.predict(jnp.array(OUTPUTS), {})
    np.testing.assert_allclose(probabilities, scipy.special.softmax(OUTPUTS, axis=1), rtol=1e-5)


def test_bernoulli_agrees_with_a_two_class_categorical():
    logits = np.array([[-2.0], [0.5], [40.0]], np.float32)
    targets = jnp.array([1, 0, 0])
    bernoulli, categorical = likelihoods.bernoulli(), likelihoods.categorical(2)
    two = jnp.array(np.concatenate([np.zeros_like(logits), logits], axis=1))
    np.testing.assert_allclose(
        bernoulli.log_likelihood(jnp.array(logits), targets, {}),
        categorical.log_likelihood(two, targets, {}),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        bernoulli.predict(jnp.array(logits), {}), categorical.predict(two, {}), atol=1e-6
    )


def test_gaussian_sums_over_targets():
    likelihood = likelihoods.gaussian(noise_std=0.4, num_targets=3)
    targets = np.array([[0.0, 0.1, 2.0], [4.0, 1.0, -1.5]], np.float32)
    ours = likelihood.log_likelihood(jnp.array(OUTPUTS), jnp.array(targets), {})
    expected = scipy.stats.norm.logpdf(targets, OUTPUTS, 0.4).sum(axis=1)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    prediction = likelihood.predict(jnp.array(OUTPUTS), {})
    np.testing.assert_allclose(prediction, np.concatenate([OUTPUTS, np.full((2, 3), 0.4)], axis=1))


def test_the_variance_of_a_learned_noise_has_an_inverse_gamma_prior():
    likelihood = likelihoods.gaussian(noise_std=0.5, learn_noise=True)
    params = likelihood.init()
    assert float(jnp.exp(params["log_noise_std"])) == pytest.approx(0.5)
    moved = {"log_noise_std": jnp.array(np.log(0.2), jnp.float32)}
    expected = log_noise_density(np.log(0.2), 0.5)
    assert float(likelihood.log_prior(moved)) == pytest.approx(expected, rel=1e-5)
    ours = likelihood.log_likelihood(jnp.array([[1.0]]), jnp.array([[1.3]]), moved)
    assert float(ours[0]) == pytest.approx(scipy.stats.norm.logpdf(1.3, 1.0, 0.2), rel=1e-5)


def test_heteroscedastic_gaussian_has_a_floor():
    likelihood = likelihoods.heteroscedastic_gaussian(noise_floor=0.01)
    outputs = jnp.array([[1.0, -100.0], [1.0, 0.3]])
    prediction = np.asarray(likelihood.predict(outputs, {}))
    np.testing.assert_allclose(prediction[:, 1], [0.01, 0.01 + np.log1p(np.exp(0.3))], rtol=1e-5)
    ours = likelihood.log_likelihood(outputs, jnp.array([[1.0], [2.0]]), {})
    expected = scipy.stats.norm.logpdf([1.0, 2.0], prediction[:, 0], prediction[:, 1])
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_a_noise_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="noise_std must be positive"):
        likelihoods.gaussian(noise_std=0.0)


def test_the_prior_of_a_learned_noise_is_the_one_that_is_sampled():
    likelihood = likelihoods.gaussian(noise_std=0.4, learn_noise=True)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = np.asarray(jax.vmap(likelihood.sample_prior)(keys)["log_noise_std"], float)
    assert drawn.shape == (4000,)
    law = scipy.stats.invgamma(0.5, scale=0.4**2 / 18)
    assert scipy.stats.kstest(np.exp(2 * drawn), law.cdf).pvalue > 1e-4
    assert drawn.std() == pytest.approx(likelihood.prior_std, rel=0.1)
    assert law.cdf((0.4 * likelihoods.UNLIKELY_NOISE) ** 2) == pytest.approx(0.05, rel=1e-3)
    # log p = log(2 / pi) / 2 + log |x| - x^2 / 2, of which E log |x| = -(gamma + log 2) / 2.
    log_prior = jax.vmap(likelihood.log_prior)({"log_noise_std": drawn.astype(np.float32)})
    assert_mean(log_prior, 0.5 * np.log(2 / np.pi) - 0.5 * (np.euler_gamma + np.log(2)) - 0.5)
    assert likelihoods.categorical(3).sample_prior(keys[0]) == {}


def test_a_network_that_meets_every_target_has_a_mode_of_its_noise():
    """At sigma^2 = noise_std^2 / 9 / (rows + 1), where the prior's wall meets the likelihood."""
    likelihood = likelihoods.gaussian(noise_std=0.3, learn_noise=True)
    targets = jnp.ones((200, 1))

    def log_joint(log_noise):
        own = {"log_noise_std": log_noise}
        fits = likelihood.log_likelihood(targets, targets, own)
        return jnp.sum(fits) + likelihood.log_prior(own)

    mode = 0.5 * np.log(0.1**2 / 201)
    slopes = [float(jax.grad(log_joint)(jnp.array(mode + shift))) for shift in (-1.0, 0.0, 1.0)]
    assert slopes[0] > 100 and abs(slopes[1]) < 1e-2 and slopes[2] < -100


def numerical_curvature(likelihood, outputs, cases, own):
    """sum_y p(y) (d log p(y | f) / df)^2, (k,), at one row of outputs; cases: (p(y), y) pairs."""

    def gradient(target):
        return jax.grad(lambda f: likelihood.log_likelihood(f, target, own)[0])(outputs)[0]

    return sum(probability * gradient(jnp.asarray(target)) ** 2 for probability, target in cases)


def test_curvature_is_the_diagonal_of_the_fisher_information():
    """The expected square of the score: by sums over classes, by quadrature over Gaussians."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    weights = weights / weights.sum()
    row = jnp.asarray(OUTPUTS[:1])

    pairs = list(zip(nodes, weights, strict=True))

    def gaussians(mean, std):
        return [(w, np.array([[mean + std * e]], np.float32)) for e, w in pairs]

    probabilities = scipy.special.softmax(OUTPUTS[0])
    chance = scipy.special.expit(0.2)
    noise = {"log_noise_std": jnp.array(np.log(0.2), jnp.float32)}
    std = float(1e-3 + np.log1p(np.exp(-1.0)))
    for likelihood, outputs, cases, own in (
        (likelihoods.categorical(3), row, [(p, [y]) for y, p in enumerate(probabilities)], {}),
        (likelihoods.bernoulli(), row[:, :1], [(1 - chance, [0]), (chance, [1])], {}),
        (likelihoods.gaussian(learn_noise=True), row[:, :1], gaussians(0.2, 0.2), noise),
        (likelihoods.heteroscedastic_gaussian(), row[:, :2], gaussians(0.2, std), {}),
    ):
        expected = numerical_curvature(likelihood, outputs, cases, own)
        np.testing.assert_allclose(likelihood.curvature(outputs, own)[0], expected, rtol=1e-4)
