"""Students of predictions: their likelihoods in closed form, a chain's student at its optimum."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scenarios

from haiku_posteriors.core import dark_knowledge, sgmcmc
from haiku_posteriors.core.likelihoods import bernoulli, categorical, heteroscedastic_gaussian
from haiku_posteriors.core.priors import make_prior

pytestmark = pytest.mark.usefixtures("first_device_only")
RNG = np.random.default_rng(0)


def test_predictions_as_targets_are_expectations_over_them():
    """E_{y ~ p} log p(y | f) by the sum over classes, and by Gauss-Hermite quadrature over y."""
    outputs = jnp.asarray(RNG.normal(size=(5, 3)), jnp.float32)
    soft = RNG.dirichlet(np.ones(3), size=5).astype(np.float32)
    likelihood = categorical(3)
    by_class = [
        likelihood.log_likelihood(outputs, jnp.full(5, label, jnp.int32), {}) for label in range(3)
    ]
    expected = np.sum(soft * np.stack(by_class, axis=1), axis=1)
    np.testing.assert_allclose(likelihood.log_likelihood(outputs, soft, {}), expected, rtol=1e-5)
    both = [bernoulli().log_likelihood(outputs[:, :1], jnp.full(5, y), {}) for y in (0, 1)]
    expected = np.sum(soft[:, :2] * np.stack(both, axis=1), axis=1)
    found = bernoulli().log_likelihood(outputs[:, :1], jnp.asarray(soft[:, :2]), {})
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)  # exact: log p is quadratic in y
    gaussian = heteroscedastic_gaussian(1)
    mean, std = np.float32(0.3), np.float32(0.7)
    values = [
        gaussian.log_likelihood(
            outputs[:, :2], jnp.full((5, 1), mean + std * node, jnp.float32), {}
        )
        for node in nodes
    ]
    expected = np.tensordot(weights / weights.sum(), np.stack(values), 1)
    targets = jnp.tile(jnp.array([[mean, std]]), (5, 1))
    found = gaussian.log_likelihood(outputs[:, :2], targets, {})
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_a_chains_student_has_the_posterior_predictive():
    """Of a constant with known noise: y ~ N(mu, 1), posterior N(m, v) of mu; the student says both.

    Its mean is m and its variance 1 + v, within the chain's error: 0.1 standard deviations, 5 %.
    """
    inputs = np.zeros((8, 1), np.float32)
    targets = RNG.normal(0.5, 1.0, size=(8, 1)).astype(np.float32)
    exact = scenarios.LinearGaussian(inputs, targets, 1.0, 1.0)
    teacher = exact.log_joint()
    transformation = sgmcmc.sghmc(sgmcmc.constant_with_burn_in(0.02, 0.02, 1), 0.7)
    chain = sgmcmc.sgmcmc(teacher, transformation, 8)
    start = {"linear": {"b": jnp.zeros(1), "w": jnp.zeros((1, 1))}}
    steps = 40_000
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    student = exact.log_joint(
        lambda x: hk.Linear(2)(x),
        likelihood=heteroscedastic_gaussian(1),
        prior=make_prior(1e-4),
    )
    method = dark_knowledge.dark_knowledge(student, teacher, chain, start, optimizer, 8)
    data = exact.data()

    @jax.jit
    def run(state):
        keys = jax.random.split(jax.random.key(1), steps)
        return jax.lax.scan(lambda s, key: (method.step(key, s, data)[0], None), state, keys)[0]

    state = run(method.init(jax.random.key(0), None))
    mean, std = np.asarray(student.predict(state.params, inputs))[0]
    variance = exact.covariance[0, 0]
    assert abs(mean - exact.mean[0]) < 0.1 * np.sqrt(variance)
    np.testing.assert_allclose(std**2, 1 + variance, rtol=0.05)
