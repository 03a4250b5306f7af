"""Stochastic gradient ascent on the log-joint: the MAP estimate, and with chains a deep ensemble.

    w <- w + update(-grad log p_T(w, B)),        B a minibatch weighted as in `core.data`

The gradient is that of the *summed* log-joint, so step sizes for plain SGD are of order 1 / N.
Target: a local maximum of log p(w | D). One run is a point mass; K members from independent
initialisations and shufflings are the deep ensemble of Lakshminarayanan et al. (2017,
arXiv 1612.01474), with the prior in place of their weight decay.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import plateau, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize, repeat
from haiku_posteriors.core.trees import Params

PLATEAU_GAIN = 0.01  # nats per parameter and window; mode and typical set are 0.5 apart


class SGDState(NamedTuple):
    """One member.

    Attributes:
      params: all parameters.
      optimizer_state: counts the steps for its schedule.
      plateau: None where training does not end by itself.
    """

    params: Params
    optimizer_state: optax.OptState
    plateau: plateau.Plateau | None


def sgd(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    plateau_window: int | None = None,
) -> Method:
    """Minimises minus the log-joint; one step is one epoch.

    Args:
      log_joint: what to maximise.
      optimizer: any optax transformation; Adam with a step size of 1e-2 by default.
      batch_size: maximum rows per minibatch.
      plateau_window: epochs of a window after which training is over if the log-joint has gained
        less than PLATEAU_GAIN nats per parameter since the window before (see `core.plateau`);
        steps then change nothing. None to train on.

    Returns:
      The method. Its draws are copies of the current parameters.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = sgd(log_joint, optax.adam(1e-2), batch_size=4)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    tolerance = PLATEAU_GAIN * trees.size(log_joint.shapes)

    def init(rng_key: jax.Array, params: Params | None) -> SGDState:
        params = log_joint.init(rng_key) if params is None else params
        dtype = jax.tree.leaves(params)[0].dtype
        watched = None if plateau_window is None else plateau.start(dtype)
        return SGDState(params, optimizer.init(params), watched)

    def update(rng_key: jax.Array, state: SGDState, batch: Data) -> tuple[SGDState, Info]:
        loss, gradient = jax.value_and_grad(lambda params: -log_joint(params, batch))(state.params)
        new = optimize(optimizer, gradient, state.optimizer_state, state.params)
        return SGDState(*new, state.plateau), {"log_joint": -loss}

    def step(rng_key: jax.Array, state: SGDState, data: Data) -> tuple[SGDState, Info]:
        new, info = minibatch_epoch(rng_key, update, state, data, batch_size)
        if plateau_window is None or state.plateau is None:
            return new, info
        log_joint = jnp.mean(info["log_joint"])
        watched = plateau.update(state.plateau, log_joint, plateau_window, tolerance)
        return trees.select(state.plateau.is_reached, state, new._replace(plateau=watched)), info

    def sample(rng_key: jax.Array, state: SGDState, num_draws: int) -> Params:
        return repeat(state.params, num_draws)

    return Method(init, step, sample, in_minibatches=True)
