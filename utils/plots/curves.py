"""Pictures of a run over its epochs: metrics, traces of its chains, and their convergence."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from haiku_posteriors.core.judging.diagnostics import MEDIAN_RHAT_LIMIT
from haiku_posteriors.utils.plots.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    new_figure,
    new_panels,
    save,
    tidy,
)

MAX_CHAINS_IN_LEGEND = 10
ROWS = {"train": "training rows", "test": "test rows"}


def training_curves(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    title: str = "",
    unit: str = "epoch",
) -> None:
    """Draws metrics over epochs, one small panel each.

    Args:
      path: file to write.
      rows: the lines of a run's metrics.jsonl; each has `epoch` and any of the metrics. A metric
        that is null or NaN leaves a break in its line.
      keys: which metrics, in the order of the panels.
      title: of the picture.
      unit: what a step of the run is called.
    """
    figure, axes = new_panels(len(keys), width=3.8, height=2.6, x_label=unit)
    for axis, key in zip(axes, keys, strict=True):
        known = [(row["epoch"], row[key]) for row in rows if key in row]
        axis.set_title(_title(key))
        if not known:
            axis.text(0.5, 0.5, "not recorded", ha="center", color=GREY, transform=axis.transAxes)
            axis.set_yticks([])
            continue
        epochs, values = np.array(known, np.float64).T
        # Markers show where the few points of a short run, or of a rare evaluation, are.
        marker = "o" if len(epochs) <= 30 else None
        axis.plot(epochs, values, color=BLUE, linewidth=1.5, marker=marker, markersize=3)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    axes[0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    figure.suptitle(title)
    save(figure, path)


def _title(key: str) -> str:
    """What a metric of metrics.jsonl is called: `test_nll` is "NLL, test rows"."""
    part, _, name = key.partition("_")
    if part not in ROWS:
        return key.replace("_", "-")
    return f"{name.upper() if len(name) <= 4 else name}, {ROWS[part]}"


def chain_diagnostics(
    path: str | os.PathLike[str],
    log_joint: ArrayLike | None,
    prediction_rhat: ArrayLike,
    parameter_rhat: ArrayLike,
) -> None:
    """Traces of the log-joint, one line per chain, and the distribution of R-hat.

    Args:
      path: file to write.
      log_joint: (chains, iterations), burn-in included; no traces when None.
      prediction_rhat: R-hat of predictions; NaN where a prediction never changed.
      parameter_rhat: R-hat of parameters.
    """
    figure = new_figure(10.0 if log_joint is not None else 5.5, 4.0)
    axes = figure.subplots(1, 2 if log_joint is not None else 1, squeeze=False)[0]
    if log_joint is not None:
        traces = np.asarray(log_joint, float)
        for chain, trace in enumerate(traces):
            axes[0].plot(np.arange(1, len(trace) + 1), trace, linewidth=0.8, label=f"chain {chain}")
        # The climb from the start is long and steep; the axis shows where the chains settle.
        settled = traces[:, traces.shape[1] // 4 :]
        low, high = np.nanquantile(settled, (0.0, 1.0))
        margin = 0.5 * (high - low) + 1e-6
        axes[0].set_ylim(low - margin, high + margin)
        axes[0].set_xlabel("iteration")
        axes[0].set_ylabel("log-joint")
        if len(traces) <= MAX_CHAINS_IN_LEGEND:
            _legend_below(axes[0], columns=min(len(traces), 5))
    for values, label, color in (
        (prediction_rhat, "predictions", BLUE),
        (parameter_rhat, "parameters", ORANGE),
    ):
        known = np.sort(np.asarray(values, float).ravel())
        known = known[np.isfinite(known)]
        if known.size:
            share = np.arange(1, known.size + 1) / known.size
            axes[-1].step(known, share, where="post", label=label, color=color, linewidth=2)
    axes[-1].axvline(
        MEDIAN_RHAT_LIMIT, color=BLACK, linestyle="--", linewidth=1, label=f"{MEDIAN_RHAT_LIMIT}"
    )
    axes[-1].set_xscale("log")
    axes[-1].xaxis.set_major_locator(MaxNLocator(5))
    axes[-1].xaxis.set_major_formatter("{x:.2f}")
    axes[-1].xaxis.set_minor_locator(NullLocator())
    axes[-1].set_xlabel("R-hat")
    axes[-1].set_ylabel("share of quantities")
    _legend_below(axes[-1], columns=3)
    tidy(*axes)
    save(figure, path)


def _legend_below(axis: Axes, columns: int) -> None:
    """A legend under the axis, where it crosses no line."""
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=columns,
        frameon=False,
        fontsize="small",
    )
