"""Pictures of a comparison: distances with their floors, and the spread of functions."""

import pathlib
from collections.abc import Mapping

import numpy as np
from matplotlib.artist import Artist

from haiku_posteriors.core.judging import distances, draw_counts
from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.core.judging.predictions import Predictions, evenly
from haiku_posteriors.utils.plots.style import (
    BLACK,
    BLUE,
    GREY,
    RUN_COLOURS,
    RUN_MARKERS,
    name_lines,
    new_panels,
    save,
)

MAX_SCATTER_ROWS = 500


def distance_bars(
    path: pathlib.Path,
    results: Mapping[str, Mapping[str, Estimate]],
    shown: Mapping[str, str],
) -> None:
    """One panel per distance: each candidate's value with two standard errors, and its floor.

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
    figure, axes = new_panels(
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
    save(figure, path)


def spread_scatter(
    path: pathlib.Path,
    candidates: Mapping[str, Predictions],
    reference_name: str,
    reference: Predictions,
) -> None:
    """Standard deviation of the function at each test row, candidate's against reference's.

    Args:
      path: file to write.
      candidates: predictions by name, of more than one draw each.
      reference_name: for the label of the axis.
      reference: predictions of the same rows.
    """
    rows = evenly(reference.outputs.shape[2], MAX_SCATTER_ROWS)

    def spread(predictions: Predictions) -> np.ndarray:
        outputs = predictions.flat_outputs[:, rows]
        values = distances.function_values(predictions.task, outputs)
        return distances.standard_deviation(values).mean(axis=1)

    figure, axes = new_panels(
        len(candidates),
        width=3.7,
        height=3.5,
        x_label=f"std of {reference_name}",
        y_label="std of the method",
        share_y=True,
    )
    theirs = spread(reference)
    ends = [np.min(theirs[theirs > 0], initial=theirs.max()), theirs.max()]
    for axis, (name, candidate) in zip(axes, candidates.items(), strict=True):
        ours = spread(candidate)
        axis.plot(theirs, ours, "o", color=BLUE, alpha=0.5, markersize=3.5, markeredgewidth=0)
        axis.plot(ends, ends, color=BLACK, linestyle="--", linewidth=1)
        axis.set(title=name, xscale="log", yscale="log")
    save(figure, path)


def draw_curves(path: pathlib.Path, runs: Mapping[str, Predictions]) -> None:
    """NLL and accuracy (or RMSE) of each run against the number of draws that are mixed.

    Args:
      path: file to write.
      runs: predictions by name, the reference first, with targets.
    """
    found = {name: draw_counts.scores_by_count(run) for name, run in runs.items()}
    score = next(key for key in next(iter(found.values())) if key not in ("draws", "nll"))
    shown = {"nll": "NLL", score: "RMSE" if score == "rmse" else score}
    figure, axes = new_panels(2, width=4.6, height=3.6, x_label="draws")
    for axis, (key, label) in zip(axes, shown.items(), strict=True):
        for index, (name, values) in enumerate(found.items()):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            marker = RUN_MARKERS[index % len(RUN_MARKERS)]
            axis.plot(
                *(values["draws"], values[key]),
                f"{marker}-",
                color=colour,
                label=name,
                lw=1.6,
                markersize=4,
            )
        axis.set(title=f"{label}, test rows", xscale="log")
    name_lines(figure, axes[0])
    save(figure, path)
