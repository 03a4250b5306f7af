"""Files by their kind: written under a temporary name and renamed, read without running code."""

import contextlib
import json
import math
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from haiku_posteriors.core.errors import UserError


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file so that its name always stands for complete content."""
    with opened_atomically(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def opened_atomically(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary path to write to, renamed to `path` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_arrays(path: pathlib.Path, **arrays: np.ndarray) -> None:
    """Writes an .npz file, atomically and without a copy of the arrays."""
    with opened_atomically(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, without unpickling."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    with _damage_told(path), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an .npz archive")
        return {name: archive[name] for name in archive.files}


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes strict JSON (a non-finite number becomes null), atomically."""
    text = json.dumps(_finite(content), indent=2, sort_keys=True, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file."""
    with _damage_told(path):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a last line torn by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class JsonLines:
    """Records by epoch in a .jsonl file, or in memory alone where there is no file.

    Attributes:
      rows: all records so far, those of an earlier session of the run included.
    """

    def __init__(self, path: pathlib.Path | None, start: int) -> None:
        """Opens the file; records later than `start`, which a crash left, are dropped."""
        self._path = path
        found = read_rows(path) if path else []
        self.rows = [row for row in found if row["epoch"] <= start]
        if path:
            lines = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_atomically(path, lines.encode())

    def append(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Adds a record; numbers that are not finite become null."""
        row = _finite({"epoch": epoch, **values})
        self.rows.append(row)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN: replaces non-finite numbers by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextlib.contextmanager
def _damage_told(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or of another kind: {error}.") from error
