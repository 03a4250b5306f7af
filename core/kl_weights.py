"""Factors of the KL term along the minibatches of an epoch, for variational inference.

In the papers, minibatch i of M pays pi_i KL - log p(D_i | w), with pi_i that sum to 1 over an
epoch, so that the costs of an epoch add up to -ELBO. Here the likelihood of a minibatch is scaled
by M, to estimate that of all data, and so is its cost: the factor of the KL is M pi_i, of mean 1
over an epoch, and Graves' weights are the ELBO itself. Common implementations put pi_i beside the
likelihood of all data *without* that M, which weakens the KL by M on average: the `tempered` ones.

    graves              pi_i = 1 / M                         (Graves 2011)
    blundell            pi_i = 2^(M - i) / (2^M - 1)         (arXiv 1505.05424, section 3.4)
    tempered_graves, tempered_blundell                       pi_i in place of M pi_i
    parameters          1 / D, D the number of random parameters
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from haiku_posteriors.core.errors import UserError, unknown_name

# (i, M, D) -> the factor of the KL at minibatch i = 1..M of an epoch, D random parameters.
KLWeight = Callable[[jax.Array, int, int], jax.Array | float]


def _blundell(number: jax.Array, batches: int, parameters: int) -> jax.Array:
    """2^(M - i) / (2^M - 1), written so that no power overflows."""
    return jnp.exp2(-number.astype(jnp.zeros(()).dtype)) / (1 - 2.0**-batches)


KL_WEIGHTS: dict[str, KLWeight] = {
    "graves": lambda number, batches, parameters: 1.0,
    "blundell": lambda number, batches, parameters: (
        batches * _blundell(number, batches, parameters)
    ),
    "tempered_graves": lambda number, batches, parameters: 1 / batches,
    "tempered_blundell": _blundell,
    "parameters": lambda number, batches, parameters: 1 / parameters,
}


def make_kl_weight(kl_weight: float | str | KLWeight) -> KLWeight:
    """The function that a number, a name in KL_WEIGHTS or a function itself stands for."""
    if callable(kl_weight):
        return kl_weight
    if isinstance(kl_weight, str):
        if kl_weight not in KL_WEIGHTS:
            raise unknown_name("kl_weight", kl_weight, KL_WEIGHTS)
        return KL_WEIGHTS[kl_weight]
    if not (kl_weight >= 0 and math.isfinite(kl_weight)):
        raise UserError(f"kl_weight must be finite and not negative, not {kl_weight}.")
    return lambda number, batches, parameters: kl_weight
