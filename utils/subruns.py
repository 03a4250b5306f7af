"""Runs that a script starts as programs of their own; those that are finished are left alone."""

import contextlib
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.logging_utils import tell
from haiku_posteriors.utils.signals import Interruption


def split_flags(text: str, reserved: Sequence[str], owner: str) -> list[str]:
    """Flags in quotes, for every run; refuses those that `owner` sets itself."""
    try:
        flags = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--flags cannot be read: {error}.") from error
    for name in reserved:
        if any(_name(flag) == name for flag in flags):
            raise UserError(f"--{name} is set by the {owner}, and cannot be among --flags.")
    return flags


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """The flags but for those of these names, written --name=value or --name value."""
    kept, is_left_out = [], False
    for flag in flags:
        if flag.startswith("-"):
            is_left_out = _name(flag) in names
        if not is_left_out:
            kept.append(flag)
    return kept


def run(command: Sequence[str]) -> int:
    """The exit code of a program; what asks this one to stop is passed on to it, and waited for.

    The program is in a process group of its own, so that it hears of Ctrl-C once: from here. It
    saves its state and ends.
    """
    with Interruption() as interruption, subprocess.Popen(command, process_group=0) as process:
        is_told = False
        try:
            while process.poll() is None:
                if interruption.received and not is_told:
                    process.send_signal(interruption.received)
                    is_told = True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
        except KeyboardInterrupt:  # asked twice
            process.kill()
            raise
        interruption.check()
    return process.returncode


def _name(flag: str) -> str:
    return flag.lstrip("-").split("=")[0]


def finish(script: pathlib.Path, flags: Sequence[str], folder: pathlib.Path, title: str) -> None:
    """Starts a script in `folder`; a run that is finished there is left as it is.

    Args:
      script: its file.
      flags: all but --dir.
      folder: of the run.
      title: what the run is called.
    """
    if (folder / "summary.json").is_file():
        return
    tell(f"{title}, in {folder} ...")
    command = [sys.executable, str(script), *flags, f"--dir={folder}"]
    code = run(command)
    if code:
        raise UserError(f"{script.name} ended with exit code {code} at {title}.")
