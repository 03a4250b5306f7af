"""evidence.json: what a run says of log p(D), in one form for all that estimate or bound it."""

import math
import pathlib
from typing import Any

import numpy as np

from haiku_posteriors.utils.files import read_json, write_json


def write(
    directory: pathlib.Path,
    estimator: str,
    value: float,
    error: float,
    *,
    values: np.ndarray,
    errors: np.ndarray | None,
    weights: np.ndarray,
    sandwich: dict[str, Any] | None = None,
) -> None:
    """Writes the file; a number that is not known is null there.

    Args:
      directory: the run's folder.
      estimator: what the value is: an estimate, a bound, neither.
      value: of all members or populations together, in nats.
      error: its standard error.
      values: of each member or population, (members,).
      errors: theirs, if each has one.
      weights: with which each enters the mixture of all.
      sandwich: bounds of the ELBO from both sides, see `utils.stages.sandwich`.
    """
    unknown = np.full(len(values), np.nan)
    content: dict[str, Any] = {
        "estimator": estimator,
        "value": _known(value),
        "error": _known(error),
        "values": [_known(x) for x in values],
        "errors": [_known(x) for x in (unknown if errors is None else errors)],
        "weights": [_known(x) for x in weights],
    }
    if sandwich is not None:
        content["sandwich"] = sandwich
    write_json(directory / "evidence.json", content)


def read(directory: pathlib.Path) -> dict[str, Any] | None:
    """What the file says, where there is one."""
    path = directory / "evidence.json"
    return read_json(path) if path.is_file() else None


def _known(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None
