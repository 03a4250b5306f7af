"""Intercepted layers against NumPy, their joint law against that of drawn weights, and coverage."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core import approximate_normals
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import models

IMAGES = np.random.default_rng(0).normal(size=(3, 6, 5, 2)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)


def transform(network, inputs, seed=0):
    """(params, inputs) -> outputs, and parameters with random biases, so that these count."""
    transformed = hk.without_apply_rng(hk.transform(network))
    shapes = jax.eval_shape(transformed.init, jax.random.key(0), inputs)
    generator = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), leaf.dtype), shapes
    )
    return transformed.apply, params


def scales_like(params, seed=1):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.2 + generator.random(leaf.shape), leaf.dtype), params
    )


def noisy(network, params, scales, inputs, estimator):
    """key -> outputs, with all parameters covered, as they must be."""
    modules = noisy_layers.covered_modules(network, params, inputs, estimator)
    assert set(modules) == set(params)
    apply = noisy_layers.noisy_network(network, modules, estimator)

    def run(key):
        spread = scales
        if estimator == "flipout":
            draws = [
                scale * jax.random.normal(jax.random.fold_in(key, 10 + index), scale.shape)
                for index, scale in enumerate(jax.tree.leaves(scales))
            ]
            spread = jax.tree.unflatten(jax.tree.structure(scales), draws)
        return apply(jax.random.fold_in(key, 1), {"params": params, "spread": spread}, inputs)

    return run


def test_noise_of_layers_is_the_default_where_it_is_exact():
    """Not where rows meet a kernel at several positions, nor for images, which are flattened."""

    def default(network, inputs):
        log_joint = make_log_joint(network, inputs, make_prior(1.0), gaussian(0.1))
        return noisy_layers.default_estimator(log_joint)

    def convolves(x):
        return hk.Linear(1)(hk.Flatten()(hk.Conv1D(2, 3)(x[..., None])))

    assert default(lambda x: hk.nets.MLP([3, 1])(x), ROWS) == "local"
    assert default(convolves, ROWS) == "reparameterization"
    assert default(lambda x: hk.Linear(1)(hk.Flatten()(x)), IMAGES) == "reparameterization"


def test_local_linear_equals_numpy_for_given_noise(monkeypatch):
    noise = np.random.default_rng(2).normal(size=(7, 3)).astype(np.float32)
    network, params = transform(lambda x: hk.Linear(3)(x), ROWS)
    scales = scales_like(params)

    def normal_like(key, outputs):
        assert outputs.shape == noise.shape, "one number a row and output"
        return jnp.asarray(noise, outputs.dtype)

    monkeypatch.setattr(approximate_normals, "approximate_normal_like", normal_like)
    ours = noisy(network, params, scales, ROWS, "local")(jax.random.key(0))
    (w, b), (sw, sb) = (
        (np.asarray(t["linear"]["w"], float), np.asarray(t["linear"]["b"], float))
        for t in (params, scales)
    )
    expected = ROWS @ w + b + np.sqrt(ROWS**2 @ sw**2 + sb**2) * noise
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


CONVOLUTIONS = {
    "same": lambda x: hk.Conv2D(3, 3)(x),
    "valid, strided": lambda x: hk.Conv2D(3, (2, 3), stride=(2, 1), padding="VALID")(x),
    "dilated, no bias": lambda x: hk.Conv2D(3, 2, rate=2, with_bias=False)(x),
    "channels first": lambda x: hk.Conv2D(3, 3, data_format="NCHW")(x.transpose(0, 3, 1, 2)),
    "1-d": lambda x: hk.Conv1D(3, 3, stride=2)(x[:, :, 0]),
}


def covariance_of_outputs(network, params, scales):
    """Exact covariance of outputs under drawn weights: J diag(scale^2) J^T, J their Jacobian."""
    flat_scales = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(scales)])
    jacobian = jax.jit(jax.jacobian(lambda p: network(p).ravel()))(params)
    columns = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(jacobian)]
    scaled = np.concatenate(columns, axis=1).astype(float) * flat_scales
    return scaled @ scaled.T


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_local_convolutions_have_the_mean_and_variance_of_drawn_weights(name, monkeypatch):
    """Exactly, by setting the noise to 1."""
    network, params = transform(CONVOLUTIONS[name], IMAGES)
    scales = scales_like(params)
    exact = covariance_of_outputs(lambda p: network(p, IMAGES), params, scales)
    monkeypatch.setattr(
        approximate_normals, "approximate_normal_like", lambda key, outputs: jnp.ones_like(outputs)
    )
    run = jax.jit(noisy(network, params, scales, IMAGES, "local"))
    noise = np.asarray(run(jax.random.key(0)) - network(params, IMAGES))
    np.testing.assert_allclose(noise.ravel() ** 2, np.diag(exact), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "same",
        "1-d",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in CONVOLUTIONS
            if n not in ("same", "1-d")
        ),
    ],
)
def test_flipout_convolutions_have_the_covariance_of_drawn_weights(name):
    """All covariances of a row's outputs, between positions too; and none between rows.

    5,000 keys; 6 standard errors.
    """
    network, params = transform(CONVOLUTIONS[name], IMAGES)
    scales, images = scales_like(params), IMAGES[:2]
    exact = covariance_of_outputs(lambda p: network(p, images[:1]), params, scales)
    run = jax.jit(jax.vmap(noisy(network, params, scales, images, "flipout")))
    draws = np.asarray(run(jax.random.split(jax.random.key(3), 5000)), float)
    noise = (draws - np.asarray(network(params, images))).reshape(5000, 2, -1)
    # A quarter of the outputs of each row says as much, and keeps this quick.
    first, second = noise[:, 0, ::4], noise[:, 1, ::4]
    within = exact[::4, ::4]
    for left, right, expected in ((first, first, within), (first, second, np.zeros_like(within))):
        products = left[:, :, None] * right[:, None, :]
        error = products.std(axis=0) / np.sqrt(len(products))
        assert np.all(np.abs(products.mean(axis=0) - expected) < 6 * error + 1e-6)
    assert np.all(np.abs(first.mean(axis=0)) < 6 * first.std(axis=0) / np.sqrt(len(first)))


def test_flipout_decorrelates_rows_in_a_square_layer():
    """As many inputs as outputs: were the signs of both alike, the diagonal's noise would be
    shared between rows. 20,000 keys; 6 standard errors.
    """
    network, params = transform(lambda x: hk.Linear(4)(x), ROWS)
    run = noisy(network, params, scales_like(params), np.ones((2, 4), np.float32), "flipout")
    draws = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(4), 20_000)), float)
    noise = draws - np.asarray(network(params, np.ones((2, 4), np.float32)))
    products = noise[:, 0, :, None] * noise[:, 1, None, :]
    assert np.all(np.abs(products.mean(axis=0)) < 6 * products.std(axis=0) / np.sqrt(20_000))


def test_where_all_inputs_are_zero_local_gradients_are_finite():
    network, params = transform(lambda x: hk.Linear(3, with_bias=False)(x), ROWS)
    inputs = jnp.zeros_like(ROWS)
    apply = noisy_layers.noisy_network(network, ("linear",), "local")

    def total(scales):
        return jnp.sum(apply(jax.random.key(0), {"params": params, "spread": scales}, inputs))

    gradient = jax.jit(jax.grad(total))(scales_like(params))
    np.testing.assert_array_equal(gradient["linear"]["w"], 0)


def test_parameters_without_spread_are_not_random():
    """Point estimates of a covered layer: noise of the weights only."""
    network, params = transform(lambda x: hk.Linear(1)(x), ROWS)
    spread = {"linear": {"w": None, "b": jnp.full(1, 0.5)}}
    apply = noisy_layers.noisy_network(network, ("linear",), "local")
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = jax.jit(jax.vmap(lambda key: apply(key, {"params": params, "spread": spread}, ROWS)))(
        keys
    )
    np.testing.assert_allclose(np.std(draws, axis=0), 0.5, rtol=0.08)


class Doubled(hk.Linear):
    """A subclass that computes something else."""

    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


def called_twice(x):
    layer = hk.Linear(4, name="layer")
    return layer(jnp.tanh(layer(x)))


def unrolled(x):
    core = hk.VanillaRNN(3, name="layer")
    _, state = hk.dynamic_unroll(core, jnp.stack([x, x]), core.initial_state(x.shape[0]))
    return state


def batch_applied(x):
    return hk.BatchApply(hk.Linear(2, name="layer"))(x[:, :, None])[:, 0]


def masked(x):
    mask = jnp.full((1, 1, 2), 0.5)
    return hk.Conv1D(2, 1, mask=mask, name="layer")(x[:, :, None])[:, 0]


def tied(read):
    """A layer whose weights decode what it has encoded; `read` gets them a second time."""

    def network(x):
        layer = hk.Linear(4, name="layer")
        return jnp.tanh(layer(x)) @ read(layer).T

    return network


def twice(x):
    last = hk.Linear(4, name="last")
    return last(last(x))


class Tied(hk.Module):
    """The same within a module that knows its layer's parameters by name."""

    def __call__(self, x):
        layer = hk.Linear(4, name="layer")
        hidden = jnp.tanh(layer(x))
        return jax.nn.relu(hidden @ layer.params_dict()[f"{layer.module_name}/w"].T)


