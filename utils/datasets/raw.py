"""What every reader of data returns: the values as stored, and how they are to be scaled."""

from typing import NamedTuple

import numpy as np

from haiku_posteriors.utils.datasets.forms import Column


class RawData(NamedTuple):
    """A data set before scaling.

    `input_scaling` is "none", "feature" (training statistics of each column; those of categories
    stay 0 and 1), "global" (one mean and deviation over all training values) or a fixed (mean,
    deviation) per channel. Integer inputs other than bytes are tokens. `columns`, `classes` and
    `target_names` are what a source of names knows.
    """

    task: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    input_scaling: str | tuple[np.ndarray, np.ndarray]
    standardize_targets: bool = False
    columns: tuple[Column, ...] | None = None
    classes: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
