"""Simulation-based calibration: are true values ranked uniformly among posterior draws?

Parameters drawn from the prior, data drawn given them, and n draws from the posterior given the
data: the rank of any function of the true parameters (and data) among the same function of the
draws is uniform on 0..n, if the draws are exact and independent (Talts, Betancourt, Simpson,
Vehtari & Gelman 2018, arXiv 1804.06788). Posteriors that are too narrow put true values at the
ends, too wide ones in the middle, biased ones at one end.
Arrays are (data sets, draws, quantities) and (data sets, quantities), on the host.
"""

from typing import NamedTuple

import numpy as np
import scipy.stats

NUM_SIMULATIONS = 20_000  # of uniform ranks, for the envelope: p-values of it are no smaller


class Deviation(NamedTuple):
    """How far the ranks of one quantity are from uniform.

    Attributes:
      shift: mean of the ranks over n, less 1/2; below 0 if the draws are above the true values.
      shift_error: its standard error, were the ranks uniform.
      spread: variance of the ranks over that of uniform ones; above 1 if the draws are too narrow.
      largest_difference: of the ranks' distribution function from the uniform one.
      chi_square_p: p-value of the histogram.
      envelope_p: p-value of the distribution function, by simulation.
    """

    shift: float
    shift_error: float
    spread: float
    largest_difference: float
    chi_square_p: float
    envelope_p: float

    @property
    def p_value(self) -> float:
        """Of both tests together: twice the smaller (Bonferroni), at most 1."""
        return min(1.0, 2 * min(self.chi_square_p, self.envelope_p))


def ranks(rng: np.random.Generator, true_values: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """How many draws are below the true value, ties broken at random.

    Args:
      rng: for the ties.
      true_values: (data sets, quantities).
      draws: (data sets, n, quantities).

    Returns:
      Integers from 0 to n, (data sets, quantities).
    """
    below = np.sum(draws < true_values[:, None], axis=1)
    ties = np.sum(draws == true_values[:, None], axis=1)
    return below + rng.integers(0, ties + 1)


def histogram(values: np.ndarray, num_draws: int, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of ranks in bins of nearly equal width, and the expected ones.

    Args:
      values: ranks of one quantity, (data sets,).
      num_draws: n.
      num_bins: at most n + 1.

    Returns:
      Counts and their expectations, (bins,) both.
    """
    bins = np.arange(num_draws + 1) * num_bins // (num_draws + 1)  # of each possible rank
    share = np.bincount(bins, minlength=num_bins) / (num_draws + 1)
    return np.bincount(bins[values], minlength=num_bins), share * len(values)


def chi_square_p(values: np.ndarray, num_draws: int, num_bins: int | None = None) -> float:
    """The p-value of Pearson's test of the histogram; 5 or more expected in each bin by default."""
    if num_bins is None:
        num_bins = int(np.clip(len(values) // 10, 2, min(num_draws + 1, 20)))
    counts, expected = histogram(values, num_draws, num_bins)
    statistic = np.sum((counts - expected) ** 2 / expected)
    return float(scipy.stats.chi2.sf(statistic, num_bins - 1))


def distribution(values: np.ndarray, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The distribution function of ranks 0..n-1, empirical and uniform, (n,) both."""
    counts = np.bincount(values, minlength=num_draws + 1)
    points = np.arange(1, num_draws + 1) / (num_draws + 1)
    return np.cumsum(counts)[:-1] / len(values), points


class Envelope:
    """Simultaneous bounds of the distribution function of so many uniform ranks.

    At each rank, the count of ranks up to it is binomial. The least two-sided p-value over all
    ranks is compared with that of simulated uniform ranks, which makes the bounds hold at all ranks
    together with a stated probability (Sailynoja, Buerkner & Vehtari 2022, arXiv 2103.10522).
    """

    def __init__(self, num_values: int, num_draws: int, seed: int = 0) -> None:
        """Simulates.

        Args:
          num_values: ranks in a sample, one for each data set.
          num_draws: n.
          seed: of the simulation.
        """
        self.num_values, self.num_draws = num_values, num_draws
        self.points = np.arange(1, num_draws + 1) / (num_draws + 1)
        counts = np.arange(num_values + 1)[:, None]
        lower = scipy.stats.binom.cdf(counts, num_values, self.points)
        upper = scipy.stats.binom.sf(counts - 1, num_values, self.points)
        self._table = np.minimum(1.0, 2 * np.minimum(lower, upper))  # (counts, ranks)
        simulated = np.random.default_rng(seed).multinomial(
            num_values, np.full(num_draws + 1, 1 / (num_draws + 1)), NUM_SIMULATIONS
        )
        self._simulated = np.sort(self._least(np.cumsum(simulated, axis=1)[:, :-1]))

    def _least(self, cumulative: np.ndarray) -> np.ndarray:
        return self._table[cumulative, np.arange(self.num_draws)].min(axis=-1)

    def p_value(self, values: np.ndarray) -> float:
        """The share of uniform samples that leave the middle as far or farther."""
        counts = np.cumsum(np.bincount(values, minlength=self.num_draws + 1))[:-1]
        below = np.searchsorted(self._simulated, self._least(counts), side="right")
        return float((below + 1) / (NUM_SIMULATIONS + 1))

    def bounds(self, false_alarm_rate: float) -> tuple[np.ndarray, np.ndarray]:
        """The lowest and highest distribution function inside the envelope, (n,) both."""
        level = np.quantile(self._simulated, false_alarm_rate)
        inside = self._table > level
        counts = np.arange(self.num_values + 1)[:, None]
        low = np.where(inside, counts, self.num_values).min(axis=0)
        high = np.where(inside, counts, 0).max(axis=0)
        return low / self.num_values, high / self.num_values


def deviation(values: np.ndarray, envelope: Envelope) -> Deviation:
    """How far ranks (data sets,) are from uniform."""
    num_draws = envelope.num_draws
    uniform_variance = ((num_draws + 1) ** 2 - 1) / 12
    empirical, points = distribution(values, num_draws)
    return Deviation(
        float(values.mean() / num_draws - 0.5),
        float(np.sqrt(uniform_variance / len(values)) / num_draws),
        float(np.mean((values - num_draws / 2) ** 2) / uniform_variance),
        float(np.abs(empirical - points).max()),
        chi_square_p(values, num_draws),
        envelope.p_value(values),
    )


def lag_one_correlations(draws: np.ndarray) -> np.ndarray:
    """Correlation of neighbouring draws, pooled over data sets, (quantities,).

    Near -1 / n where draws are independent. Far above 0 the ranks are not uniform even if every
    draw is exact.
    """
    centred = draws - draws.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.mean(centred[:, 1:] * centred[:, :-1], axis=(0, 1)) / np.mean(
            centred**2, axis=(0, 1)
        )


def overall_p_value(deviations: list[Deviation]) -> float:
    """Of several quantities of the same data sets: the least times their number, at most 1."""
    return min(1.0, len(deviations) * min(d.p_value for d in deviations))
