"""Noise inside ordinary Haiku networks: layer calls are intercepted, networks are not rewritten.

A layer y = x * W + b (`hk.Linear`, `hk.Conv1D`, `hk.Conv2D`; * a product or a convolution) with
independent Gaussian weights of means M, m and standard deviations S, s can be run in three ways,
each by calling the module's own method with other inputs and parameters in place of its own:

    local     y = x * M + m + sqrt(x^2 * S^2 + s^2) e      e ~ N(0, 1), per row and output
    flipout   y = x * M + m + r ((x u) * (S E) + s E')     E, E' ~ N(0, 1), per weight;
                                                           u, r = +-1, per row and channel
    dropout   y = (x z / (1 - p)) * M + m                  z ~ Bernoulli(1 - p), per row, channel

`local` (Kingma et al. 2015, arXiv 1506.02557) draws outputs and not weights. For `hk.Linear` on
inputs (rows, features) a row's outputs then have their exact joint law, so that sums over rows of
expectations are estimated without bias. For convolutions the outputs at two positions of one row
share weights and are correlated, which noise drawn independently per position ignores: the law of
each output is right, the joint law is not, and the objective differs from the ELBO, little where
correlations matter little. It is exact where a convolution has one position only. Noise is by
`core.approximate_normals`: its first eleven moments are the normal ones, and it is the largest part
of the cost otherwise.

`flipout` (Wen et al. 2018, arXiv 1803.04386) is exact for all three layers: given the signs, each
row sees weights of the right law, and rows are uncorrelated.

A call is replaced only where this is sure to be right, see `covered_modules`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_posteriors.core import approximate_normals, trees
from haiku_posteriors.core.data import Data, Inputs, pad
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.networks.interception import Layer, intercept_layers
from haiku_posteriors.core.trees import Params

LAYERS: dict[type[hk.Module], int] = {hk.Linear: 0, hk.Conv1D: 1, hk.Conv2D: 2}  # spatial axes
# (rng_key, bundle, inputs) -> outputs; a bundle holds trees of floats, among them `params`.
NoisyNetwork = Callable[[jax.Array, dict[str, Params], Inputs], jax.Array]


class Call(NamedTuple):
    """One call of a layer, as seen while tracing.

    Attributes:
      module: its name, the key of its parameters.
      shape: of its inputs.
      extra_axes: axes beyond rows, space and channels; negative where the rows are missing.
      repeated: whether the call is inside a scan, a vmap or another transformation within the
        network, and so may run many times with the same weights.
      grouped: whether its weights are masked or its channels split into groups.
    """

    module: str
    shape: tuple[int, ...]
    extra_axes: int
    repeated: bool
    grouped: bool


def record_calls(function: Callable[..., Any], *arguments: Any) -> list[Call]:
    """The layer calls of `function`, traced on arrays or shapes; nothing is computed."""
    calls: list[Call] = []

    def traced(*arguments: Any) -> Any:
        outermost = get_opaque_trace_state()

        def record(module: hk.Module, layer: Layer, inputs: jax.Array) -> jax.Array:
            grouped = (
                getattr(module, "mask", None) is not None
                or getattr(module, "feature_group_count", 1) > 1
            )
            extra_axes = inputs.ndim - 2 - LAYERS[type(module)]
            repeated = get_opaque_trace_state() != outermost
            calls.append(Call(module.module_name, inputs.shape, extra_axes, repeated, grouped))
            return layer(inputs)

        with intercept_layers(LAYERS, record):
            return function(*arguments)

    jax.eval_shape(traced, *arguments)
    return calls


def calls_with_rows(
    network: Callable[[Params, Inputs], jax.Array], params: Params, inputs: Inputs
) -> list[tuple[Call, bool]]:
    """The network's layer calls, and whether the leading axis of each one's inputs is the rows.

    Tracing two numbers of rows tells the rows from an axis that happens to have the same length.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)

    def calls(rows: int) -> list[Call]:
        return record_calls(network, shapes, _shapes_of_rows(inputs, rows))

    return [
        (few, few.shape[:1] == (2,) and many.shape[:1] == (3,))
        for few, many in zip(calls(2), calls(3), strict=True)
    ]