# Network, whether `local` and whether `flipout` covers `layer`.
COVERAGE = {
    "linear": (lambda x: hk.Linear(2, name="layer")(x), True, True),
    "linear by keyword": (lambda x: hk.Linear(2, name="layer")(inputs=x), True, True),
    "several positions": (lambda x: hk.Linear(2, name="layer")(x[:, :, None])[:, 0], False, True),
    "called twice": (called_twice, False, False),
    "tied": (tied(lambda layer: layer.params_dict()["layer/w"]), False, False),
    "tied in front of others": (
        lambda x: twice(tied(lambda layer: layer.params_dict()["layer/w"])(x)), False, False,
    ),
    "tied in a loop": (
        tied(lambda layer: jax.lax.fori_loop(0, 2, lambda i, w: w, layer.params_dict()["layer/w"])),
        False,
        False,
    ),
    "in a scan": (unrolled, False, False),
    "in a vmap": (
        lambda x: hk.vmap(hk.Linear(2, name="layer"), split_rng=False)(x), False, False,
    ),
    "vmap over positions": (
        lambda x: hk.vmap(hk.Linear(2, name="layer"), in_axes=1, split_rng=False)(x[:, :, None])[0],
        False,
        False,
    ),
    "merged rows": (batch_applied, False, False),
    "transposed": (lambda x: hk.Linear(2, name="layer")(x.T @ x)[:1] + x[:, :1], False, False),
    "one row by itself": (
        lambda x: hk.Conv1D(2, 1, name="layer")(x)[:, :2], False, False,
    ),
    "grouped": (
        lambda x: hk.Conv1D(2, 1, feature_group_count=2, name="layer")(x[:, None])[:, 0],
        False,
        False,
    ),
    "masked": (masked, False, False),
    "subclass": (lambda x: Doubled(2, name="layer")(x), False, False),
    "another module": (lambda x: hk.LayerNorm(-1, True, True, name="layer")(x), False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", COVERAGE)
def test_coverage(name):
    network, *expected = COVERAGE[name]
    # As many rows as features: shapes alone must not mislead.
    apply, params = transform(network, ROWS[:4])
    for estimator, covers in zip(("local", "flipout"), expected, strict=True):
        modules = noisy_layers.covered_modules(apply, params, ROWS[:4], estimator)
        assert modules == (("layer",) if covers else ()), estimator
    assert noisy_layers.covered_modules(apply, params, ROWS, "reparameterization") == ()


@pytest.mark.parametrize("network", [called_twice, lambda x: Tied()(x)], ids=["twice", "tied"])
def test_a_module_that_is_read_twice_falls_back_to_its_draw(network):
    """Then the estimate is the log-likelihood at the draw, to the bit."""
    log_joint = make_log_joint(network, ROWS, make_prior(1.0), gaussian(1.0, 4))
    drawn = log_joint.init(jax.random.key(0))
    scales = scales_like(drawn)
    mean = jax.tree.map(jnp.zeros_like, drawn)
    data = jax.tree.map(jnp.asarray, noisy_layers.Data(ROWS, ROWS, np.ones(7, np.float32), 7))

    @jax.jit
    def values(key):
        plain = log_joint.log_likelihood(drawn, data)
        return plain, *(
            noisy_layers.sampled_log_likelihood(
                key, log_joint, mean, scales, drawn, data, estimator
            )
            for estimator in ("reparameterization", "local", "flipout")
        )

    plain, *others = values(jax.random.key(1))
    assert all(float(other) == float(plain) for other in others)


@pytest.mark.parametrize(
    ("network", "shape", "dtype", "left_over"),
    [
        ("lenet", (2, 16, 16, 1), np.float32, ()),
        ("resnet20_frn_swish", (2, 8, 8, 3), np.float32, ("norm",)),
        ("cnn_lstm", (2, 20), np.int32, ("embedding", "lstm")),
    ],
)
def test_coverage_of_the_built_in_networks(network, shape, dtype, left_over):
    inputs = np.zeros(shape, dtype)
    log_joint = make_log_joint(
        models.get_network(network, 1), inputs, make_prior(1.0), gaussian(learn_noise=True)
    )
    left_over = (*left_over, "likelihood")
    for estimator in ("local", "flipout"):
        covered, rest = noisy_layers.covered_parameters(log_joint, inputs, estimator)
        assert covered and not any(word in name for name in covered for word in left_over)
        assert rest and all(any(word in name for word in left_over) for name in rest), rest
