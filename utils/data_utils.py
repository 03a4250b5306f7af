"""Data sets by name: embedded, from raw files, UCI, or an .npz file of the user's own."""

import difflib
import os
import pathlib
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from core.errors import UserError, unknown_name
from utils import data_readers
from utils.data_readers import RawData


class Dataset(NamedTuple):
    """A data set ready for use.

    Attributes:
      name: the name it was loaded by.
      task: "classification" or "regression".
      x_train: training inputs (rows, ...): floats, images as NHWC, or int32 tokens.
      y_train: int32 labels (rows,), or float targets (rows, targets).
      x_test: test inputs.
      y_test: test labels or targets.
      num_classes: number of classes; 0 for regression.
      target_mean: (targets,); shape (0,) for classification.
      target_scale: (targets,); a target in its own unit is y * target_scale + target_mean.
    """

    name: str
    task: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    target_mean: np.ndarray
    target_scale: np.ndarray


class _UciSet(NamedTuple):
    rows: int
    openml_id: int | None  # None: no copy on OpenML is known to be the one papers use.
    spellings: tuple[str, ...] = ()


# The regression sets of Hernández-Lobato and Adams 2015 (arXiv 1502.05336), with the folder names
# of the published splits (Gal and Ghahramani 2016) as further spellings.
_UCI_SETS = {
    "boston": _UciSet(506, 531, ("bostonHousing",)),
    "concrete": _UciSet(1030, 44959),
    "energy": _UciSet(768, 44960),
    "kin8nm": _UciSet(8192, 44980),
    "naval": _UciSet(11934, 44969, ("naval-propulsion-plant",)),
    "power": _UciSet(9568, None, ("power-plant",)),
    "protein": _UciSet(45730, 44963, ("protein-tertiary-structure",)),
    "wine_quality": _UciSet(1599, 44972, ("wine-quality-red", "wine_quality_red", "wine")),
    "yacht": _UciSet(308, 42370),
    "year": _UciSet(515345, 44027, ("YearPredictionMSD",)),
}


def known_names() -> list[str]:
    """Names that `load` accepts besides paths; `yacht_<seed>` stands for yacht_0, yacht_1, ..."""
    plain = [*_EMBEDDED, *data_readers.IMAGE_SETS, "imdb"]
    return sorted([*plain, *(f"{name}_<seed>" for name in _UCI_SETS)])


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    subset_train_to: int | None = None,
    task: str | None = None,
    standardize: bool = True,
    float_dtype: npt.DTypeLike = np.float32,
) -> Dataset:
    """Loads a data set; the same arguments always give the same values.

    Args:
      name: one of `known_names()`, or a path ending in .npz with arrays x_train, y_train, x_test,
        y_test (looked up as given, then in `data_dir`). In such a file uint8 inputs are images,
        divided by 255 and given a channel axis if they have none; other integer inputs are
        tokens, left alone; integer targets are class labels.
      data_dir: folder of data files; see `data_readers` and `_read_uci` for its layout.
      subset_train_to: keeps the first so many training rows. Statistics for scaling are those of
        the whole training part, so a subset sees the same values.
      task: "classification" or "regression", for an .npz file whose targets' type misleads.
      standardize: if False, values stay in their own units (pixels divided by 255).
      float_dtype: type of float inputs and targets.

    Returns:
      The data set. An image set of which only test files exist has no training rows.

    Raises:
      UserError: the name is unknown, or files are missing or wrong.
    """
    if task is not None and task not in ("classification", "regression"):
        raise unknown_name("task", task, ("classification", "regression"))
    folder = None if data_dir is None else pathlib.Path(data_dir).expanduser()
    if folder is not None and not folder.is_dir():
        raise UserError(f"The data folder {folder} does not exist.")
    raw = _read(name, folder, task)
    if task not in (None, raw.task):
        raise UserError(f"Data set '{name}' is for {raw.task}, not {task}.")
    dataset = _prepare(name, raw, standardize, np.dtype(float_dtype))
    if subset_train_to is None:
        return dataset
    rows = len(dataset.x_train)
    if not 1 <= subset_train_to <= rows:
        raise UserError(
            f"Cannot take a subset of {subset_train_to} training rows of data set '{name}', which "
            f"has {rows}."
        )
    return dataset._replace(
        x_train=dataset.x_train[:subset_train_to], y_train=dataset.y_train[:subset_train_to]
    )


