"""Ascent of an ELBO by stochastic gradients: what methods of one family of posteriors share.

    q  <-  q + optimizer( grad L(q) ),      L an unbiased estimate of the ELBO or of a bound of it

Likelihoods come from minibatches weighted as in `core.data`, expectations over q from draws. The
target is that of the family whose terms are given.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import ElboTerms, Posterior
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize
from haiku_posteriors.core.trees import Params


class ElboState(NamedTuple):
    """The posterior's own parameters and the optimizer's state."""

    variational: Posterior
    optimizer_state: optax.OptState


def elbo_ascent(
    start: Callable[[jax.Array, Params | Posterior | None], Posterior],
    terms: Callable[[jax.Array, Posterior, Data, int], ElboTerms],
    draw: Callable[[jax.Array, Posterior], Params],
    optimizer: optax.GradientTransformation | None,
    batch_size: int,
    num_samples: int,
    align: Callable[[Posterior, Posterior], Posterior] | None = None,
) -> Method:
    """Maximises a bound; one step is one epoch.

    Args:
      start: (rng_key, what `init` was given) -> the first q.
      terms: (rng_key, q, data, num_samples) -> differentiable terms of the bound, (num_samples,).
      draw: (rng_key, q) -> parameters.
      optimizer: any optax transformation; Adam with a step size of 1e-2 for None.
      batch_size: maximum rows per minibatch.
      num_samples: draws of q per minibatch.
      align: (q, another) -> the same q by other parameters, nearest to the other's; None where q
        has one set of parameters. For averages of iterates.

    Returns:
      The method. Infos are, at each minibatch: `log_joint`, the estimate of E_q[log p_T(w, D)];
      `expected_log_likelihood`, tempered; `kl`; `elbo`, their difference.
    """
    if num_samples < 1:
        raise UserError(f"num_samples must be at least 1, not {num_samples}.")
    chosen = optax.adam(1e-2) if optimizer is None else optimizer

    def init(rng_key: jax.Array, params: Params | Posterior | None) -> ElboState:
        q = start(rng_key, params)
        return ElboState(q, chosen.init(q))

    def update(rng_key: jax.Array, state: ElboState, batch: Data) -> tuple[ElboState, Info]:
        def loss(q: Posterior) -> tuple[jax.Array, ElboTerms]:
            found = jax.tree.map(jnp.mean, terms(rng_key, q, batch, num_samples))
            return -found.elbo, found

        gradient, found = jax.grad(loss, has_aux=True)(state.variational)
        q, optimizer_state = optimize(chosen, gradient, state.optimizer_state, state.variational)
        info = {
            "log_joint": found.expected_log_likelihood + found.expected_log_prior,
            "expected_log_likelihood": found.expected_log_likelihood,
            "kl": -found.expected_log_prior - found.entropy,
            "elbo": found.elbo,
        }
        return ElboState(q, optimizer_state), info

    def step(rng_key: jax.Array, state: ElboState, data: Data) -> tuple[ElboState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    def sample(rng_key: jax.Array, state: ElboState, num_draws: int) -> Params:
        keys = jax.random.split(rng_key, num_draws)
        return jax.vmap(lambda key: draw(key, state.variational))(keys)

    def align_states(state: ElboState, like: ElboState) -> ElboState:
        assert align is not None
        return state._replace(variational=align(state.variational, like.variational))

    return Method(init, step, sample, in_minibatches=True, align=align_states if align else None)
