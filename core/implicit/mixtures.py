"""Mixtures of several approximations of a posterior, q(w) = sum_k pi_k q_k(w).

The entropy of a mixture is at least sum_k pi_k H[q_k], and more by up to H[pi], all of that if
members do not overlap. So with L_k the members' ELBOs or lower bounds of them,

    sum_k pi_k L_k  <=  ELBO(q)  <=  log p_T(D).

This says nothing of linearised estimates, which bound nothing: their weighted mean is an estimate
as they are. If members do not overlap, pi_k in proportion to exp(ELBO_k) gives the highest ELBO.
"""

import numpy as np
from scipy.special import softmax

WEIGHTS = ("even", "evidence")


def weigh(kind: str, values: np.ndarray) -> np.ndarray:
    """pi, (members,): all equal, or in proportion to exp(value) of the members' values, in nats."""
    return softmax(values) if kind == "evidence" else np.full(len(values), 1 / len(values))


def of_mixture(values: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """sum_k pi_k L_k and its standard error, for L, their errors and pi, (members,) each."""
    return float(weights @ values), float(np.sqrt(weights**2 @ errors**2))
