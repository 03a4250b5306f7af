"""Laplace's approximation against posteriors and evidences that are known."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scenarios

from haiku_posteriors.core import gauss_newton, laplace, trees
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import (
    bernoulli,
    categorical,
    gaussian,
    heteroscedastic_gaussian,
)
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

pytestmark = pytest.mark.usefixtures("first_device_only")
RNG = np.random.default_rng(0)
INPUTS = (RNG.normal(size=(60, 3)) @ RNG.normal(size=(3, 3))).astype(np.float32)
TARGETS = (INPUTS @ [[1.0], [-0.5], [0.2]] + RNG.normal(size=(60, 1))).astype(np.float32)


def at_mode(exact):
    """The parameters at the posterior's mode."""
    mean = exact.mean.astype(np.float32)
    return {"linear": {"b": jnp.asarray(mean[:1]), "w": jnp.asarray(mean[1:, None])}}


def fit(log_joint, structure, params, data):
    method = laplace.laplace(log_joint, structure)
    state, info = jax.jit(method.step)(
        jax.random.key(0), method.init(jax.random.key(0), params), data
    )
    return method, state, info


@pytest.mark.parametrize("structure", ["kron", "full", "last_layer", "diagonal"])
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.3])
def test_is_exact_on_a_linear_gaussian_model(structure, temperature):
    """Mean and covariance of 20,000 draws, and the evidence; 5 standard errors each.

    The diagonal one has the diagonal of the precision, and none of its correlations.
    """
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 0.9, 0.7, temperature)
    log_joint, data = exact.log_joint(), exact.data()
    method, state, info = fit(log_joint, structure, at_mode(exact), data)
    draws = jax.jit(lambda key: method.sample(key, state, 20_000))(jax.random.key(1))
    covariance = exact.covariance
    if structure == "diagonal":
        covariance = np.diag(exact.mean_field_std() ** 2)
    scenarios.assert_gaussian_moments(scenarios.coefficients(draws), exact.mean, covariance)
    if structure == "last_layer":
        assert "log_evidence" not in info
    else:
        gap = exact.mean_field_gap() if structure == "diagonal" else 0.0
        np.testing.assert_allclose(info["log_evidence"], exact.log_normaliser() - gap, rtol=2e-5)


LIKELIHOODS = {
    "categorical": (categorical(3), RNG.integers(0, 3, 8).astype(np.int32)),
    "bernoulli": (bernoulli(), RNG.integers(0, 2, 8).astype(np.int32)),
    "gaussian": (gaussian(0.4, 2), RNG.normal(size=(8, 2)).astype(np.float32)),
    "heteroscedastic": (
        heteroscedastic_gaussian(1),
        RNG.normal(size=(8, 1)).astype(np.float32),
    ),
}


