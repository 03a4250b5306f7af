"""Ranks of true values among posterior draws: histograms and distribution functions."""

import os
from collections.abc import Mapping

import numpy as np
import scipy.stats

from haiku_posteriors.core.judging import calibration_ranks
from haiku_posteriors.core.judging.calibration_ranks import Envelope
from haiku_posteriors.utils.plots.style import BLUE, GREY, VERMILLION, new_figure, save, tidy

NUM_BINS = 16
BAND = 0.99  # of the counts of single bins, and of the whole distribution function


def rank_panels(
    path: str | os.PathLike[str],
    ranks: Mapping[str, np.ndarray],
    envelope: Envelope,
    title: str,
) -> None:
    """Draws, for each quantity, the histogram of its ranks and their distribution function.

    Args:
      path: file to write.
      ranks: (data sets,), by name of the quantity.
      envelope: of as many uniform ranks; what leaves it is no chance.
      title: of the whole.
    """
    num_draws = envelope.num_draws
    num_bins = min(NUM_BINS, num_draws + 1)
    figure = new_figure(2.9 * len(ranks), 4.8)
    axes = figure.subplots(2, len(ranks), squeeze=False, sharex=True, sharey="row")
    low, high = envelope.bounds(1 - BAND)
    edges = np.linspace(0, 1, num_bins + 1)
    for column, (name, values) in enumerate(ranks.items()):
        above, below = axes[:, column]
        counts, expected = calibration_ranks.histogram(values, num_draws, num_bins)
        shares = expected / len(values)
        tails = (1 - BAND) / 2
        bounds = [scipy.stats.binom.ppf(q, len(values), shares) for q in (tails, 1 - tails)]
        above.fill_between(
            edges, *(np.append(b, b[-1]) for b in bounds), step="post", color=GREY, alpha=0.35
        )
        above.stairs(counts, edges, color=BLUE, linewidth=1.5)
        above.set_title(name)
        above.set_ylim(bottom=0)
        empirical, points = calibration_ranks.distribution(values, num_draws)
        below.fill_between(points, low - points, high - points, color=GREY, alpha=0.35, step="post")
        outside = np.any((empirical < low) | (empirical > high))
        below.step(
            points,
            empirical - points,
            where="post",
            color=VERMILLION if outside else BLUE,
            linewidth=1.5,
        )
        below.set_xlabel("rank / draws")
    axes[0, 0].set_ylabel("data sets")
    axes[1, 0].set_ylabel("distribution - uniform")
    tidy(*axes.ravel())
    figure.suptitle(f"{title}; grey: {BAND:.0%} of uniform ranks")
    save(figure, path)
