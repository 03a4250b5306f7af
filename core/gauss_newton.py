"""Sums over rows of generalised Gauss-Newton products, in the forms that posteriors need.

    sum_i a_i J_i' H_i J_i

with J_i the Jacobian of the network's outputs at row i, H_i = S_i S_i' the Fisher information of
the likelihood about them, and a_i the weights of rows: any reduction of sqrt(a) S' J
(`sum_over_jacobians`: the matrix itself, its diagonal), or Kronecker factors by layer
(`kronecker_factors`). Rows are taken in pieces that fit into memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data, Inputs, pad
from haiku_posteriors.core.layerwise import layers
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.networks.interception import intercept_layers
from haiku_posteriors.core.trees import Params

ROWS_AT_ONCE = 500
JACOBIAN_SIZE = 2**24  # numbers in the Jacobians of the rows that are in memory at a time


class Kronecker(NamedTuple):
    """Eigenvalues and vectors of both factors of a layer, in units of the prior's deviations.

    The precision is I + A (x) B, with A = U diag(a) U' of the features, B = V diag(b) V'.
    """

    features: jax.Array
    feature_vectors: jax.Array
    gradients: jax.Array
    gradient_vectors: jax.Array


def sum_over_jacobians(
    log_joint: LogJoint,
    params: Params,
    names: tuple[str, ...],
    data: Data,
    reduce: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The sum over rows of reduce(sqrt(a H) J), J by the parameters of `names`, (rows x k, D)."""
    flat, unravel = ravel_pytree(chosen(params, names))
    leaves = trees.named_leaves(params)

    def row_outputs(flat: jax.Array, row: Inputs) -> jax.Array:
        own = trees.from_named_leaves(params, leaves | unravel(flat))
        return log_joint.network(own, jax.tree.map(lambda leaf: leaf[None], row))[0]

    def piece(inputs: Inputs, weights: jax.Array) -> jax.Array:
        root = _fisher_root(log_joint, params, log_joint.network(params, inputs))
        jacobians = jax.vmap(jax.jacrev(row_outputs), (None, 0))(flat, inputs)
        scaled = jnp.einsum("rkc,rkd->rcd", root, jacobians)
        scaled *= jnp.sqrt(weights)[:, None, None]
        return reduce(scaled.reshape(-1, flat.size))

    most = JACOBIAN_SIZE // (flat.size * log_joint.likelihood.num_outputs)
    return _sum_over_pieces(piece, data, min(ROWS_AT_ONCE, max(1, most)))


def kronecker_factors(
    log_joint: LogJoint, shapes: layers.Shapes, params: Params, data: Data
) -> dict[str, Kronecker]:
    """The factors of all layers, by one pass forward and k backward."""

    def piece(inputs: Inputs, weights: jax.Array) -> Any:
        def perturbed(added: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            features = {}

            def visit(shape: layers.Shape, met: jax.Array, call: layers.Call) -> jax.Array:
                features[shape.module] = met
                return call(params[shape.module]) + added[shape.module]

            return layers.walk(log_joint.network, params, inputs, shapes, visit), features

        zeros = {
            module: jnp.zeros(shape, dtype)
            for module, (shape, dtype) in _layer_outputs(log_joint, shapes, params, inputs).items()
        }
        outputs, pull_back, features = jax.vjp(perturbed, zeros, has_aux=True)
        root = _fisher_root(log_joint, params, outputs)

        def weighted(values: jax.Array) -> jax.Array:
            """sum a v v' over rows and positions, of (rows, ..., channels)."""
            by_row = values.reshape(len(weights), -1, values.shape[-1])
            scaled = by_row * jnp.sqrt(weights)[:, None, None]
            flat = scaled.reshape(-1, values.shape[-1])
            return flat.T @ flat

        def of_column(column: jax.Array) -> dict[str, jax.Array]:
            return {module: weighted(g) for module, g in pull_back(column)[0].items()}

        gradients = jax.lax.map(of_column, jnp.moveaxis(root, -1, 0))
        return (
            {module: weighted(met) for module, met in features.items()},
            jax.tree.map(lambda leaf: leaf.sum(axis=0), gradients),
            {m: jnp.sum(weights) * (met.shape[0] // len(weights)) for m, met in features.items()},
        )

    features, gradients, counts = _sum_over_pieces(piece, data, ROWS_AT_ONCE)
    blocks = {}
    for module in shapes:
        pairs = []
        # The features are in units of s sqrt(T): the likelihood's own 1 / T is still to come.
        over = counts[module] * log_joint.temperature
        for factor in (features[module], gradients[module] / over):
            values, vectors = jnp.linalg.eigh(factor)
            pairs.append((jnp.maximum(values, 0), vectors))
        blocks[module] = Kronecker(*pairs[0], *pairs[1])
    return blocks


def chosen(params: Params, names: tuple[str, ...]) -> dict[str, Any]:
    """The leaves of `names`, by name."""
    leaves = trees.named_leaves(params)
    return {name: leaves[name] for name in names}


def _fisher_root(log_joint: LogJoint, params: Params, outputs: jax.Array) -> jax.Array:
    """S with S S' = H, (rows, k, k)."""
    likelihood, own = log_joint.likelihood, params.get(PARAMETER_GROUP, {})
    if likelihood.curvature_root is not None:
        return likelihood.curvature_root(outputs, own)
    diagonal = jnp.sqrt(likelihood.curvature(outputs, own))
    return diagonal[:, :, None] * jnp.eye(outputs.shape[1], dtype=outputs.dtype)


def _sum_over_pieces(
    function: Callable[[Inputs, jax.Array], Any], data: Data, rows_at_once: int
) -> Any:
    """The sum of function(inputs, weights) over pieces of the rows."""
    pieces = -(-data.weights.shape[0] // rows_at_once)
    data = pad(data, pieces)

    def split(leaf: jax.Array) -> jax.Array:
        # Strided, as in `core.log_joint`, so that rows spread over devices stay where they are.
        return leaf.reshape(-1, pieces, *leaf.shape[1:]).swapaxes(0, 1)

    batches = jax.tree.map(split, (data.inputs, data.weights))
    if pieces == 1:
        return function(*jax.tree.map(lambda leaf: leaf[0], batches))
    shapes = jax.eval_shape(function, *jax.tree.map(lambda leaf: leaf[0], batches))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(total: Any, batch: tuple[Inputs, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*batch)), None

    return jax.lax.scan(add, zeros, batches)[0]


def _layer_outputs(
    log_joint: LogJoint, shapes: layers.Shapes, params: Params, inputs: Inputs
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of the outputs of each layer, by module."""
    found = {}

    def record(module: Any, layer: Any, x: jax.Array) -> jax.Array:
        outputs = layer(x)
        if module.module_name in shapes:
            found[module.module_name] = (outputs.shape, outputs.dtype)
        return outputs

    def traced(params: Params, inputs: Inputs) -> jax.Array:
        with intercept_layers(noisy_layers.LAYERS, record):
            return log_joint.network(params, inputs)

    jax.eval_shape(traced, params, inputs)
    return found
