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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core import curvature, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.factors import inverse_factor
from haiku_posteriors.core.gauss_newton import (
    Kronecker,
    chosen,
    kronecker_factors,
    sum_over_jacobians,
)
from haiku_posteriors.core.layerwise import layers
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method
from haiku_posteriors.core.trees import Params

STRUCTURES = ("kron", "last_layer", "diagonal", "full")
MAX_FULL = 5000  # parameters of a full matrix


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
    size = sum(leaf.size for leaf in chosen(log_joint.shapes, weights).values())
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
            for name, leaf in chosen(params, names).items()
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
            for name, leaf in chosen(params, parts.own).items()
        }
        size = sum(leaf.size for leaf in chosen(params, parts.full).values())
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
            blocks = kronecker_factors(log_joint, parts.layers, params, data)
        if parts.diagonal:
            unravel = ravel_pytree(chosen(params, parts.diagonal))[1]
            squares = sum_over_jacobians(
                log_joint, params, parts.diagonal, data, lambda j: jnp.sum(j**2, axis=0)
            )
            added = unravel(squares / log_joint.temperature)
            precision = jax.tree.map(jnp.add, precision, added)
        if parts.full:
            products = sum_over_jacobians(log_joint, params, parts.full, data, lambda j: j.T @ j)
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
            standard, unravel = ravel_pytree(chosen(noise, parts.full))
            scales = jax.lax.rsqrt(ravel_pytree(prior_precision(state.params, parts.full))[0])
            for name, value in unravel(scales * (state.root.T @ standard)).items():
                leaves[name] = leaves[name] + value
        return trees.from_named_leaves(state.params, leaves)

    def sample(rng_key: jax.Array, state: LaplaceState, num_draws: int) -> Params:
        keys = jax.random.split(rng_key, num_draws)
        return jax.lax.map(lambda key: sample_one(key, state), keys)

    return Method(init, step, sample)


def _matrix(shape: layers.Shape, own: dict[str, jax.Array]) -> jax.Array:
    """w above b, (D, units)."""
    parts = [own["w"].reshape(-1, shape.num_units)]
    return jnp.concatenate(parts + ([own["b"][None]] if shape.has_bias else []))


def _own_precision(
    log_joint: LogJoint, params: Params, names: tuple[str, ...], data: Data
) -> dict[str, jax.Array]:
    """The diagonal of the Hessian by the likelihood's own parameters, at least 1 / prior_std^2."""
    if not names:
        return {}
    flat, unravel = ravel_pytree(chosen(params, names))
    zeros = trees.named_leaves(jax.tree.map(jnp.zeros_like, params))

    def second(direction: jax.Array) -> jax.Array:
        vector = trees.from_named_leaves(params, zeros | unravel(direction))
        found = curvature.hessian_product(log_joint, params, data, vector)
        return direction @ ravel_pytree(chosen(found, names))[0]

    found = jax.lax.map(second, jnp.eye(flat.size, dtype=flat.dtype))
    least = 1 / (log_joint.likelihood.prior_std**2 * log_joint.temperature)
    return unravel(jnp.maximum(found, least))
