"""SWAG: a Gaussian with the moments of the way that SGD takes at a constant step.

    after each epoch   mean <- (n mean + w) / (n + 1),   square likewise
                       the last K columns w - mean, with the mean of that epoch, are D
    q(w) = N(mean, 1/2 diag(square - mean^2) + 1/(2 (K - 1)) D D')

(Maddox, Garipov, Izmailov, Vetrov & Wilson 2019, arXiv 1902.02476, algorithm 1.) Gradients are
those of the *summed* log-joint over minibatches, as in `core.sgd`, and the prior's part is in them.
Target: this Gaussian. SGD's stationary covariance is the posterior's only where step and gradient
noise happen to fit (Mandt, Hoffman & Blei 2017, arXiv 1704.04289): of a posterior of D parameters
and minibatch gradients of covariance C, the step of their theorem 1 that comes nearest is

    step = 2 D (1 - momentum) / tr C,

with heavy-ball momentum that lengthens steps by 1 / (1 - momentum); see `nearest_step_size`.
Parameters that are not random are averaged and drawn without spread.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize
from haiku_posteriors.core.trees import Params


class SWAGState(NamedTuple):
    """Where SGD is, and the moments of its way.

    Attributes:
      params: the current ones.
      optimizer_state: of the optimizer.
      num_epochs: done, in all.
      mean: of the collected parameters; the start's before any is.
      scatter: sum of their squared distances from the mean (Welford's: square - mean^2 would lose
        the digits of small deviations).
      deviations: the last ones, (rank, ...) each; zero where there are none yet.
    """

    params: Params
    optimizer_state: optax.OptState
    num_epochs: jax.Array
    mean: Params
    scatter: Params
    deviations: Params


def swag(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    rank: int = 20,
    num_burn_in: int = 0,
) -> Method:
    """SGD at a constant step that collects its moments; one step is one epoch.

    Args:
      log_joint: the model.
      optimizer: with a constant step; plain SGD of step 1e-4 by default.
      batch_size: maximum rows per minibatch.
      rank: K, the deviations that are kept.
      num_burn_in: epochs before the first is collected.

    Returns:
      The method; give `init` a trained network. Before there are two epochs collected, draws have
      no spread.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = swag(log_joint, optax.sgd(1e-3), batch_size=4, rank=3)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(4):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    if rank < 2:
        raise UserError(f"rank must be at least 2, not {rank}: one deviation has no variance.")
    optimizer = optax.sgd(1e-4) if optimizer is None else optimizer

    def init(rng_key: jax.Array, params: Params | None) -> SWAGState:
        params = log_joint.init(rng_key) if params is None else params
        empty = jax.tree.map(lambda leaf: jnp.zeros((rank, *leaf.shape), leaf.dtype), params)
        zero = jnp.zeros((), jnp.int32)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SWAGState(params, optimizer.init(params), zero, params, zeros, empty)

    def update(rng_key: jax.Array, state: SWAGState, batch: Data) -> tuple[SWAGState, Info]:
        loss, gradient = jax.value_and_grad(lambda params: -log_joint(params, batch))(state.params)
        params, optimizer_state = optimize(optimizer, gradient, state.optimizer_state, state.params)
        return state._replace(params=params, optimizer_state=optimizer_state), {"log_joint": -loss}

    def step(rng_key: jax.Array, state: SWAGState, data: Data) -> tuple[SWAGState, Info]:
        state, info = minibatch_epoch(rng_key, update, state, data, batch_size)
        state = state._replace(num_epochs=optax.safe_increment(state.num_epochs))
        is_collected = state.num_epochs > num_burn_in
        return trees.select(is_collected, _collect(state, num_burn_in), state), info

    def sample(rng_key: jax.Array, state: SWAGState, num_draws: int) -> Params:
        keys = jax.random.split(rng_key, num_draws)
        return jax.vmap(lambda key: _sample_one(key, log_joint, state, num_burn_in))(keys)

    return Method(init, step, sample, in_minibatches=True)


def nearest_step_size(
    num_parameters: int, noise: jax.Array, largest: jax.Array, momentum_decay: float
) -> jax.Array:
    """The constant step whose stationary law is nearest to the posterior, and stable.

    Args:
      num_parameters: D.
      noise: tr C, of gradients of the summed log-joint.
      largest: eigenvalue of the Hessian, 1 over which is the longest step with momentum,
        step / (1 - momentum), that is taken: noise of the gradients that grows with the distance
        leaves a mode long before the quadratic's own limit.
      momentum_decay: of heavy-ball momentum.
    """
    nearest = 2 * num_parameters * (1 - momentum_decay) / noise
    return jnp.minimum(nearest, (1 - momentum_decay) / largest)


def _collect(state: SWAGState, num_burn_in: int) -> SWAGState:
    """The moments with the current parameters among them."""
    count = state.num_epochs - num_burn_in
    mean = jax.tree.map(
        lambda m, w: jnp.where(count == 1, w, m + (w - m) / count.astype(m.dtype)),
        state.mean,
        state.params,
    )
    scatter = jax.tree.map(
        lambda s, w, old, new: jnp.where(count == 1, 0, s + (w - old) * (w - new)),
        state.scatter,
        state.params,
        state.mean,
        mean,
    )
    deviations = jax.tree.map(
        lambda d, w, m: jnp.concatenate([d[1:], (w - m)[None]]),
        state.deviations,
        state.params,
        mean,
    )
    return state._replace(mean=mean, scatter=scatter, deviations=deviations)


def _sample_one(
    rng_key: jax.Array, log_joint: LogJoint, state: SWAGState, num_burn_in: int
) -> Params:
    rank = jax.tree.leaves(state.deviations)[0].shape[0]
    dtype = jax.tree.leaves(state.mean)[0].dtype
    count = jnp.maximum(state.num_epochs - num_burn_in, 1)
    kept = jnp.maximum(jnp.minimum(count, rank) - 1, 1).astype(dtype)
    noise = trees.normal_like(jax.random.fold_in(rng_key, 0), state.mean)
    weights = jax.random.normal(jax.random.fold_in(rng_key, 1), (rank,), dtype)
    weights *= jax.lax.rsqrt(2 * kept)

    def draw(mean: jax.Array, scatter: jax.Array, deviations: jax.Array, e: jax.Array) -> jax.Array:
        std = jnp.sqrt(jnp.maximum(scatter, 0) / (2 * count.astype(scatter.dtype)))
        return mean + std * e + jnp.tensordot(weights, deviations, axes=1)

    random = log_joint.partition
    drawn = jax.tree.map(
        draw,
        random(state.mean)[0],
        random(state.scatter)[0],
        random(state.deviations)[0],
        random(noise)[0],
    )
    return trees.merge(drawn, random(state.mean)[1])
