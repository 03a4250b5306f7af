"""A user's own arrays and .npz files: what they are taken for, and what is refused."""

import pathlib
from collections.abc import Mapping

import numpy as np

from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.utils.datasets.raw import RawData, Scaling, Values
from haiku_posteriors.utils.files import read_arrays

ARRAY_NAMES = ("x_train", "y_train", "x_test", "y_test")
PARTS = ("train", "test")
INPUT_KINDS = ("features", "tokens", "images")
# Whole numbers of at most this many different values may be classes.
MAX_CLASSES_GUESSED = 20


def read_plain(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file without unpickling."""
    try:
        return read_arrays(path)
    except UserError as error:
        if "allow_pickle" not in str(error):
            raise
        raise UserError(
            f"{path} holds pickled objects, which are not read because unpickling can run code; "
            "save plain numeric arrays."
        ) from error


def find_inputs(found: Mapping[str, np.ndarray], name: str) -> Values | None:
    """The array `name` of a file, or several inputs: {photo: `<name>_photo`, ...}; None for none.

    x_train and x_test are no parts of x.
    """
    if name in found:
        return found[name]
    start = f"{name}_"
    parts = {key.removeprefix(start): found[key] for key in found if key.startswith(start)}
    if name == "x":
        parts = {key: part for key, part in parts.items() if key.split("_")[0] not in PARTS}
    return parts or None


def split_arrays(
    path: pathlib.Path, found: Mapping[str, np.ndarray]
) -> tuple[Values, np.ndarray, Values, np.ndarray]:
    """x_train, y_train, x_test and y_test among the arrays of a file."""
    x_train, x_test = (find_inputs(found, name) for name in ("x_train", "x_test"))
    y_train, y_test = (found.get(name) for name in ("y_train", "y_test"))
    if x_train is None or x_test is None or y_train is None or y_test is None:
        there = (x_train, y_train, x_test, y_test)
        missing = [name for name, x in zip(ARRAY_NAMES, there, strict=True) if x is None]
        raise UserError(f"{path} lacks the arrays {', '.join(missing)}.")
    return x_train, y_train, x_test, y_test


def check_rows(
    source: str, x_train: Values, y_train: np.ndarray, x_test: Values, y_test: np.ndarray
) -> None:
    """Refuses arrays whose inputs and targets do not go together."""
    for part, values, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        for name, x in named(values, f"x_{part}").items():
            if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
                raise UserError(
                    f"{source} has arrays {name} and y_{part} of shapes {x.shape} and {y.shape}; "
                    "they need the same number of rows, at least one."
                )


def named(values: Values, name: str) -> dict[str, np.ndarray]:
    """Arrays by the names that they have in a file."""
    if isinstance(values, Mapping):
        return {f"{name}_{part}": array for part, array in values.items()}
    return {name: values}


def check_arrays(
    source: str,
    x_train: Values,
    y_train: np.ndarray,
    x_test: Values,
    y_test: np.ndarray,
    task: str | None = None,
    inputs: str | None = None,
) -> RawData:
    """Arrays as a data set, still to be scaled; `source` names them in error messages.

    uint8 inputs are images, given a channel axis if they have none, and others are features,
    unless `inputs` (one of INPUT_KINDS) says otherwise. Integer targets are class labels, and
    floats are amounts, unless `task` says otherwise; floats that look like classes need it.
    """
    check_rows(source, x_train, y_train, x_test, y_test)
    all_inputs = [*named(x_train, "x_train").values(), *named(x_test, "x_test").values()]
    for array in (*all_inputs, y_train, y_test):
        if array.dtype.kind not in "biuf":
            raise UserError(f"{source} must hold real numbers, not values of {array.dtype}.")
        if not np.isfinite(array).all():
            raise UserError(f"{source} holds values that are not finite numbers.")
    x_train, x_test, scaling = _own_inputs(source, x_train, x_test, inputs)
    if task is None and y_train.dtype.kind == "f" and looks_like_classes(y_train):
        raise UserError(
            f"{source} has {len(np.unique(y_train))} different whole numbers as targets, in "
            "floats, which may be classes or amounts: say which by "
            "task 'classification' or 'regression' (--task)."
        )
    if task is None:
        task = "regression" if y_train.dtype.kind == "f" else "classification"
    if task == "classification":
        y_train, y_test, num_classes = _own_labels(source, y_train, y_test)
        return RawData(task, x_train, y_train, x_test, y_test, num_classes, scaling)
    if y_train.ndim > 2 or y_train.shape[1:] != y_test.shape[1:]:
        raise UserError(f"{source} must have targets of shape (rows,) or (rows, targets).")
    y_train, y_test = (y.astype(np.float64).reshape(len(y), -1) for y in (y_train, y_test))
    return RawData(task, x_train, y_train, x_test, y_test, 0, scaling, True)


def looks_like_classes(targets: np.ndarray) -> bool:
    """Whether numbers may be classes: one a row, whole, few, and most of them repeated."""
    values = np.unique(targets)
    few = len(values) <= min(MAX_CLASSES_GUESSED, len(targets) // 2)
    return few and targets.size == len(targets) and np.array_equal(values, np.round(values))


def _own_inputs(
    source: str, x_train: Values, x_test: Values, inputs: str | None
) -> tuple[Values, Values, Scaling | dict[str, Scaling]]:
    """The inputs as they are stored, and their scaling; several of them each by its own kind."""
    if not isinstance(x_train, Mapping) or not isinstance(x_test, Mapping):
        if isinstance(x_train, Mapping) or isinstance(x_test, Mapping):
            raise UserError(f"{source} has several inputs in x_train or in x_test alone.")
        return _own_input(source, x_train, x_test, inputs)
    if x_train.keys() != x_test.keys():
        raise UserError(
            f"{source} has the inputs {', '.join(x_train)} in x_train and {', '.join(x_test)} in "
            "x_test."
        )
    kinds = _kinds(source, tuple(x_train), inputs)
    found = {
        name: _own_input(f"{source}, input {name},", x_train[name], x_test[name], kinds.get(name))
        for name in x_train
    }
    train, test, scaling = ({name: parts[i] for name, parts in found.items()} for i in range(3))
    return train, test, scaling  # type: ignore[return-value]


def _kinds(source: str, names: tuple[str, ...], inputs: str | None) -> dict[str, str]:
    """The kinds that `text=tokens,photo=images` gives to inputs by name."""
    pairs = [pair.partition("=") for pair in (inputs or "").split(",") if pair]
    for name, equals, _ in pairs:
        if not equals or name not in names:
            raise UserError(
                f"{source} has the inputs {', '.join(names)}: say what one of them is by "
                f"--inputs={names[0]}=tokens, not by --inputs={inputs}."
            )
    return {name: kind for name, _, kind in pairs}


def _own_input(
    source: str, x_train: np.ndarray, x_test: np.ndarray, inputs: str | None
) -> tuple[np.ndarray, np.ndarray, str]:
    def kind(x: np.ndarray) -> str:
        return inputs or ("images" if x.dtype == np.uint8 else "features")

    if inputs not in (None, *INPUT_KINDS):
        raise unknown_name("kind of inputs", inputs, INPUT_KINDS)
    if x_train.shape[1:] != x_test.shape[1:] or kind(x_train) != kind(x_test):
        raise UserError(f"{source} has x_train and x_test of different row shapes or types.")
    if x_train.ndim == 1:
        x_train, x_test = x_train[:, np.newaxis], x_test[:, np.newaxis]
    if kind(x_train) == "features":
        x_train, x_test = x_train.astype(np.float64), x_test.astype(np.float64)
        return x_train, x_test, "feature" if x_train.ndim == 2 else "global"
    whole = x_train.dtype.kind in "iu" and x_test.dtype.kind in "iu"
    if kind(x_train) == "tokens":
        if not whole or min(x_train.min(), x_test.min()) < 0:
            raise UserError(
                f"{source} has inputs that cannot be tokens: these are integers from 0."
            )
        return x_train.astype(np.int64), x_test.astype(np.int64), "none"
    if x_train.dtype != np.uint8 or x_test.dtype != np.uint8:
        raise UserError(f"{source} has inputs that are no images: these are bytes (uint8).")
    if x_train.ndim == 3:
        x_train, x_test = x_train[..., np.newaxis], x_test[..., np.newaxis]
    # Flat images too: pixels at the border that hardly ever vary must not be blown up.
    return x_train, x_test, "global"


def _own_labels(
    source: str, y_train: np.ndarray, y_test: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    if y_train.size != len(y_train) or y_test.size != len(y_test):
        raise UserError(f"{source} must have one class label per row.")
    y_train, y_test = y_train.reshape(-1), y_test.reshape(-1)
    present = np.union1d(y_train, y_test)
    if not np.array_equal(present, np.arange(len(present))):
        raise UserError(
            f"{source} must have class labels 0 to K - 1, each of them present; it has "
            f"{len(present)} different ones from {present[0]} to {present[-1]}."
        )
    if len(np.unique(y_train)) == 1:
        raise UserError(f"{source} has one class only in y_train: there is nothing to learn.")
    return y_train, y_test, len(present)
