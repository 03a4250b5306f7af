"""Bayesian dark knowledge: a student network that learns from a Markov chain while it runs.

    teacher   w_t, a chain of `core.sgmcmc` on its own log-joint
    student   v <- v + update(grad [ sum_i a_i E_{y ~ p(. | x_i, w_t)} log p(y | x_i, v)
                                     + log p(v) ]),      x_i with noise added

(Balan, Rathod, Murphy & Welling 2015, arXiv 1506.04416.) The expectation is linear in the teacher's
predictive probabilities, or first two moments, so that over the chain the student's objective is,
up to a constant, minus the divergence KL(mean over t of p(. | x, w_t) || p(. | x, v)) of class
probabilities; in regression that of the Gaussian with the mixture's mean and variance. An epoch of
the chain and one of the student take turns, with the teacher where that epoch ended.

Target: the student of least divergence from the chain's predictive at the (noisy) inputs; as far
from the posterior predictive as the chain is, and as its network can be.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, State, minibatch_epoch, optimize, repeat
from haiku_posteriors.core.sgmcmc import SGMCMCState
from haiku_posteriors.core.trees import Params


class DarkKnowledgeState(NamedTuple):
    """The chain's state, the student's parameters and its optimizer's state."""

    teacher: SGMCMCState
    params: Params
    optimizer_state: optax.OptState
    num_epochs: jax.Array


def soften(teacher: LogJoint, params: Params, data: Data) -> Data:
    """The rows with what the teacher predicts of them in place of their targets."""
    targets = jax.lax.stop_gradient(teacher.predict(params, data.inputs))
    return dataclasses.replace(data, targets=targets)


def dark_knowledge(
    student: LogJoint,
    teacher: LogJoint,
    chain: Method,
    start: Params,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    input_noise: float = 0.0,
    num_burn_in: int = 0,
) -> Method:
    """The chain and its student; one step is an epoch of each.

    Args:
      student: its likelihood takes predictions as targets (see `core.likelihoods`).
      teacher: the chain's log-joint.
      chain: of `core.sgmcmc.sgmcmc`.
      start: where the chain starts.
      optimizer: the student's; Adam with a step size of 1e-3 by default.
      batch_size: of the student.
      input_noise: standard deviation of the noise on the student's inputs, drawn anew every time.
      num_burn_in: epochs in which the chain runs alone.

    Returns:
      The method. Its draws are the student; `info["log_joint"]` is its objective, and
      `teacher_log_joint` the chain's.
    """
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer

    def init(rng_key: jax.Array, params: Params | None) -> DarkKnowledgeState:
        params = student.init(jax.random.fold_in(rng_key, 0)) if params is None else params
        state = chain.init(jax.random.fold_in(rng_key, 1), start)
        return DarkKnowledgeState(state, params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def step(rng_key: jax.Array, state: DarkKnowledgeState, data: Data) -> tuple[State, Info]:
        chain_key, student_key = (jax.random.fold_in(rng_key, number) for number in range(2))
        taught, chain_info = chain.step(chain_key, state.teacher, data)

        def update(
            key: jax.Array, carry: tuple[Params, optax.OptState], batch: Data
        ) -> tuple[tuple[Params, optax.OptState], Info]:
            if input_noise:
                noise = trees.normal_like(key, batch.inputs)
                inputs = jax.tree.map(lambda x, e: x + input_noise * e, batch.inputs, noise)
                batch = dataclasses.replace(batch, inputs=inputs)
            soft = soften(teacher, taught.params, batch)
            loss, gradient = jax.value_and_grad(lambda params: -student(params, soft))(carry[0])
            return optimize(optimizer, gradient, carry[1], carry[0]), {"log_joint": -loss}

        carry = (state.params, state.optimizer_state)
        new, info = minibatch_epoch(student_key, update, carry, data, batch_size)
        kept = trees.select(state.num_epochs >= num_burn_in, new, carry)
        info["teacher_log_joint"] = jnp.mean(chain_info["log_joint"])
        count = optax.safe_increment(state.num_epochs)
        return DarkKnowledgeState(taught, kept[0], kept[1], count), info

    def sample(rng_key: jax.Array, state: DarkKnowledgeState, num_draws: int) -> Params:
        return repeat(state.params, num_draws)

    return Method(init, step, sample, in_minibatches=True)
