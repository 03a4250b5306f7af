"""Curves over the temperature of the posterior, and over the parts of a stream of data."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.utils.plots.style import (
    BLUE,
    GREY,
    RUN_COLOURS,
    name_lines,
    new_panels,
    save,
)

LEAST_KEPT = 1e-4  # share of weights; none at all has no place on a logarithmic axis


def temperature_curves(
    path: pathlib.Path,
    results: Mapping[float, Mapping[str, Estimate]],
    shown: Mapping[str, str],
) -> None:
    """One panel a number, with two standard errors, against the temperature; T = 1 is marked.

    Args:
      path: file to write.
      results: numbers by temperature.
      shown: labels of the numbers to draw; one that no run has is left out.
    """
    known = {key: text for key, text in shown.items() if any(key in r for r in results.values())}
    figure, axes = new_panels(len(known), width=4.6, height=3.6, x_label="temperature")
    for axis, (key, label) in zip(axes, known.items(), strict=True):
        points = [(t, r[key].value, 2 * r[key].error) for t, r in results.items() if key in r]
        temperatures, values, errors = np.array(points).T
        axis.errorbar(temperatures, values, errors, color=BLUE, fmt="o-", capsize=3, lw=1.8)
        axis.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
        axis.set(xscale="log", title=f"{label} (±2 standard errors)")
    save(figure, path)


def part_curves(
    path: pathlib.Path,
    results: Mapping[str, Sequence[Mapping[str, Estimate]]],
    shown: Mapping[str, str],
) -> None:
    """One panel a number, a line for each kind of training, against the parts seen.

    Args:
      path: file to write.
      results: by kind of training, numbers after each part.
      shown: labels of the numbers to draw.
    """
    figure, axes = new_panels(len(shown), width=4.2, height=3.4, x_label="parts seen")
    for axis, (key, label) in zip(axes, shown.items(), strict=True):
        for colour, (kind, numbers) in zip(RUN_COLOURS[1:], results.items(), strict=False):
            values = [found[key].value for found in numbers]
            parts = np.arange(1, len(values) + 1)
            axis.plot(parts, values, "o-", color=colour, label=kind, lw=1.8, markersize=4)
        axis.set(title=label, xticks=parts)
    name_lines(figure, axes[0])
    save(figure, path)


def pruning_curves(
    path: pathlib.Path, rows: Sequence[Mapping[str, float]], shown: Mapping[str, str]
) -> None:
    """One panel a number, against the share of weights kept; the run's own is marked.

    On a logarithmic axis: what counts is how few will do.

    Args:
      path: file to write.
      rows: `share` (removed), `of_draws` and the numbers, by share.
      shown: labels of the numbers to draw.
    """
    figure, axes = new_panels(len(shown), width=4.4, height=3.4, x_label="share of weights kept")
    kept = [max(1 - row["share"], LEAST_KEPT) for row in rows]
    own = next(share for share, row in zip(kept, rows, strict=True) if row["of_draws"])
    for axis, (key, label) in zip(axes, shown.items(), strict=True):
        axis.plot(kept, [row[key] for row in rows], "o-", color=BLUE, lw=1.8, markersize=4)
        axis.axvline(own, color=GREY, linestyle="--", linewidth=1)
        axis.set(title=f"{label}, test rows", xscale="log")
    save(figure, path)
