"""The look that all pictures share: colours, figures, and how they become files.

Figures are built on matplotlib's objects, without pyplot: nothing global is touched, so pictures
can be made from any thread and do not disturb a notebook's own. A file appears under its name only
when it is complete. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

import io
import os
import pathlib

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.files import write_atomically

BLUE, SKY_BLUE, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
GREEN, PURPLE, GREY, BLACK = "#009E73", "#CC79A7", "#999999", "#000000"
# Of runs that share an axis, the reference first.
RUN_COLOURS = (BLACK, BLUE, VERMILLION, GREEN, ORANGE, SKY_BLUE, PURPLE)
RUN_MARKERS = "oosD^v<>"

MAX_COLUMNS = 3
DOTS_PER_INCH = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, that belongs to no window."""
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
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
        raise UserError("There is nothing to draw: no panel was asked for.")
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


def name_lines(figure: Figure, axis: Axes) -> None:
    """A legend of one axis under the figure, where it covers nothing."""
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )


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
    # Tight: a title above an axis of fixed aspect would be cut off otherwise.
    figure.savefig(buffer, format=path.suffix.removeprefix(".") or "png", bbox_inches="tight")
    write_atomically(path, buffer.getvalue())
