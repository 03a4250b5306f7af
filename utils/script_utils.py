"""A script as a program: arguments, help, exit codes."""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from absl import logging

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils
from haiku_posteriors.utils.cmd_args_utils import Groups
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.signals import Interrupted
from haiku_posteriors.utils.train_utils import DivergedError
from haiku_posteriors.version import __version__


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
    try:
        settings = cmd_args_utils.parse(groups, sys.argv[1:] if arguments is None else arguments)
        if settings.help:
            print(cmd_args_utils.describe_flags(description, groups))
        elif settings.version:
            print(f"haiku-posteriors {__version__}")
        else:
            jax.config.update("jax_enable_x64", settings.values.get("use_float64", False))
            _enable_compilation_cache()
            run(settings)
    except UserError as error:
        _leave(str(error), 2)
    except DivergedError as error:
        _leave(str(error), 1)
    except Interrupted as request:
        # A computation may still be running; an ordinary exit would wait for it.
        print(f"Stopped by {request}; the same command goes on from here.", flush=True)
        os._exit(128 + request.signal_number)
    except KeyboardInterrupt:  # outside the loop, or asked twice
        _leave("Stopped; the last checkpoint, if there is one, stands.", 130)
    except OSError as error:
        _leave(f"The file system refused: {error}. The last checkpoint stands.", 1)
    raise SystemExit(0)


def _leave(sentence: str, code: int) -> NoReturn:
    print(f"{pathlib.Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _enable_compilation_cache() -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path.home() / ".cache" / "haiku-posteriors" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
