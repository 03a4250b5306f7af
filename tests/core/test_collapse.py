"""The output layer integrated out: density, gradient, redrawn layer, and the same posterior."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.test_util import check_grads
from scenarios import assert_mean_of_chains, chain_keys, run_chains, standard_errors, tanh_mlp

from haiku_posteriors.core.collapse import collapse, collapsed
from haiku_posteriors.core.data import make_data, pad
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.hmc import hmc
from haiku_posteriors.core.likelihoods import gaussian, heteroscedastic_gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

INPUTS = np.random.default_rng(0).normal(size=(12, 2))
TARGETS = np.sin(2 * INPUTS[:, :1]) + 0.3 * INPUTS[:, 1:]
PRIOR = make_prior(1.0, groups=[("linear_1/b", 4.0)])  # a bias of another scale than the weights


def make(temperature=1.0, inputs=INPUTS, targets=TARGETS, network=tanh_mlp, **settings):
    arguments = {"prior": PRIOR, "likelihood": gaussian(0.3, targets.shape[1], learn_noise=True)}
    log_joint = make_log_joint(network, inputs, **arguments | settings, temperature=temperature)
    return log_joint, jax.tree.map(jnp.asarray, make_data(inputs, targets))


def closed_form(log_joint, params, targets, temperature):
    """log p(v)/T + log int [N(y; F u, t^2) N(u; 0, S)]^(1/T) du up to a constant, F by hand."""
    hidden = params["mlp/~/linear_0"]
    features = np.tanh(INPUTS @ np.asarray(hidden["w"]) + np.asarray(hidden["b"]))
    design = np.concatenate([features, np.ones((len(INPUTS), 1))], axis=1)
    noise = float(np.exp(params["likelihood"]["log_noise_std"]))
    scales = np.array([1.0] * 4 + [0.5])
    covariance = temperature * (noise**2 * np.eye(len(design)) + (design * scales**2) @ design.T)
    integral = sum(
        scipy.stats.multivariate_normal.logpdf(column, cov=covariance) for column in targets.T
    )
    # N(y; F u, t^2)^(1/T) over N(y; F u, T t^2), as a function of t.
    integral += targets.size * (1 - 1 / temperature) * np.log(noise)
    return float(log_joint.log_prior(params)) / temperature + integral


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_density_and_gradient_are_those_of_the_marginal(temperature):
    """Differences between two points, since constants are free; two targets; padded rows."""
    with jax.enable_x64(True):
        targets = np.concatenate([TARGETS, np.cos(INPUTS[:, :1])], axis=1)

        def network(inputs):
            return hk.nets.MLP([4, 2], activation=jnp.tanh)(inputs)

        log_joint, data = make(temperature, targets=targets, network=network)
        collapsed, data = collapse(log_joint, INPUTS), pad(data, 5)
        points = [collapsed.init(jax.random.key(seed)) for seed in (1, 2)]
        points[1]["likelihood"]["log_noise_std"] = jnp.array(-3.0)
        assert all("mlp/~/linear_1" not in point for point in points)
        expected = [closed_form(collapsed, point, targets, temperature) for point in points]
        found = [float(collapsed(point, data)) for point in points]
        assert found[1] - found[0] == pytest.approx(expected[1] - expected[0], rel=1e-9)
        assert float(collapsed.difference(points[1], points[0], data)) == pytest.approx(
            expected[1] - expected[0], rel=1e-9
        )
        check_grads(lambda v: collapsed(v, data), (points[0],), 1, ["rev"], rtol=1e-5)


@pytest.mark.slow  # float64 beside float32: two programs
def test_single_precision_holds_where_the_noise_is_small():
    """A condition number of some 1e4 for B: normal equations would fail in float32."""
    values = {}
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype == np.float64):
            log_joint, data = make(inputs=INPUTS.astype(dtype), targets=TARGETS.astype(dtype))
            collapsed = collapse(log_joint, INPUTS.astype(dtype))
            first = jax.tree.map(
                lambda leaf: leaf.astype(dtype),  # noqa: B023
                make(inputs=INPUTS.astype(np.float32))[0].init(jax.random.key(1)),
            )
            first.pop("mlp/~/linear_1")
            first["likelihood"]["log_noise_std"] = jnp.array(-7.0, dtype)
            gradient = jax.grad(collapsed)(first, data)["mlp/~/linear_0"]["w"]
            values[dtype] = np.asarray(gradient, float)
    np.testing.assert_allclose(*values.values(), rtol=0.02, atol=1e-2 * np.abs(gradient).max())


def test_the_layer_is_redrawn_from_its_conditional():
    log_joint, data = make(0.7, INPUTS.astype(np.float32), TARGETS.astype(np.float32))
    collapsed = collapse(log_joint, INPUTS.astype(np.float32))
    params = collapsed.init(jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), 20_000)
    drawn = jax.jit(jax.vmap(lambda key: collapsed.redraw(key, params, data)))(keys)
    values = np.concatenate([drawn["w"][:, :, 0], drawn["b"]], axis=1).astype(float)
    hidden = params["mlp/~/linear_0"]
    design = np.tanh(INPUTS @ np.asarray(hidden["w"]) + np.asarray(hidden["b"]))
    design = np.concatenate([design, np.ones((len(INPUTS), 1))], axis=1)
    precision = (design.T @ design / 0.3**2 + np.diag([1, 1, 1, 1, 4.0])) / 0.7
    mean = np.linalg.solve(precision, design.T @ TARGETS[:, 0] / 0.3**2 / 0.7)
    blocks = (values - mean).reshape(20, 1000, 5)  # independent draws: blocks stand for chains
    assert_mean_of_chains(blocks, 0)
    assert_mean_of_chains(blocks[..., :, None] * blocks[..., None, :], np.linalg.inv(precision))


@pytest.mark.slow
def test_the_posterior_is_that_of_all_parameters():
    """Predictions, their squares and the noise by both, to 5 standard errors of both."""
    inputs, targets = INPUTS.astype(np.float32), TARGETS.astype(np.float32)
    log_joint, data = make(inputs=inputs, targets=targets)
    points = jnp.asarray(np.linspace(-2, 2, 5, dtype=np.float32)[:, None] * [[1.0, -0.5]], float)

    def summary(method):
        _, draws, _ = run_chains(method, data, num_chains=4, num_steps=3000)
        outputs = jax.vmap(jax.vmap(lambda p: log_joint.network(p, points)[:, 0]))(draws)
        noise = draws["likelihood"]["log_noise_std"][..., None]
        values = np.concatenate([outputs, outputs**2, noise], axis=-1)[:, 500:].astype(float)
        return values.mean(axis=(0, 1)), standard_errors(values)

    mean, error = summary(hmc(log_joint, num_burn_in=300))
    other, its_error = summary(collapsed(hmc, log_joint, inputs, num_burn_in=300))
    assert np.all(np.abs(mean - other) < 5 * np.hypot(error, its_error))


@pytest.mark.slow
def test_chains_pool_and_draws_have_all_parameters():
    inputs, targets = INPUTS.astype(np.float32), TARGETS.astype(np.float32)
    log_joint, data = make(inputs=inputs, targets=targets)
    method = collapsed(hmc, log_joint, inputs, num_burn_in=40)
    given = jax.vmap(log_joint.init)(chain_keys(jax.random.key(3), 2))
    states = jax.vmap(method.init)(chain_keys(jax.random.key(1), 2), given)
    draws = jax.vmap(method.sample, (0, 0, None))(chain_keys(jax.random.key(2), 2), states, 1)
    for a, b in zip(*map(jax.tree.leaves, (draws, given)), strict=True):
        np.testing.assert_array_equal(a[:, 0], b)
    states, info = jax.jit(jax.vmap(method.step, (0, 0, None)))(
        chain_keys(jax.random.key(4), 2), states, data
    )
    assert np.ptp(method.pool(states).sampler.step_size) == 0 and info["log_joint"].shape == (2,)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"likelihood": heteroscedastic_gaussian()}, "one noise"),
        ({"prior": make_prior(1.0, "laplace")}, "one noise and prior"),
        ({"stochastic_params": "linear_1"}, "neither"),
        ({"num_microbatches": 2}, "neither"),
        ({"network": lambda x: jnp.tanh(hk.Linear(1)(x))}, "ends with an hk.Linear"),
    ],
)
def test_refusals(settings, sentence):
    network = settings.get("network") or (
        lambda x: hk.nets.MLP([4, 2 if "likelihood" in settings else 1], activation=jnp.tanh)(x)
    )
    log_joint, _ = make(inputs=INPUTS.astype(np.float32), **settings | {"network": network})
    with pytest.raises(UserError, match=sentence):
        collapse(log_joint, INPUTS.astype(np.float32))
