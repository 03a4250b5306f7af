"""A user's own table as a data set: its target, its split, and what its columns are taken for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_posteriors.core.data import take_rows
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.datasets import arrays, tables
from haiku_posteriors.utils.datasets.forms import Column
from haiku_posteriors.utils.datasets.raw import RawData, Values
from haiku_posteriors.utils.datasets.tables import Table

DEFAULT_SPLIT = "0.1"


class TableOptions(NamedTuple):
    """How a table, or arrays x and y, are to be read; None and () leave it to the data.

    Attributes:
      target: names of the columns to predict, or the name of one.
      split: the part of the rows to test on, or the name of a column of `train` and `test`.
      split_seed: from which the rows to test on are drawn.
      inputs: "features", "tokens" or "images".
      categorical: columns of numbers that are categories all the same.
      ignore: columns that are no inputs.
      input_groups: columns of each input of a network that takes several, by its name.
    """

    target: str | tuple[str, ...] = ()
    split: str | float | None = None
    split_seed: int | None = None
    inputs: str | None = None
    categorical: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    input_groups: Mapping[str, Sequence[str]] | None = None


def parse_groups(texts: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Groups of columns from NAME=COLUMN,COLUMN; None for none."""
    groups: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, columns = text.partition("=")
        if not name or not columns or name in groups:
            raise UserError(
                f"input_group '{text}' is not of the form NAME=COLUMN,COLUMN, with another name "
                "for each."
            )
        groups[name] = tuple(column.strip() for column in columns.split(","))
    return groups or None


def refuse_options(name: str, options: TableOptions) -> None:
    """Refuses options of tables for data that are none."""
    given = [option for option, value in options._asdict().items() if value not in (None, (), {})]
    if given:
        raise UserError(
            f"{given[0]} is for tables and arrays of your own, not for data set '{name}'."
        )


def from_table(table: Table, options: TableOptions, task: str | None) -> RawData:
    """A table as a data set, still to be scaled.

    Args:
      table: rows and columns.
      options: what is its target, and so on.
      task: "classification" or "regression"; None if the target's values say it.

    Raises:
      UserError: a column is unknown, values are missing, or the task cannot be told.
    """
    if options.inputs not in (None, "features"):
        raise UserError(f"{table.source} is a table of features; --inputs is for .npz files.")
    target = (options.target,) if isinstance(options.target, str) else tuple(options.target)
    if not target:
        raise UserError(
            f"{table.source}: name the column to predict by --target; there are "
            f"{', '.join(table.columns)}."
        )
    split_column = None if is_fraction(options.split) else str(options.split)
    special = (*target, *([split_column] if split_column else ()), *options.ignore)
    groups = options.input_groups or {}
    grouped = [name for group in groups.values() for name in group]
    for name in (*special, *options.categorical, *grouped):
        if name not in table.columns:
            raise UserError(
                f"{table.source} has no column '{name}'; it has {', '.join(table.columns)}."
            )
    names = [name for name in table.columns if name not in special]
    if not names:
        raise UserError(f"{table.source} has no column left to predict from.")
    for name in sorted({*names} ^ {*grouped}) if groups else ():
        why = "is in no input_group: name it in one, or in --ignore"
        why = why if name in names else "is in an input_group, and is no input"
        raise UserError(f"{table.source}: column '{name}' {why}.")
    tables.refuse_missing(table, [*names, *target])
    columns = tables.infer_columns(table, names, options.categorical)
    train, test = split_rows(table, split_column, options)
    chosen: Any = columns
    x: Values = tables.encode(columns, table)
    scaling: Any = "feature"
    if groups:
        by_name = {column.name: column for column in columns}
        chosen = {group: tuple(map(by_name.__getitem__, groups[group])) for group in groups}
        x = {group: tables.encode(chosen[group], table) for group in groups}
        scaling = dict.fromkeys(groups, "feature")
    x_train, x_test = take_rows(x, train), take_rows(x, test)
    task = task or _task_of(table, target)
    if task == "classification":
        labels, classes = _labels(table, target)
        raw = RawData(task, x_train, labels[train], x_test, labels[test], len(classes), scaling)
        return raw._replace(columns=chosen, classes=classes, target_names=target)
    y = tables.encode([Column(name) for name in target], table)
    raw = RawData(task, x_train, y[train], x_test, y[test], 0, scaling, True)
    return raw._replace(columns=chosen, target_names=target)


