"""Gaussians as priors: their density, and data in parts against all data at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scenarios
import scipy.stats
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.gaussian_priors import Gaussian, make_gaussian_prior
from haiku_posteriors.core.likelihoods import gaussian as gaussian_likelihood

pytestmark = pytest.mark.usefixtures("first_device_only")
RNG = np.random.default_rng(0)
INPUTS = (RNG.normal(size=(60, 3)) @ RNG.normal(size=(3, 3))).astype(np.float32)
TARGETS = (INPUTS @ [[1.0], [-0.5], [0.2]] + RNG.normal(size=(60, 1))).astype(np.float32)


def by_name(flat):
    """Values of (bias, weights), (..., 4), by the parameter's name."""
    return {"linear/b": flat[..., :1], "linear/w": flat[..., 1:, None]}


def some_gaussian(rank):
    """Of four parameters, one much narrower than its correlated part; and its covariance."""
    mean, scale = RNG.normal(size=4), np.array([0.5, 1.0, 2.0, 1e-2])
    factor = RNG.normal(size=(rank, 4))
    covariance = np.diag(scale**2) + factor.T @ factor
    found = Gaussian(by_name(mean), by_name(scale), by_name(factor) if rank else {}, {})
    return found, mean, covariance


@pytest.mark.parametrize("rank", [0, 2])
def test_density_and_draws(rank):
    """The density is SciPy's; 20,000 draws have its moments, 5 standard errors each."""
    found, mean, covariance = some_gaussian(rank)
    prior = make_gaussian_prior(found)
    points = RNG.multivariate_normal(mean, covariance, 20).astype(np.float32)
    trees = {"linear": {k.split("/")[1]: jnp.asarray(v) for k, v in by_name(points).items()}}
    densities = jax.vmap(prior.log_density)(trees)
    expected = scipy.stats.multivariate_normal.logpdf(points, mean, covariance)
    np.testing.assert_allclose(densities, expected, rtol=1e-3, atol=2e-2)
    one = jax.tree.map(lambda leaf: leaf[0], trees)
    diagonal = ravel_pytree(prior.precisions(one))[0]
    np.testing.assert_allclose(diagonal, np.diag(np.linalg.inv(covariance)), rtol=1e-5)
    assert prior.is_correlated == (rank > 0)
    keys = jax.random.split(jax.random.key(0), 20_000)
    draws = jax.jit(jax.vmap(lambda key: prior.sample(key, one)))(keys)
    scenarios.assert_gaussian_moments(scenarios.coefficients(draws), mean, covariance)


def curvature_and_mode(log_joint, data, start):
    """Of a log-joint that is quadratic."""
    flat, unravel = ravel_pytree(start)

    def energy(flat):
        return -log_joint(unravel(flat), data)

    hessian = np.asarray(jax.hessian(energy)(flat), float)
    return hessian, np.asarray(flat - np.linalg.solve(hessian, jax.grad(energy)(flat)), float)


@pytest.mark.slow  # ten programs
def test_ten_parts_equal_the_batch_posterior():
    """Each posterior, exactly as (mean, scale, factor), is the prior of the next part.

    The covariance of a posterior C is diag(s^2) + U U' with s^2 half the least eigenvalue of C:
    every Gaussian has this form. In float32; 1e-3 of a standard deviation, 1 % of the covariance.
    """
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 0.9, 0.7)
    log_joint = exact.log_joint()
    start = {"linear": {"b": jnp.zeros(1), "w": jnp.zeros((3, 1))}}
    for part in range(10):
        rows = slice(part, None, 10)
        data = jax.tree.map(jnp.asarray, make_data(INPUTS[rows], TARGETS[rows]))
        precision, mode = curvature_and_mode(log_joint, data, start)
        values, vectors = np.linalg.eigh(np.linalg.inv(precision))
        scale = np.full(4, np.sqrt(values[0] / 2))
        factor = (vectors * np.sqrt(values - scale**2)).T
        found = Gaussian(by_name(mode), by_name(scale), by_name(factor), {})
        log_joint = dataclasses.replace(log_joint, prior=make_gaussian_prior(found))
    deviations = np.sqrt(np.diag(exact.covariance))
    np.testing.assert_allclose((mode - exact.mean) / deviations, 0, atol=2e-3)
    np.testing.assert_allclose(
        np.linalg.inv(precision), exact.covariance, atol=1e-2 * deviations.min() ** 2
    )


def test_the_likelihoods_own_parameters_are_among_them():
    """The log-joint's prior is the Gaussian's alone, and its expectation is in closed form."""
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 0.9, 0.7)
    log_joint = exact.log_joint(likelihood=gaussian_likelihood(0.9, learn_noise=True))
    params = log_joint.init(jax.random.key(0))
    name = "likelihood/log_noise_std"
    mean = {"linear/b": np.ones(1), "linear/w": np.ones((3, 1)), name: np.array(0.3)}
    scale = {key: np.full_like(leaf, 0.2) for key, leaf in mean.items()}
    prior = make_gaussian_prior(Gaussian(mean, scale, {}, {}))
    log_joint = dataclasses.replace(log_joint, prior=prior)
    flat = np.asarray(ravel_pytree(params)[0], float)
    center = np.concatenate([[0.3], np.ones(4)])
    expected = scipy.stats.norm.logpdf(flat, center, 0.2).sum()
    np.testing.assert_allclose(log_joint.log_prior(params), expected, rtol=1e-5)
    spread = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), params)
    found = log_joint.expected_log_prior(params, spread, None)
    np.testing.assert_allclose(found, expected - 5 * 0.5 * (0.1 / 0.2) ** 2, rtol=1e-5)
    drawn = log_joint.sample_prior(jax.random.key(1))
    assert abs(float(drawn["likelihood"]["log_noise_std"]) - 0.3) < 1.0
