"""Laplace's approximation: a Gaussian around a mode, as wide as the curvature there says.

    q(w) = N(w*, P^-1),        P = (1 / T) ( diag(1 / s^2) + sum_i a_i J_i' H_i J_i )

with w* a mode of log p_T(w, D), s the prior's standard deviations, J_i the Jacobian of the
network's outputs at row i and H_i the Fisher information of the likelihood about them: the Hessian
of minus the log-joint without the curvature of the network itself (generalised Gauss-Newton), which
is positive definite wherever w* is. (MacKay 1992; Daxberger et al. 2021, arXiv 2106.14806.) The
sum over rows is kept as one of STRUCTURES:

    full         as it is
    last_layer   as it is, of the last layer; all other weights stay at w*
    diagonal     its diagonal
    kron         by layer, of features F and gradients g of sqrt(H) f by the layer's outputs (those
                 of its rows, and positions in convolutions, M in all): 1/M (sum F F') (x)
                 (sum g g') (Martens & Grosse 2015, arXiv 1503.05671; Ritter et al. 2018), the prior
                 added to its eigenvalues exactly; what is in no such layer has its diagonal

Parameters of the likelihood itself (learned noise) have their own Hessian, as independent of the
weights, which they are by Fisher's measure. Parameters that are not random stay where they are.

Target: the posterior, exactly if that is Gaussian with independent noise of one size (a linear
model; by `kron`, `last_layer` and `full`), and in the limit of many rows around one mode. The
normaliser of the same quadratic is the log-evidence that `info` has,

    log p(D) ~ log p(w*, D) + D/2 log 2 pi - 1/2 log det P,

at T = 1; of `last_layer` there is none.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core import curvature, trees
from haiku_posteriors.core.data import Data, Inputs, pad
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.layerwise import layers
from haiku_posteriors.core.layerwise.factors import inverse_factor
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.networks.interception import intercept_layers
from haiku_posteriors.core.trees import Params

STRUCTURES = ("kron", "last_layer", "diagonal", "full")
MAX_FULL = 5000  # parameters of a full matrix
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


class LaplaceState(NamedTuple):
    """The approximation, that of the prior alone around w* before the first step.

    Attributes:
      params: w*, all parameters.
      layers: by module.
      precision: of parameters with a diagonal one, by name, tempered.
      root: G with G' G the covariance of the parameters with a full one, in units of the prior's
        deviations; (0, 0) where there are none.
    """

    params: Params
    layers: dict[str, Kronecker]
    precision: dict[str, jax.Array]
    root: jax.Array


class Parts(NamedTuple):
    """Which parameters are treated in which way.

    Attributes:
      layers: as Kronecker products.
      full: names, in one full matrix.
      diagonal: names, by a diagonal.
      own: names, the likelihood's own.
    """

    layers: layers.Shapes
    full: tuple[str, ...]
    diagonal: tuple[str, ...]
    own: tuple[str, ...]


def find_parts(log_joint: LogJoint, structure: str) -> Parts:
    """The parts of the random parameters that `structure` makes; refuses what it cannot do."""
    if structure not in STRUCTURES:
        raise unknown_name("structure", structure, STRUCTURES)
    if log_joint.prior.family != "gaussian":
        raise UserError(
            f"Laplace's approximation is for a Gaussian prior, whose curvature is the same "
            f"everywhere, not {log_joint.prior.family}."
        )
    if log_joint.input_shapes is None:
        raise UserError("Laplace's approximation needs a network of known inputs.")
    names = list(trees.named_leaves(log_joint.random_shapes))
    own = tuple(name for name in names if trees.module_name(name) == PARAMETER_GROUP)
    weights = tuple(name for name in names if name not in own)
    if structure == "diagonal":
        return Parts({}, (), weights, own)
    found = layers.find_layers(log_joint, log_joint.input_shapes, max_positions=2**31)
    if structure == "kron":
        rest = tuple(name for name in weights if trees.module_name(name) not in found)
        return Parts(found, (), rest, own)
    if structure == "last_layer":
        if not found:
            raise UserError(
                "There is no last layer: it must be an hk.Linear or a convolution of the rows that "
                "is called once, with all its weights random."
            )
        last = list(found)[-1]
        weights = tuple(name for name in weights if trees.module_name(name) == last)
    size = sum(leaf.size for leaf in _chosen(log_joint.shapes, weights).values())
    if size > MAX_FULL:
        raise UserError(
            f"A full matrix is for at most {MAX_FULL:,} parameters, and there are {size:,}: use "
            "structure 'kron', or 'last_layer' if that is smaller."
        )
    return Parts({}, weights, (), own)


def laplace(log_joint: LogJoint, structure: str = "kron") -> Method:
    """Laplace's approximation around given parameters; the one step that it needs is a pass.

    Args:
      log_joint: the model.
      structure: one of STRUCTURES.

    Returns:
      The method. `init` takes w*, which should be trained (`core.sgd`); steps compute the curvature
      there and do not move it, so that a second one changes nothing. Infos are `log_joint`, that of
      w*, and, but for `last_layer`, `log_evidence`.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = laplace(log_joint)
      >>> state = method.init(jax.random.key(0), None)
      >>> state, info = jax.jit(method.step)(jax.random.key(1), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    parts = find_parts(log_joint, structure)

    def prior_precision(params: Params, names: tuple[str, ...]) -> dict[str, jax.Array]:
        """By name, tempered."""
        scale = log_joint.prior.scale
        return {
            name: jnp.full_like(leaf, 1 / (scale(name) ** 2 * log_joint.temperature))
            for name, leaf in _chosen(params, names).items()
        }

    def init(rng_key: jax.Array, params: Params | None) -> LaplaceState:
        params = log_joint.init(rng_key) if params is None else params
        dtype = jax.tree.leaves(params)[0].dtype

        def start(shape: layers.Shape) -> Kronecker:
            sizes = (shape.num_weights, shape.num_units)
            pairs = [(jnp.zeros(size, dtype), jnp.eye(size, dtype=dtype)) for size in sizes]
            return Kronecker(*pairs[0], *pairs[1])

        own = {
            name: jnp.full_like(
                leaf, 1 / (log_joint.likelihood.prior_std**2 * log_joint.temperature)
            )
            for name, leaf in _chosen(params, parts.own).items()
        }
        size = sum(leaf.size for leaf in _chosen(params, parts.full).values())
        return LaplaceState(
            params,
            {module: start(shape) for module, shape in parts.layers.items()},
            prior_precision(params, parts.diagonal) | own,
            jnp.eye(size, dtype=dtype),
        )

    def step(rng_key: jax.Array, state: LaplaceState, data: Data) -> tuple[LaplaceState, Info]:
        params = state.params
        precision = prior_precision(params, parts.diagonal)
        blocks, root = state.layers, state.root
        if parts.layers:
            blocks = _kronecker_blocks(log_joint, parts.layers, params, data)
        if parts.diagonal:
            unravel = ravel_pytree(_chosen(params, parts.diagonal))[1]
            squares = _over_jacobians(
                log_joint, params, parts.diagonal, data, lambda j: jnp.sum(j**2, axis=0)
            )
            added = unravel(squares / log_joint.temperature)
            precision = jax.tree.map(jnp.add, precision, added)
        if parts.full:
            products = _over_jacobians(log_joint, params, parts.full, data, lambda j: j.T @ j)
            scales = jax.lax.rsqrt(ravel_pytree(prior_precision(params, parts.full))[0])
            standardised = products * scales[:, None] * scales / log_joint.temperature
            identity = jnp.eye(len(scales), dtype=scales.dtype)
            root = inverse_factor(identity + (standardised + standardised.T) / 2)
        precision |= _own_precision(log_joint, params, parts.own, data)
        new = LaplaceState(params, blocks, precision, root)
        info = {"log_joint": log_joint(params, data)}
        if structure != "last_layer":
            info["log_evidence"] = info["log_joint"] + _log_volume(new)
        return new, info

    def _log_volume(state: LaplaceState) -> jax.Array:
        """log int exp(-1/2 d' P d) dd = D/2 log 2 pi - 1/2 log det P."""
        size, log_determinant = 0, jnp.zeros((), state.root.dtype)
        for module, block in state.layers.items():
            shape = parts.layers[module]
            eigenvalues = 1 + jnp.outer(block.features, block.gradients)
            units = jnp.asarray(
                2 * shape.num_units * jnp.log(shape.scales).sum(), eigenvalues.dtype
            )
            log_determinant += jnp.sum(jnp.log(eigenvalues)) - units
            size += eigenvalues.size
        size += trees.size(state.precision)
        log_determinant += trees.total(jax.tree.map(jnp.log, state.precision))
        if parts.full:
            prior = prior_precision(state.params, parts.full)
            log_determinant += trees.total(jax.tree.map(jnp.log, prior))
            log_determinant -= 2 * jnp.sum(jnp.log(jnp.diagonal(state.root)))
            size += state.root.shape[0]
        return (size * math.log(2 * math.pi) - log_determinant) / 2

    def sample_one(rng_key: jax.Array, state: LaplaceState) -> Params:
        noise = trees.normal_like(rng_key, state.params)
        leaves, noises = trees.named_leaves(state.params), trees.named_leaves(noise)
        for name, precision in state.precision.items():
            leaves[name] = leaves[name] + noises[name] * jax.lax.rsqrt(precision)
        for module, block in state.layers.items():
            shape = parts.layers[module]
            standard = _matrix(shape, noise[module])
            standard /= jnp.sqrt(1 + jnp.outer(block.features, block.gradients))
            drawn = block.feature_vectors @ standard @ block.gradient_vectors.T
            for name, value in shape.to_parameters(drawn).items():
                leaves[f"{module}/{name}"] = leaves[f"{module}/{name}"] + value
        if parts.full:
            standard, unravel = ravel_pytree(_chosen(noise, parts.full))
            scales = jax.lax.rsqrt(ravel_pytree(prior_precision(state.params, parts.full))[0])
            for name, value in unravel(scales * (state.root.T @ standard)).items():
                leaves[name] = leaves[name] + value
        return trees.from_named_leaves(state.params, leaves)

    def sample(rng_key: jax.Array, state: LaplaceState, num_draws: int) -> Params:
        keys = jax.random.split(rng_key, num_draws)
        return jax.lax.map(lambda key: sample_one(key, state), keys)

    return Method(init, step, sample)


def _chosen(params: Params, names: tuple[str, ...]) -> dict[str, Any]:
    leaves = trees.named_leaves(params)
    return {name: leaves[name] for name in names}


def _matrix(shape: layers.Shape, own: dict[str, jax.Array]) -> jax.Array:
    """w above b, (D, units)."""
    parts = [own["w"].reshape(-1, shape.num_units)]
    return jnp.concatenate(parts + ([own["b"][None]] if shape.has_bias else []))


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


def _over_jacobians(
    log_joint: LogJoint,
    params: Params,
    names: tuple[str, ...],
    data: Data,
    reduce: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The sum over rows of reduce(sqrt(a H) J), J by the parameters of `names`, (rows x k, D)."""
    flat, unravel = ravel_pytree(_chosen(params, names))
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


def _kronecker_blocks(
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


def _own_precision(
    log_joint: LogJoint, params: Params, names: tuple[str, ...], data: Data
) -> dict[str, jax.Array]:
    """The diagonal of the Hessian by the likelihood's own parameters, at least the prior's."""
    if not names:
        return {}
    flat, unravel = ravel_pytree(_chosen(params, names))
    zeros = trees.named_leaves(jax.tree.map(jnp.zeros_like, params))

    def second(direction: jax.Array) -> jax.Array:
        vector = trees.from_named_leaves(params, zeros | unravel(direction))
        found = curvature.hessian_product(log_joint, params, data, vector)
        return direction @ ravel_pytree(_chosen(found, names))[0]

    found = jax.lax.map(second, jnp.eye(flat.size, dtype=flat.dtype))
    least = 1 / (log_joint.likelihood.prior_std**2 * log_joint.temperature)
    return unravel(jnp.maximum(found, least))
