"""Pictures of predictions and of training, each written to one PNG file.

Figures are built on matplotlib's objects, without pyplot: nothing global is touched, so pictures
can be made from any thread and do not disturb a notebook's own. A file appears under its name only
when it is complete. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

import io
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from haiku_posteriors.core import errors
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.utils.checkpoint_utils import write_atomically

BLUE, SKY_BLUE, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
GREY, BLACK = "#999999", "#000000"

MAX_DRAW_LINES = 10
MAX_SCATTER_ROWS = 500
MAX_COLUMNS = 3


def predictive_panel(
    path: str | os.PathLike[str],
    panels: Mapping[str, ArrayLike],
    grid: ArrayLike,
    x_train: ArrayLike,
    y_train: ArrayLike,
    true_function: Callable[[NDArray], ArrayLike] | None = None,
) -> None:
    """Draws predictive distributions of one-dimensional regression, side by side on shared axes.

    Each panel has the mean over draws, a band of two standard deviations of the draws' means
    (epistemic), one of two standard deviations of a new observation, sqrt(mean variance + variance
    of means) (total), and up to ten single draws.

    Args:
      path: file to write.
      panels: predictions `(draws, points, 2)`, means and standard deviations, by their title.
      grid: `(points,)`, inputs of the predictions, increasing.
      x_train: `(rows,)` or `(rows, 1)`, inputs of the observations.
      y_train: `(rows,)` or `(rows, 1)`, the observations.
      true_function: if known, maps inputs `(points,)` to noiseless values `(points,)`.
    """
    grid, x_train, y_train = np.ravel(grid), np.ravel(x_train), np.ravel(y_train)
    figure, axes = new_panels(
        len(panels), width=5.2, height=3.9, x_label="x", y_label="y", share_y=True
    )
    reach = [y_train]
    for axis, (title, predictions) in zip(axes, panels.items(), strict=True):
        draws, deviations = np.moveaxis(np.asarray(predictions, np.float64), -1, 0)
        mean, epistemic = draws.mean(axis=0), draws.std(axis=0)
        total = np.sqrt(np.mean(deviations**2, axis=0) + epistemic**2)
        for spread, opacity, label in (
            (total, 0.18, "total, ±2 std"),
            (epistemic, 0.35, "epistemic, ±2 std"),
        ):
            low, high = mean - 2 * spread, mean + 2 * spread
            axis.fill_between(grid, low, high, color=BLUE, alpha=opacity, linewidth=0, label=label)
            reach += [low, high]
        chosen = np.linspace(0, len(draws) - 1, min(len(draws), MAX_DRAW_LINES)).round().astype(int)
        lines = axis.plot(grid, draws[chosen].T, color=ORANGE, linewidth=0.7, alpha=0.8)
        lines[0].set_label("single draws")
        if true_function is not None:
            axis.plot(grid, true_function(grid), color=BLACK, linestyle="--", label="true function")
        axis.plot(grid, mean, color=BLUE, linewidth=2, label="mean")
        axis.plot(
            x_train, y_train, "o", color=BLACK, markersize=3.5, alpha=0.7, mew=0, label="data"
        )
        axis.set(title=title, xlim=(grid.min(), grid.max()))
    # Far from the data a band can be wide enough to flatten the data to a line: the view goes at
    # most the data's own height beyond them on either side.
    values = np.concatenate(reach)
    values = values[np.isfinite(values)]
    bottom, height = y_train.min(), max(np.ptp(y_train), 1e-12)
    low = max(values.min(), bottom - height)
    high = min(values.max(), bottom + 2 * height)
    axes[0].set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


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
    upper.set(title=f"{title} (ECE {error:.4f})", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
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
    left.legend(loc="upper left", frameon=False)
    levels = np.linspace(0, 1, 101)
    coverage = [metrics.interval_coverage(transform, level) for level in levels]
    right.plot(levels, coverage, color=BLUE, linewidth=2, label="observed")
    right.plot([0, 1], [0, 1], color=BLACK, linestyle="--", linewidth=1, label="calibrated")
    right.set(xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1.01))
    right.set_aspect("equal")
    right.legend(loc="upper left", frameon=False)
    figure.suptitle(title)
    save(figure, path)


def decision_surface(
    path: str | os.PathLike[str],
    grid_x: ArrayLike,
    grid_y: ArrayLike,
    probabilities: ArrayLike,
    x_train: ArrayLike,
    y_train: ArrayLike,
    title: str,
) -> None:
    """Draws the predictive probability of class 1 and the mutual information over a plane.

    Args:
      path: file to write.
      grid_x: `(columns,)`, first input, increasing.
      grid_y: `(lines,)`, second input, increasing.
      probabilities: `(draws, lines * columns, 2)`, at the flattened `np.meshgrid(grid_x, grid_y)`,
        where the first input varies fastest.
      x_train: `(rows, 2)`.
      y_train: `(rows,)`, 0 or 1.
      title: of the picture.

    Raises:
      UserError: the probabilities are not of two classes on that grid.
    """
    grid_x, grid_y = np.ravel(grid_x), np.ravel(grid_y)
    x_train, y_train = np.asarray(x_train), np.ravel(y_train)
    probabilities = np.asarray(probabilities)
    shape = (len(grid_y), len(grid_x))
    if probabilities.shape[1:] != (shape[0] * shape[1], 2):
        raise errors.UserError(
            f"A decision surface on a grid of {shape[1]} by {shape[0]} points needs probabilities "
            f"of shape (draws, {shape[0] * shape[1]}, 2), not {probabilities.shape}."
        )
    probability = probabilities[..., 1].mean(axis=0, dtype=np.float64).reshape(shape)
    information = metrics.mutual_information(probabilities).reshape(shape)
    figure = new_figure(10.4, 4.6)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    two_sided = colors.LinearSegmentedColormap.from_list("classes", [BLUE, "#F7F7F7", VERMILLION])
    image = left.pcolormesh(
        grid_x, grid_y, probability, cmap=two_sided, vmin=0, vmax=1, shading="nearest"
    )
    figure.colorbar(image, ax=left, label="p(class 1)")
    if probability.min() < 0.5 < probability.max():
        left.contour(grid_x, grid_y, probability, levels=[0.5], colors=BLACK, linewidths=1)
    # Not below 0.05 nats at the top: draws that agree everywhere must look as if they do.
    top = max(0.05, float(np.nanmax(information, initial=0.0)))
    image = right.pcolormesh(
        grid_x, grid_y, information, cmap="cividis", vmin=0, vmax=top, shading="nearest"
    )
    figure.colorbar(image, ax=right, label="mutual information (nats)")
    for axis, subtitle in ((left, "predictive probability"), (right, "epistemic uncertainty")):
        for label, marker, colour in ((0, "o", BLUE), (1, "^", VERMILLION)):
            points = x_train[y_train == label]
            axis.plot(
                *points.T, marker, color=colour, mec="white", mew=0.6, ms=5, label=f"class {label}"
            )
        axis.set(title=subtitle, xlabel="first input")
    left.set(
        ylabel="second input",
        xlim=(grid_x.min(), grid_x.max()),
        ylim=(grid_y.min(), grid_y.max()),
    )
    left.legend(loc="upper right", framealpha=0.85)
    figure.suptitle(title)
    save(figure, path)


def training_curves(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> None:
    """Draws metrics over epochs, one small panel each.

    Args:
      path: file to write.
      rows: the lines of a run's metrics.jsonl; each has `epoch` and any of the metrics. A metric
        that is null or NaN leaves a break in its line.
      keys: which metrics, in the order of the panels.
    """
    figure, axes = new_panels(len(keys), width=3.8, height=2.6, x_label="epoch")
    for axis, key in zip(axes, keys, strict=True):
        known = [(row["epoch"], row[key]) for row in rows if key in row]
        axis.set_title(key)
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
    save(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, that belongs to no window."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_panels(
    count: int,
    width: float,
    height: float,
    x_label: str,
    y_label: str = "",
    share_x: bool = True,
    share_y: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` axes of the given size in inches, line by line."""
    if count == 0:
        raise errors.UserError("There is nothing to draw: no panel was asked for.")
    columns = 2 if count == 4 else min(count, MAX_COLUMNS)
    lines = -(-count // columns)
    figure = new_figure(width * columns, height * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=share_x, sharey=share_y).ravel()
    for spare in grid[count:]:
        spare.remove()
    axes = list(grid[:count])
    # Not only the last line: where it is short, the panels above the gap end their columns.
    for axis in axes[-columns:]:
        axis.set_xlabel(x_label)
        axis.tick_params(labelbottom=True)
    for axis in axes[::columns]:
        axis.set_ylabel(y_label)
    tidy(*axes)
    return figure, axes


def tidy(*axes: Axes) -> None:
    """The look that all pictures share: no frame, a faint grid behind the data."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes the figure under a temporary name, then renames: no reader sees half a picture.

    PNG, or what the name's suffix says.
    """
    buffer, path = io.BytesIO(), pathlib.Path(path)
    figure.savefig(buffer, format=path.suffix.removeprefix(".") or "png")
    write_atomically(path, buffer.getvalue())


def chain_diagnostics(
    path: str | os.PathLike[str],
    log_joint: ArrayLike | None,
    prediction_rhat: ArrayLike,
    parameter_rhat: ArrayLike,
) -> None:
    """Traces of the log-joint, one line a chain, and the distribution of R-hat.

    Args:
      path: the PNG file.
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
        # The way down from the start is long and steep: show where the chains live.
        settled = traces[:, traces.shape[1] // 4 :]
        low, high = np.nanquantile(settled, (0.0, 1.0))
        margin = 0.5 * (high - low) + 1e-6
        axes[0].set_ylim(low - margin, high + margin)
        axes[0].set_xlabel("iteration")
        axes[0].set_ylabel("log-joint")
        if len(traces) <= MAX_DRAW_LINES:
            axes[0].legend(frameon=False, fontsize="small", ncols=2, loc="lower right")
    for values, label, color in (
        (prediction_rhat, "predictions", BLUE),
        (parameter_rhat, "parameters", ORANGE),
    ):
        known = np.sort(np.asarray(values, float).ravel())
        known = known[np.isfinite(known)]
        if known.size:
            share = np.arange(1, known.size + 1) / known.size
            axes[-1].step(known, share, where="post", label=label, color=color, linewidth=2)
    axes[-1].axvline(1.01, color=BLACK, linestyle="--", linewidth=1, label="1.01")
    axes[-1].set_xscale("log")
    axes[-1].xaxis.set_major_locator(MaxNLocator(5))
    axes[-1].xaxis.set_major_formatter("{x:.2f}")
    axes[-1].xaxis.set_minor_locator(NullLocator())
    axes[-1].set_xlabel("R-hat")
    axes[-1].set_ylabel("share of quantities")
    axes[-1].legend(frameon=False, fontsize="small", loc="lower right")
    tidy(*axes)
    save(figure, path)