def covered_modules(
    network: Callable[[Params, Inputs], jax.Array],
    params: Params,
    inputs: Inputs,
    estimator: str,
) -> tuple[str, ...]:
    """The modules whose calls `local` or `flipout` may replace; all others use drawn weights.

    A module must be called once, outside any loop, since the noise of its weights must be the same
    whenever one row meets them, and its weights must not be read in any other way (tied weights);
    on inputs whose leading axis is the rows; and have ordinary weights (no mask, no groups).
    `local` also needs that each row meets the weights of a `hk.Linear` at one position only, i.e.
    inputs (rows, features).

    Args:
      network: (params, inputs) -> outputs.
      params: arrays or shapes.
      inputs: (rows, ...), arrays or shapes.
      estimator: "local", "flipout", or "reparameterization", which replaces nothing.

    Returns:
      Names of modules.
    """
    if estimator == "reparameterization":
        return ()
    calls = calls_with_rows(network, params, inputs)
    names = [call.module for call, _ in calls]
    elsewhere = read_elsewhere(network, params, inputs)

    def covered(call: Call, by_row: bool) -> bool:
        axes_fit = call.extra_axes == 0 if estimator == "local" else call.extra_axes >= 0
        once = names.count(call.module) == 1 and not call.repeated
        untied = call.module not in elsewhere
        return once and untied and by_row and axes_fit and not call.grouped

    return tuple(call.module for call, by_row in calls if covered(call, by_row))


def read_elsewhere(
    network: Callable[[Params, Inputs], jax.Array], params: Params, inputs: Inputs
) -> set[str]:
    """The modules whose parameters reach the outputs in another way than by a call of the layer.

    The network is traced with layers that put out the sum of their inputs: parameters on which the
    outputs depend then are read elsewhere. What a `while` loop reads counts as used.
    """

    def without_layers(params: Params, inputs: Inputs) -> jax.Array:
        # Not zeros: what is read in front of a layer must reach the outputs behind it.
        with intercept_layers(LAYERS, lambda module, layer, x: jnp.full_like(layer(x), jnp.sum(x))):
            return network(params, inputs)

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    traced = jax.make_jaxpr(without_layers)(shapes, _shapes_of_rows(inputs, 2)).jaxpr
    _, used = dce_jaxpr(traced, [True] * len(traced.outvars))
    names = list(trees.named_leaves(shapes))
    return {trees.module_name(name) for name, is_used in zip(names, used, strict=False) if is_used}


def _shapes_of_rows(inputs: Inputs, num_rows: int) -> Inputs:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype), inputs
    )


def default_estimator(log_joint: LogJoint) -> str:
    """`local` where it is exact, for the dense layers of networks on rows of numbers."""
    shapes = log_joint.input_shapes
    if shapes is None or any(leaf.ndim != 2 for leaf in jax.tree.leaves(shapes)):
        return "reparameterization"
    calls = record_calls(log_joint.network, log_joint.shapes, shapes)
    has_convolutions = any(len(call.shape) - call.extra_axes > 2 for call in calls)
    return "reparameterization" if has_convolutions else "local"


def covered_parameters(
    log_joint: LogJoint, inputs: Inputs, estimator: str
) -> tuple[list[str], list[str]]:
    """Names of the random parameters that `estimator` covers, and of those that are drawn instead.

    Args:
      log_joint: of the network in question.
      inputs: (rows, ...); only shape and dtype matter.
      estimator: as for `covered_modules`.
    """
    modules = covered_modules(log_joint.network, log_joint.shapes, inputs, estimator)
    names = list(trees.named_leaves(log_joint.random_shapes))
    covered = [name for name in names if trees.module_name(name) in modules]
    return covered, [name for name in names if name not in covered]


def noisy_network(
    network: Callable[[Params, Inputs], jax.Array], modules: tuple[str, ...], estimator: str
) -> NoisyNetwork:
    """The network with `local` or `flipout` noise in the calls of `modules`.

    Its bundle holds `params`, with the means of the parameters of `modules`, and `spread`: their
    standard deviations for `local`, a draw of w - mean for `flipout`; none where w is not random.
    """
    estimate = _local if estimator == "local" else _flipout

    def apply(rng_key: jax.Array, bundle: dict[str, Params], inputs: Inputs) -> jax.Array:
        spreads = trees.named_leaves(bundle["spread"])

        def intercept(module: hk.Module, layer: Layer, x: jax.Array) -> jax.Array:
            names = [f"{module.module_name}/{name}" for name in ("w", "b")]
            own = {name: spreads[name] for name in names if name in spreads}
            if module.module_name not in modules or not own:
                return layer(x)
            key = jax.random.fold_in(rng_key, modules.index(module.module_name))
            return estimate(key, layer, x, own, getattr(module, "channel_index", -1))

        with intercept_layers(LAYERS, intercept):
            return network(bundle["params"], inputs)

    return apply


