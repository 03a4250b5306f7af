"""The built-in networks: their size, their arithmetic, their types; and finding a user's own."""

import math
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import models

CIFAR, MNIST, TOKENS = (1, 32, 32, 3), (1, 28, 28, 1), (1, 100)


def transform(name, num_outputs):
    return hk.without_apply_rng(hk.transform(models.get_network(name, num_outputs)))


def random_params(network, inputs, scale=0.3):
    """Normal draws for every parameter: at their initial 0 and 1, biases and gammas hide errors."""
    shapes = jax.eval_shape(network.init, jax.random.key(0), inputs)
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(scale * generator.normal(size=leaf.shape), leaf.dtype), shapes
    )


@pytest.mark.parametrize(
    ("name", "shape", "num_outputs", "count"),
    [
        ("lenet", CIFAR, 10, 142_646),
        ("resnet20_frn", CIFAR, 10, 274_042),
        ("resnet20_frn", CIFAR, 100, 279_892),
        ("resnet20_frn_swish", CIFAR, 10, 274_042),
        ("resnet20_frn_swish", CIFAR, 100, 279_892),
        ("cnn_lstm", TOKENS, 2, 2_700_098),
        ("mlp_regression", (1, 8), 2, 100 * 8 + 10_402),
        ("mlp_regression", (1, 13), 2, 100 * 13 + 10_402),
        ("mlp_50", (1, 8), 1, 50 * 8 + 101),
        ("mlp_regression_small", (1, 8), 2, 50 * 8 + 152),
        ("mlp_classification", MNIST, 10, 269_322),
        ("mlp_400_400", MNIST, 10, 478_410),
        ("lenet5", MNIST, 10, 44_426),
        ("logistic_regression", MNIST, 10, 785 * 10),
        ("mlp_toy", (1, 1), 1, 105),
        ("mlp_20_20", (1, 1), 1, 481),
        # Without normalisation these are the original's 2,745,274 and 36,518,932.
        ("wide_resnet_16_4", CIFAR, 10, 2_745_274 + 3 * 1_808),
        ("wide_resnet_28_10", CIFAR, 100, 36_518_932 + 3 * 8_976),
    ],
)
def test_number_of_parameters(name, shape, num_outputs, count):
    network = transform(name, num_outputs)
    inputs = jax.ShapeDtypeStruct(shape, jnp.int32 if name == "cnn_lstm" else jnp.float32)
    params = jax.eval_shape(network.init, jax.random.key(0), inputs)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(network.apply, params, inputs).shape == (1, num_outputs)


def test_filter_response_norm_is_its_equation():
    generator = np.random.default_rng(1)
    # Small inputs, so that eps counts; a negative gamma and a tau on either side of zero.
    inputs = 1e-3 * generator.normal(size=(2, 4, 5, 3)).astype(np.float32)
    gamma = np.array([1.5, -0.7, 0.2], np.float32)
    beta = np.array([0.1, -0.3, 0.0], np.float32)
    tau = np.array([-0.5, 0.2, 0.0], np.float32)
    expected = np.empty_like(inputs)
    for row in range(2):
        for channel in range(3):
            plane = inputs[row, :, :, channel].astype(np.float64)
            scaled = plane / np.sqrt((plane**2).sum() / 20 + 1e-6)
            expected[row, :, :, channel] = np.maximum(
                gamma[channel] * scaled + beta[channel], tau[channel]
            )
    network = hk.without_apply_rng(
        hk.transform(lambda images: models.FilterResponseNorm(name="norm")(images))
    )
    actual = network.apply({"norm": {"gamma": gamma, "beta": beta, "tau": tau}}, inputs)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    initial = network.init(jax.random.key(0), inputs)["norm"]
    assert {name: set(np.asarray(value)) for name, value in initial.items()} == {
        "gamma": {1.0},
        "beta": {0.0},
        "tau": {0.0},
    }


def test_logistic_regression_is_an_affine_map_of_the_flattened_inputs():
    network = transform("logistic_regression", 3)
    inputs = jnp.asarray(np.random.default_rng(2).normal(size=(4, 2, 5)), jnp.float32)
    params = random_params(network, inputs)
    expected = np.asarray(inputs).reshape(4, 10) @ params["output"]["w"] + params["output"]["b"]
    np.testing.assert_allclose(network.apply(params, inputs), expected, rtol=1e-5, atol=1e-6)


