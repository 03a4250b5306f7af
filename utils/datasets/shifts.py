"""Inputs that a run was not trained on: foreign sets, and its own test rows shifted."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.predictions import evenly
from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.datasets.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    add_feature_noise,
    corrupt,
    rotate,
)
from haiku_posteriors.utils.datasets.own_tables import TableOptions

# Sets of other content whose images have the same shape.
FOREIGN_SETS = {
    "mnist": ("fashion_mnist", "notmnist"),
    "fashion_mnist": ("mnist", "notmnist"),
    "cifar10": ("svhn", "cifar100"),
    "cifar100": ("svhn", "cifar10"),
    "svhn": ("cifar10", "cifar100"),
}
FLAT_IMAGES = {"digits": (8, 8, 1)}  # images that the network gets as flat rows of pixels
ROTATIONS = tuple(range(0, 181, 15))


class InputSpace(NamedTuple):
    """The affine map from values in their own units (pixels: 0 to 1) to a network's inputs.

    Attributes:
      is_image: whether the values are pixels.
      shape: of one row of values, (height, width, channels) for images.
      slope: inputs = slope * values + offset, by channel or feature, as in training.
      offset: see `slope`.
    """

    is_image: bool
    shape: tuple[int, ...]
    slope: np.ndarray
    offset: np.ndarray

    def to_inputs(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Values (rows, *shape) as inputs, in the row shape and type of `like`."""
        scaled = values * self.slope + self.offset
        return scaled.reshape(len(values), *like.shape[1:]).astype(like.dtype)


class Shift(NamedTuple):
    """Test rows changed by one kind of shift at one strength."""

    kind: str
    strength: float
    inputs: np.ndarray


def input_space(
    dataset: Dataset,
    data_dir: str | None,
    task: str | None,
    table: TableOptions = TableOptions(),  # noqa: B008  (a frozen value)
) -> tuple[InputSpace, np.ndarray]:
    """A data set's space of inputs, and its test rows in their own units.

    The scaling is found by comparing the rows with and without it, so that it is the one of the
    run whatever statistics it came from.
    """
    raw = data_utils.load(
        dataset.name, data_dir, None, task, standardize=False, float_dtype=np.float64, table=table
    ).x_test
    shape = FLAT_IMAGES.get(dataset.name, raw.shape[1:])
    values, scaled = (x.reshape(-1, *shape) for x in (raw, dataset.x_test.astype(np.float64)))
    is_image = len(shape) == 3 and values.min() >= 0 and values.max() <= 1
    rows = tuple(range(values.ndim - 1))
    reach = np.ptp(values, axis=rows)
    slope = np.where(reach > 0, np.ptp(scaled, axis=rows) / np.where(reach > 0, reach, 1), 1.0)
    offset = scaled.mean(axis=rows) - slope * values.mean(axis=rows)
    return InputSpace(is_image, shape, slope, offset), values


def foreign_rows(
    name: str, data_dir: str | None, space: InputSpace, like: np.ndarray, max_rows: int
) -> np.ndarray:
    """Test rows of another data set as the run's network would see them.

    Raises:
      UserError: the set cannot be found, or its rows have another shape.
    """
    values = data_utils.load(name, data_dir, standardize=False, float_dtype=np.float64).x_test
    if values.shape[1:] != like.shape[1:]:
        raise UserError(
            f"Rows of '{name}' have shape {values.shape[1:]}, but this network takes "
            f"{like.shape[1:]}."
        )
    values = values[evenly(len(values), max_rows)].reshape(-1, *space.shape)
    return space.to_inputs(values, like)


def corruptions(space: InputSpace, values: np.ndarray, like: np.ndarray) -> Iterator[Shift]:
    """Every corruption of images at every severity; noise on the features of other data."""
    for severity in SEVERITIES:
        if not space.is_image:
            # Noise in units of the network's inputs, which have unit variance.
            inputs = space.to_inputs(values, like)
            noisy = add_feature_noise(inputs, severity)
            yield Shift("feature_noise", severity, noisy)
            continue
        for kind in CORRUPTIONS:
            changed = corrupt(values, kind, severity)
            yield Shift(kind, severity, space.to_inputs(changed, like))


def rotations(space: InputSpace, values: np.ndarray, like: np.ndarray) -> Iterator[Shift]:
    """Images at every angle of ROTATIONS; nothing for other data."""
    for degrees in ROTATIONS if space.is_image else ():
        turned = rotate(values, degrees)
        yield Shift("rotation", degrees, space.to_inputs(turned, like))
