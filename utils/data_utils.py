"""Data sets by name, scaled for use: embedded, from files, or of the user's own rows."""

import difflib
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from haiku_posteriors.core.data import Inputs, take_rows
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.utils import hosts
from haiku_posteriors.utils.datasets import (
    arrays,
    images,
    openml,
    own_tables,
    tables,
    text,
    uci,
)
from haiku_posteriors.utils.datasets.embedded import EMBEDDED_SETS
from haiku_posteriors.utils.datasets.forms import Column, DataForm, InputForm, SeveralInputs
from haiku_posteriors.utils.datasets.own_tables import TableOptions
from haiku_posteriors.utils.datasets.raw import RawData, Scaling, Values
from haiku_posteriors.utils.datasets.scaled_rows import ScaledRows
from haiku_posteriors.utils.files import expand

ROWS_AT_ONCE = 4096  # of which a checksum is made


class Dataset(NamedTuple):
    """A data set ready for use.

    Attributes:
      name: the name it was loaded by.
      x_train: training inputs (rows, ...): floats, images as NHWC, or int32 tokens; several
        inputs are a dict or tuple of arrays.
      y_train: int32 labels (rows,), or float targets (rows, targets).
      x_test: test inputs.
      y_test: test labels or targets.
      form: what is known of the data without their rows.
    """

    name: str
    x_train: Inputs
    y_train: np.ndarray
    x_test: Inputs
    y_test: np.ndarray
    form: DataForm

    @property
    def task(self) -> str:
        """Either "classification" or "regression"."""
        return self.form.task

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 for regression."""
        return self.form.num_classes

    @property
    def target_mean(self) -> np.ndarray:
        """(targets,); shape (0,) for classification."""
        return self.form.target_mean

    @property
    def target_scale(self) -> np.ndarray:
        """(targets,); a target in its own unit is y * target_scale + target_mean."""
        return self.form.target_scale


def known_names() -> list[str]:
    """Names that `load` accepts besides paths; `yacht_<seed>` stands for yacht_0, yacht_1, ..."""
    plain = [*EMBEDDED_SETS, *images.IMAGE_SETS, "imdb"]
    return sorted([*plain, *(f"{name}_<seed>" for name in uci.UCI_SETS)])


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    subset_train_to: int | None = None,
    task: str | None = None,
    standardize: bool = True,
    float_dtype: npt.DTypeLike = np.float32,
    table: TableOptions = TableOptions(),  # noqa: B008  (a frozen value)
) -> Dataset:
    """Loads a data set; the same arguments always give the same values.

    Args:
      name: one of `known_names()`; `openml:<number>`; or a path (looked up as given, then in
        `data_dir`) of a table (.csv, .tsv, .parquet), or of an .npz file with arrays x_train,
        y_train, x_test, y_test, or x and y, taken as `from_arrays` takes them, or else columns.
        Several inputs of a network are arrays x_train_<name> and x_test_<name>, or x_<name>.
      data_dir: folder of data files, laid out as the readers in utils/datasets describe.
      subset_train_to: number of training rows to keep, from the first on. Statistics for scaling
        are those of the whole training part, so that a subset sees the same values.
      task: "classification" or "regression", for files whose targets' type misleads.
      standardize: if False, values stay in their own units (pixels divided by 255).
      float_dtype: type of float inputs and targets.
      table: how a table or arrays of the user's own are to be read.

    Returns:
      The data set. An image set of which only test files exist has no training rows.

    Raises:
      UserError: the name is unknown, or files are missing or wrong.
    """
    if task is not None and task not in ("classification", "regression"):
        raise unknown_name("task", task, ("classification", "regression"))
    folder = None if data_dir is None else expand(os.fspath(data_dir), "data_dir")
    if folder is not None and not folder.is_dir():
        raise UserError(f"The data folder {folder} does not exist.")
    raw = _read(name, folder, task, table)
    if task not in (None, raw.task):
        raise UserError(f"Data set '{name}' is for {raw.task}, not {task}.")
    dataset = _prepare(name, raw, standardize, np.dtype(float_dtype))
    if subset_train_to is None:
        return dataset
    rows = len(dataset.y_train)
    if not 1 <= subset_train_to <= rows:
        raise UserError(
            f"Cannot take a subset of {subset_train_to} training rows of data set '{name}', which "
            f"has {rows}."
        )
    x_train = dataset.x_train
    return dataset._replace(
        x_train=x_train.first(subset_train_to)
        if isinstance(x_train, ScaledRows)
        else take_rows(x_train, slice(subset_train_to)),
        y_train=dataset.y_train[:subset_train_to],
    )


def take_part(dataset: Dataset, part: str) -> Dataset:
    """One of the parts in which training rows arrive, as in '2/5', or several, as in '1-3/5'.

    Rows are dealt out one by one: the parts are alike, in whatever order the rows are stored. Test
    rows, and the statistics for scaling, are those of the whole.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?/(\d+)", part)
    first, last, count = (int(n or match[1]) for n in match.groups()) if match else (0, 0, 0)
    if not 1 <= first <= last <= count:
        raise UserError(f"train_part is a number of so many, as in 2/5 or 1-3/5, not '{part}'.")
    num_rows = len(dataset.y_train)
    if count > num_rows:
        raise UserError(f"{num_rows} training rows do not make {count} parts.")
    position = np.arange(num_rows) % count
    rows = np.flatnonzero((position >= first - 1) & (position < last))
    return dataset._replace(x_train=take_rows(dataset.x_train, rows), y_train=dataset.y_train[rows])


