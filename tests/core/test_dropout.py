"""Monte Carlo dropout: its draws and its training noise have one law, with known moments."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scenarios import assert_mean

from haiku_posteriors.core import dropout, trees
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import categorical, gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import models

RATE = 0.3
GENERATOR = np.random.default_rng(0)
INPUTS = GENERATOR.normal(size=(9, 4)).astype(np.float32)
TARGETS = GENERATOR.normal(size=(9, 1)).astype(np.float32)
DATA = jax.tree.map(jnp.asarray, make_data(INPUTS, TARGETS))


def two_layers(inputs):
    return hk.Linear(1, name="second")(hk.Linear(5, name="first")(inputs))


def build(network=two_layers, **settings):
    prior = settings.pop("prior", make_prior(2.0))
    return make_log_joint(
        network, INPUTS, prior, settings.pop("likelihood", gaussian(0.5)), **settings
    )


def params_of(log_joint):
    shapes = log_joint.shapes
    generator = np.random.default_rng(1)
    return jax.tree.map(lambda s: jnp.asarray(generator.normal(size=s.shape), s.dtype), shapes)


def check_moments(draws, mean, variance):
    """Means as in `scenarios`; variances to 6 %."""
    assert_mean(draws, mean)
    np.testing.assert_allclose(draws.var(axis=0), variance, rtol=0.06)


def test_draws_and_training_noise_have_the_analytic_moments():
    """y = sum_k z_k h_k w_k / (1 - p) + b: mean h w + b, variance p / (1 - p) sum (h_k w_k)^2.

    Between rows, one draw of weights has covariance p / (1 - p) sum h_k h'_k w_k^2; the masks of
    training have none.
    """
    log_joint = build()
    params = params_of(log_joint)
    method = dropout.mc_dropout(log_joint, RATE)
    hidden = INPUTS @ np.asarray(params["first"]["w"], float) + np.asarray(params["first"]["b"])
    terms = hidden * np.asarray(params["second"]["w"][:, 0], float)
    mean = terms.sum(axis=1) + float(params["second"]["b"][0])
    covariance = RATE / (1 - RATE) * terms @ terms.T

    state = method.init(jax.random.key(0), params)
    weights = jax.jit(method.sample, static_argnums=2)(jax.random.key(1), state, 20_000)
    outputs = jax.jit(jax.vmap(log_joint.network, (0, None)))(weights, INPUTS)
    outputs = np.asarray(outputs[:, :, 0], float)
    check_moments(outputs, mean, np.diag(covariance))
    np.testing.assert_allclose(np.cov(outputs.T), covariance, atol=0.06 * np.abs(covariance).max())

    calls = noisy_layers.calls_with_rows(log_joint.network, params, INPUTS)
    assert [(call.module, by_row) for call, by_row in calls] == [("first", True), ("second", True)]
    noisy = dropout.dropout_network(log_joint.network, {"second": True}, RATE)
    keys = jax.random.split(jax.random.key(2), 20_000)
    outputs = jax.jit(jax.vmap(lambda key: noisy(key, {"params": params}, INPUTS)))(keys)
    outputs = np.asarray(outputs[:, :, 0], float)
    check_moments(outputs, mean, np.diag(covariance))
    off_diagonal = np.cov(outputs.T) - np.diag(np.diag(covariance))
    assert np.abs(off_diagonal - np.diag(np.diag(off_diagonal))).max() < 0.1 * covariance.max()


def test_a_draw_masks_whole_input_channels_and_nothing_else():
    def network(inputs):
        images = inputs.reshape(-1, 2, 2, 1)
        hidden = jax.nn.relu(hk.Conv2D(3, 2, name="first")(images))
        hidden = jax.nn.relu(hk.Conv2D(4, 2, name="second")(hidden))
        return hk.Linear(1, name="last")(hidden.mean(axis=(1, 2)))

    log_joint = build(network, likelihood=gaussian(0.5, learn_noise=True))
    params = params_of(log_joint)
    method = dropout.mc_dropout(log_joint, RATE)
    state = method.init(jax.random.key(0), params)
    draws = trees.named_leaves(
        jax.jit(method.sample, static_argnums=2)(jax.random.key(1), state, 2000)
    )
    masked = {"second/w", "last/w"}
    for name, value in trees.named_leaves(params).items():
        if name not in masked:
            assert np.all(draws[name] == value), name
            continue
        ratios = np.asarray(draws[name] / value)
        assert np.allclose(np.unique(ratios.round(4)), [0, 1 / (1 - RATE)], atol=1e-3), name
        flat = np.moveaxis(ratios, -2, 1).reshape(2000, value.shape[-2], -1)
        assert np.all((flat > 0) == (flat[:, :, :1] > 0)), "a channel is kept or dropped as a whole"
        # A binomial frequency: 5 standard errors.
        kept = (flat[:, :, 0] > 0).mean(axis=0)
        assert np.all(np.abs(kept - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / 2000))
    both = np.corrcoef(draws["second/w"][:, 0, 0, :2, 0].T)[0, 1]
    assert abs(both) < 5 / np.sqrt(2000), "channels are dropped independently"


def test_the_objective_is_the_expected_log_joint_of_the_draws():
    """The reported log-joint, averaged over keys, against that of drawn weights; z at 5."""
    log_joint = build(prior=make_prior(2.0, "laplace"), temperature=0.5)
    params = params_of(log_joint)
    method = dropout.mc_dropout(log_joint, RATE, optax.sgd(0.0), batch_size=9)
    state = method.init(jax.random.key(0), params)
    keys = jax.random.split(jax.random.key(3), 4000)
    _, info = jax.jit(jax.vmap(method.step, (0, None, None)))(keys, state, DATA)
    draws = jax.jit(method.sample, static_argnums=2)(jax.random.key(4), state, 20_000)
    values = jax.jit(jax.vmap(log_joint, (0, None)))(draws, DATA)
    ours, theirs = np.asarray(info["log_joint"][:, 0], float), np.asarray(values, float)
    error = np.sqrt(ours.var() / len(ours) + theirs.var() / len(theirs))
    assert abs(ours.mean() - theirs.mean()) < 5 * error
    priors = ours - np.asarray(info["expected_log_likelihood"][:, 0], float)
    assert priors.std() < 1e-3, "the log-prior's expectation is in closed form"
    expected = np.mean(np.asarray(jax.jit(jax.vmap(log_joint.log_prior))(draws), float)) / 0.5
    assert priors.mean() == pytest.approx(expected, rel=0.01)


def test_a_rate_of_zero_is_the_map_estimate():
    log_joint = build(num_microbatches=2)
    method = dropout.mc_dropout(log_joint, 0.0, optax.sgd(1e-3), batch_size=9)
    state = method.init(jax.random.key(0), params_of(log_joint))
    new, info = jax.jit(method.step)(jax.random.key(1), state, DATA)
    value, gradient = jax.jit(jax.value_and_grad(log_joint))(state.params, DATA)
    assert float(info["log_joint"][0]) == pytest.approx(float(value), rel=1e-5)
    for before, after, slope in zip(
        *map(jax.tree.leaves, (state.params, new.params, gradient)), strict=True
    ):
        np.testing.assert_allclose(after, before + 1e-3 * slope, rtol=1e-4, atol=1e-5)


def test_which_modules_are_dropped():
    def modules(name, shape, dtype=np.float32, **settings):
        inputs = np.zeros(shape, dtype)
        log_joint = make_log_joint(
            models.get_network(name, 2), inputs, make_prior(1.0), categorical(2), **settings
        )
        return dropout.dropped_modules(log_joint)

    assert modules("mlp_20_20", (2, 1)) == ("hidden_1", "output")
    assert modules("mlp_20_20", (2, 1), stochastic_params="output") == ("output",)
    assert modules("mlp_20_20", (2, 1), stochastic_params="/b$") == ()
    assert modules("cnn_lstm", (2, 20), np.int32) == ("lstm/linear", "output")
    assert dropout.dropped_modules(build(), drop_inputs=True) == ("first", "second")


def test_tied_weights_are_not_dropped():
    """Dropped in the calls only, draws and training would have other laws: here, other means.

    y = x W W^T v: under a mask z of rows of W the mean over draws is not that over masked calls.
    """

    def network(inputs):
        layer = hk.Linear(4, with_bias=False, name="tied")
        hidden = layer(hk.Linear(4, name="first")(inputs))
        return hk.Linear(1, name="last")(hidden @ layer.params_dict()["tied/w"].T)

    log_joint = build(network)
    assert dropout.dropped_modules(log_joint) == ("last",)
    params = params_of(log_joint)
    method = dropout.mc_dropout(log_joint, RATE)
    state = method.init(jax.random.key(0), params)
    draws = jax.jit(method.sample, static_argnums=2)(jax.random.key(1), state, 4000)
    outputs = np.asarray(jax.jit(jax.vmap(log_joint.network, (0, None)))(draws, INPUTS), float)
    assert_mean(outputs[:, :, 0], np.asarray(log_joint.network(params, INPUTS))[:, 0])


def test_a_recurrent_network_trains():
    """The mask of a module inside a scan is the same at every step, as that of its weights."""

    def network(inputs):
        core = hk.VanillaRNN(3)
        _, state = hk.dynamic_unroll(
            core, inputs.T[:, :, None], core.initial_state(inputs.shape[0])
        )
        return hk.Linear(1)(state)

    log_joint = build(network)
    params = params_of(log_joint)
    method = dropout.mc_dropout(log_joint, 0.5, batch_size=4)
    state = method.init(jax.random.key(0), params)
    draws = jax.jit(method.sample, static_argnums=2)(jax.random.key(1), state, 4000)
    outputs = np.asarray(jax.jit(jax.vmap(log_joint.network, (0, None)))(draws, INPUTS), float)
    calls = noisy_layers.calls_with_rows(log_joint.network, params, INPUTS)
    by_row = {
        call.module: rows
        for call, rows in calls
        if call.module in dropout.dropped_modules(log_joint)
    }
    noisy = dropout.dropout_network(log_joint.network, by_row, 0.5)
    keys = jax.random.split(jax.random.key(2), 4000)
    training = np.asarray(
        jax.jit(jax.vmap(lambda key: noisy(key, {"params": params}, INPUTS)))(keys), float
    )
    error = np.sqrt((outputs.var(axis=0) + training.var(axis=0)) / 4000)
    assert np.all(np.abs(outputs.mean(axis=0) - training.mean(axis=0)) < 5 * error)
    np.testing.assert_allclose(outputs.std(axis=0), training.std(axis=0), rtol=0.1)
    _, info = jax.jit(method.step)(jax.random.key(3), state, DATA)
    assert np.all(np.isfinite(info["log_joint"]))


def test_refusals():
    with pytest.raises(UserError, match="dropout_rate must be at least 0 and below 1"):
        dropout.mc_dropout(build(), 1.0)
    with pytest.raises(UserError, match="nothing to drop"):
        dropout.mc_dropout(build(lambda x: hk.Linear(1)(x)))
