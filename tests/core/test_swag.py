"""SWAG's moments against the way of SGD itself, and its draws against their formula."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scenarios

from haiku_posteriors.core import curvature, swag
from haiku_posteriors.core.data import take
from haiku_posteriors.core.errors import UserError

pytestmark = pytest.mark.usefixtures("first_device_only")
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(64, 2)).astype(np.float32)
TARGETS = (INPUTS @ [[1.0], [-0.5]] + RNG.normal(size=(64, 1))).astype(np.float32)
BURN_IN, EPOCHS, RANK = 3, 9, 4


@pytest.fixture(scope="module")
def way():
    """States after each epoch."""
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 1.0, 1.0)
    method = swag.swag(exact.log_joint(), optax.sgd(2e-3), 16, rank=RANK, num_burn_in=BURN_IN)
    state = method.init(jax.random.key(0), None)
    step, data, states = jax.jit(method.step), exact.data(), []
    for epoch in range(EPOCHS):
        state, _ = step(jax.random.key(epoch), state, data)
        states.append(state)
    return method, states


def test_moments_are_those_of_the_way(way):
    """Mean, variance and the last deviations, each from the mean of its own epoch."""
    _, states = way
    path = np.array([scenarios.coefficients(state.params) for state in states])[BURN_IN:]
    last = states[-1]
    np.testing.assert_allclose(scenarios.coefficients(last.mean), path.mean(axis=0), rtol=1e-5)
    variance = scenarios.coefficients(last.scatter) / len(path)
    np.testing.assert_allclose(variance, path.var(axis=0), rtol=1e-3)
    deviations = [path[n] - path[: n + 1].mean(axis=0) for n in range(len(path))][-RANK:]
    np.testing.assert_allclose(scenarios.coefficients(last.deviations), deviations, atol=1e-5)


def test_draws_have_the_covariance_of_the_formula(way):
    """40,000 draws; 5 standard errors for each of 3 means and 9 covariances."""
    method, states = way
    draws = jax.jit(lambda key: method.sample(key, states[-1], 40_000))(jax.random.key(5))
    path = np.array([scenarios.coefficients(state.params) for state in states])[BURN_IN:]
    columns = np.array([path[n] - path[: n + 1].mean(axis=0) for n in range(len(path))][-RANK:]).T
    covariance = np.diag(path.var(axis=0)) / 2 + columns @ columns.T / (2 * (RANK - 1))
    scenarios.assert_gaussian_moments(
        scenarios.coefficients(draws), path.mean(axis=0), covariance, allowance=1e-3
    )


@pytest.mark.slow
def test_the_nearest_step_gives_the_posteriors_size():
    """Of a linear model: variances along SGD, on average over coordinates, are the posterior's.

    Mandt et al.'s rule is for noise that is independent from step to step, which it is not in an
    epoch of shuffled minibatches, and for small steps: minibatches of two rows, drawn anew. The
    allowance of 15 % is for the step's length (3 %) and noise that depends on the position.
    """
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 1.0, 1.0)
    log_joint, data = exact.log_joint(), exact.data()
    mean = exact.mean.astype(np.float32)
    params = {"linear": {"b": jnp.asarray(mean[:1]), "w": jnp.asarray(mean[1:, None])}}
    noise = curvature.gradient_noise(jax.random.key(0), log_joint, params, data, 2)
    total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(noise))
    step = swag.nearest_step_size(3, total, jnp.asarray(1e-6), 0.0)
    gradient = jax.grad(log_joint)

    def move(params, key):
        rows = jax.random.permutation(key, 64)[:2]
        weights = jnp.full(2, 32.0)
        g = gradient(params, take(data, rows, weights))
        params = jax.tree.map(lambda w, g: w + step * g, params, g)
        return params, params

    keys = jax.random.split(jax.random.key(1), 40_000)
    path = scenarios.coefficients(jax.jit(lambda k: jax.lax.scan(move, params, k)[1])(keys))
    ratio = np.mean(path.var(axis=0) / np.diag(exact.covariance))
    assert 0.85 < ratio < 1.15, ratio


def test_refuses_one_deviation():
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 1.0, 1.0)
    with pytest.raises(UserError, match="rank"):
        swag.swag(exact.log_joint(), rank=1)
