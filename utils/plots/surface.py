"""The picture of log-densities on a plane through three points."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import BoundaryNorm

from haiku_posteriors.core.judging.predictions import evenly
from haiku_posteriors.utils.plots.style import VERMILLION, new_panels, save

LEVELS = 24


def draw_surfaces(
    path: pathlib.Path,
    values: Mapping[str, np.ndarray],
    first: np.ndarray,
    second: np.ndarray,
    points: np.ndarray,
    lengths: np.ndarray,
    names: Sequence[str] = ("1", "2", "3"),
) -> None:
    """Contours side by side, at true distances, with the three points where they are.

    Args:
      path: file to write, .png or .pdf.
      values: (lines, columns) by title.
      first: (columns,), first coordinate, increasing.
      second: (lines,), second coordinate, increasing.
      points: (3, 2), coordinates of the three points.
      lengths: (2,), what a unit of each coordinate is in the space of parameters.
      names: what the three points are called below the picture.
    """
    figure, axes = new_panels(
        len(values),
        width=4.6,
        height=4.4,
        x_label="distance along point 2 - point 1",
        y_label="distance across",
        share_y=True,
    )
    x, y = first * lengths[0], second * lengths[1]
    for axis, (title, surface) in zip(axes, values.items(), strict=True):
        levels = _levels(surface)
        filled = axis.contourf(
            x, y, surface, levels=levels, cmap="cividis", norm=BoundaryNorm(levels, 256)
        )
        axis.contour(x, y, surface, levels=levels[::3], colors="white", linewidths=0.5, alpha=0.6)
        ticks = levels[evenly(LEVELS, 4)]
        bar = figure.colorbar(filled, ax=axis, orientation="horizontal", shrink=0.9, ticks=ticks)
        bar.ax.set_xticklabels([f"{tick:.4g}" for tick in ticks])
        for number, (s, t) in enumerate(points * lengths, start=1):
            axis.plot(s, t, "o", color=VERMILLION, mec="white", markersize=7)
            axis.annotate(
                str(number),
                (s, t),
                xytext=(6, 6),
                textcoords="offset points",
                color="white",
                fontweight="bold",
            )
        axis.set(title=title, aspect="equal", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        axis.grid(visible=False)
    figure.supxlabel(
        "; ".join(f"point {number}: {name}" for number, name in enumerate(names, start=1)),
        fontsize="small",
    )
    save(figure, path)


def _levels(surface: np.ndarray) -> np.ndarray:
    """Levels whose depth below the top grows by a constant factor.

    Away from the modes a log-density falls by orders of magnitude; evenly spaced levels would show
    nothing else.
    """
    known = surface[np.isfinite(surface)].astype(np.float64)
    reach = max(np.ptp(known), 1e-9)
    shallowest = max(1e-5 * reach, min(1.0, 0.05 * reach))
    depths = np.geomspace(reach, shallowest, LEVELS - 1)
    return known.max() - np.append(depths, 0.0)
