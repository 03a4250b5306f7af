"""What every reader of data returns: the values as stored, and how they are to be scaled."""

from typing import NamedTuple

import numpy as np


class RawData(NamedTuple):
    """A data set before scaling.

    `input_scaling` is "none", "feature" (training statistics of each column), "global" (one mean
    and deviation over all training values) or a fixed (mean, deviation) per channel.
    """

    task: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    input_scaling: str | tuple[np.ndarray, np.ndarray]
    standardize_targets: bool = False