def _read(name: str, data_dir: pathlib.Path | None, task: str | None) -> RawData:
    if name.endswith(".npz"):
        return _read_own_npz(name, data_dir, task)
    if name in _EMBEDDED:  # First, so that 'wine' is scikit-learn's and 'wine_0' is UCI's.
        return _EMBEDDED[name]()
    if name in data_readers.IMAGE_SETS:
        return data_readers.read_images(name, data_dir)
    if name == "imdb":
        return data_readers.read_imdb(data_dir)
    split = re.fullmatch(r"(.+)_(\d+)", name)
    uci_name = _uci_name(split[1] if split else name)
    if split and uci_name:
        return _read_uci(uci_name, int(split[2]), data_dir)
    if uci_name:
        raise UserError(
            f"Data set '{name}' needs the number of a split after its name, as in '{name}_0'."
        )
    known = known_names()
    is_unlike_all = not difflib.get_close_matches(name, known)
    if split and is_unlike_all and difflib.get_close_matches(split[1], _UCI_SETS):
        # Compared as 'yatch_<seed>': a number in its place would hide the likeness.
        pattern = f"{split[1]}_<seed>"
        sentence = str(unknown_name("data set", pattern, known))
        raise UserError(sentence.replace(pattern, name, 1))
    raise unknown_name("data set", name, known)


def _prepare(name: str, raw: RawData, standardize: bool, dtype: np.dtype) -> Dataset:
    x_train, x_test = _scale_inputs(raw, standardize, dtype)
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
    return Dataset(name, raw.task, x_train, y_train, x_test, y_test, raw.num_classes, mean, scale)


