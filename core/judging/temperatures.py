"""How hot a Langevin sampler is: kinetic and configurational temperature.

For a density proportional to e^{-U} with flat or no boundaries, and any fixed point c,

    E[(w - c) . grad U(w)] = D                 (integration by parts; the virial theorem)

so that (w - c) . grad U / D, on average over draws, is the configurational temperature: 1 for the
posterior. Gradients are those of all data, whatever drove the sampler. If the law of the draws is a
Gaussian of covariance S around the mode of a quadratic U = w' A w / 2, it is tr(A S) / D: 1 plus
the relative excess of the variance, on average over the directions. That is how the bias by
gradient noise and by steps shows, of which R-hat and effective sample sizes know nothing
(Leimkuhler & Matthews 2013, arXiv 1203.5428, compare both temperatures).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.judging.bootstrap import Estimate

NUM_ERRORS = 2  # a temperature counts for what of its distance to 1 is beyond this many errors
# Of the variance: 5 % of a standard deviation.
TOLERANCE = 0.1


class Temperatures(NamedTuple):
    """What a sampler's draws and velocities say.

    Attributes:
      configurational: with its standard error.
      kinetic: mean squared velocity, in units of M^-1/2; None of samplers without one.
      noise_bias: relative excess of the variance by gradient noise, by formula; None if not known.
    """

    configurational: Estimate
    kinetic: float | None = None
    noise_bias: float | None = None


class Measured(NamedTuple):
    """What gradients of all data tell.

    Attributes:
      temperatures: of the run.
      log_joint: of the chosen draws, (chains, draws).
    """

    temperatures: Temperatures
    log_joint: np.ndarray


def configurational(virials: ArrayLike) -> Estimate:
    """The temperature from values (w - c) . grad U / D of draws, (chains, draws).

    The error is the larger of that within chains, by their effective sample size, and that between
    them.
    """
    virials = np.asarray(virials, np.float64)
    num_chains = len(virials)
    size = float(np.squeeze(diagnostics.ess(virials[:, :, None])))
    size = size if np.isfinite(size) else 1.0
    within = virials.std() / np.sqrt(size)
    between = virials.mean(axis=1).std(ddof=1) / np.sqrt(num_chains) if num_chains > 1 else 0.0
    return Estimate(float(virials.mean()), float(max(within, between)))


def problems(found: Temperatures, remedy: str) -> list[str]:
    """A sentence if the draws are too hot or too cold by more than their error explains."""
    value, error = found.configurational.value, found.configurational.error
    said = []
    if not abs(value - 1) - NUM_ERRORS * error <= TOLERANCE:
        kind = "wide" if value > 1 else "narrow"
        said.append(
            f"The configurational temperature is {value:.3f} +- {error:.3f}: the draws are too "
            f"{kind}, by {abs(value - 1):.0%} of the variance (limit {TOLERANCE:.0%}). {remedy}"
        )
    if found.noise_bias is not None and found.noise_bias > TOLERANCE and value > 1 + TOLERANCE / 2:
        said.append(
            f"By the noise of minibatch gradients alone variances are {found.noise_bias:.0%} too "
            "large on average: raise batch_size, or lower final_step_size."
        )
    return said
