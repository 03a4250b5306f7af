"""Standard errors by resampling the test rows (bootstrap), and the record that carries them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RESAMPLES = 200  # the standard error itself is then known to 5 %
# Each resample of two samples ranks both of them again, which is slower than a mean over rows.
RESAMPLES_OF_TWO = 50


class Estimate(NamedTuple):
    """A number, its standard error, and for a distance its floor; NaN where unknown."""

    value: float
    error: float = float("nan")
    floor: float = float("nan")
    floor_error: float = float("nan")


def bootstrap_error(statistic: Callable[[np.ndarray], float], num_rows: int) -> float:
    """Standard deviation of a statistic over resampled rows; the same resamples in every call.

    Args:
      statistic: from row indices, drawn with replacement, to the number.
      num_rows: the number of rows to draw from, and of rows drawn.
    """
    rng = np.random.default_rng(0)
    values = [statistic(rng.integers(num_rows, size=num_rows)) for _ in range(RESAMPLES)]
    return float(np.std(values))


def bootstrap_error_of_two(
    statistic: Callable[[np.ndarray, np.ndarray], float], first: np.ndarray, second: np.ndarray
) -> float:
    """As `bootstrap_error`, for a statistic of two independent samples, both resampled."""
    rng = np.random.default_rng(0)
    values = [
        statistic(rng.choice(first, first.size), rng.choice(second, second.size))
        for _ in range(RESAMPLES_OF_TWO)
    ]
    return float(np.std(values))
