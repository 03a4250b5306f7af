"""UCI regression sets by name and split: from files, or OpenML's copy."""

import pathlib
from typing import Literal, NamedTuple

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.datasets import openml, tables
from haiku_posteriors.utils.datasets.forms import Column
from haiku_posteriors.utils.datasets.raw import RawData


class UciSet(NamedTuple):
    """A set's size, its copy on OpenML, and how else its folder may be called."""

    rows: int
    openml_id: int | None  # None: no copy on OpenML is known to be the one papers use.
    spellings: tuple[str, ...] = ()


# The regression sets of Hernández-Lobato and Adams 2015 (arXiv 1502.05336), with the folder names
# of the published splits (Gal and Ghahramani 2016) as further spellings.
UCI_SETS = {
    "boston": UciSet(506, 531, ("bostonHousing",)),
    "concrete": UciSet(1030, 44959),
    "energy": UciSet(768, 44960),
    "kin8nm": UciSet(8192, 44980),
    "naval": UciSet(11934, 44969, ("naval-propulsion-plant",)),
    "power": UciSet(9568, None, ("power-plant",)),
    "protein": UciSet(45730, 44963, ("protein-tertiary-structure",)),
    "wine_quality": UciSet(1599, 44972, ("wine-quality-red", "wine_quality_red", "wine")),
    "yacht": UciSet(308, 42370),
    "year": UciSet(515345, 44027, ("YearPredictionMSD",)),
}


def uci_name(spelling: str) -> str | None:
    """The name of the set that a spelling means; None if it means none."""
    matches = (name for name, uci in UCI_SETS.items() if spelling in (name, *uci.spellings))
    return next(matches, None)


def read_uci(name: str, seed: int, data_dir: pathlib.Path | None) -> RawData:
    """Reads a UCI regression set and takes its split number `seed`.

    The set is `<data_dir>/uci/<name>/` or `<data_dir>/<name>/` (or a folder `data` in it) with
    data.txt, index_features.txt and index_target.txt, else OpenML's copy. The split is that of
    index_train_<seed>.txt and index_test_<seed>.txt; without any such files rows are permuted by
    the seed and the first 90 % are for training.
    """
    spellings = (name, *UCI_SETS[name].spellings)
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
        elif any(folder.glob("index_train_*.txt")):  # a split of our own would be no such split
            raise UserError(
                f"There is no split {seed} of data set '{name}': {folder} has no {paths[0].name}."
            )
    return RawData("regression", x[train], y[train], x[test], y[test], 0, "feature", True)


def _read_numbers(path: pathlib.Path, min_dimensions: Literal[1, 2]) -> np.ndarray:
    try:
        return np.loadtxt(path, ndmin=min_dimensions)
    except (OSError, ValueError) as error:
        raise UserError(f"File {path} cannot be read as rows of numbers: {error}.") from error


def _read_indices(path: pathlib.Path, size: int) -> np.ndarray:
    indices = _read_numbers(path, 1).astype(np.int64)
    if indices.ndim != 1 or indices.size == 0 or indices.min() < 0 or indices.max() >= size:
        raise UserError(f"File {path} must list numbers from 0 to {size - 1}, one per line.")
    return indices


def _fetch_openml(name: str) -> tuple[np.ndarray, np.ndarray]:
    layout = (
        f"put data.txt, index_features.txt and index_target.txt into <data_dir>/uci/{name}/ "
        "(columns of numbers and the positions of inputs and target among them)"
    )
    uci = UCI_SETS[name]
    if uci.openml_id is None:
        raise UserError(f"Data set '{name}' was not found and is not fetched: {layout}.")
    try:
        table, targets = openml.fetch(uci.openml_id)
        features = [column for column in table.columns if column not in targets]
        x, y = (
            tables.encode([Column(column) for column in columns], table)
            for columns in (features, targets)
        )
    except UserError as error:
        raise UserError(f"Data set '{name}' was not found. {error} Or {layout}.") from error
    if len(x) != uci.rows:
        raise UserError(
            f"OpenML gave {len(x)} rows for data set '{name}', which has {uci.rows}: {layout}."
        )
    return x, y
