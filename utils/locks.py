"""One process at a time in a run's folder: two would write each other's files.

The lock is the kernel's, on the file `.lock`, and ends with the process that holds it, however that
ends: what a killed run leaves behind is an empty promise that the next one takes over. A lock
belongs to the process, so that the table of those held is the module's.
"""

import fcntl
import os
import pathlib
import socket

from haiku_posteriors.core.errors import UserError

NAME = ".lock"
_held: dict[pathlib.Path, int] = {}  # folder -> open file


def hold(directory: pathlib.Path) -> bool:
    """Locks the folder for this process, and makes it if need be.

    Returns:
      Whether the lock is new: False if this process holds it already.

    Raises:
      UserError: another process works there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    key = directory.resolve()
    if key in _held:
        return False
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
    _held[key] = file
    return True


def release(directory: pathlib.Path) -> None:
    """Ends this process's lock, if it has one, and removes the file."""
    key = directory.resolve()
    file = _held.pop(key, None)
    if file is not None:
        (key / NAME).unlink(missing_ok=True)
        os.close(file)


def _is_file(path: pathlib.Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
