"""Pictures of uncertainty under shift, on foreign inputs, and of abstention."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from haiku_posteriors.core.judging import detection
from haiku_posteriors.utils.plots.style import (
    RUN_COLOURS,
    RUN_MARKERS,
    name_lines,
    new_figure,
    new_panels,
    save,
    tidy,
)

MAX_RUNS_IN_DETAIL = 2  # with more, the lines of single kinds would hide the means


def distribution_functions(
    path: pathlib.Path, scores: Mapping[str, Mapping[str, np.ndarray]], label: str
) -> None:
    """Empirical distribution functions of an uncertainty, a panel per run and a line per data set.

    Args:
      path: file to write.
      scores: uncertainties of rows, by run and data set.
      label: what the uncertainty is.
    """
    figure, axes = new_panels(
        len(scores), width=4.6, height=3.4, x_label=label, y_label="share of rows", share_y=True
    )
    for axis, (run, sets) in zip(axes, scores.items(), strict=True):
        for index, (name, values) in enumerate(sets.items()):
            share = np.arange(1, len(values) + 1) / len(values)
            axis.step(
                np.sort(values),
                share,
                where="post",
                label=name,
                color=RUN_COLOURS[index % len(RUN_COLOURS)],
                linewidth=1.8,
            )
        axis.set(title=run, ylim=(0, 1.01))
    name_lines(figure, axes[0])
    save(figure, path)


def shift_curves(
    path: pathlib.Path,
    shifts: Mapping[str, Sequence[tuple[str, float, Mapping[str, float]]]],
    shown: Sequence[str],
    labels: Mapping[str, str],
    x_label: str,
) -> None:
    """Metrics against the strength of a shift, a panel per metric and a line per run.

    The line is the mean over kinds of shift; faint lines, of few runs, are the single kinds.

    Args:
      path: file to write.
      shifts: (kind, strength, metrics) of every shift, by run.
      shown: which metrics.
      labels: what they are called.
      x_label: what the strength is.
    """
    figure, axes = new_panels(len(shown), width=4.2, height=3.4, x_label=x_label)
    for axis, metric in zip(axes, shown, strict=True):
        for index, (run, found) in enumerate(shifts.items()):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            kinds = sorted({kind for kind, _, _ in found})
            lines = []
            for kind in kinds:
                points = sorted((s, m[metric]) for k, s, m in found if k == kind)
                strengths, values = np.array(points).T
                lines.append(values)
                if len(kinds) > 1 and len(shifts) <= MAX_RUNS_IN_DETAIL:
                    axis.plot(strengths, values, color=colour, linewidth=0.6, alpha=0.35)
            axis.plot(
                strengths,
                np.mean(lines, axis=0),
                color=colour,
                marker=RUN_MARKERS[index % len(RUN_MARKERS)],
                markersize=4,
                linewidth=2,
                label=run,
            )
        axis.set_title(labels[metric])
    axes[0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    name_lines(figure, axes[0])
    save(figure, path)


def risk_coverage(
    path: pathlib.Path,
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]],
    label: str,
) -> None:
    """Risk against coverage, a line per run; `rows` has uncertainties and losses by run."""
    figure = new_figure(6.0, 4.2)
    axis = figure.subplots()
    tidy(axis)
    for index, (run, (uncertainty, losses)) in enumerate(rows.items()):
        coverage, risk = detection.risk_coverage(uncertainty, losses)
        axis.plot(
            coverage, risk, color=RUN_COLOURS[index % len(RUN_COLOURS)], linewidth=1.8, label=run
        )
    axis.set(xlabel="coverage: share of rows answered", ylabel=f"{label} of those", xlim=(0, 1))
    axis.set_ylim(bottom=0)
    name_lines(figure, axis)
    save(figure, path)
