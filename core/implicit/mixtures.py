"""Mixtures of several approximations of a posterior, q(w) = sum_k pi_k q_k(w), and their ELBO.

For the mixture's entropy only bounds are known,

    sum_k pi_k H[q_k]  <=  H[q]  <=  sum_k pi_k H[q_k] + H[pi],

the upper one attained if members do not overlap. Hence, with L_k the members' ELBOs,

    sum_k pi_k L_k  <=  ELBO(q)  <=  sum_k pi_k L_k + H[pi],

and if members do not overlap, pi_k in proportion to exp(L_k) gives the highest ELBO, log sum_k
exp(L_k). (The L_k contain the linearised entropies of `core.implicit.implicit_vi`.)
"""

import numpy as np
from scipy.special import softmax

WEIGHTS = ("even", "elbo")


def weigh(kind: str, elbos: np.ndarray) -> np.ndarray:
    """pi, (members,): all equal, or in proportion to exp(ELBO)."""
    return softmax(elbos) if kind == "elbo" else np.full(len(elbos), 1 / len(elbos))


def elbo_bounds(elbos: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Bounds of the mixture's ELBO for members' ELBOs and weights pi, (members,) both."""
    lower = float(weights @ elbos)
    positive = weights[weights > 0]
    return lower, lower - float(positive @ np.log(positive))
