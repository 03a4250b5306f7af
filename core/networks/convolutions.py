"""Gradients of convolutions that stay fast inside compiled loops on CPUs.

JAX differentiates a convolution into two others with their axes exchanged. CPUs run these at full
speed only after transposition to the layout of the forward pass. Outside of loops XLA transposes
them; inside `scan` and `fori_loop` it does not, and there they were measured to be 20 to 40 times
slower. All methods here are loops, so on CPUs both are written as forward convolutions of
transposed arrays. For y = x * w with stride s, rate r and padding (a, b),

    dL/dx = dilate_s(dL/dy) * flip(w)^T              padded so that the shape is that of x
    dL/dw = (x^T *_(stride r) dilate_s(dL/dy)^T)^T   padded so that the shape is that of w

These are the derivatives that JAX computes. Other devices keep JAX's own program for them.
"""

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_posteriors.core.networks.interception import Layer, intercept_layers

KINDS = (hk.Conv1D, hk.Conv2D, hk.Conv3D)
# Of each spatial axis: stride, rate, and padding before and after.
Geometry = tuple[tuple[int, int, tuple[int, int]], ...]


def fast_gradients() -> Any:
    """Context in which convolutions of Haiku networks have the gradients above.

    Layers with a mask, with channels in groups or before space, and inputs without rows keep JAX's
    gradients. The outputs can be differentiated in reverse mode, and the gradients in any mode.
    """
    return intercept_layers(KINDS, _intercept)


def _intercept(module: Any, layer: Layer, inputs: jax.Array) -> jax.Array:
    if (
        module.mask is not None
        or module.feature_group_count > 1
        or module.channel_index != -1
        or inputs.ndim != module.num_spatial_dims + 2
        or layer.keywords  # a precision of the product
    ):
        return layer(inputs)
    geometry = geometry_of(module, inputs)
    shape = (*module.kernel_shape, inputs.shape[-1], module.output_channels)
    outputs = _convolution(geometry, inputs, hk.get_parameter("w", shape, inputs.dtype))
    if module.with_bias:
        outputs += hk.get_parameter("b", shape[-1:], inputs.dtype)
    return outputs


def geometry_of(module: Any, inputs: jax.Array) -> Geometry:
    """Of a convolution of inputs (rows, space, channels)."""
    strides, rates, padding = module.stride, module.kernel_dilation, module.padding
    if isinstance(padding, str):
        extents = [(k - 1) * r + 1 for k, r in zip(module.kernel_shape, rates, strict=True)]
        padding = jax.lax.padtype_to_pads(inputs.shape[1:-1], extents, strides, padding)
    return tuple(zip(strides, rates, map(tuple, padding), strict=True))


def _plain(geometry: Geometry, inputs: jax.Array, weights: jax.Array) -> jax.Array:
    strides, rates, padding = zip(*geometry, strict=True)
    return _convolve(inputs, weights, strides, padding, weight_dilation=rates)


def _forward(geometry: Geometry, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _plain(geometry, *operands), operands


def _backward(
    geometry: Geometry, operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jax.lax.platform_dependent(
        gradient,
        *operands,
        cpu=functools.partial(_transposed_gradients, geometry),
        default=functools.partial(_own_gradients, geometry),
    )


_convolution = jax.custom_vjp(_plain, nondiff_argnums=(0,))
_convolution.defvjp(_forward, _backward)


def _own_gradients(
    geometry: Geometry, gradient: jax.Array, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jax.vjp(functools.partial(_plain, geometry), *operands)[1](gradient)


def _transposed_gradients(
    geometry: Geometry, gradient: jax.Array, inputs: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    space = range(1, len(geometry) + 1)
    strides, rates, _ = zip(*geometry, strict=True)
    input_padding, weight_padding = [], []
    for axis, (stride, rate, (before, _)) in zip(space, geometry, strict=True):
        size, extent = inputs.shape[axis], (weights.shape[axis - 1] - 1) * rate + 1
        dilated = (gradient.shape[axis] - 1) * stride + 1
        # What comes after follows from the shape that the result must have; a stride that leaves
        # inputs over makes it differ from the forward pass's.
        first = extent - 1 - before
        input_padding.append((first, size + extent - 1 - dilated - first))
        weight_padding.append((before, extent - 1 + dilated - size - before))
    flipped = jnp.flip(weights, range(len(geometry))).swapaxes(-1, -2)
    ones = (1,) * len(geometry)
    input_gradient = _convolve(
        gradient, flipped, ones, input_padding, input_dilation=strides, weight_dilation=rates
    )
    weight_gradient = _convolve(
        inputs.swapaxes(0, -1),  # (channels, space, rows)
        jnp.moveaxis(gradient, 0, -2),  # (space, rows, outputs)
        rates,
        weight_padding,
        weight_dilation=strides,
    )
    return input_gradient, jnp.moveaxis(weight_gradient, 0, -2)


def _convolve(
    inputs: jax.Array,
    weights: jax.Array,
    strides: Any,
    padding: Any,
    input_dilation: Any = None,
    weight_dilation: Any = None,
) -> jax.Array:
    """inputs (rows, space, channels) by weights (space, channels, outputs)."""
    space = "HWD"[: inputs.ndim - 2]
    layout = (f"N{space}C", f"{space}IO", f"N{space}C")
    return jax.lax.conv_general_dilated(
        inputs, weights, strides, padding, input_dilation, weight_dilation, layout
    )
