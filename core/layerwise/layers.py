"""The layers of an ordinary Haiku network as regressions of outputs on inputs, in order of calls.

A call of `hk.Linear`, `hk.Conv1D` or `hk.Conv2D` is outputs = features @ matrix at every position
of every row: the features are the inputs there (for a convolution the patch under the kernel), and
a 1 for the bias; the matrix is (D, units), the weights above the bias. Positions are where a row
meets the weights: one for (rows, features), all pixels of the output for a convolution. Where there
are more than asked for, some of them enter the regression, others for every row.

Networks are not rewritten: calls are intercepted, as in `core.networks.noisy_layers`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Inputs
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.networks import convolutions, noisy_layers
from haiku_posteriors.core.networks.interception import Layer, intercept_layers
from haiku_posteriors.core.trees import Params

Network = Callable[[Params, Inputs], jax.Array]


class Shape(NamedTuple):
    """A layer that is a regression.

    Attributes:
      module: its name, the key of its parameters.
      weights: the shape of w.
      has_bias: whether it has b.
      scales: the prior's standard deviations of a unit's weights, times sqrt(T), (D,).
      positions: which of each row's positions enter, (rows, positions).
    """

    module: str
    weights: tuple[int, ...]
    has_bias: bool
    scales: np.ndarray
    positions: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows of the regression."""
        return self.positions.size

    @property
    def num_weights(self) -> int:
        """D: the weights of a unit, its bias among them."""
        return len(self.scales)

    @property
    def num_units(self) -> int:
        """Outputs."""
        return self.weights[-1]

    def features(self, module: Any, inputs: jax.Array) -> jax.Array:
        """F: what meets the weights at the chosen positions, times the scales; (rows, D)."""
        if isinstance(module, hk.Linear):
            met = self.chosen(inputs)
        else:
            geometry = convolutions.geometry_of(module, inputs)
            met = patches(inputs, module.kernel_shape, geometry, self.positions)
        ones = jnp.ones((len(met), int(self.has_bias)), met.dtype)
        return jnp.concatenate([met, ones], axis=1) * self.scales.astype(met.dtype)

    def chosen(self, values: jax.Array) -> jax.Array:
        """The chosen positions of (inputs, ..., channels), (rows, channels)."""
        flat = values.reshape(values.shape[0], -1, values.shape[-1])
        if flat.shape[1] > self.positions.shape[1]:
            flat = jnp.take_along_axis(flat, jnp.asarray(self.positions)[..., None], axis=1)
        return flat.reshape(-1, values.shape[-1])

    def to_parameters(self, standardised: jax.Array) -> dict[str, jax.Array]:
        """w and b of a matrix in units of the scales, (D, units)."""
        matrix = standardised * self.scales.astype(standardised.dtype)[:, None]
        weights = matrix[: math.prod(self.weights[:-1])].reshape(self.weights)
        return {"w": weights, "b": matrix[-1]} if self.has_bias else {"w": weights}

    def to_standardised(self, own: dict[str, jax.Array]) -> jax.Array:
        """The inverse of `to_parameters`."""
        parts = [own["w"].reshape(-1, self.num_units)]
        parts += [own["b"][None]] if self.has_bias else []
        matrix = jnp.concatenate(parts)
        return matrix / self.scales.astype(matrix.dtype)[:, None]


Shapes = dict[str, Shape]  # by module, in order of calls
Call = Callable[[dict[str, jax.Array]], jax.Array]  # a layer's outputs as a function of w and b
Visit = Callable[[Shape, jax.Array, Call], jax.Array]  # with F, in place of a call: the outputs


