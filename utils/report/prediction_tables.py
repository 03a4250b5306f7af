"""Predictions of new rows as tables: read what to predict, write what was predicted."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.predictive import Predictive
from haiku_posteriors.utils import files
from haiku_posteriors.utils.datasets import arrays, tables
from haiku_posteriors.utils.datasets.raw import Values
from haiku_posteriors.utils.datasets.tables import Table

SUFFIXES = (".csv", ".npz", ".parquet")
INPUT_ARRAYS = ("x", "inputs", "x_test")


def read_inputs(path: pathlib.Path, several: bool = False) -> Table | Values:
    """A table of text, parquet or named columns; of an .npz file, else its array of inputs.

    With `several`, an .npz file holds the inputs as `data_utils.load` finds them: x_<name>.
    """
    if path.suffix != ".npz":
        if not tables.is_table(path.name):
            known = ", ".join((*tables.TABLE_SUFFIXES, ".npz"))
            raise UserError(f"{path} is none of the files that can be read: {known}.")
        return tables.read_table(path)
    found = arrays.read_plain(path)
    if several:
        inputs = arrays.find_inputs(found, "x") or arrays.find_inputs(found, "x_test")
        if inputs is None:
            raise UserError(f"{path} lacks the inputs, arrays x_<name> for each of them.")
        return inputs
    name = next((name for name in INPUT_ARRAYS if name in found), None)
    if name is not None:
        return found[name]
    if len(found) == 1 and next(iter(found.values())).ndim > 1:
        return next(iter(found.values()))
    return tables.from_columns(found, f"{path}")


def columns_of(predictive: Predictive, levels: Sequence[float]) -> dict[str, np.ndarray]:
    """A table's columns by name; those of several targets have the target's name in front."""
    if predictive.task == "classification":
        if levels:
            raise UserError("Quantiles are of numbers; a run of classification predicts classes.")
        return {
            "class": predictive.labels,
            **{
                f"probability_{name}": predictive.probabilities[:, index]
                for index, name in enumerate(predictive.classes)
            },
            "entropy": predictive.entropy,
            "mutual_information": predictive.mutual_information,
        }
    by_kind = {
        "mean": predictive.mean,
        "std": predictive.std,
        "aleatoric_std": predictive.aleatoric_std,
        "epistemic_std": predictive.epistemic_std,
    }
    if levels:
        quantiles = predictive.quantile(levels)
        by_kind |= {
            f"quantile_{level:g}": values for level, values in zip(levels, quantiles, strict=True)
        }
    num_targets = predictive.mean.shape[1]
    names = predictive.target_names or tuple(f"target_{i}" for i in range(num_targets))
    return {
        kind if num_targets == 1 else f"{name}_{kind}": values[:, index]
        for index, name in enumerate(names)
        for kind, values in by_kind.items()
    }


def check_output(path: pathlib.Path) -> None:
    """Refuses, before any work, a file that could not be written."""
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path} is none of the files that can be written: {', '.join(SUFFIXES)}.")
    if path.suffix == ".parquet":
        _parquet(path)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise UserError(f"{path} cannot be written: its folder does not exist, or it is one.")


def write(path: pathlib.Path, columns: Mapping[str, np.ndarray]) -> None:
    """Writes .csv, .npz or .parquet, atomically; numbers come back from .csv exactly."""
    if path.suffix == ".npz":
        files.write_arrays(path, **columns)
    elif path.suffix == ".parquet":
        table, parquet = _parquet(path)
        with files.opened_atomically(path) as temporary:
            parquet.write_table(table(dict(columns)), temporary)
    else:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
        files.write_atomically(path, buffer.getvalue().encode())


def _parquet(path: pathlib.Path) -> tuple:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow; write .csv or .npz.") from None
    return pyarrow.table, parquet
