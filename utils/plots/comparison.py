"""Pictures of a comparison: distances with their floors, calibration and spread side by side."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist

from haiku_posteriors.core.judging import distances, metrics
from haiku_posteriors.core.judging.floors import Estimate
from haiku_posteriors.utils.plots import plot_utils
from haiku_posteriors.utils.plots.plot_utils import BLACK, BLUE, GREY, VERMILLION
from haiku_posteriors.utils.report.run_folders import Predictive, evenly

ROWS_SHOWN = 500
COLOURS = (BLACK, BLUE, VERMILLION, "#009E73", plot_utils.ORANGE, plot_utils.SKY_BLUE, "#CC79A7")
MARKERS = "oosD^v<>"


def distance_bars(
    path: pathlib.Path,
    results: Mapping[str, Mapping[str, Estimate]],
    shown: Mapping[str, str],
) -> None:
    """One panel a distance: each candidate's value with two standard errors, and its floor.

    Args:
      path: file to write.
      results: distances by the candidate's name.
      shown: labels of the distances to draw.
    """
    known = {
        key: label
        for key, label in shown.items()
        if any(np.isfinite(result[key].value) for result in results.values() if key in result)
    }
    figure, axes = plot_utils.new_panels(
        len(known), width=4.6, height=1.1 + 0.42 * len(results), x_label="", share_x=False
    )
    for axis, (key, label) in zip(axes, known.items(), strict=True):
        for place, result in enumerate(results.values()):
            estimate = result.get(key)
            if estimate is None or not np.isfinite(estimate.value):
                continue
            if np.isfinite(estimate.floor):
                axis.barh(
                    place,
                    4 * estimate.floor_error,
                    0.7,
                    left=estimate.floor - 2 * estimate.floor_error,
                    color=GREY,
                    alpha=0.45,
                    label="floor ±2 std over halvings",
                )
                axis.plot([estimate.floor] * 2, [place - 0.35, place + 0.35], color=GREY, lw=1.5)
            axis.errorbar(
                estimate.value,
                place,
                xerr=2 * estimate.error,
                fmt="o",
                color=BLUE,
                markersize=5,
                capsize=3,
                label="method ±2 standard errors",
            )
        axis.set(title=label, yticks=range(len(results)), yticklabels=list(results))
        axis.set_ylim(len(results) - 0.5, -0.5)
        axis.use_sticky_edges = False  # a bar is a band here, and no end of the axis
    handles: dict[str, Artist] = {}
    for axis in axes:
        handles |= {label: h for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False
    )
    plot_utils.save(figure, path)


def calibration_curves(path: pathlib.Path, predictives: Sequence[Predictive]) -> None:
    """Accuracy against confidence, or observed against nominal coverage, a line a method."""
    figure = plot_utils.new_figure(6.0, 5.0)
    axis = figure.subplots()
    plot_utils.tidy(axis)
    axis.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated")
    for index, predictive in enumerate(predictives):
        if predictive.targets is None:
            continue
        if predictive.task == "classification":
            mean = predictive.outputs.mean(axis=0, dtype=np.float64)
            bins = metrics.reliability_bins(mean, predictive.targets, equal_mass=True)
            x, y = bins.confidence[bins.weight > 0], bins.accuracy[bins.weight > 0]
            axis.set(xlabel="confidence", ylabel="accuracy (bins of equal numbers of rows)")
        else:
            transform = metrics.probability_integral_transform(
                predictive.outputs, predictive.targets
            )
            x = np.linspace(0, 1, 41)
            y = np.array([metrics.interval_coverage(transform, level) for level in x])
            axis.set(xlabel="nominal coverage", ylabel="observed coverage")
        axis.plot(
            x,
            y,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)] if predictive.task == "classification" else None,
            markersize=4,
            linewidth=1.6,
            label=predictive.name,
        )
    axis.legend(frameon=False, fontsize="small")
    plot_utils.save(figure, path)


def spread_scatter(
    path: pathlib.Path, candidates: Sequence[Predictive], reference: Predictive
) -> None:
    """Standard deviation of the function at each test row, candidate's against reference's."""
    rows = evenly(reference.outputs.shape[1], ROWS_SHOWN)

    def spread(predictive: Predictive) -> np.ndarray:
        values = distances.function_values(predictive.task, predictive.outputs[:, rows])
        return distances.standard_deviation(values).mean(axis=1)

    able = [candidate for candidate in candidates if len(candidate.outputs) > 1]
    figure, axes = plot_utils.new_panels(
        len(able),
        width=3.7,
        height=3.5,
        x_label=f"std of {reference.name}",
        y_label="std of the method",
        share_y=True,
    )
    theirs = spread(reference)
    ends = [np.min(theirs[theirs > 0], initial=theirs.max()), theirs.max()]
    for axis, candidate in zip(axes, able, strict=True):
        ours = spread(candidate)
        axis.plot(theirs, ours, "o", color=BLUE, alpha=0.5, markersize=3.5, markeredgewidth=0)
        axis.plot(ends, ends, color=BLACK, linestyle="--", linewidth=1)
        axis.set(title=candidate.name, xscale="log", yscale="log")
    plot_utils.save(figure, path)
