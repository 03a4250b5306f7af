"""Stochastic gradient ascent on the log-joint: the MAP estimate, and with chains a deep ensemble.

    w <- w + update(-grad log p_T(w, B)),        B a minibatch weighted as in `core.data`

The gradient is that of the *summed* log-joint, so step sizes for plain SGD are of order 1 / N.
Target: a local maximum of log p(w | D). One run is a point mass; K members from independent
initialisations and shufflings are the deep ensemble of Lakshminarayanan et al. (2017,
arXiv 1612.01474), with the prior in place of their weight decay.
"""

from typing import NamedTuple

import jax
import optax

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize, repeat
from haiku_posteriors.core.trees import Params


class SGDState(NamedTuple):
    """Parameters and the optimizer's state, which counts the steps for its schedule."""

    params: Params
    optimizer_state: optax.OptState


def sgd(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
) -> Method:
    """Minimises minus the log-joint; one step is one epoch.

    Args:
      log_joint: what to maximise.
      optimizer: any optax transformation; Adam with a step size of 1e-2 by default.
      batch_size: at most so many rows a minibatch.

    Returns:
      The method. Its draws are copies of the current parameters.
    """
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer

    def init(rng_key: jax.Array, params: Params | None) -> SGDState:
        params = log_joint.init(rng_key) if params is None else params
        return SGDState(params, optimizer.init(params))

    def update(rng_key: jax.Array, state: SGDState, batch: Data) -> tuple[SGDState, Info]:
        loss, gradient = jax.value_and_grad(lambda params: -log_joint(params, batch))(state.params)
        new = optimize(optimizer, gradient, state.optimizer_state, state.params)
        return SGDState(*new), {"log_joint": -loss}

    def step(rng_key: jax.Array, state: SGDState, data: Data) -> tuple[SGDState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    return Method(init, step, lambda rng_key, state, num_draws: repeat(state.params, num_draws))
