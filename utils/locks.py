"""One process at a time in a run's folder: two would write each other's files.

The lock is the kernel's, on the file `.lock`, and ends with the process that holds it, however that
ends: what a killed run leaves behind is an empty promise that the next one takes over. A lock
belongs to the process, so that the table of those held is the module's.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Collection
from typing import NamedTuple

from haiku_posteriors.core.errors import UserError

NAME = ".lock"


class _Lock(NamedTuple):
    """An open file, and the folders that were made for it, the innermost first."""

    file: int
    made: list[pathlib.Path]


_held: dict[pathlib.Path, _Lock] = {}


def hold(directory: pathlib.Path) -> bool:
    """Locks the folder for this process, and makes it if need be.

    Returns:
      Whether the lock is new: False if this process holds it already.

    Raises:
      UserError: another process works there.
    """
    key = directory.resolve()
    if key in _held:
        return False
    made = [path for path in (key, *key.parents) if not path.exists()]
    key.mkdir(parents=True, exist_ok=True)
    path = key / NAME
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise UserError(
                f"{directory} is in use by {holder}: wait for its end, or use another --dir."
            ) from None
        if _is_file(path, file):
            break
        os.close(file)  # the holder before removed it while we waited for its lock
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held[key] = _Lock(file, made)
    return True


def release(directory: pathlib.Path) -> None:
    """Ends this process's lock, if it has one, and removes the file."""
    key = directory.resolve()
    lock = _held.pop(key, None)
    if lock is not None:
        (key / NAME).unlink(missing_ok=True)
        os.close(lock.file)


def abandon(harmless: Collection[str]) -> None:
    """Ends all locks of this process, and removes folders that were made for nothing.

    Args:
      harmless: names of files by which a folder is still nothing.
    """
    for key, lock in list(_held.items()):
        release(key)
        if lock.made and {path.name for path in key.iterdir()} <= {*harmless}:
            for name in harmless:
                (key / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else may be in the outer ones by now
                for folder in lock.made:
                    folder.rmdir()


def _is_file(path: pathlib.Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
