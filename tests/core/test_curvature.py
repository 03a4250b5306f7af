"""Curvature and gradient noise against those of a linear-Gaussian model, in closed form."""

import jax
import numpy as np
import pytest
from scenarios import LinearGaussian, coefficients

from haiku_posteriors.core import curvature, trees

ROWS = 40
RANDOM = np.random.default_rng(1)
INPUTS = (RANDOM.normal(size=(ROWS, 3)) @ np.array([[1, 0.9, 0], [0, 1, 0], [0, 0, 3]])).astype(
    np.float32
)
TARGETS = RANDOM.normal(size=(ROWS, 1)).astype(np.float32)
EXACT = LinearGaussian(INPUTS, TARGETS, noise_std=0.5, prior_std=2.0, temperature=0.5)
LOG_JOINT, DATA = EXACT.log_joint(), EXACT.data()
PARAMS = LOG_JOINT.init(jax.random.key(0))


def test_the_diagonal_is_exact_for_few_parameters():
    found = curvature.diagonal(jax.random.key(0), LOG_JOINT, PARAMS, DATA)
    np.testing.assert_allclose(coefficients(found), np.diag(EXACT.precision), rtol=1e-4)


def test_random_signs_estimate_it():
    num_probes, num_keys = 3, 400
    keys = jax.random.split(jax.random.key(2), num_keys)
    found = jax.vmap(
        lambda key: curvature.diagonal(key, LOG_JOINT, PARAMS, DATA, num_probes=num_probes)
    )(keys)
    off_diagonal = EXACT.precision - np.diag(np.diag(EXACT.precision))
    # Five standard errors, four comparisons: one failure in 400,000 choices of the seed.
    error = np.sqrt(np.sum(off_diagonal**2, axis=1) / num_probes / num_keys)
    difference = coefficients(found).mean(axis=0) - np.diag(EXACT.precision)
    assert np.all(np.abs(difference) < 5 * error + 1e-3)
    spread = coefficients(found).std(axis=0)
    np.testing.assert_allclose(spread, error * np.sqrt(num_keys), rtol=0.25)


def test_no_curvature_is_below_that_of_the_prior():
    """Three probes of a matrix whose rows nearly cancel: estimates far below it, and negative."""
    wide = LinearGaussian(INPUTS[:2], TARGETS[:2], noise_std=0.5, prior_std=0.5)
    log_joint, data = wide.log_joint(), wide.data()
    found = jax.vmap(lambda key: curvature.diagonal(key, log_joint, PARAMS, data, num_probes=1))(
        jax.random.split(jax.random.key(4), 50)
    )
    least = min(float(leaf.min()) for leaf in jax.tree.leaves(found))
    np.testing.assert_allclose(least, 1 / 0.5**2, rtol=1e-5)


def test_the_largest_eigenvalue():
    mass = curvature.diagonal(jax.random.key(0), LOG_JOINT, PARAMS, DATA)
    found = curvature.largest_eigenvalue(jax.random.key(1), LOG_JOINT, PARAMS, DATA, mass)
    root = 1 / np.sqrt(np.diag(EXACT.precision))
    expected = np.linalg.eigvalsh(EXACT.precision * np.outer(root, root)).max()
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("batch_size", [ROWS, 10])
def test_gradient_noise(batch_size):
    """Of n of N rows without replacement: N^2 / n * (1 - n / N) * variance of a row's gradient."""
    keys = jax.random.split(jax.random.key(3), 300)
    found = jax.vmap(
        lambda key: curvature.gradient_noise(key, LOG_JOINT, PARAMS, DATA, batch_size)
    )(keys)
    values = coefficients(PARAMS)
    residuals = EXACT.design @ values - EXACT.observed
    by_row = EXACT.design * residuals[:, None] / 0.5**2 / EXACT.temperature
    expected = ROWS**2 / batch_size * (1 - batch_size / ROWS) * by_row.var(axis=0, ddof=1)
    noise = coefficients(found)
    error = noise.std(axis=0) / np.sqrt(len(keys))
    assert np.all(np.abs(noise.mean(axis=0) - expected) <= 5 * error + 1e-6)
    assert trees.size(found) == 4 * len(keys)