def test_mlp_toy_is_two_elu_layers():
    def elu(x):
        return np.where(x > 0, x, np.expm1(x))

    network = transform("mlp_toy", 1)
    inputs = jnp.linspace(-2.0, 2.0, 9)[:, None]
    params = random_params(network, inputs, scale=1.0)
    hidden = np.asarray(inputs)
    for name in ("hidden_0", "hidden_1"):
        hidden = elu(hidden @ np.asarray(params[name]["w"]) + np.asarray(params[name]["b"]))
    expected = hidden @ params["output"]["w"] + params["output"]["b"]
    np.testing.assert_allclose(network.apply(params, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lenet", "resnet20_frn_swish", "wide_resnet_16_4"])
def test_convolutional_networks_take_grey_images_with_or_without_channel_axis(name):
    network = transform(name, 10)
    images = jnp.asarray(np.random.default_rng(3).normal(size=(2, 28, 28, 1)), jnp.float32)
    params = random_params(network, images, scale=0.5)
    apply = jax.jit(network.apply)
    outputs = np.asarray(apply(params, images))
    assert outputs.shape == (2, 10)
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3, "the image makes no difference"
    np.testing.assert_allclose(apply(params, images[..., 0]), outputs, rtol=1e-4, atol=1e-3)


def test_a_rows_output_does_not_depend_on_the_other_rows():
    network = transform("resnet20_frn", 10)
    images = jnp.asarray(np.random.default_rng(4).normal(size=(3, 16, 16, 3)), jnp.float32)
    params = random_params(network, images, scale=0.5)
    apply = jax.jit(network.apply)
    outputs = apply(params, images)
    others_changed = apply(params, images.at[jnp.array([0, 2])].multiply(3.0))
    np.testing.assert_allclose(others_changed[1], outputs[1], rtol=1e-5)
    assert np.abs(others_changed[0] - outputs[0]).max() > 1e-3


def test_resnet20_output_is_unmoved_by_flipping_when_kernels_are_symmetric():
    """The mean over pixels covers the whole image: only then does a mirrored one give the same."""
    network = transform("resnet20_frn", 10)
    # 33 pixels: with an even number, strides of 2 sample columns that mirroring does not keep.
    images = jnp.asarray(np.random.default_rng(5).normal(size=(1, 33, 33, 1)), jnp.float32)
    params = random_params(network, images, scale=0.2)
    params = hk.data_structures.map(
        lambda _, name, value: value + value[:, ::-1] if name == "w" and value.ndim == 4 else value,
        params,
    )
    apply = jax.jit(network.apply)
    np.testing.assert_allclose(
        apply(params, images), apply(params, images[:, :, ::-1]), rtol=1e-3, atol=1e-3
    )


@pytest.fixture(scope="module")
def text_network():
    network = transform("cnn_lstm", 2)
    tokens = jnp.asarray(np.random.default_rng(6).integers(0, 20_000, size=(3, 30)))
    return jax.jit(network.apply), random_params(network, tokens, scale=0.1), tokens


def test_cnn_lstm_reads_to_the_last_step(text_network):
    apply, params, tokens = text_network
    outputs = np.asarray(apply(params, tokens))
    np.testing.assert_array_equal(apply(params, tokens), outputs)
    # 30 tokens make 26 windows and 6 pools of 4: windows 24 and 25, so tokens 28 and 29, are
    # dropped, and token 27 is the last one read.
    ends_differently = np.asarray(apply(params, tokens.at[0, 24:28].set(7)))
    assert np.abs(ends_differently[0] - outputs[0]).max() > 1e-3
    np.testing.assert_allclose(ends_differently[1:], outputs[1:], rtol=1e-6)
    np.testing.assert_array_equal(apply(params, tokens.at[:, 28:].set(7)), outputs)
    starts_differently = np.asarray(apply(params, tokens.at[0, :4].set(7)))
    changes = [
        np.abs(changed - outputs)[0].max() for changed in (starts_differently, ends_differently)
    ]
    assert 0 < changes[0] < changes[1], "the latest tokens should matter most at initialisation"


def test_cnn_lstm_is_its_equations(text_network):
    apply, params, tokens = text_network
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    words = p["embedding"]["embeddings"][np.asarray(tokens)]
    windows = np.stack([words[:, start : start + 5] for start in range(26)], axis=1)
    features = np.maximum(np.einsum("rtkc,kco->rto", windows, p["conv"]["w"]) + p["conv"]["b"], 0)
    pooled = features[:, :24].reshape(3, 6, 4, 64).max(axis=2)
    hidden = cell = np.zeros((3, 128))
    (lstm,) = (value for name, value in p.items() if name.startswith("lstm"))
    for step in range(6):
        gates = np.concatenate([pooled[:, step], hidden], axis=-1) @ lstm["w"] + lstm["b"]
        inlet, candidate, forget, outlet = np.split(gates, 4, axis=-1)
        cell = sigmoid(forget + 1) * cell + sigmoid(inlet) * np.tanh(candidate)
        hidden = sigmoid(outlet) * np.tanh(cell)
    expected = hidden @ p["output"]["w"] + p["output"]["b"]
    np.testing.assert_allclose(apply(params, tokens), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(models.NETWORKS) - {"wide_resnet_28_10"}))
def test_float64_is_kept(name):
    with jax.enable_x64(True):
        if name == "cnn_lstm":
            inputs = jax.ShapeDtypeStruct(TOKENS, jnp.int32)
        else:
            inputs = jax.ShapeDtypeStruct((2, 28, 28, 1), jnp.float64)
        network = transform(name, 3)
        params = jax.eval_shape(network.init, jax.random.key(0), inputs)
        gradient = jax.eval_shape(
            jax.grad(lambda params, inputs: network.apply(params, inputs).sum()), params, inputs
        )
        outputs = jax.eval_shape(network.apply, params, inputs)
        assert {leaf.dtype for leaf in jax.tree.leaves((params, gradient, outputs))} == {
            jnp.dtype(jnp.float64)
        }


def test_float32_inputs_stay_float32_when_x64_is_on():
    with jax.enable_x64(True):
        network = transform("resnet20_frn", 3)
        inputs = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
        params = jax.eval_shape(network.init, jax.random.key(0), inputs)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_pixels_given_as_bytes_are_read_as_numbers():
    network = transform("mlp_classification", 3)
    images = np.random.default_rng(7).integers(0, 256, size=(2, 8, 8), dtype=np.uint8)
    params = random_params(network, images.astype(np.float32), scale=0.01)
    np.testing.assert_array_equal(
        network.apply(params, images), network.apply(params, images.astype(np.float32))
    )


@pytest.mark.parametrize(
    ("name", "inputs", "sentence"),
    [
        ("resnet20_frn", np.zeros((2, 784), np.float32), r"needs inputs of shape .* \(2, 784\)"),
        ("lenet", np.zeros((2, 14, 20, 1), np.float32), "at least 15x15 pixels, not 14x20"),
        ("lenet5", np.zeros((2, 20, 15, 1), np.float32), "at least 16x16 pixels, not 20x15"),
        ("cnn_lstm", np.zeros((2, 100), np.float32), "integer tokens .* not float32"),
        ("cnn_lstm", np.zeros((2, 7), np.int32), "length at least 8"),
    ],
)
def test_inputs_a_network_cannot_read(name, inputs, sentence):
    with pytest.raises(UserError, match=sentence):
        jax.eval_shape(transform(name, 2).init, jax.random.key(0), inputs)


def test_lenet_takes_the_smallest_images_it_says_it_takes():
    images = jnp.ones((1, 15, 15, 1))
    network = transform("lenet", 2)
    params = random_params(network, images)
    outputs = np.asarray(jax.jit(network.apply)(params, images))
    assert np.isfinite(outputs).all() and np.ptp(outputs) > 0


@pytest.fixture
def user_package(tmp_path, monkeypatch):
    package = tmp_path / "someones_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "networks.py").write_text(
        "import haiku as hk\n"
        "def fixed(inputs):\n"
        "    return hk.Linear(4)(inputs)\n"
        "def flexible(inputs, num_outputs):\n"
        "    return hk.Linear(num_outputs)(inputs)\n"
        "not_a_function = 3\n"
    )
    (package / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    yield "someones_package"
    for name in [name for name in sys.modules if name.startswith("someones_package")]:
        del sys.modules[name]


@pytest.mark.parametrize(("function", "width"), [("fixed", 4), ("flexible", 7)])
def test_a_users_network_is_found_in_the_working_directory(user_package, function, width):
    network = transform(f"{user_package}.networks:{function}", 7)
    inputs = jnp.ones((2, 3))
    params = network.init(jax.random.key(0), inputs)
    assert params["linear"]["w"].shape == (3, width)
    np.testing.assert_allclose(
        network.apply(params, inputs)[0], params["linear"]["w"].sum(axis=0), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("networks:missing", r"module 'someones_package\.networks' has no 'missing'\.$"),
        ("networks:", r"module 'someones_package\.networks' has no ''\.$"),
        ("networks:not_a_function", r"'not_a_function' is not a function \(int\)\.$"),
        ("absent:fixed", r"cannot be imported \(ModuleNotFoundError: No module named .*\)"),
        ("broken:fixed", r"cannot be imported \(ZeroDivisionError: division by zero\)\.$"),
    ],
)
def test_what_is_wrong_with_a_users_network(user_package, name, sentence):
    with pytest.raises(UserError, match=sentence):
        models.get_network(f"{user_package}.{name}", 2)


def test_a_name_without_a_module():
    with pytest.raises(UserError, match="cannot be imported"):
        models.get_network(":lenet", 2)


def test_an_unknown_name_tells_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'lenet'") as error:
        models.get_network("lennet", 2)
    assert "package.module:function" in str(error.value)


@pytest.mark.parametrize(
    ("task", "input_shape", "input_is_integer", "name"),
    [
        ("classification", (100,), True, "cnn_lstm"),
        ("classification", (32, 32, 3), False, "lenet"),
        ("classification", (32, 32, 3), True, "lenet"),
        ("classification", (28, 28, 1), False, "mlp_classification"),
        ("classification", (8, 8, 3), False, "mlp_classification"),
        ("classification", (28, 28), True, "mlp_classification"),
        ("classification", (30,), False, "mlp_50"),
        ("classification", (1,), False, "mlp_50"),
        ("regression", (1,), False, "mlp_toy"),
        ("regression", (13,), False, "mlp_50"),
    ],
)
def test_default_network(task, input_shape, input_is_integer, name):
    assert models.default_network_name(task, input_shape, input_is_integer) == name
    assert name in models.NETWORKS
