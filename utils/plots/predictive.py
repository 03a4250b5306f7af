"""Pictures of predictive distributions over one input (regression) or two (classification)."""

import os
from collections.abc import Callable, Mapping

import numpy as np
from matplotlib import colors
from numpy.typing import ArrayLike, NDArray

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.utils.plots.style import (
    BLACK,
    BLUE,
    ORANGE,
    VERMILLION,
    name_lines,
    new_figure,
    new_panels,
    save,
    tidy,
)

MAX_DRAW_LINES = 10


def predictive_panel(
    path: str | os.PathLike[str],
    panels: Mapping[str, ArrayLike],
    grid: ArrayLike,
    x_train: ArrayLike,
    y_train: ArrayLike,
    true_function: Callable[[NDArray], ArrayLike] | None = None,
    show_bands: bool = False,
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
      show_bands: whether the view reaches as far as the bands do, and not as far as the data ask.
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
        # Opaque: where one lies on the other, the colour must be that of the legend.
        for spread, strength, label in (
            (total, 0.18, "total, ±2 std"),
            (epistemic, 0.45, "epistemic, ±2 std"),
        ):
            low, high = mean - 2 * spread, mean + 2 * spread
            colour = 1 - strength * (1 - np.array(colors.to_rgb(BLUE)))
            axis.fill_between(grid, low, high, color=colour, linewidth=0, label=label)
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
    low, high = values.min(), values.max()
    if not show_bands:
        low, high = max(low, bottom - height), min(high, bottom + 2 * height)
    axes[0].set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def prior_histograms(
    path: str | os.PathLike[str], task: str, outputs: ArrayLike, targets: ArrayLike
) -> None:
    """What draws of the prior predict at the rows of the data, as distributions.

    Args:
      path: file to write.
      task: "regression": means and totals beside the observed targets; "classification": the
        probabilities of each draw's favoured class, which should not all be near 1.
      outputs: `(draws, rows, p)`, as of a posterior.
      targets: of the training rows.
    """
    outputs = np.asarray(outputs, np.float64)
    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    tidy(axis)
    if task == "regression":
        means, deviations = np.split(outputs, 2, axis=-1)
        noise = np.random.default_rng(0).standard_normal(means.shape)
        shown = {"new target": (means + deviations * noise, BLUE), "mean": (means, ORANGE)}
        ends = np.quantile(np.abs(means + deviations * noise), 0.99)
        bins = np.linspace(-ends, ends, 61).tolist()
        axis.set(xlabel="y", ylabel="density")
        axis.hist(np.ravel(targets), bins, density=True, color=BLACK, alpha=0.35, label="observed")
    else:
        shown = {"favoured class": (outputs.max(axis=-1), BLUE)}
        bins = np.linspace(1 / outputs.shape[-1], 1, 41).tolist()
        axis.set(xlabel="probability of the favoured class", ylabel="density")
    for label, (values, colour) in shown.items():
        known = np.ravel(values)[np.isfinite(np.ravel(values))]
        axis.hist(known, bins, density=True, histtype="step", color=colour, lw=2, label=label)
    axis.set_title(f"prior predictive, {len(outputs)} draws at {outputs.shape[1]:,} training rows")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
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
        raise UserError(
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
    name_lines(figure, left)
    figure.suptitle(title)
    save(figure, path)
