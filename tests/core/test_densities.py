"""Mixtures of posteriors with a density, against quadrature and an independent optimiser."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from scenarios import LinearGaussian, assert_mean

from haiku_posteriors.core import densities, vi

INPUTS = np.linspace(-1, 1, 5, dtype=np.float32)[:, None]
MEANS, STDS, WEIGHTS = np.array([-0.4, 0.9]), np.array([0.5, 0.2]), np.array([0.3, 0.7])


def members_of_one_weight():
    """Two mean-field posteriors of y = x w."""
    raw = np.log(np.expm1(STDS))
    leaves = (jnp.asarray(x.reshape(2, 1, 1), jnp.float32) for x in (MEANS, raw))
    mean, raw_scale = ({"linear": {"w": leaf}} for leaf in leaves)
    return vi.VariationalParams(mean, raw_scale, {"linear": {"w": None}}, {})


def test_the_elbo_of_a_mixture_is_that_of_quadrature():
    model = LinearGaussian(INPUTS, 0.6 * INPUTS + 0.1, 0.8, 1.3, with_bias=False)
    log_joint, data = model.log_joint(), model.data()
    family, members = vi.MeanFieldFamily(log_joint), members_of_one_weight()
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    grid = np.linspace(-5, 5, 2001)
    step = grid[1] - grid[0]

    @jax.jit
    def evaluate(grid):
        params = {"linear": {"w": grid[:, None, None]}}
        mixture = jax.vmap(lambda w: densities.log_mixture_density(family, members, weights, w))(
            params
        )
        terms = [
            densities.elbo_terms(
                jax.random.key(k), family, members, weights, jnp.array(k), data, 4000
            )
            for k in range(2)
        ]
        first = jax.tree.map(lambda leaf: leaf[0], members)
        ratios = densities.log_importance_ratios(
            jax.random.key(2), family, log_joint, first, data, 4000
        )
        return mixture, jax.vmap(lambda w: log_joint(w, data))(params), terms, ratios

    mixture, joint, terms, ratios = evaluate(jnp.asarray(grid, jnp.float32))
    weights_of_pairs = np.exp(np.asarray(ratios, float) - model.log_evidence()).reshape(2, -1)
    assert_mean(weights_of_pairs.mean(axis=0), 1.0)
    each = scipy.stats.norm.pdf(grid[:, None], MEANS, STDS)
    density = each @ WEIGHTS
    near = density > 1e-12
    np.testing.assert_allclose(np.asarray(mixture)[near], np.log(density[near]), atol=2e-4)
    joint, logs = np.asarray(joint, float), np.log(np.maximum(density, 1e-300))
    for k, (elbos, gains) in enumerate(terms):
        own = np.log(np.maximum(each[:, k], 1e-300))
        assert_mean(elbos, np.sum(each[:, k] * (joint - own)) * step)
        assert_mean(gains, np.sum(each[:, k] * (own - logs)) * step)
    value = sum(w * np.mean(a + b) for w, (a, b) in zip(WEIGHTS, terms, strict=True))
    expected = np.sum(density * (joint - logs)) * step
    assert value == pytest.approx(expected, abs=0.05)
    assert expected < model.log_evidence()


def test_one_member_is_its_own_mixture():
    model = LinearGaussian(INPUTS, INPUTS, 0.8, 1.3, with_bias=False)
    members = jax.tree.map(lambda leaf: leaf[:1], members_of_one_weight())
    family = vi.MeanFieldFamily(model.log_joint(hk_linear))
    _, gains = densities.elbo_terms(
        jax.random.key(0), family, members, jnp.ones(1), jnp.array(0), model.data(), 4
    )
    np.testing.assert_array_equal(gains, np.zeros(2))


def hk_linear(inputs):
    return hk.Linear(1, with_bias=False)(inputs)


def test_stacking_weights_are_the_best():
    """Against SciPy's optimiser over the simplex, by softmax; the third member is never best."""
    scores = np.random.default_rng(0).normal(size=(40, 3)) - np.array([0.0, 0.3, 4.0])

    def loss(logits):
        weights = np.exp(logits - np.logaddexp.reduce(logits))
        return -np.log(np.exp(scores) @ weights).sum()

    best = -scipy.optimize.minimize(loss, np.zeros(3), tol=1e-12).fun
    weights = densities.stacking_weights(scores)
    assert weights.sum() == pytest.approx(1) and weights[2] < 0.02
    assert np.log(np.exp(scores) @ weights).sum() == pytest.approx(best, abs=1e-3)
