"""What every reader of data returns: the values as stored, and how they are to be scaled."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from haiku_posteriors.utils.datasets.forms import Column

Scaling = str | tuple[np.ndarray, np.ndarray]
Values = np.ndarray | Mapping[str, np.ndarray]


class RawData(NamedTuple):
    """A data set before scaling.

    `input_scaling` is "none", "feature" (training statistics of each column; those of categories
    stay 0 and 1), "global" (one mean and deviation over all training values) or a fixed (mean,
    deviation) per channel. Integer inputs other than bytes are tokens. `columns`, `classes` and
    `target_names` are what a source of names knows.

    Of several inputs, x_train, x_test, `input_scaling` and `columns` are dicts by their names;
    `is_tuple` says that the network takes a tuple of them.
    """

    task: str
    x_train: Values
    y_train: np.ndarray
    x_test: Values
    y_test: np.ndarray
    num_classes: int
    input_scaling: Scaling | Mapping[str, Scaling]
    standardize_targets: bool = False
    columns: tuple[Column, ...] | Mapping[str, tuple[Column, ...]] | None = None
    classes: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
    is_tuple: bool = False