def from_arrays(
    x_train: npt.ArrayLike | Mapping[str, npt.ArrayLike] | tuple[npt.ArrayLike, ...],
    y_train: npt.ArrayLike,
    x_test: npt.ArrayLike | Mapping[str, npt.ArrayLike] | tuple[npt.ArrayLike, ...],
    y_test: npt.ArrayLike,
    *,
    task: str | None = None,
    inputs: str | None = None,
    standardize: bool = True,
    float_dtype: npt.DTypeLike = np.float32,
) -> Dataset:
    """A data set of the caller's own arrays.

    Inputs and regression targets are scaled by training statistics (metrics and predictions are
    given in the targets' own units all the same); uint8 inputs are images, divided by 255 first.
    Integer targets are class labels. `task` and `inputs` ("features", "tokens", "images") say
    otherwise; tokens are left alone. Several inputs of a network are a dict, or a tuple, of arrays,
    with `inputs` such as "text=tokens,photo=images", or "0=tokens" for the first of a tuple.
    """
    raw = arrays.check_arrays(
        "The data set",
        _as_values(x_train),
        np.asarray(y_train),
        _as_values(x_test),
        np.asarray(y_test),
        task,
        inputs,
    )._replace(is_tuple=isinstance(x_train, tuple))
    return _prepare("arrays", raw, standardize, np.dtype(float_dtype))


def _as_values(x: Any) -> Values:
    if isinstance(x, tuple):
        x = {str(index): part for index, part in enumerate(x)}
    if isinstance(x, Mapping):
        return {name: np.asarray(part) for name, part in x.items()}
    return np.asarray(x)


def fingerprint(dataset: Dataset) -> str:
    """A checksum of the rows as the network sees them: equal if and only if the data are."""
    digest = hashlib.sha256()
    parts = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    for array in jax.tree.leaves(parts):
        digest.update(f"{array.dtype} {array.shape}".encode())
        for first in range(0, len(array), ROWS_AT_ONCE):
            digest.update(np.ascontiguousarray(array[first : first + ROWS_AT_ONCE]).data)
    return digest.hexdigest()


def _read(
    name: str, data_dir: pathlib.Path | None, task: str | None, options: TableOptions
) -> RawData:
    if tables.is_table(name):
        return own_tables.from_table(tables.read_table(_find(name, data_dir)), options, task)
    if name.endswith(".npz"):
        return _read_npz(_find(name, data_dir), task, options)
    if name.startswith("openml:"):
        return _read_openml(name, task, options)
    own_tables.refuse_options(name, options)
    if name in EMBEDDED_SETS:  # First, so that 'wine' is scikit-learn's and 'wine_0' is UCI's.
        return EMBEDDED_SETS[name]()
    if name in images.IMAGE_SETS:
        return images.read_images(name, data_dir)
    if name == "imdb":
        return text.read_imdb(data_dir)
    split = re.fullmatch(r"(.+)_(\d+)", name)
    uci_name = uci.uci_name(split[1] if split else name)
    if split and uci_name:
        return uci.read_uci(uci_name, int(split[2]), data_dir)
    if uci_name:
        raise UserError(
            f"Data set '{name}' needs the number of a split after its name, as in '{name}_0'."
        )
    known = known_names()
    is_unlike_all = not difflib.get_close_matches(name, known)
    if split and is_unlike_all and difflib.get_close_matches(split[1], uci.UCI_SETS):
        # Compared as 'yatch_<seed>': a number in its place would hide the likeness.
        pattern = f"{split[1]}_<seed>"
        sentence = str(unknown_name("data set", pattern, known))
        raise UserError(sentence.replace(pattern, name, 1))
    raise unknown_name("data set", name, known)


def _find(name: str, data_dir: pathlib.Path | None) -> pathlib.Path:
    path = expand(name, "dataset_name")
    if not path.is_file() and data_dir is not None and (data_dir / name).is_file():
        return data_dir / name
    return path


def _read_npz(path: pathlib.Path, task: str | None, options: TableOptions) -> RawData:
    found, source = arrays.read_plain(path), f"File {path}"
    if options.target:
        return own_tables.from_table(tables.from_columns(found, source), options, task)
    for option in ("categorical", "ignore", "input_groups"):
        if getattr(options, option):
            raise UserError(f"{source} is read by columns, with {option}, if it gets a --target.")
    x = arrays.find_inputs(found, "x")
    if x is not None and "y" in found:
        return own_tables.from_x_and_y(source, x, found["y"], options, task)
    if options.split is not None or options.split_seed is not None:
        raise UserError(f"{source} is split already; --split is for arrays x and y.")
    split = arrays.split_arrays(path, found)
    return arrays.check_arrays(source, *split, task=task, inputs=options.inputs)


