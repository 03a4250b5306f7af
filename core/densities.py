"""Families of posteriors with a density: what their ELBO is made of, and that of their mixtures.

Of members q_k of one family with weights pi_k, the mixture q = sum_k pi_k q_k has the density that
this says, and with L_k the members' ELBOs

    ELBO(q) = sum_k pi_k ( L_k + E_{q_k}[ log q_k(w) - log q(w) ] ),

where the second term is between 0 and -log pi_k. It is estimated by draws, and so is L_k, with the
closed forms that the family has. At temperature 1 both are lower bounds of log p(D).
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

Posterior = Params  # a pytree: a member's own parameters


class ElboTerms(NamedTuple):
    """Estimates of the ELBO's terms, tempered, one per draw or their means.

    Attributes:
      expected_log_likelihood: E_q[log p(D | w)] / T.
      expected_log_prior: E_q[log p(w)] / T.
      entropy: H[q].
    """

    expected_log_likelihood: jax.Array
    expected_log_prior: jax.Array
    entropy: jax.Array

    @property
    def elbo(self) -> jax.Array:
        """Their sum."""
        return self.expected_log_likelihood + self.expected_log_prior + self.entropy


@runtime_checkable
class BoundedFamily(Protocol):
    """Posteriors q that can be drawn from, with estimates of their ELBO or of a bound of it."""

    def evidence_terms(
        self, rng_key: jax.Array, q: Posterior, data: Data, num_samples: int
    ) -> tuple[ElboTerms, Params]:
        """Unbiased estimates of the ELBO's terms, (num_samples,), and the draws they are from.

        An even number of draws comes in pairs of opposite noise, draw i with i + num_samples / 2.
        """


@runtime_checkable
class Family(BoundedFamily, Protocol):
    """Posteriors q that can be evaluated, too."""

    def log_density(self, q: Posterior, params: Params) -> jax.Array:
        """log q(w), exact, a scalar."""

    def noise_like(self, q: Posterior) -> Params:
        """Arrays or shapes of the standard normal noise x that makes one draw."""

    def transport(self, q: Posterior, noise: Params) -> tuple[Params, jax.Array]:
        """w as a function of x, and log N(x; 0, I) - log q(w), a scalar.

        Where the map is a bijection, the second is the log-determinant of its Jacobian.
        """


def log_mixture_density(
    family: Family, members: Posterior, weights: jax.Array, params: Params
) -> jax.Array:
    """log sum_k pi_k q_k(w), a scalar; `members` with a leading axis, weights (members,)."""
    each = jax.lax.map(lambda q: family.log_density(q, params), members)
    return jax.nn.logsumexp(each, b=weights)


def elbo_terms(
    rng_key: jax.Array,
    family: BoundedFamily,
    members: Posterior,
    weights: jax.Array,
    member: jax.Array,
    data: Data,
    num_samples: int,
) -> tuple[jax.Array, jax.Array]:
    """Estimates of L_k and of E_{q_k}[log q_k(w) - log q(w)], of independent pairs of draws.

    Args:
      rng_key: for all noise.
      family: of the members.
      members: with a leading axis.
      weights: pi, (members,).
      member: k, an integer scalar.
      data: all rows.
      num_samples: draws, an even number.

    Returns:
      Both (num_samples / 2,). The second are 0 where the family has no density: a lower bound.
    """
    q = jax.tree.map(lambda leaf: leaf[member], members)
    terms, draws = family.evidence_terms(rng_key, q, data, num_samples)
    if weights.shape[0] == 1 or not isinstance(family, Family):
        gains = jnp.zeros_like(terms.elbo)
    else:

        def gain(params: Params) -> jax.Array:
            mixture = log_mixture_density(family, members, weights, params)
            return family.log_density(q, params) - mixture

        gains = jax.lax.map(gain, draws)
    return tuple(jnp.mean(value.reshape(2, -1), axis=0) for value in (terms.elbo, gains))  # type: ignore[return-value]


def log_importance_ratios(
    rng_key: jax.Array,
    family: Family,
    log_joint: LogJoint,
    q: Posterior,
    data: Data,
    num_samples: int,
) -> jax.Array:
    """log p_T(w, D) - log q(w) of draws w of q, (num_samples,).

    The mean of their exponentials estimates the integral of p_T(w, D) without bias; how heavy the
    tail of these weights is says how far q is from the posterior (arXiv 1802.02538). They are all
    alike if q is the posterior.

    Args:
      rng_key: for all noise.
      family: of q.
      log_joint: the model.
      q: a member.
      data: all rows.
      num_samples: draws, an even number.
    """
    terms, draws = family.evidence_terms(rng_key, q, data, num_samples)

    def rest(params: Params) -> jax.Array:
        log_prior = log_joint.log_prior(params) / log_joint.temperature
        return log_prior - family.log_density(q, params)

    return terms.expected_log_likelihood + jax.lax.map(rest, draws)


def stacking_weights(log_scores: np.ndarray, num_iterations: int = 1000) -> np.ndarray:
    """The pi that maximise sum_i log sum_k pi_k exp(log_scores[i, k]), (members,).

    With log_scores the log-densities of left-out rows under each member (Yao, Vehtari, Simpson &
    Gelman 2018, arXiv 1704.02030): the mixture of the best predictions of rows not seen. The
    problem is concave, and the EM iterations for mixture weights go up to its maximum.
    """
    ratios = np.exp(log_scores - log_scores.max(axis=1, keepdims=True))
    weights = np.full(ratios.shape[1], 1 / ratios.shape[1])
    for _ in range(num_iterations):
        responsibilities = weights * ratios
        responsibilities /= responsibilities.sum(axis=1, keepdims=True)
        weights = responsibilities.mean(axis=0)
    return weights