def find_layers(log_joint: LogJoint, inputs: Inputs, max_positions: int) -> Shapes:
    """The layers whose weights can be drawn given their inputs.

    They are called once, outside of loops, on rows; nothing else reads their weights; these are
    ordinary (no mask, no groups, channels last) and all random.

    Args:
      log_joint: the model.
      inputs: the inducing inputs, (rows, ...); only shape and dtype matter.
      max_positions: how many positions of a row enter a regression at most.
    """
    network, shapes = log_joint.network, log_joint.shapes
    covered = noisy_layers.covered_modules(network, shapes, inputs, "flipout")
    random = trees.named_leaves(log_joint.random_shapes)
    found: Shapes = {}

    def intercept(module: Any, layer: Layer, x: jax.Array) -> jax.Array:
        outputs, name = layer(x), module.module_name
        own = shapes.get(name, {})
        is_random = all(f"{name}/{leaf}" in random for leaf in own)
        if name in covered and is_random and getattr(module, "channel_index", -1) == -1:
            count = math.prod(outputs.shape[1:-1])
            scale = math.sqrt(log_joint.temperature)
            scales = [
                np.full(math.prod(own[leaf].shape[:-1]), scale * log_joint.prior.scale(path))
                for leaf in ("w", "b")
                if leaf in own and (path := f"{name}/{leaf}")
            ]
            found[name] = Shape(
                name,
                own["w"].shape,
                "b" in own,
                np.concatenate(scales),
                _spread_positions(len(x), count, min(count, max_positions)),
            )
        return outputs

    def traced(params: Params, inputs: Inputs) -> jax.Array:
        with intercept_layers(noisy_layers.LAYERS, intercept):
            return network(params, inputs)

    jax.eval_shape(traced, shapes, inputs)
    return found


def _spread_positions(rows: int, count: int, chosen: int) -> np.ndarray:
    """(rows, chosen) of `count` positions, spread over them and over rows; the same every time."""
    if chosen == count:
        return np.tile(np.arange(count), (rows, 1))
    generator = np.random.default_rng(0)
    return np.stack([np.sort(generator.permutation(count)[:chosen]) for _ in range(rows)])


def walk(
    network: Network, params: Params, inputs: Inputs, shapes: Shapes, visit: Visit
) -> jax.Array:
    """The network's outputs with `visit` in place of the calls of its layers, in their order."""

    def intercept(module: Any, layer: Layer, x: jax.Array) -> jax.Array:
        shape = shapes.get(module.module_name)
        if shape is None:
            return layer(x)

        def call(own: dict[str, jax.Array]) -> jax.Array:
            values = {f"{shape.module}/{name}": value for name, value in own.items()}
            return noisy_layers.with_parameters(layer, values, x)

        return visit(shape, shape.features(module, x), call)

    with intercept_layers(noisy_layers.LAYERS, intercept):
        return network(params, inputs)


def patches(
    inputs: jax.Array,
    kernel_shape: tuple[int, ...],
    geometry: convolutions.Geometry,
    positions: np.ndarray,
) -> jax.Array:
    """What a kernel meets at some positions, in the order of w's own axes.

    One gather of what is asked for: patches at all positions are the kernel's size times as many
    numbers as the inputs, and took minutes to compile where each offset was a slice of its own.

    Args:
      inputs: (rows, space, channels).
      kernel_shape: of the convolution.
      geometry: likewise.
      positions: which of each row's outputs, counted through space, (rows, chosen), or (1, chosen)
        if they are the same ones of all rows.

    Returns:
      (rows x chosen, kernel x channels).
    """
    padded = jnp.pad(inputs, [(0, 0), *(padding for _, _, padding in geometry), (0, 0)])
    extents = [
        (length - (size - 1) * rate - 1) // stride + 1
        for length, size, (stride, rate, _) in zip(
            padded.shape[1:-1], kernel_shape, geometry, strict=True
        )
    ]
    first = np.unravel_index(positions, extents)
    offsets = np.meshgrid(*map(np.arange, kernel_shape), indexing="ij")
    places = [
        stride * start[..., None] + rate * offset.ravel()
        for start, offset, (stride, rate, _) in zip(first, offsets, geometry, strict=True)
    ]
    rows = np.arange(len(inputs))[:, None, None]
    met = padded[(rows, *places)]  # (rows, chosen, kernel, channels)
    return met.reshape(len(inputs) * positions.shape[1], -1)