def _read_openml(name: str, task: str | None, options: TableOptions) -> RawData:
    number = name.removeprefix("openml:")
    if not number.isdecimal():
        raise UserError(f"OpenML's data sets have numbers, as in 'openml:31', not '{number}'.")
    table, targets = openml.fetch(int(number))
    options = options if options.target else options._replace(target=targets)
    return own_tables.from_table(table, options, task)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # looked for at the end
def _prepare(name: str, raw: RawData, standardize: bool, dtype: np.dtype) -> Dataset:
    inputs = _input_form(raw, standardize, dtype)
    y_train, y_test = raw.y_train, raw.y_test
    if raw.task == "classification":
        y_train, y_test = y_train.astype(np.int32), y_test.astype(np.int32)
        mean = scale = np.zeros(0, dtype)
    else:
        mean, scale = np.zeros(y_train.shape[1]), np.ones(y_train.shape[1])
        if standardize and raw.standardize_targets:
            mean, scale = _statistics(y_train, axis=0)
        y_train = ((y_train - mean) / scale).astype(dtype)
        y_test = ((y_test - mean) / scale).astype(dtype)
        mean, scale = mean.astype(dtype), scale.astype(dtype)
    form = DataForm(raw.task, inputs, raw.num_classes, raw.classes, raw.target_names, mean, scale)
    x_train, x_test = _scaled(inputs, raw.x_train), _scaled(inputs, raw.x_test)
    scaled = [
        values
        for values in jax.tree.leaves((x_train, y_train, x_test, y_test, mean))
        if not isinstance(values, ScaledRows)  # bytes are neither large nor close together
    ]
    if not (all(np.isfinite(values).all() for values in scaled) and np.all(scale > 0)):
        raise UserError(
            f"Data set '{name}' has values too large or too close together to compute with in "
            f"{dtype}: give them another unit."
        )
    return Dataset(name, x_train, y_train, x_test, y_test, form)


def _scaled(form: InputForm | SeveralInputs, values: Any) -> Any:
    """As the network sees them; of images, where there are several processes, when it does."""
    if hosts.are_several() and isinstance(form, InputForm) and form.kind == "images":
        return ScaledRows(form, values)
    return form.to_inputs(values)


def _input_form(raw: RawData, standardize: bool, dtype: np.dtype) -> InputForm | SeveralInputs:
    x, scaling, columns = raw.x_train, raw.input_scaling, raw.columns
    if not isinstance(x, Mapping):
        assert not isinstance(scaling, Mapping) and not isinstance(columns, Mapping)
        return _one_form(x, scaling if standardize else "none", columns, dtype)
    assert isinstance(scaling, Mapping) and not isinstance(columns, tuple)
    columns_of = columns or {}
    forms = [
        _one_form(x[name], scaling[name] if standardize else "none", columns_of.get(name), dtype)
        for name in x
    ]
    return SeveralInputs(tuple(x), tuple(forms), raw.is_tuple)


def _one_form(
    x: np.ndarray, scaling: Scaling, columns: tuple[Column, ...] | None, dtype: np.dtype
) -> InputForm:
    shape, neutral = x.shape[1:], (np.zeros(1), np.ones(1))
    is_image = x.dtype == np.uint8
    if x.dtype.kind in "iu" and not is_image:
        return InputForm("tokens", shape, np.dtype(np.int32), 1.0, *neutral)
    unit = 255.0 if is_image else 1.0
    if scaling == "none":
        mean, scale = neutral
    elif isinstance(scaling, tuple):
        mean, scale = scaling
    else:
        mean, scale = _statistics(x, 0 if scaling == "feature" else None)
        mean, scale = mean / unit, scale / unit
        if columns is not None:
            # A rare category scaled to unit variance would be a very large input.
            category = np.repeat(
                [bool(column.categories) for column in columns],
                [column.width for column in columns],
            )
            mean, scale = np.where(category, 0.0, mean), np.where(category, 1.0, scale)
    kind = "images" if is_image else "features"
    return InputForm(kind, shape, dtype, unit, mean, scale, columns)


def _statistics(values: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation, the latter 1 where values are constant (rounding can hide that).

    NaN where a square is beyond float64: divided by infinity, values would all be 0.
    """
    mean = np.mean(values, axis=axis, dtype=np.float64)
    deviation = np.std(values, axis=axis, dtype=np.float64)
    constant = values.max(axis=axis) == values.min(axis=axis)
    deviation = np.where(np.isfinite(deviation), deviation, np.nan)
    return np.asarray(mean), np.where(constant, 1.0, deviation)