def expected_precision(log_joint, params, inputs):
    """The sum of J' H J over rows, H from the definition E_y[grad log p grad log p'] (no roots)."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    jacobian = np.asarray(
        jax.jacrev(lambda flat: log_joint.network(unravel(flat), inputs))(flat), float
    )
    outputs = log_joint.network(params, inputs)
    if isinstance(log_joint.likelihood.curvature_root, type(None)):
        h = np.array([np.diag(row) for row in log_joint.likelihood.curvature(outputs, {})], float)
    else:
        p = np.asarray(jax.nn.softmax(outputs), float)
        h = np.array([np.diag(row) - np.outer(row, row) for row in p])
    return np.einsum("rkd,rkl,rle->de", jacobian, h, jacobian)


@pytest.mark.slow  # linear models have the same sums
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_gauss_newton_of_a_network(name):
    """The full precision of a nonlinear network is that of Jacobians and Fisher information."""
    likelihood, targets = LIKELIHOODS[name]
    inputs = RNG.normal(size=(8, 2)).astype(np.float32)

    def network(x):
        return hk.nets.MLP([3, likelihood.num_outputs], activation=jnp.tanh)(x)

    log_joint = make_log_joint(network, inputs, make_prior(2.0), likelihood, temperature=0.5)
    params = log_joint.init(jax.random.key(3))
    data = jax.tree.map(jnp.asarray, make_data(inputs, targets))
    _, state, _ = fit(log_joint, "full", params, data)
    root = np.asarray(state.root, float)
    precision = np.linalg.inv(root.T @ root) * 2.0 / 0.5  # in units of the prior's deviations
    expected = expected_precision(log_joint, params, inputs)
    expected = (expected + 2.0 * np.eye(len(expected))) / 0.5
    np.testing.assert_allclose(precision, expected, rtol=1e-3, atol=1e-3)
    diagonal = fit(log_joint, "diagonal", params, data)[1].precision
    flat = np.concatenate([np.ravel(diagonal[name]) for name in trees.named_leaves(params)])
    np.testing.assert_allclose(flat, np.diag(expected), rtol=1e-4)


def test_kronecker_factors_of_a_convolution():
    """By hand: patches and gradients of every row and position, with loops."""
    images = RNG.normal(size=(6, 4, 4, 2)).astype(np.float32)
    labels = RNG.integers(0, 3, 6).astype(np.int32)

    def network(x):
        x = jax.nn.relu(hk.Conv2D(3, 2, padding="VALID", name="conv")(x))
        return hk.Linear(3, name="head")(x.reshape(len(x), -1))

    log_joint = make_log_joint(network, images, make_prior(1.5), categorical(3))
    params = log_joint.init(jax.random.key(0))
    data = jax.tree.map(jnp.asarray, make_data(images, labels))
    _, state, _ = fit(log_joint, "kron", params, data)
    block = state.layers["conv"]
    scale = 1 / np.sqrt(1.5)
    patches = np.array(
        [
            [
                np.append(image[i : i + 2, j : j + 2].ravel(), 1.0)
                for i in range(3)
                for j in range(3)
            ]
            for image in images
        ]
    )  # (rows, positions, D)
    features = scale**2 * np.einsum("rpd,rpe->de", patches, patches)
    found = block.feature_vectors * block.features @ block.feature_vectors.T
    np.testing.assert_allclose(found, features, rtol=1e-4, atol=1e-4)
    # The conv's outputs at each position as inputs of the rest.
    weights = np.asarray(params["conv"]["w"]).reshape(-1, 3)
    hidden = patches[..., :-1] @ weights + np.asarray(params["conv"]["b"])
    head = np.asarray(params["head"]["w"])
    logits = np.maximum(hidden, 0).reshape(6, -1) @ head + np.asarray(params["head"]["b"])
    gradients = np.zeros((3, 3))
    for row in range(6):
        p = np.exp(logits[row] - logits[row].max())
        p /= p.sum()
        fisher = np.diag(p) - np.outer(p, p)
        slopes = (hidden[row] > 0)[..., None] * head.reshape(9, 3, 3)  # position, unit, logit
        gradients += np.einsum("puk,kl,pvl->uv", slopes, fisher, slopes)
    found = block.gradient_vectors * block.gradients @ block.gradient_vectors.T
    np.testing.assert_allclose(found, gradients / 54, rtol=1e-4, atol=1e-6)


def test_learned_noise_has_its_own_curvature():
    """Precision of log_noise_std, its prior included: 2 (sum r^2 + (noise_std / 3)^2) / sigma^2."""
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 0.9, 0.7)
    log_joint = exact.log_joint(likelihood=gaussian(0.9, learn_noise=True))
    params = at_mode(exact) | {"likelihood": {"log_noise_std": jnp.log(jnp.array(0.8))}}
    _, state, _ = fit(log_joint, "kron", params, exact.data())
    squares = np.sum((exact.observed - exact.design @ exact.mean) ** 2)
    expected = 2 * (squares + 0.3**2) / 0.8**2
    np.testing.assert_allclose(state.precision["likelihood/log_noise_std"], expected, rtol=1e-4)


@pytest.mark.slow
def test_pieces_of_rows_do_not_matter(monkeypatch):
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 0.9, 0.7)
    log_joint, data = exact.log_joint(scenarios.tanh_mlp), exact.data()
    params = log_joint.init(jax.random.key(0))
    whole = [fit(log_joint, s, params, data)[2]["log_evidence"] for s in ("kron", "full")]
    monkeypatch.setattr(gauss_newton, "ROWS_AT_ONCE", 7)
    pieces = [fit(log_joint, s, params, data)[2]["log_evidence"] for s in ("kron", "full")]
    np.testing.assert_allclose(pieces, whole, rtol=1e-5)


def test_refuses_what_it_cannot_do():
    exact = scenarios.LinearGaussian(INPUTS, TARGETS, 0.9, 0.7)
    with pytest.raises(UserError, match="Gaussian prior"):
        laplace.laplace(exact.log_joint(prior=make_prior(1.0, "laplace")))
    with pytest.raises(UserError, match="structure"):
        laplace.laplace(exact.log_joint(), "block")
    wide = exact.log_joint(lambda x: hk.nets.MLP([2000, 1])(x))
    with pytest.raises(UserError, match="at most 5,000"):
        laplace.laplace(wide, "full")
    unknown = dataclasses.replace(exact.log_joint(), input_shapes=None)
    with pytest.raises(UserError, match="known inputs"):
        laplace.laplace(unknown)
