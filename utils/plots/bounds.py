"""Bounds that close with the number of draws."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from haiku_posteriors.utils.plots.style import BLUE, VERMILLION, name_lines, new_panels, save


def closing_bounds(
    path: str | os.PathLike[str],
    found: Mapping[str, Any],
    title: str = "",
    exact: float | None = None,
) -> None:
    """Lower and upper bound of the ELBO against K, with two standard errors; a panel a member.

    Args:
      path: file to write.
      found: as `utils.stages.sandwich.find` returns it.
      title: of the picture.
      exact: the value between them, where it is known.
    """
    counts = found["num_mixture_draws"]
    lower, upper = (np.asarray(found[f"elbo_{name}"], float) for name in ("lower", "upper"))
    figure, axes = new_panels(
        len(lower), width=4.6, height=3.6, x_label="draws of the mixture, K", y_label="nats"
    )
    for member, axis in enumerate(axes):
        for name, values, colour in (("upper", upper, VERMILLION), ("lower", lower, BLUE)):
            errors = 2 * np.asarray(found[f"elbo_{name}_error"][member], float)
            axis.errorbar(
                counts,
                values[member],
                errors,
                color=colour,
                fmt="o-",
                capsize=3,
                linewidth=1.8,
                label=f"{name} bound of the ELBO",
            )
        axis.fill_between(counts, lower[member], upper[member], color="#EEEEEE", zorder=0)
        if exact is not None:
            axis.axhline(exact, color="black", linestyle="--", linewidth=1, label="ELBO")
        # Of few draws the upper bound is far away, and would hide where they meet.
        width = max(upper[member][-1] - lower[member][-1], lower[member][-1] - lower[member][0])
        low, high = lower[member].min(), min(upper[member].max(), upper[member][-1] + 2 * width)
        margin = 0.06 * (high - low)
        axis.set(xscale="log", ylim=(low - margin, high + margin))
        if len(axes) > 1:
            axis.set_title(f"member {member}")
    figure.suptitle(title)
    name_lines(figure, axes[0])
    save(figure, path)