def sampled_log_likelihood(
    rng_key: jax.Array,
    log_joint: LogJoint,
    mean: Params,
    scale: Params,
    drawn: Params,
    data: Data,
    estimator: str,
) -> jax.Array:
    """log p(D | w), not tempered, at w ~ q: by `estimator` where it covers w, else at `drawn`.

    Args:
      rng_key: of the noise inside the network.
      log_joint: of the network.
      mean: of the random parameters under q, `None` elsewhere.
      scale: their standard deviations, likewise.
      drawn: a draw from q of all parameters, with the point estimates in their places.
      data: rows and weights.
      estimator: as for `covered_modules`.

    Returns:
      A scalar, of expectation E_q[log p(D | w)] with the exception for `local` stated above.
    """
    modules = covered_modules(log_joint.network, drawn, data.inputs, estimator)
    means = trees.map_with_name(
        lambda name, m: m if trees.module_name(name) in modules else None, mean
    )
    noise = jax.tree.map(jnp.subtract, log_joint.partition(drawn)[0], mean)
    bundle = {
        "params": trees.merge(means, drawn),
        "spread": scale if estimator == "local" else noise,
    }
    network = noisy_network(log_joint.network, modules, estimator)
    return noisy_log_likelihood(rng_key, log_joint, network, bundle, data)


def noisy_log_likelihood(
    rng_key: jax.Array,
    log_joint: LogJoint,
    network: NoisyNetwork,
    bundle: dict[str, Params],
    data: Data,
) -> jax.Array:
    """sum_i a_i log p(y_i | network(bundle, x_i, noise_i)), not tempered, in microbatches.

    Every row carries a key, and a microbatch uses that of its first row, so that no two rows share
    noise, whatever the number of microbatches. The likelihood's own parameters are in `params`.
    """
    data = pad(data, log_joint.num_microbatches)
    keys = jax.random.split(rng_key, data.weights.shape[0])
    noisy = dataclasses.replace(
        log_joint, network=lambda bundle, rows: network(rows[1][0], bundle, rows[0])
    )
    own = bundle["params"].get(PARAMETER_GROUP, {})
    return noisy.log_likelihood(
        {**bundle, PARAMETER_GROUP: own},
        dataclasses.replace(data, inputs=(data.inputs, keys)),
    )


def _local(
    rng_key: jax.Array, layer: Layer, x: jax.Array, scales: dict[str, jax.Array], channel: int
) -> jax.Array:
    variance = with_parameters(layer, jax.tree.map(jnp.square, scales), jnp.square(x))
    # Where all inputs are zero so is the variance, and the root's gradient would be infinite.
    positive = variance > 0
    std = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0)
    return layer(x) + std * approximate_normals.approximate_normal_like(rng_key, std)


def _flipout(
    rng_key: jax.Array, layer: Layer, x: jax.Array, noise: dict[str, jax.Array], channel: int
) -> jax.Array:
    def signs(index: int, shape: tuple[int, ...]) -> jax.Array:
        own_key = jax.random.fold_in(rng_key, index)
        return jax.random.rademacher(own_key, row_and_channel(shape, channel), x.dtype)

    mean = layer(x)
    # The bias is the weight of a constant input, whose own sign may be fixed to 1.
    perturbation = with_parameters(layer, noise, x * signs(0, x.shape))
    return mean + signs(1, mean.shape) * perturbation


def with_parameters(layer: Layer, values: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The layer's output with other parameters than its own; those not in `values` are zero."""

    def getter(next_getter: Callable, value: jax.Array, context: hk.GetterContext) -> jax.Array:
        return next_getter(values.get(context.full_name, jnp.zeros_like(value)))

    with hk.custom_getter(getter):
        return layer(x)


def row_and_channel(shape: tuple[int, ...], channel: int, by_row: bool = True) -> tuple[int, ...]:
    """`shape` with 1 for all axes but the rows (the first, if `by_row`) and the channels."""
    kept = {channel % len(shape)} | ({0} if by_row else set())
    return tuple(n if axis in kept else 1 for axis, n in enumerate(shape))