def from_x_and_y(
    source: str, x: Values, y: np.ndarray, options: TableOptions, task: str | None
) -> RawData:
    """Arrays x and y, or several inputs and y, without a split of their own."""
    for name, array in arrays.named(x, "x").items():
        if array.ndim == 0 or y.ndim == 0 or len(array) != len(y):
            raise UserError(
                f"{source} has arrays {name} and y of shapes {array.shape} and {y.shape}."
            )
    if not is_fraction(options.split):
        raise UserError(f"{source} has no columns: --split must be a number between 0 and 1.")
    train, test = _random_split(source, len(y), options)
    x_train, x_test = (take_rows(x, rows) for rows in (train, test))
    return arrays.check_arrays(
        source, x_train, y[train], x_test, y[test], task=task, inputs=options.inputs
    )


def is_fraction(split: str | float | None) -> bool:
    """Whether a split is a part of the rows, and not the name of a column."""
    if split is None:
        return True
    try:
        float(split)
    except ValueError:
        return False
    return True


def split_rows(
    table: Table, column: str | None, options: TableOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows to train and to test on, each at least one."""
    if column is None:
        return _random_split(table.source, table.num_rows, options)
    if options.split_seed is not None:
        raise UserError(f"split_seed is for random splits; here column '{column}' splits the rows.")
    words = np.char.lower(tables.as_texts(table.columns[column]).astype(str))
    train, test = (np.flatnonzero(words == word) for word in ("train", "test"))
    if len(train) + len(test) < table.num_rows or not (len(train) and len(test)):
        found = ", ".join(f"'{word}'" for word in sorted({*words.tolist()})[:5])
        raise UserError(
            f"{table.source}: the column '{column}' that splits the rows must hold train and test, "
            f"and nothing else; it holds {found}."
        )
    return train, test


def _random_split(
    source: str, num_rows: int, options: TableOptions
) -> tuple[np.ndarray, np.ndarray]:
    fraction = float(options.split or DEFAULT_SPLIT)
    num_test = round(fraction * num_rows) if 0 < fraction < 1 else 0
    if not 0 < num_test < num_rows:
        raise UserError(
            f"{source} has {num_rows} rows: --split={fraction:g} must be a part of them, between 0 "
            "and 1, that leaves rows to train and to test on."
        )
    order = np.random.default_rng(options.split_seed or 0).permutation(num_rows)
    return order[num_test:], order[:num_test]


def _task_of(table: Table, target: tuple[str, ...]) -> str:
    if all(table.columns[name].dtype.kind != "f" for name in target):
        return "classification"
    for name in target:
        values = table.columns[name]
        if values.dtype.kind == "f" and arrays.looks_like_classes(values):
            raise UserError(
                f"{table.source}: column '{name}' has {len(np.unique(values))} different whole "
                "numbers, which may be classes or amounts: give --task=classification or "
                "--task=regression."
            )
    return "regression"


def _labels(table: Table, target: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    if len(target) > 1:
        raise UserError("Classification has one target, a column of classes.")
    values = table.columns[target[0]]
    found, labels = np.unique(values, return_inverse=True)  # numbers in their order, not as text
    classes = tuple(tables.as_texts(found).tolist())
    if len(classes) < 2:
        raise UserError(f"{table.source}: column '{target[0]}' has one class only, '{classes[0]}'.")
    return labels.astype(np.int32), classes
