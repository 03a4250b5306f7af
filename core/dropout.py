"""Monte Carlo dropout: dropout in training and in prediction, as an approximate posterior.

A draw keeps each input channel k of a layer with probability 1 - p, which is the same as drawing
the layer's weights W, with M the parameters that are trained (Gal & Ghahramani 2016,
arXiv 1506.02142):

    W[..., k, :] = z_k M[..., k, :] / (1 - p),        z_k ~ Bernoulli(1 - p)

So a draw is a parameter pytree, a whole function, as for any other method. The objective, maximised
over M and all parameters that no mask covers, is E_q[log p_T(w, D)]: the likelihood with a separate
mask for every row, as is usual in training, and the expected log-prior in closed form,

    E_q[log p(w)] = (1 - p) log p(M / (1 - p)) + p log p(0)        over the masked weights,

which for a Gaussian prior is weight decay by (1 / s^2) / (1 - p). The entropy of q is that of the
masks, a constant. Target: this objective only; q is a discrete set of weights around the trained
ones, whose spread is set by p and not by the data, so that more data do not narrow it.

The masks act on the inputs of every `hk.Linear`, `hk.Conv1D` and `hk.Conv2D` except the first, on
whole channels. (For ReLU networks this equals dropout before or after the hidden activations;
outputs are never dropped.)
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data, Inputs
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.networks.interception import Layer, intercept_layers
from haiku_posteriors.core.trees import Params


class DropoutState(NamedTuple):
    """Parameters M and the optimizer's state."""

    params: Params
    optimizer_state: optax.OptState


def dropped_modules(log_joint: LogJoint, drop_inputs: bool = False) -> tuple[str, ...]:
    """The modules whose inputs are dropped: the layers with random weights after the first.

    Layers with grouped or masked weights are left alone, and layers whose weights are read in
    another way than by calls (tied weights): a mask on what goes into the calls would not be one
    on the weights. With `drop_inputs`, the first counts too.
    """
    calls = noisy_layers.record_calls(log_joint.init, jax.random.key(0))
    modules = list(dict.fromkeys(call.module for call in calls))
    with_weights = {
        trees.module_name(name)
        for name in trees.named_leaves(log_joint.random_shapes)
        if _is_weight(name)
    }
    left_alone = {call.module for call in calls if call.grouped}
    if log_joint.input_shapes is not None:
        left_alone |= noisy_layers.read_elsewhere(
            log_joint.network, log_joint.shapes, log_joint.input_shapes
        )
    kept = modules if drop_inputs else modules[1:]
    return tuple(name for name in kept if name in with_weights and name not in left_alone)


