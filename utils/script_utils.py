"""A script as a program: arguments, help, exit codes."""

import codecs
import contextlib
import io
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from absl import logging

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, hosts, locks
from haiku_posteriors.utils.cmd_args_utils import Groups
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.signals import Interrupted
from haiku_posteriors.utils.train_utils import DivergedError
from haiku_posteriors.version import __version__

# What XLA and NumPy say where memory does not suffice.
NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "Unable to allocate")

MAX_REASON = 200  # letters of another program's error that are repeated


def run_script(
    run: Callable[[Settings], None],
    groups: Groups,
    description: str,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Runs a script; a mistake of the user's is one sentence and exit code 2, never a traceback.

    Args:
      run: does the work.
      groups: the script's flags.
      description: what --help says first.
      arguments: without the program's name; those of the command line by default.
    """
    logging.set_verbosity(logging.WARNING)  # JAX tells of every accelerator it does not find
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            _accept_any_letter(stream)
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        settings = cmd_args_utils.parse(groups, arguments)
        if settings.help:
            print(cmd_args_utils.describe_flags(description, groups))
        elif settings.version:
            print(f"haiku-posteriors {__version__}")
        else:
            jax.config.update("jax_enable_x64", settings.values.get("use_float64", False))
            _enable_compilation_cache()
            if "coordinator_address" in settings.values:
                _join_processes(settings)
            _refuse_missing_devices()
            run(settings)
        sys.stdout.flush()
        if hosts.are_several():
            jax.distributed.shutdown()  # the others wait for process 0
            hosts.say_goodbye()
    except UserError as error:
        locks.abandon(harmless=("flags.json", "problem.json"))
        _leave(str(error), 2)
    except DivergedError as error:
        _leave(str(error), 1)
    except Interrupted as request:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"Stopped by {request}; to go on: {_command(arguments, request.directory)}")
            sys.stdout.flush()
        # A computation may still be running; an ordinary exit would wait for it.
        os._exit(128 + request.signal_number)
    except KeyboardInterrupt:  # outside the loop, or asked twice
        _leave("Stopped; the last checkpoint, if there is one, stands.", 130)
    except BrokenPipeError:
        # What is still to be written must go somewhere, or Python complains as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave("Stopped: nobody reads the output. The last checkpoint, if any, stands.", 141)
    except OSError as error:
        _leave(f"The file system refused: {error}. Checkpoints, if there are any, stand.", 1)
    except (jax.errors.JaxRuntimeError, MemoryError, ValueError) as error:
        if hosts.is_loss(error):
            _leave_lost(f"Another process of this run is gone ({str(error)[:MAX_REASON]})")
        if not (isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)):
            raise
        _leave(
            "There is not enough memory: fewer chains or members, a smaller batch_size, or more "
            "pieces by --num_microbatches need less.",
            1,
        )
    raise SystemExit(0)


def _command(arguments: Sequence[str], directory: pathlib.Path | None) -> str:
    """The command that goes on with a run, as it is typed."""
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    known = any(argument.lstrip("-").startswith("dir=") for argument in arguments)
    where = [] if directory is None or known else [f"--dir={directory}"]
    return shlex.join([*program, *arguments, *where])


def _leave(sentence: str, code: int) -> NoReturn:
    sentence = " ".join(sentence.split())  # of several lines that another program has said
    with contextlib.suppress(BrokenPipeError):
        print(f"{pathlib.Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    if hosts.are_several():
        os._exit(code)  # an ordinary exit would wait for the others, who may wait for us
    raise SystemExit(code)


def _leave_lost(sentence: str) -> NoReturn:
    _leave(
        f"{sentence}, as process {jax.process_index()} finds. Start the same command again on all: "
        "it goes on from the last checkpoint.",
        hosts.EXIT_LOST,
    )


def _join_processes(settings: Settings) -> None:
    several = (settings.coordinator_address, settings.num_processes, settings.process_id)
    hosts.start(*several, lost=_leave_lost)
    if not hosts.is_first():  # it speaks by its errors alone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _accept_any_letter(stream: io.TextIOWrapper) -> None:
    """A ± or the name of a file must not end a run where the locale is said to know ASCII only."""
    if codecs.lookup(stream.encoding).name in ("ascii", "utf-8"):
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    else:
        stream.reconfigure(errors="backslashreplace")


def _refuse_missing_devices() -> None:
    try:
        found = len(jax.devices())
    except (RuntimeError, AssertionError) as error:  # what JAX raises depends on what is missing
        asked = os.environ.get("JAX_PLATFORMS")
        where = f" with JAX_PLATFORMS={asked}" if asked else ""
        why = f" ({error})" if str(error) else ""
        raise UserError(
            f"JAX finds no device to compute on{where}{why}; JAX_PLATFORMS=cpu takes the CPU."
        ) from error
    if not found:
        raise UserError("JAX has no devices; look at XLA_FLAGS and JAX_PLATFORMS.")


def _enable_compilation_cache() -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path.home() / ".cache" / "haiku-posteriors" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
