"""Scripts started as programs, as a user starts them, and what they leave."""

import json
import os
import pathlib
import random
import shlex
import subprocess
import sys
import time

import haiku as hk
import jax
import numpy as np

from haiku_posteriors.utils import checkpoint_utils, cmd_args_utils
from haiku_posteriors.utils.files import read_rows as read_rows

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "XLA_FLAGS": "",
    "JAX_COMPILATION_CACHE_DIR": os.environ.get(
        "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path.home() / ".cache/haiku-posteriors/xla")
    ),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": str(ROOT / "tests"),
}


def run_here(script, flags, directory):
    """Runs a script, given as a module, in this process."""
    script.run(cmd_args_utils.parse(script.GROUPS, [*shlex.split(flags), f"--dir={directory}"]))


def start(script, *flags):
    return subprocess.Popen(
        [sys.executable, script, *flags],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script, *flags):
    """Exit code, standard output and standard error."""
    with start(script, *flags) as process:
        try:
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()  # a program that has ended does not mind
    return process.returncode, out, err


def succeed(script, *flags):
    """Standard output of a run that must end well."""
    code, out, err = run(script, *flags)
    assert code == 0, err
    assert "Traceback" not in err
    return out


def start_until_checkpoint(directory, script, *flags):
    """Starts a run and returns its process once there is a checkpoint."""
    process = start(script, *flags)
    while not list(directory.glob("checkpoints/*.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def kill_after_checkpoint(directory, script, *flags):
    """Starts a run and kills it at a random moment after its first checkpoint."""
    process = start_until_checkpoint(directory, script, *flags)
    time.sleep(random.uniform(0, 0.5))
    process.kill()
    process.communicate()


def outcome(directory):
    """All that a run leaves which must not depend on how it came to its end."""
    summary = json.loads((directory / "summary.json").read_text())
    del summary["seconds"], summary["peak_memory_bytes"]
    draws = checkpoint_utils.load_draws(directory / "draws")
    with np.load(directory / "predictions.npz") as predictions:
        return summary, draws, dict(predictions)


def assert_same_outcome(first, second):
    (summary, *arrays), (other_summary, *other_arrays) = outcome(first), outcome(second)
    assert summary == other_summary
    for ours, theirs in zip(arrays, other_arrays, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def small_network(inputs):
    """A network of the user's own."""
    return hk.nets.MLP([3, 1], activation=jax.nn.tanh)(inputs)


def wide_network(inputs):
    """A million weights, for tests of memory."""
    return hk.nets.MLP([1000, 1000, 1], activation=jax.nn.tanh)(inputs)