def mc_dropout(
    log_joint: LogJoint,
    dropout_rate: float = 0.1,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    drop_inputs: bool = False,
) -> Method:
    """Maximises the expected log-joint under dropout; one step is one epoch.

    Args:
      log_joint: the model.
      dropout_rate: p, the probability that a channel is dropped.
      optimizer: any optax transformation; Adam with a step size of 1e-2 by default.
      batch_size: maximum rows per minibatch.
      drop_inputs: whether the first layer's inputs, i.e. features of the data, are dropped too.

    Returns:
      The method. Its draws are parameters with masked weights. Infos are, at each minibatch:
      `log_joint`, the estimate of E_q[log p_T(w, D)], and `expected_log_likelihood`, tempered.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = mc_dropout(log_joint, dropout_rate=0.2, batch_size=8)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    if not 0 <= dropout_rate < 1:
        raise UserError(f"dropout_rate must be at least 0 and below 1, not {dropout_rate}.")
    modules = dropped_modules(log_joint, drop_inputs)
    if not modules:
        raise UserError(
            "There is nothing to drop: dropout acts on the inputs of hk.Linear, hk.Conv1D and "
            "hk.Conv2D layers with random weights after the first, and this network has none."
        )
    keep_rate = 1 - dropout_rate
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer

    def masked(params: Params, mask: Callable[[str, jax.Array], jax.Array]) -> Params:
        """The parameters with mask(name, weights) in place of each weight array of `modules`."""
        return trees.map_with_name(
            lambda name, leaf: (
                mask(name, leaf)
                if _is_weight(name) and trees.module_name(name) in modules
                else leaf
            ),
            params,
        )

    def expected_log_prior(params: Params) -> jax.Array:
        kept = log_joint.log_prior(masked(params, lambda name, leaf: leaf / keep_rate))
        dropped = log_joint.log_prior(masked(params, lambda name, leaf: jnp.zeros_like(leaf)))
        return keep_rate * kept + dropout_rate * dropped

    def init(rng_key: jax.Array, params: Params | None) -> DropoutState:
        params = log_joint.init(rng_key) if params is None else params
        return DropoutState(params, optimizer.init(params))

    def update(rng_key: jax.Array, state: DropoutState, batch: Data) -> tuple[DropoutState, Info]:
        calls = noisy_layers.calls_with_rows(log_joint.network, state.params, batch.inputs)
        by_row = {
            name: all(rows_first for call, rows_first in calls if call.module == name)
            for name in modules
        }
        network = dropout_network(log_joint.network, by_row, dropout_rate)

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            log_likelihood = noisy_layers.noisy_log_likelihood(
                rng_key, log_joint, network, {"params": params}, batch
            )
            log_joint_value = log_likelihood + expected_log_prior(params)
            return -log_joint_value / log_joint.temperature, log_likelihood

        (energy, log_likelihood), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
        new = optimize(optimizer, gradient, state.optimizer_state, state.params)
        info = {
            "log_joint": -energy,
            "expected_log_likelihood": log_likelihood / log_joint.temperature,
        }
        return DropoutState(*new), info

    def step(rng_key: jax.Array, state: DropoutState, data: Data) -> tuple[DropoutState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    def sample_one(rng_key: jax.Array, params: Params) -> Params:
        def mask(name: str, leaf: jax.Array) -> jax.Array:
            key = jax.random.fold_in(rng_key, modules.index(trees.module_name(name)))
            # The input channels are the second axis from the end, in Linear and Conv alike.
            keep = jax.random.bernoulli(key, keep_rate, (leaf.shape[-2], 1))
            return jnp.where(keep, leaf / keep_rate, jnp.zeros((), leaf.dtype))

        return masked(params, mask)

    def sample(rng_key: jax.Array, state: DropoutState, num_draws: int) -> Params:
        keys = jax.random.split(rng_key, num_draws)
        return jax.vmap(lambda key: sample_one(key, state.params))(keys)

    return Method(init, step, sample, in_minibatches=True)


def dropout_network(
    network: Callable[[Params, Inputs], jax.Array],
    by_row: Mapping[str, bool],
    dropout_rate: float,
) -> noisy_layers.NoisyNetwork:
    """The network with dropout on the input channels of some modules.

    A mask belongs to a row and a module: it is the same at every position and in every call, as a
    mask on the module's weights would be. Where the shape of the inputs does not show
    which axis is the rows (e.g. inside hk.vmap), all rows share a mask.

    Args:
      network: (params, inputs) -> outputs.
      by_row: for each module, whether the leading axis of its inputs is the rows.
      dropout_rate: p, the probability of dropping.

    Returns:
      A function of `params` in its bundle.
    """
    modules = tuple(by_row)

    def apply(rng_key: jax.Array, bundle: dict[str, Params], inputs: Inputs) -> jax.Array:
        def intercept(module: hk.Module, layer: Layer, x: jax.Array) -> jax.Array:
            if module.module_name not in modules:
                return layer(x)
            key = jax.random.fold_in(rng_key, modules.index(module.module_name))
            channel = getattr(module, "channel_index", -1)
            shape = noisy_layers.row_and_channel(x.shape, channel, by_row[module.module_name])
            keep = jax.random.bernoulli(key, 1 - dropout_rate, shape)
            return layer(jnp.where(keep, x / (1 - dropout_rate), jnp.zeros((), x.dtype)))

        with intercept_layers(noisy_layers.LAYERS, intercept):
            return network(bundle["params"], inputs)

    return apply


def _is_weight(name: str) -> bool:
    return name.endswith("/w")
