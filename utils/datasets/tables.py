"""Tables: .csv, .tsv, .parquet and .npz files, or columns by name, read and made into numbers.

A column of numbers is one input; a column of text is one input of 0 or 1 for each of its
categories. Missing values are never filled in: they are refused, with the rows that have them.
"""

import csv
import gzip
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.datasets.forms import Column, name_rows
from haiku_posteriors.utils.files import read_arrays

TEXT_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
TABLE_SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
# Cells that say that there is no value.
MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
# More different texts than this are names or sentences, not categories.
MAX_CATEGORIES = 100


class Table(NamedTuple):
    """Columns of equal length.

    Attributes:
      source: what to call it in messages.
      columns: by name, (rows,): float64 with NaN for a missing value, or text with "" for one.
    """

    source: str
    columns: dict[str, np.ndarray]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values())))

    def take(self, rows: np.ndarray) -> "Table":
        """The table of some of the rows."""
        return Table(self.source, {name: column[rows] for name, column in self.columns.items()})


def is_table(name: str) -> bool:
    """Whether a name means a file that this module reads as a table."""
    return name.endswith(TABLE_SUFFIXES)


def read_table(path: pathlib.Path) -> Table:
    """Reads a file by its suffix."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    if path.name.endswith(TEXT_SUFFIXES):
        return _read_text(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    return from_columns(read_arrays(path), f"{path}")


def from_columns(columns: Mapping[str, Any], source: str = "The table") -> Table:
    """A table of arrays or lists by name."""
    if not columns:
        raise UserError(f"{source} has no columns.")
    found = {str(name): _as_column(f"{source}, column '{name}'", columns[name]) for name in columns}
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{source} has columns of different lengths: {lengths}.")
    if not next(iter(lengths.values())):
        raise UserError(f"{source} has no rows.")
    return Table(source, found)


def infer_columns(
    table: Table, names: Sequence[str], categorical: Sequence[str] = ()
) -> tuple[Column, ...]:
    """What each of the named columns is: a number, or (text, or named so) categories."""
    found = []
    for name in names:
        values = table.columns[name]
        if values.dtype.kind == "f" and name not in categorical:
            found.append(Column(name))
            continue
        texts = as_texts(values)
        categories = sorted({*texts.tolist()} - {""})
        if len(categories) > MAX_CATEGORIES:
            example = ", ".join(f"'{text}'" for text in categories[:2])
            raise UserError(
                f"{table.source}: column '{name}' holds {len(categories)} different texts "
                f"({example}, ...), too many for categories; leave it out by --ignore={name}."
            )
        found.append(Column(name, tuple(categories)))
    return tuple(found)


def encode(columns: Sequence[Column], table: Table) -> np.ndarray:
    """The columns as float64 numbers (rows, inputs), categories as 0 and 1.

    Raises:
      UserError: a column is missing, has missing values, or holds what it did not hold before.
    """
    missing = [column.name for column in columns if column.name not in table.columns]
    if missing:
        raise UserError(
            f"{table.source} lacks the column{'s' if len(missing) > 1 else ''} "
            f"{', '.join(missing)}; it has {', '.join(table.columns)}."
        )
    refuse_missing(table, [column.name for column in columns])
    blocks = []
    for column in columns:
        values = table.columns[column.name]
        if column.categories:
            blocks.append(_one_hot(column, as_texts(values), table.source))
        elif values.dtype.kind == "f":
            blocks.append(values[:, np.newaxis])
        else:
            row = next(i for i, text in enumerate(values) if not _is_number(text))
            raise UserError(
                f"{table.source}: column '{column.name}' must hold numbers, but row {row + 1} has "
                f"'{values[row]}'."
            )
    return np.concatenate(blocks, axis=1)


def refuse_missing(table: Table, names: Sequence[str]) -> None:
    """Refuses values that are missing or infinite, with the rows that have them."""
    found = []
    for name in names:
        values = table.columns[name]
        bad = ~np.isfinite(values) if values.dtype.kind == "f" else values == ""
        if bad.any():
            found.append(f"column '{name}' in {name_rows(bad)}")
    if found:
        raise UserError(
            f"{table.source} has missing or infinite values, which are not guessed: "
            f"{'; '.join(found)}. Fill them, or remove these rows or columns."
        )


def as_texts(values: np.ndarray) -> np.ndarray:
    """Values as text, whole numbers without a point; a missing one is empty."""
    if values.dtype.kind != "f":
        return values

    def text(value: float) -> str:
        if np.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() else repr(value)

    return np.array([text(value) for value in values.tolist()])


def _one_hot(column: Column, texts: np.ndarray, source: str) -> np.ndarray:
    unknown = ~np.isin(texts, column.categories)
    if unknown.any():
        row = int(np.argmax(unknown))
        raise UserError(
            f"{source}: column '{column.name}' has '{texts[row]}' in {name_rows(unknown)}, which "
            f"is none of the categories known: {', '.join(column.categories)}."
        )
    return (texts[:, np.newaxis] == np.array(column.categories)).astype(np.float64)


def _as_column(source: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise UserError(f"{source} has shape {array.shape}; a column has one value a row.")
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    if array.dtype.kind not in "UOT":
        raise UserError(f"{source} holds {array.dtype}, neither numbers nor text.")
    return _parse(["" if value is None else str(value) for value in array.tolist()])


def _parse(cells: Sequence[str]) -> np.ndarray:
    """Numbers if every cell that is not missing is one, else text."""
    cells = ["" if cell.strip().lower() in MISSING else cell.strip() for cell in cells]
    if all(_is_number(cell) for cell in cells if cell):
        return np.array([float(cell or "nan") for cell in cells])
    return np.array(cells)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # Python's float would take 1_000


def _read_text(path: pathlib.Path) -> Table:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            delimiter = "\t" if ".tsv" in path.suffixes else _delimiter(first)
            lines = [
                row for row in csv.reader(file, delimiter=delimiter) if any(map(str.strip, row))
            ]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a table of text: {error}.") from error
    if len(lines) < 2:
        raise UserError(f"{path} needs a line of column names and at least one row.")
    names = [name.strip() for name in lines[0]]
    if all(_is_number(name) for name in names):
        raise UserError(f"{path} has numbers in its first line, which must name the columns.")
    doubled = sorted({name for name in names if names.count(name) > 1 or not name})
    if doubled:
        raise UserError(
            f"{path} needs a different name for every column; not so: "
            f"{', '.join(name or 'an empty name' for name in doubled)}."
        )
    wrong = np.array([len(row) != len(names) for row in lines[1:]])
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UserError(
            f"{path} has {len(names)} columns, but {len(lines[row + 1])} values in "
            f"{name_rows(wrong)}."
        )
    cells = zip(*lines[1:], strict=True)
    return Table(f"{path}", {name: _parse(cell) for name, cell in zip(names, cells, strict=True)})


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _read_parquet(path: pathlib.Path) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"{path} needs the package pyarrow to be read; install it, or save the table as .csv."
        ) from None
    try:
        found = parquet.ParquetFile(path).read()
        columns = {name: found.column(name).to_pylist() for name in found.column_names}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as a parquet file: {error}.") from error

    def plain(values: list) -> np.ndarray:
        if all(value is None or isinstance(value, int | float) for value in values):
            return np.array([np.nan if value is None else float(value) for value in values])
        return np.array(["" if value is None else str(value) for value in values])

    return from_columns({name: plain(values) for name, values in columns.items()}, f"{path}")
