"""Gradients of convolutions equal JAX's own, for every geometry that Haiku's layers allow."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core.networks import convolutions

GEOMETRIES = {
    "plain": {},
    "valid": {"padding": "VALID"},
    "stride": {"stride": 2},
    "stride that leaves inputs over": {"stride": 3, "padding": "VALID"},
    "rate": {"rate": 2},
    "rate and stride": {"rate": 2, "stride": 2, "padding": "VALID"},
    "uneven padding": {"padding": [(0, 3)]},
    "more padding than kernel": {"padding": [(4, 5)], "stride": 2},
    "causal": {"padding": hk.pad.causal},
    "no bias": {"with_bias": False},
}
LAYERS = {1: hk.Conv1D, 2: hk.Conv2D, 3: hk.Conv3D}


def smooth(layer: type[hk.Module], shape: tuple[int, ...], fast: bool, **keywords):
    """A smooth function of the layer's parameters and inputs, and these."""
    network = hk.without_apply_rng(hk.transform(lambda x: layer(4, 3, **keywords)(x)))
    generator = np.random.default_rng(0)
    inputs = jnp.asarray(generator.normal(size=shape), jnp.float32)
    shapes = jax.eval_shape(network.init, jax.random.key(1), inputs)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * generator.normal(size=leaf.shape), leaf.dtype), shapes
    )

    def value(params, inputs):
        if not fast:
            return jnp.sum(jnp.sin(network.apply(params, inputs)))
        with convolutions.fast_gradients():
            return jnp.sum(jnp.sin(network.apply(params, inputs)))

    return value, params, inputs


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )


@pytest.mark.parametrize(
    ("axes", "name"),
    [(2, name) for name in GEOMETRIES]
    + [(axes, name) for axes in (1, 3) for name in ("rate and stride", "more padding than kernel")],
)
def test_gradients_are_those_of_jax(axes, name):
    shape = (5, *(8, 7, 6)[:axes], 2)
    (fast, *arguments), (own, *_) = (
        smooth(LAYERS[axes], shape, fast, **GEOMETRIES[name]) for fast in (True, False)
    )

    @jax.jit  # one program for both
    def gradients(*arguments):
        return [jax.value_and_grad(value, argnums=(0, 1))(*arguments) for value in (fast, own)]

    close(*gradients(*arguments))


def test_gradients_of_many_weights_at_once_and_second_derivatives():
    (fast, params, inputs), (own, *_) = (
        smooth(hk.Conv2D, (5, 6, 6, 2), fast, stride=2) for fast in (True, False)
    )
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), params)

    def per_chain(value):
        return jax.jit(jax.vmap(jax.grad(value), in_axes=(0, None)))(many, inputs)

    close(per_chain(fast), per_chain(own))

    def product(value):
        return jax.jit(lambda p: jax.jvp(lambda p: jax.grad(value)(p, inputs), (p,), (p,))[1])

    close(product(fast)(params), product(own)(params))


def test_other_devices_take_the_gradients_of_jax():
    geometry = ((2, 1, (1, 0)), (1, 2, (2, 2)))
    keys = jax.random.split(jax.random.key(0), 3)
    gradient, inputs, weights = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(5, 3, 6, 4), (5, 6, 6, 2), (3, 3, 2, 4)], strict=True)
    )
    operands = (gradient, inputs, weights)
    close(
        convolutions._own_gradients(geometry, *operands),
        convolutions._transposed_gradients(geometry, *operands),
    )


@pytest.mark.parametrize(
    "keywords", [{"feature_group_count": 2}, {"data_format": "channels_first"}]
)
def test_other_layers_keep_their_own_gradients(keywords):
    shape = (5, 4, 4, 4)
    found, expected = (
        jax.jit(jax.grad(value, argnums=(0, 1)))(params, inputs)
        for value, params, inputs in (
            smooth(hk.Conv2D, shape, fast, **keywords) for fast in (True, False)
        )
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_on_cpus_gradients_are_convolutions_in_the_layout_of_the_forward_pass():
    value, params, inputs = smooth(hk.Conv2D, (5, 6, 6, 2), fast=True)
    program = jax.jit(jax.grad(value, argnums=(0, 1))).lower(params, inputs)
    lines = [line for line in program.as_text().splitlines() if "stablehlo.convolution" in line]
    assert len(lines) == 3
    assert all("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in line for line in lines)
