"""Pictures of calibration: of one run in detail, and of several runs on the same axes."""

import os
import pathlib
from collections.abc import Mapping

import numpy as np
from matplotlib import colors
from numpy.typing import ArrayLike

from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils.plots.style import (
    BLACK,
    BLUE,
    GREY,
    RUN_COLOURS,
    RUN_MARKERS,
    SKY_BLUE,
    VERMILLION,
    new_figure,
    save,
    tidy,
)

MAX_SCATTER_ROWS = 500


def reliability_diagram(
    path: str | os.PathLike[str], probabilities: ArrayLike, targets: ArrayLike, title: str
) -> None:
    """Draws accuracy against confidence by bin, and how many rows have which confidence.

    Args:
      path: file to write.
      probabilities: `(rows, classes)`, averaged over draws.
      targets: `(rows,)` integers.
      title: of the picture.
    """
    bins = metrics.reliability_bins(probabilities, targets)
    error = metrics.expected_calibration_error(probabilities, targets)
    filled, num_bins = bins.weight > 0, len(bins.weight)
    centre = ((np.arange(num_bins) + 0.5) / num_bins)[filled]
    confidence, accuracy = bins.confidence[filled], bins.accuracy[filled]
    figure = new_figure(5.2, 6.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    tidy(upper, lower)
    width = 0.9 / num_bins
    both = np.minimum(accuracy, confidence)
    upper.bar(centre, accuracy, width, color=BLUE, label="accuracy")
    for excess, colour, label in (
        (confidence - both, VERMILLION, "confidence beyond accuracy"),
        (accuracy - both, SKY_BLUE, "accuracy beyond confidence"),
    ):
        upper.bar(centre, excess, width, bottom=both, color=colour, label=label)
    upper.plot([0, 1], [0, 1], color=BLACK, linestyle="--", linewidth=1, label="calibrated")
    rows = f"{len(np.asarray(targets)):,} test rows, ECE {error:.4f}"
    upper.set(title=f"{title}\n{rows}", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    lower.bar(centre, bins.weight[filled], width, color=GREY)
    lower.set(xlabel="confidence", ylabel="share of rows")
    save(figure, path)


def regression_calibration(
    path: str | os.PathLike[str], predictions: ArrayLike, targets: ArrayLike, title: str
) -> None:
    """Draws observed against predicted values, and observed against nominal coverage.

    Args:
      path: file to write.
      predictions: `(draws, rows, 2 * targets)`, means, then standard deviations.
      targets: `(rows, targets)`.
      title: of the picture.
    """
    transform = metrics.probability_integral_transform(predictions, targets)
    means, deviations = np.split(np.asarray(predictions, np.float64), 2, axis=-1)
    mean = means.mean(axis=0).ravel()
    spread = np.sqrt(np.mean(deviations**2, axis=0) + means.var(axis=0)).ravel()
    observed = np.asarray(targets, np.float64).ravel()
    # Evenly spaced in the order of the rows, so that the same run gives the same picture.
    shown = np.unique(
        np.linspace(0, len(observed) - 1, min(len(observed), MAX_SCATTER_ROWS)).round().astype(int)
    )
    figure = new_figure(9.6, 4.6)
    left, right = figure.subplots(1, 2)
    tidy(left, right)
    left.errorbar(
        observed[shown],
        mean[shown],
        yerr=2 * spread[shown],
        fmt="o",
        color=colors.to_rgba(BLUE, 0.7),
        ecolor=colors.to_rgba(BLUE, 0.2),
        markersize=3,
        markeredgewidth=0,
        elinewidth=0.8,
        label="mean ±2 std",
    )
    ends = [observed.min(), observed.max()]
    left.plot(ends, ends, color=BLACK, linestyle="--", linewidth=1, zorder=3, label="exact")
    left.set(xlabel="observed", ylabel="predicted")
    levels = np.linspace(0, 1, 101)
    coverage = [metrics.interval_coverage(transform, level) for level in levels]
    right.plot(levels, coverage, color=BLUE, linewidth=2, label="observed")
    right.plot([0, 1], [0, 1], color=BLACK, linestyle="--", linewidth=1, label="calibrated")
    right.set(xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1.01))
    right.set_aspect("equal")
    for axis in (left, right):  # below the axes, where no point or line is
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    figure.suptitle(f"{title}\nposterior predictive checks on {len(observed):,} test rows")
    save(figure, path)


def calibration_curves(path: pathlib.Path, runs: Mapping[str, Predictions]) -> None:
    """Accuracy against confidence, or observed against nominal coverage, one line per run.

    Args:
      path: file to write.
      runs: predictions by the run's name; one without targets is left out.
    """
    figure = new_figure(6.0, 5.0)
    axis = figure.subplots()
    tidy(axis)
    axis.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated")
    for index, (name, predictions) in enumerate(runs.items()):
        if predictions.targets is None:
            continue
        outputs, is_classification = predictions.flat_outputs, predictions.task == "classification"
        if is_classification:
            mean = outputs.mean(axis=0, dtype=np.float64)
            bins = metrics.reliability_bins(mean, predictions.targets, equal_mass=True)
            x, y = bins.confidence[bins.weight > 0], bins.accuracy[bins.weight > 0]
            axis.set(xlabel="confidence", ylabel="accuracy (bins of equal numbers of rows)")
        else:
            transform = metrics.probability_integral_transform(outputs, predictions.targets)
            x = np.linspace(0, 1, 41)
            y = np.array([metrics.interval_coverage(transform, level) for level in x])
            axis.set(xlabel="nominal coverage", ylabel="observed coverage")
        axis.plot(
            x,
            y,
            color=RUN_COLOURS[index % len(RUN_COLOURS)],
            marker=RUN_MARKERS[index % len(RUN_MARKERS)] if is_classification else None,
            markersize=4,
            linewidth=1.6,
            label=name,
        )
    axis.set_title("test rows")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    save(figure, path)