def _scale_inputs(
    raw: RawData, standardize: bool, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    is_image = raw.x_train.dtype == np.uint8
    if raw.x_train.dtype.kind in "iu" and not is_image:
        return raw.x_train.astype(np.int32), raw.x_test.astype(np.int32)
    unit = 255.0 if is_image else 1.0
    if not standardize or raw.input_scaling == "none":
        mean, scale = np.zeros(1), np.ones(1)
    elif isinstance(raw.input_scaling, tuple):
        mean, scale = raw.input_scaling
    else:
        mean, scale = _statistics(raw.x_train, 0 if raw.input_scaling == "feature" else None)
        mean, scale = mean / unit, scale / unit

    def scaled(x: np.ndarray) -> np.ndarray:
        # Pixels are few-valued, so the wanted type is exact enough and saves memory, as does
        # working in place; features may be large with small differences, so they get float64.
        values = x.astype(dtype if is_image else np.float64)
        values /= unit
        values -= mean.astype(values.dtype)
        values /= scale.astype(values.dtype)
        return values.astype(dtype, copy=False)

    return scaled(raw.x_train), scaled(raw.x_test)


def _statistics(values: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation, the latter 1 where values are constant (rounding can hide that)."""
    mean = np.mean(values, axis=axis, dtype=np.float64)
    deviation = np.std(values, axis=axis, dtype=np.float64)
    constant = values.max(axis=axis) == values.min(axis=axis)
    return np.asarray(mean), np.where(constant, 1.0, deviation)


def _toy_regression() -> RawData:
    """The first figure of "Implicit Variational Inference for High-Dimensional Posteriors".

    y = x + 0.8 sin(2 pi x) + 0.8 sin(4 pi x) + 0.3 e (arXiv 2310.06643), with 38 training inputs
    on [-1.28, -0.61] and 32 on [0.61, 1.28]; the test inputs cover the gap between them as well.
    """
    rng = np.random.default_rng(0)
    left, right = rng.uniform(-1.28, -0.61, 38), rng.uniform(0.61, 1.28, 32)
    x_train = np.concatenate([left, right])[:, np.newaxis]
    x_test = np.linspace(-1.28, 1.28, 128)[:, np.newaxis]

    def targets(x: np.ndarray) -> np.ndarray:
        waves = 0.8 * np.sin(2 * np.pi * x) + 0.8 * np.sin(4 * np.pi * x)
        return x + waves + 0.3 * rng.standard_normal(x.shape)

    y_train, y_test = targets(x_train), targets(x_test)
    return RawData("regression", x_train, y_train, x_test, y_test, 0, "none")


def _sine_regression() -> RawData:
    """y = 10 sin(2 pi x) + 2 e on [-0.5, 0.5]: 92 evenly spaced inputs, 92 other ones for tests."""
    rng = np.random.default_rng(1)
    x_train = np.linspace(-0.5, 0.5, 92)[:, np.newaxis]
    x_test = np.sort(rng.uniform(-0.5, 0.5, 92))[:, np.newaxis]

    def targets(x: np.ndarray) -> np.ndarray:
        return 10 * np.sin(2 * np.pi * x) + 2 * rng.standard_normal(x.shape)

    y_train, y_test = targets(x_train), targets(x_test)
    return RawData("regression", x_train, y_train, x_test, y_test, 0, "none", True)


def _two_moons() -> RawData:
    """Two half circles with noise 0.2, as drawn by scikit-learn's `make_moons`."""
    from sklearn.datasets import make_moons

    x_train, y_train = make_moons(200, noise=0.2, random_state=0)
    x_test, y_test = make_moons(1000, noise=0.2, random_state=1)
    return RawData("classification", x_train, y_train, x_test, y_test, 2, "feature")


def _from_scikit_learn(name: str) -> RawData:
    """A set bundled with scikit-learn, split 80/20, by equal proportions of each class."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    is_regression = name == "diabetes"
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.2, random_state=0, stratify=None if is_regression else y
    )
    if is_regression:
        y_train, y_test = y_train[:, np.newaxis], y_test[:, np.newaxis]
        return RawData("regression", x_train, y_train, x_test, y_test, 0, "feature", True)
    classes = int(y.max()) + 1
    if name == "digits":  # 8 x 8 pixels of 0 to 16; many are constant, so one scale for all.
        x_train, x_test = x_train / 16, x_test / 16
        return RawData("classification", x_train, y_train, x_test, y_test, classes, "global")
    return RawData("classification", x_train, y_train, x_test, y_test, classes, "feature")


_EMBEDDED: dict[str, Callable[[], RawData]] = {
    "toy_regression": _toy_regression,
    "sine_regression": _sine_regression,
    "two_moons": _two_moons,
    "digits": lambda: _from_scikit_learn("digits"),
    "diabetes": lambda: _from_scikit_learn("diabetes"),
    "breast_cancer": lambda: _from_scikit_learn("breast_cancer"),
    "wine": lambda: _from_scikit_learn("wine"),
}


def _uci_name(spelling: str) -> str | None:
    matches = (name for name, uci in _UCI_SETS.items() if spelling in (name, *uci.spellings))
    return next(matches, None)


def _read_uci(name: str, seed: int, data_dir: pathlib.Path | None) -> RawData:
    """Reads a UCI regression set and takes its split number `seed`.

    The set is `<data_dir>/uci/<name>/` or `<data_dir>/<name>/` (or a folder `data` in it) with
    data.txt, index_features.txt and index_target.txt, else OpenML's copy. The split is that of
    index_train_<seed>.txt and index_test_<seed>.txt where these exist; otherwise rows are permuted
    by the seed and the first 90 % are for training.
    """
    spellings = (name, *_UCI_SETS[name].spellings)
    parents = [] if data_dir is None else [data_dir / "uci", data_dir]
    folders = [
        folder
        for parent in parents
        for spelling in spellings
        for folder in (parent / spelling, parent / spelling / "data")
    ]
    folder = next((place for place in folders if (place / "data.txt").is_file()), None)
    if folder is None:
        x, y = _fetch_openml(name)
    else:
        table = _read_numbers(folder / "data.txt", 2)
        x, y = (
            table[:, _read_indices(folder / f"index_{columns}.txt", table.shape[1])]
            for columns in ("features", "target")
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise UserError(f"The values of data set '{name}' are not all finite numbers.")
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = np.split(order, [round(0.9 * len(x))])
    if folder is not None:
        paths = [folder / f"index_{part}_{seed}.txt" for part in ("train", "test")]
        if any(path.is_file() for path in paths):
            train, test = (_read_indices(path, len(x)) for path in paths)
            if np.intersect1d(train, test).size:
                raise UserError(f"Split {seed} in {folder} has rows that both train and test.")
    return RawData("regression", x[train], y[train], x[test], y[test], 0, "feature", True)


def _read_numbers(path: pathlib.Path, min_dimensions: Literal[1, 2]) -> np.ndarray:
    try:
        return np.loadtxt(path, ndmin=min_dimensions)
    except (OSError, ValueError) as error:
        raise UserError(f"File {path} cannot be read as rows of numbers: {error}.") from error


def _read_indices(path: pathlib.Path, size: int) -> np.ndarray:
    indices = _read_numbers(path, 1).astype(np.int64)
    if indices.ndim != 1 or indices.size == 0 or indices.min() < 0 or indices.max() >= size:
        raise UserError(f"File {path} must list numbers from 0 to {size - 1}, one a line.")
    return indices


def _fetch_openml(name: str) -> tuple[np.ndarray, np.ndarray]:
    layout = (
        f"put data.txt, index_features.txt and index_target.txt into <data_dir>/uci/{name}/ "
        "(columns of numbers and the positions of inputs and target among them)"
    )
    uci = _UCI_SETS[name]
    if uci.openml_id is None:
        raise UserError(f"Data set '{name}' was not found and is not fetched: {layout}.")
    from sklearn import datasets

    try:
        bunch = datasets.fetch_openml(
            data_id=uci.openml_id, as_frame=False, parser="liac-arff", n_retries=1
        )
        x = np.array(bunch.data, np.float64)
        # Columns declared nominal arrive as positions in their list of values: undo that.
        for feature, values in (bunch.categories or {}).items():
            if feature in bunch.feature_names:
                column = bunch.feature_names.index(feature)
                x[:, column] = np.array(values, np.float64)[x[:, column].astype(np.int64)]
        y = np.array(bunch.target, np.float64).reshape(len(x), -1)
    except (OSError, ValueError) as error:
        raise UserError(
            f"Data set '{name}' was not found and OpenML did not give it ({error}): {layout}."
        ) from error
    if len(x) != uci.rows:
        raise UserError(
            f"OpenML gave {len(x)} rows for data set '{name}', which has {uci.rows}: {layout}."
        )
    return x, y


def _read_own_npz(name: str, data_dir: pathlib.Path | None, task: str | None) -> RawData:
    path = pathlib.Path(name).expanduser()
    if not path.is_file() and data_dir is not None and (data_dir / name).is_file():
        path = data_dir / name
    x_train, y_train, x_test, y_test = data_readers.read_npz(path)
    for array in (x_train, y_train, x_test, y_test):
        if array.dtype.kind not in "biuf":
            raise UserError(f"File {path} must hold real numbers, not values of {array.dtype}.")
        if not np.isfinite(array).all():
            raise UserError(f"File {path} holds values that are not finite numbers.")
    x_train, x_test, scaling = _own_inputs(path, x_train, x_test)
    if task is None:
        task = "regression" if y_train.dtype.kind == "f" else "classification"
    if task == "classification":
        y_train, y_test, num_classes = _own_labels(path, y_train, y_test)
        return RawData(task, x_train, y_train, x_test, y_test, num_classes, scaling)
    if y_train.ndim > 2 or y_train.shape[1:] != y_test.shape[1:]:
        raise UserError(f"File {path} must have targets of shape (rows,) or (rows, targets).")
    y_train, y_test = (y.astype(np.float64).reshape(len(y), -1) for y in (y_train, y_test))
    return RawData(task, x_train, y_train, x_test, y_test, 0, scaling, True)


def _own_inputs(
    path: pathlib.Path, x_train: np.ndarray, x_test: np.ndarray
) -> tuple[np.ndarray, np.ndarray, str]:
    def kind(x: np.ndarray) -> str:
        if x.dtype == np.uint8:
            return "image"
        return "tokens" if x.dtype.kind in "iu" else "floats"

    if x_train.shape[1:] != x_test.shape[1:] or kind(x_train) != kind(x_test):
        raise UserError(f"File {path} has x_train and x_test of different row shapes or types.")
    if x_train.ndim == 1:
        x_train, x_test = x_train[:, np.newaxis], x_test[:, np.newaxis]
    if kind(x_train) == "tokens" and min(x_train.min(), x_test.min()) < 0:
        raise UserError(
            f"File {path} has negative integer inputs, which cannot be tokens; save features as "
            "floats."
        )
    if kind(x_train) != "image":
        return x_train, x_test, "feature" if x_train.ndim == 2 else "global"
    if x_train.ndim == 3:
        x_train, x_test = x_train[..., np.newaxis], x_test[..., np.newaxis]
    # Flat images too: pixels at the border that hardly ever vary must not be blown up.
    return x_train, x_test, "global"


def _own_labels(
    path: pathlib.Path, y_train: np.ndarray, y_test: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    if y_train.size != len(y_train) or y_test.size != len(y_test):
        raise UserError(f"File {path} must have one class label a row.")
    y_train, y_test = y_train.reshape(-1), y_test.reshape(-1)
    present = np.union1d(y_train, y_test)
    if not np.array_equal(present, np.arange(len(present))):
        raise UserError(
            f"File {path} must have class labels 0 to K - 1, each of them present; it has "
            f"{len(present)} different ones from {present[0]} to {present[-1]}."
        )
    return y_train, y_test, len(present)
