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


def expand(name: str, what: str = "A path") -> pathlib.Path:
    """The path that a user means, ~ being their home; `what` names it where it is refused."""
    if not name or "\0" in name:
        raise UserError(f"{what} is empty or holds a null character.")
    expanded = pathlib.Path(os.path.expanduser(name))
    if name.startswith("~") and str(expanded) == name:
        raise UserError(f"{what}: there is no user {expanded.parts[0]}.")
    return expanded


def readable(name: str) -> str:
    """A file's name as text: the locale may not have known its letters, or they are none."""
    return os.fsencode(name).decode("utf-8", errors="replace")


def refuse_unusable(directory: pathlib.Path) -> None:
    """Refuses a folder that exists as something else, or that cannot be made or written to."""
    try:
        nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"{directory} cannot be a folder: {error.strerror}.") from error
    if not nearest.is_dir():
        raise UserError(f"{directory} cannot be a folder: {nearest} is a file.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{directory} cannot be written to: {nearest} is not yours to change.")


def open_report(directory: pathlib.Path, page: str) -> None:
    """Makes a folder for a report, or takes that of an earlier one, whose pictures go.

    Args:
      directory: the folder.
      page: the file by which a report of this kind is known; a folder of other things is refused,
        since pictures of one name would be lost.
    """
    refuse_unusable(directory)
    found = sorted(directory.iterdir()) if directory.is_dir() else []
    if found and not (directory / page).is_file():
        raise UserError(f"{directory} is not empty and holds no {page}; use another --dir.")
    for path in found:
        if path.suffix == ".png":
            path.unlink()


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


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes text as UTF-8; names of files that are not text come out as the bytes they are."""
    write_atomically(path, text.encode("utf-8", errors="surrogateescape"))


def drop_leftovers(directory: pathlib.Path) -> None:
    """Removes temporary files of writes that a crash ended; nobody else may be at work there."""
    for path in directory.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_arrays(path: pathlib.Path, **arrays: np.ndarray) -> None:
    """Writes an .npz file, atomically and without a copy of the arrays."""
    with opened_atomically(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, without unpickling."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    with _damage_told(path), path.open("rb") as file:
        if file.read(2) != b"PK":  # NumPy would take anything else for a pickle
            raise ValueError("it is no .npz archive")
        file.seek(0)
        archive = np.load(file, allow_pickle=False)
        return {name: archive[name] for name in archive.files}


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes strict JSON (a non-finite number becomes null), atomically."""
    text = json.dumps(_finite(content), indent=2, sort_keys=True, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def read_json(
    path: pathlib.Path, required: Mapping[str, type | tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
      path: of the file.
      required: what the object must have, by name, and of which type; a file of this program's that
        lacks it was changed by something else.
    """
    with _damage_told(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        for name, kind in (required or {}).items():
            if name not in content:
                raise ValueError(f"it has no '{name}'")
            if not isinstance(content[name], kind):
                raise ValueError(f"its '{name}' is {content[name]!r}")
        return content


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a last line torn by a crash is left out."""
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and isinstance(row.get("epoch"), int)):
                raise ValueError("no record of an epoch")
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path} is damaged in line {number}: {error}.") from error
        rows.append(row)
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
