"""Layers as regressions: patches of convolutions, and which layers of a network they are."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.layerwise import layers
from haiku_posteriors.core.layerwise.layerwise_vi import find_family
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

CONVOLUTIONS = {
    "same": (lambda: hk.Conv2D(3, 3), (2, 5, 6, 2)),
    "valid, strided": (lambda: hk.Conv2D(2, (2, 3), stride=(2, 1), padding="VALID"), (2, 5, 6, 2)),
    "dilated": (lambda: hk.Conv2D(2, 2, rate=2, padding="SAME", with_bias=False), (2, 5, 5, 1)),
    "strided, same": (lambda: hk.Conv2D(2, 3, stride=2), (2, 6, 6, 2)),
    "one axis": (lambda: hk.Conv1D(2, 3, padding=[(2, 0)]), (2, 7, 3)),
    "positions of a linear layer": (lambda: hk.Linear(3), (2, 4, 2)),
}


def flat_network(make):
    return lambda inputs: hk.Linear(1)(hk.Flatten()(make()(inputs)))


def build(network, inputs, stochastic_params="", family="gaussian"):
    return make_log_joint(
        network,
        inputs,
        make_prior(4.0, family, groups=[("/b", 0.25)]),
        gaussian(),
        stochastic_params=stochastic_params,
    )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_features_times_matrix_are_the_layer(name):
    """At the chosen positions, three of a row: F @ (standardised weights) is the layer's output."""
    make, shape = CONVOLUTIONS[name]
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    log_joint = build(flat_network(make), inputs)
    shapes = layers.find_layers(log_joint, jnp.asarray(inputs), 3)
    assert len(shapes) == 2
    generator = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: generator.normal(size=leaf.shape).astype(leaf.dtype), log_joint.shapes
    )

    @jax.jit
    def visited(params, inputs):
        seen = {}

        def visit(shape, features, call):
            own = params[shape.module]
            outputs, standardised = call(own), shape.to_standardised(own)
            again = shape.to_parameters(standardised)
            seen[shape.module] = features @ standardised, outputs, again
            return outputs

        outputs = layers.walk(log_joint.network, params, inputs, shapes, visit)
        return outputs, log_joint.network(params, inputs), seen

    outputs, plain, seen = visited(params, inputs)
    np.testing.assert_allclose(outputs, plain, rtol=1e-4, atol=1e-5)
    for module, (regressed, all_outputs, again) in seen.items():
        positions, units = shapes[module].positions, all_outputs.shape[-1]
        chosen = np.asarray(all_outputs).reshape(len(inputs), -1, units)
        expected = np.concatenate(
            [row[which] for row, which in zip(chosen, positions, strict=True)]
        )
        np.testing.assert_allclose(regressed, expected, atol=1e-4)
        for key, leaf in again.items():
            np.testing.assert_allclose(leaf, params[module][key], rtol=1e-5)
    first = next(iter(shapes.values()))
    assert first.positions.shape == (2, 3)
    assert all(len(set(row)) == 3 for row in first.positions)
    expected = [0.5] * int(np.prod(first.weights[:-1])) + [2.0] * first.has_bias
    np.testing.assert_allclose(first.scales, expected)


def test_all_positions_where_there_are_no_more():
    """A convolution whose outputs are all asked for, in their order."""
    make, shape = CONVOLUTIONS["one axis"]
    inputs = jnp.ones(shape)
    (first, _) = layers.find_layers(build(flat_network(make), inputs), inputs, 7).values()
    np.testing.assert_array_equal(first.positions, [range(7)] * 2)


def twice(inputs):
    layer = hk.Linear(2)
    return hk.Linear(1, name="last")(layer(layer(inputs)))


def in_a_loop(inputs):
    layer = hk.Linear(2)
    hidden = hk.scan(lambda x, _: (layer(x), None), inputs, jnp.arange(3))[0]
    return hk.Linear(1, name="last")(hidden)


def tied(inputs):
    layer = hk.Linear(2)
    hidden = jnp.tanh(layer(inputs))
    return hk.Linear(1, name="last")(hidden @ layer.params_dict()["linear/w"].T)


def normalised(inputs):
    hidden = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(2)(inputs))
    return hk.Linear(1, name="last")(hidden)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (twice, ["last"]),
        (in_a_loop, ["last"]),
        (tied, ["last"]),
        (normalised, ["linear", "last"]),
    ],
)
def test_layers_that_cannot_be_regressions_are_left_out(network, expected):
    inputs = np.ones((4, 2), np.float32)
    family = find_family(build(network, inputs), jnp.asarray(inputs))
    assert list(family.shapes) == expected


def two_layers(inputs):
    return hk.nets.MLP([3, 1])(inputs)


def test_only_random_layers():
    inputs = np.ones((4, 2), np.float32)
    log_joint = build(two_layers, inputs, stochastic_params="linear_1|linear_0/w")
    assert list(find_family(log_joint, jnp.asarray(inputs)).shapes) == ["mlp/~/linear_1"]


def recurrent(inputs):
    layer = hk.Linear(1)
    return layer(layer(inputs[:, :1]))


def test_refusals():
    inputs = np.ones((4, 2), np.float32)
    with pytest.raises(UserError, match="called once"):
        find_family(build(recurrent, inputs), jnp.asarray(inputs))
    with pytest.raises(UserError, match="Gaussian prior"):
        find_family(build(two_layers, inputs, family="laplace"), jnp.asarray(inputs))
