"""Where a variational posterior begins: around trained parameters, as wide as its ELBO says.

    sigma_i = c / sqrt(H_ii),        c = argmax over WIDTHS of ELBO(q(w, c sigma))

with H_ii the diagonal curvature there (`core.curvature`). At the mode of a Gaussian posterior c = 1
is the best mean-field q. At a network that fits all its rows the likelihood has next to no
curvature, and c = 1 is as wide as the prior: draws predict nonsense, and training flees to weights
that predict a constant.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from haiku_posteriors.core import curvature
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import BoundedFamily, Posterior
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

WIDTHS, NUM_DRAWS = tuple(2.0 ** (-n / 2) for n in range(9)), 8  # from 1 to 1/16


def start_around(
    rng_key: jax.Array,
    log_joint: LogJoint,
    params: Params,
    data: Data,
    begin: Callable[[jax.Array, Params, Params], Posterior],
    family: BoundedFamily,
) -> Posterior:
    """q around `params`, with the width of the highest ELBO, by the same draws for all of them.

    Args:
      rng_key: of the curvature's probes, of `begin` and of draws.
      log_joint: the model.
      params: trained ones, all of them.
      data: all rows.
      begin: (rng_key, params, sigma of the random ones) -> q.
      family: of q.
    """
    diagonal = curvature.diagonal(rng_key, log_joint, params, data)
    scales = jax.tree.map(jax.lax.rsqrt, log_joint.partition(diagonal)[0])
    # The curvature's probes have the keys before these.
    q_key, draw_key = (jax.random.fold_in(rng_key, curvature.NUM_PROBES + n) for n in range(2))

    def around(width: jax.Array) -> Posterior:
        narrowed = jax.tree.map(lambda scale: width.astype(scale.dtype) * scale, scales)
        return begin(q_key, params, narrowed)

    def elbo(width: jax.Array) -> jax.Array:
        terms, _ = family.evidence_terms(draw_key, around(width), data, NUM_DRAWS)
        return jnp.mean(terms.elbo)

    widths = jnp.asarray(WIDTHS)
    values = jax.lax.map(elbo, widths)
    return around(widths[jnp.argmax(jnp.nan_to_num(values, nan=-jnp.inf, neginf=-jnp.inf))])
