"""Simulated data have the law they are given, and exact posterior draws uniform ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scenarios import assert_mean, linear

from haiku_posteriors.core import simulation
from haiku_posteriors.core.judging import calibration_ranks
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior

INPUTS = np.linspace(-1, 2, 6, dtype=np.float32)[:, None]
NOISE, NUM_DATA_SETS, NUM_DRAWS = 0.5, 600, 15
LOG_JOINT = make_log_joint(linear, INPUTS, make_prior(1.0), gaussian(NOISE))


def exact_method(scale):
    """One step finds the posterior in closed form; draws of it, `scale` times too wide."""
    design = jnp.concatenate([jnp.ones_like(INPUTS), INPUTS], axis=1)
    precision = design.T @ design / NOISE**2 + jnp.eye(2)
    factor = scale * jnp.linalg.cholesky(jnp.linalg.inv(precision))

    def step(rng_key, state, data):
        return jnp.linalg.solve(precision, design.T @ data.targets[:, 0] / NOISE**2), {}

    def sample(rng_key, state, num_draws):
        noise = jax.random.normal(rng_key, (num_draws, 2))
        b, w = jnp.split(state + noise @ factor.T, 2, axis=1)
        return {"linear": {"b": b, "w": w[..., None]}}

    return Method(lambda rng_key, params: jnp.zeros(2), step, sample)


def quantities(params, data):
    log_value = LOG_JOINT.log_prior(params) + LOG_JOINT.log_likelihood(params, data)
    return jnp.stack([params["linear"]["b"][0], params["linear"]["w"][0, 0], log_value])


def simulated(method, thinning):
    def one(index):
        key = jax.random.fold_in(jax.random.key(0), index)
        params, data = simulation.simulate_regression(key, LOG_JOINT, jnp.asarray(INPUTS))
        draws = simulation.posterior_draws(
            jax.random.fold_in(jax.random.key(1), index),
            method,
            data,
            quantities,
            num_draws=NUM_DRAWS,
            num_steps=1,
            thinning=thinning,
        )
        return quantities(params, data), draws, data.targets[:, 0]

    return map(np.asarray, jax.jit(jax.vmap(one))(jnp.arange(NUM_DATA_SETS)))


def overall_p_value(true_values, draws):
    ranks = calibration_ranks.ranks(np.random.default_rng(0), true_values, draws)
    envelope = calibration_ranks.Envelope(NUM_DATA_SETS, NUM_DRAWS)
    return calibration_ranks.overall_p_value(
        [calibration_ranks.deviation(column, envelope) for column in ranks.T]
    )


@pytest.mark.parametrize("thinning", [None, 2])
def test_exact_draws_have_uniform_ranks(thinning):
    """A correct one fails one time in 1,000; the seed is fixed."""
    true_values, draws, targets = simulated(exact_method(1.0), thinning)
    assert draws.shape == (NUM_DATA_SETS, NUM_DRAWS, 3)
    assert len(np.unique(draws[0, :, 0])) == NUM_DRAWS
    assert overall_p_value(true_values, draws) > 1e-3
    assert_mean(targets**2, NOISE**2 + 1 + INPUTS[:, 0] ** 2)


def test_draws_a_quarter_too_wide_are_detected():
    true_values, draws, _ = simulated(exact_method(1.25), None)
    assert overall_p_value(true_values, draws) < 1e-3
