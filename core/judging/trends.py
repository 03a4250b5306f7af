"""Does a noisy series still rise? A line through the means of ten equal batches.

For batch means y_1 .. y_B of a series, with x = 1 .. B and independent errors of one variance,

    gain = B * slope of the least-squares line,    its error from the B - 2 residual degrees

so that (gain - true gain) / error is Student's t with B - 2 degrees; with errors of different
variances, known but for a factor, by weighted least squares. Two one-sided questions at the
level LEVEL each:

    rising    gain - q error > 0             wrong for a series at rest in LEVEL of all cases
    settled   gain + q error < tolerance     wrong for a rise of `tolerance` or more in LEVEL of all

A series can be neither: its noise hides whether it rises by the tolerance. Means of batches that
are longer than the series remembers are as good as independent; shorter ones follow a slow wave as
if it were a trend, which costs time and no trust. (Batch means: Fishman & Yarberry 1997, INFORMS J.
Computing 9; the same use in stochastic optimisation: arXiv 2009.00666, section 3.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jax.typing import ArrayLike

NUM_BATCHES = 10
LEVEL = 0.025
QUANTILE = float(scipy.stats.t.ppf(1 - LEVEL, NUM_BATCHES - 2))  # q, 2.31
POSITIONS = np.arange(NUM_BATCHES) - (NUM_BATCHES - 1) / 2


class Trend(NamedTuple):
    """The rise of a series from its first batch to its last, scalars or (members,) each.

    Attributes:
      gain: by the line, over all batches.
      error: its standard error.
    """

    gain: jax.Array
    error: jax.Array

    @property
    def highest(self) -> jax.Array:
        """What the gain is below, but for a chance of LEVEL."""
        return self.gain + QUANTILE * self.error

    @property
    def is_rising(self) -> jax.Array:
        """Whether a series at rest would hardly look like this one."""
        return self.gain - QUANTILE * self.error > 0


def trend(batch_means: ArrayLike, weights: np.ndarray | None = None) -> Trend:
    """The trend of batch means, (..., NUM_BATCHES).

    Args:
      batch_means: the series.
      weights: of the batches, (NUM_BATCHES,), proportional to one over the variances of their
        errors; all the same by default.
    """
    batch_means = jnp.asarray(batch_means)
    own = np.ones(NUM_BATCHES) if weights is None else np.asarray(weights, float)
    own = own * (NUM_BATCHES / np.sum(own))
    from_center = POSITIONS - np.mean(own * POSITIONS)
    squares = float(np.sum(own * from_center**2))
    shares, positions = (jnp.asarray(values, batch_means.dtype) for values in (own, from_center))
    centred = batch_means - jnp.mean(shares * batch_means, axis=-1, keepdims=True)
    slope = jnp.sum(shares * centred * positions, axis=-1) / squares
    residuals = centred - slope[..., None] * positions
    variance = jnp.sum(shares * jnp.square(residuals), axis=-1) / (NUM_BATCHES - 2)
    return Trend(NUM_BATCHES * slope, NUM_BATCHES * jnp.sqrt(variance / squares))
