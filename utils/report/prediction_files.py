"""Published class probabilities as files: text tables or .npz, read without unpickling."""

import gzip
import pathlib
import zlib

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.distances import SMALLEST_PROBABILITY
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.files import read_arrays, readable
from haiku_posteriors.utils.report.run_folders import OpenedRun

TEXT_SUFFIXES = (".csv", ".txt", ".tsv")
PROBABILITY_NAMES = ("probabilities", "test_predictions", "probs", "predictions")
LABEL_NAMES = ("test_targets", "y_test", "targets", "labels")
# Published tables are rounded; a table of logits or percentages is not within this of one.
SUM_TOLERANCE = 1e-2


def is_prediction_file(path: pathlib.Path) -> bool:
    """Whether a path means a file of probabilities, and not a run's folder."""
    return path.name.endswith((*TEXT_SUFFIXES, *(f"{s}.gz" for s in TEXT_SUFFIXES), ".npz"))


def open_predictions(path: pathlib.Path) -> OpenedRun:
    """Class probabilities (rows, classes), or (draws, rows, classes) in an .npz file.

    An .npz file names them as one of PROBABILITY_NAMES, and may bring labels as one of
    LABEL_NAMES. A text table, plain or .gz, has one line per row with numbers separated by commas
    or blanks; a first line of column names is skipped.
    """
    labels = None
    if path.suffix == ".npz":
        arrays = read_arrays(path)
        probabilities = _first(arrays, PROBABILITY_NAMES)
        labels = _first(arrays, LABEL_NAMES)
        if probabilities is None:
            raise UserError(f"{path} has none of the arrays {', '.join(PROBABILITY_NAMES)}.")
    else:
        probabilities = _read_table(path)
    probabilities = probabilities[None] if probabilities.ndim == 2 else probabilities
    if probabilities.ndim != 3 or 0 in probabilities.shape or probabilities.shape[2] < 2:
        raise UserError(
            f"{path} holds an array of shape {probabilities.shape}; class probabilities are "
            "(rows, classes), or (draws, rows, classes)."
        )
    if probabilities.dtype.kind not in "biuf":
        raise UserError(f"{path} must hold real numbers, not values of {probabilities.dtype}.")
    sums = np.abs(probabilities.sum(axis=-1) - 1) <= SUM_TOLERANCE  # False for NaN
    wrong = np.argwhere(~(sums & np.all(probabilities >= 0, axis=-1)))
    if len(wrong):
        draw, row = wrong[0]
        of_draw = f" of draw {draw}" if len(probabilities) > 1 else ""
        values = probabilities[draw, row].tolist()
        raise UserError(
            f"{path} holds no class probabilities: row {row}{of_draw} has {values}, which are not "
            "all at least 0 with a sum of 1."
        )
    name = readable(path.name.split(".")[0])
    published = OpenedRun(
        name, path, Predictions("classification", probabilities[None]), {}, {}, {}
    )
    return published if labels is None else with_targets(published, labels)


def with_targets(published: OpenedRun, labels: np.ndarray) -> OpenedRun:
    """The same probabilities with labels, and so with the log-likelihoods of these."""
    labels = np.asarray(labels)
    outputs = published.predictions.outputs
    rows, classes = outputs.shape[2:]
    if labels.shape != (rows,) or labels.dtype.kind not in "iu":
        raise UserError(
            f"The labels have shape {labels.shape} and type {labels.dtype}, but {published.path} "
            f"has {rows} rows: {rows} whole numbers are needed."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise UserError(
            f"The labels run from {labels.min()} to {labels.max()}, but {published.path} has "
            f"{classes} classes."
        )
    observed = outputs[:, :, np.arange(rows), labels].astype(np.float64)
    predictions = published.predictions._replace(
        log_likelihoods=np.log(np.maximum(observed, SMALLEST_PROBABILITY)), targets=labels
    )
    return published._replace(predictions=predictions)


def read_labels(source: str, data_dir: str | None) -> np.ndarray:
    """Test labels from a text table or .npz file, or else of the data set of that name."""
    path = pathlib.Path(source)
    if not is_prediction_file(path):
        dataset = data_utils.load(source, data_dir)
        if dataset.task != "classification":
            raise UserError(f"The data set '{source}' has no class labels.")
        return dataset.y_test
    if path.suffix != ".npz":
        labels = _read_table(path).ravel()
        if not np.array_equal(labels, np.round(labels)):
            raise UserError(f"{path} holds numbers that are no labels.")
        return labels.astype(np.int64)
    found = _first(read_arrays(path), LABEL_NAMES)
    if found is None:
        raise UserError(f"{path} has none of the arrays {', '.join(LABEL_NAMES)}.")
    return found


def _first(arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray | None:
    return next((arrays[name] for name in names if name in arrays), None)


def _read_table(path: pathlib.Path) -> np.ndarray:
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            lines = [line.replace(",", " ") for line in file if line.strip()]
        rows = lines[not _is_numbers(lines[0]) :] if lines else []
        if not rows:
            raise ValueError("there are no rows")
        return np.loadtxt(rows, ndmin=2)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read as a table of numbers: {error}.") from error


def _is_numbers(line: str) -> bool:
    try:
        return bool(np.loadtxt([line]).size)
    except ValueError:
        return False
