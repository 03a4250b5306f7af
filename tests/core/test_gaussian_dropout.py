"""Gaussian dropout: its divergences against quadrature, and weights that the data do not need."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scenarios
import scipy.integrate
import scipy.linalg
import scipy.optimize
import scipy.stats

from haiku_posteriors.core import gaussian_dropout
from haiku_posteriors.core.errors import UserError

pytestmark = pytest.mark.usefixtures("first_device_only")


def log_uniform_divergence(log_alpha):
    """-KL + C = 1/2 log alpha - E_{x ~ N(1, alpha)} log |x|, by quadrature on both sides of 0."""
    std = np.exp(log_alpha / 2)

    def integrand(x):
        return np.log(abs(x)) * scipy.stats.norm.pdf(x, 1, std)

    ends = (1 - 12 * std, 1 + 12 * std)
    pieces = sorted({*ends, *(x for x in (0.0, 1 - std, 1.0, 1 + std) if ends[0] < x < ends[1])})
    total = sum(
        scipy.integrate.quad(integrand, a, b, limit=200)[0] for a, b in itertools.pairwise(pieces)
    )
    return 0.5 * log_alpha - total


def test_the_log_uniform_divergence_is_within_a_hundredth_of_a_nat():
    """Up to its constant, fixed at large alpha, where both are flat."""
    values = np.array([-8.0, -5.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0, 12.0])
    exact = np.array([log_uniform_divergence(value) for value in values])
    found = gaussian_dropout.negative_divergence(jnp.asarray(values), "log_uniform")
    np.testing.assert_allclose(found - found[-1], exact - exact[-1], atol=0.012)


def test_the_learned_priors_divergence_is_exact():
    """KL(N(theta, s^2) || N(0, theta^2 + s^2)), and no other variance has a smaller one."""
    theta, sigma = 0.7, 0.4

    def divergence(variance):
        return 0.5 * ((theta**2 + sigma**2) / variance - 1 + np.log(variance / sigma**2))

    best = divergence(theta**2 + sigma**2)
    assert all(divergence(f * (theta**2 + sigma**2)) > best for f in (0.9, 1.1))
    log_alpha = jnp.asarray(np.log(sigma**2 / theta**2))
    found = gaussian_dropout.negative_divergence(log_alpha, "empirical_bayes")
    np.testing.assert_allclose(-found, best, rtol=1e-5)


def best_of_one_weight(z, prior):
    """theta and log alpha for a least-squares estimate of z standard errors, in their units.

    maximise  -((theta - z)^2 + sigma^2) / 2 + (-KL)  from theta = z, sigma = 1, numerically.
    """

    def loss(point):
        theta, log_sigma = point
        log_alpha = 2 * log_sigma - np.log(theta**2 + 1e-16)
        fit = ((theta - z) ** 2 + np.exp(2 * log_sigma)) / 2
        return fit - float(gaussian_dropout.negative_divergence(jnp.asarray(log_alpha), prior))

    theta, log_sigma = scipy.optimize.minimize(loss, (z, 0.0), method="Nelder-Mead").x
    return theta, 2 * log_sigma - np.log(theta**2 + 1e-16)


@pytest.mark.slow
@pytest.mark.parametrize("prior", gaussian_dropout.PRIORS)
def test_weights_that_the_data_do_not_need_go(prior):
    """Orthogonal inputs: every weight is at the optimum of its own, kept or removed.

    With a learned prior that is known: z^2 < 1 goes, and others shrink by 1 - 1 / z^2.
    """
    z = np.array([40.0, -30.0, 3.0, 0.3, -0.5, 0.1, 0.0, 0.4])
    inputs = np.tile(scipy.linalg.hadamard(16)[:, 1:9], (12, 1)).astype(np.float32)
    unit = 0.5 / np.sqrt(len(inputs))  # a standard error, of noise of 0.5
    targets = (inputs @ (unit * z[:, None])).astype(np.float32)
    exact = scenarios.LinearGaussian(inputs, targets, 0.5, 1.0)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 6000))
    method = gaussian_dropout.gaussian_dropout(
        exact.log_joint(), optimizer, len(inputs), prior=prior, num_samples=4, estimator="local"
    )
    data = exact.data()

    @jax.jit
    def run(state):
        keys = jax.random.split(jax.random.key(1), 6000)
        return jax.lax.scan(lambda s, key: (method.step(key, s, data)[0], None), state, keys)[0]

    weights = jnp.asarray(unit * z[:, None], jnp.float32)
    start = method.init(jax.random.key(0), {"linear": {"w": weights, "b": jnp.zeros(1)}})
    draws = np.asarray(method.sample(jax.random.key(2), run(start), 4000)["linear"]["w"])[..., 0]
    best = np.array([best_of_one_weight(value, prior) for value in z])
    goes = best[:, 1] > gaussian_dropout.PRUNE_ABOVE
    assert goes.tolist() == (abs(z) < 1).tolist()
    assert np.all((draws == 0) == goes)
    # Draws of 4,000 have a mean to 0.016 standard errors, and Adam stays within 0.05 of its end.
    np.testing.assert_allclose(draws.mean(axis=0)[~goes] / unit, best[~goes, 0], atol=0.12)
    if prior == "empirical_bayes":
        np.testing.assert_allclose(best[~goes, 0], z[~goes] - 1 / z[~goes], atol=1e-3)


def test_refuses_a_temperature():
    exact = scenarios.LinearGaussian(*(np.ones((4, 1), np.float32),) * 2, 1.0, 1.0, 0.5)
    with pytest.raises(UserError, match="temperature"):
        gaussian_dropout.gaussian_dropout(exact.log_joint())
