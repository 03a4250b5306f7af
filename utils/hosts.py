"""The processes of a run: every one runs the same script, process 0 speaks and writes.

All processes take the same decisions, since a program over the devices of all needs all of them.
What may differ from process to process (times, signals, what is on disk) is agreed on here.
A process that dies is noticed by the others in their next collective, and one that hangs by its
silence (`utils.heartbeats`): they end with a sentence, and the same command goes on. Where they
cannot connect for that, JAX notices after HEARTBEAT_SECONDS and ends them with words of its own.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import heartbeats

AUTOMATIC = "auto"  # as coordinator_address: everything by what JAX knows of the cluster
HEARTBEAT_SECONDS = 2 * int(heartbeats.SILENCE_SECONDS)  # of JAX's own, where ours fail
# At the end, process 0 may write and draw for long while the others wait.
SHUTDOWN_SECONDS = 7 * 24 * 3600
EXIT_LOST = 75  # "try again", by convention: the same command goes on
# What the runtimes say where a process has gone.
LOST = (
    "Gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "heartbeat",
    "coordination service",
    "CoordinationService",
    "NCCL",
)


def start(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    lost: heartbeats.Lost = print,
) -> None:
    """Joins the other processes, if the arguments or the environment tell of several.

    Args:
      coordinator: host:port of process 0, or AUTOMATIC.
      num_processes: their number.
      process_id: which of them this is.
      lost: called, from another thread, with a sentence about a process that is lost; it should end
        this one.
    """
    num_given = 3 - [coordinator, num_processes, process_id].count(None)
    if not num_given and not _several_by_environment():
        return
    if 0 < num_given < 3 and coordinator != AUTOMATIC and not _several_by_environment():
        raise UserError(
            "Several processes need coordinator_address, num_processes and process_id, all three; "
            f"coordinator_address={AUTOMATIC} takes them from the cluster."
        )
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise UserError(f"process_id must lie between 0 and {num_processes - 1}, not {process_id}.")
    address = coordinator if coordinator != AUTOMATIC else None
    if address is not None and not address.rpartition(":")[2].isdecimal():
        raise UserError(f"coordinator_address '{address}' is not of the form host:port.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # To be reached from elsewhere only where somebody is elsewhere.
    is_local = address is not None and address.rpartition(":")[0] in ("127.0.0.1", "localhost")
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if num_given == 3 and address else None,
            coordinator_bind_address=address if is_local else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"The processes do not find each other: {error}") from error
    if are_several():
        _watch_each_other(None if address is None else address.rpartition(":")[0], is_local, lost)


def _watch_each_other(host: str | None, is_local: bool, lost: heartbeats.Lost) -> None:
    """Connects to process 0, or waits for those that do."""
    listener = heartbeats.Listener("127.0.0.1" if is_local else "") if is_first() else None
    where = listener and [host or socket.gethostname(), listener.port, listener.token]
    host, port, token = share(where)
    if listener:
        found = listener.accept(jax.process_count() - 1)
    else:
        found = heartbeats.connect(host, port, token, jax.process_index())
    _watched.append(heartbeats.Heartbeats(found, lost))


def say_goodbye() -> None:
    """At the end of this process, which the others then do not take for lost."""
    for beats in _watched:
        beats.say_goodbye()


def _several_by_environment() -> bool:
    """Whether JAX's own variables, Slurm, Kubernetes or a TPU pod tell of several processes."""
    environment = os.environ
    if "JAX_COORDINATOR_ADDRESS" in environment:
        return True
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return True
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return importlib.util.find_spec("kubernetes") is not None
    return "," in environment.get("TPU_WORKER_HOSTNAMES", "")


def are_several() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which speaks and writes."""
    return not are_several() or jax.process_index() == 0


def share(value: Any) -> Any:
    """The value of process 0, which JSON can hold, on all."""
    if not are_several():
        return value
    content = json.dumps(value if is_first() else None).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.frombuffer(content[:size].ljust(size), np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


def share_arrays(tree: Any, like: Any) -> Any:
    """The host arrays of process 0 on all, a leaf at a time; `like` has their shapes."""
    if not are_several():
        return tree
    if not is_first():
        tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.broadcast_one_to_all(leaf)), tree)


def share_draws(
    parts: Callable[[], Iterator[Params]], template: Params, num_chains: int
) -> Iterator[Params]:
    """Draws that process 0 has, part by part, on all.

    Args:
      parts: on process 0, the host arrays (chains, some draws, ...).
      template: the shapes of one draw.
      num_chains: their chains.
    """
    if not are_several():
        yield from parts()
        return
    left = parts() if is_first() else iter(())
    while True:
        part = next(left, None)
        count = share(0 if part is None else jax.tree.leaves(part)[0].shape[1])
        if not count:
            return
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num_chains, count, *leaf.shape), leaf.dtype),  # noqa: B023
            template,
        )
        yield share_arrays(part, like)


def largest(value: int) -> int:
    """The largest value of all processes."""
    if not are_several():
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def on_first(function: Callable[[], Any]) -> Any:
    """What a function gives on process 0, which JSON can hold, on all.

    Raises:
      UserError: what it raises on process 0, on all.
    """
    outcome: Mapping[str, Any] = {}
    if is_first():
        try:
            outcome = {"value": function()}
        except UserError as error:
            if not are_several():
                raise
            outcome = {"error": str(error)}
    outcome = share(outcome)
    if "error" in outcome:
        raise UserError(outcome["error"])
    return outcome["value"]


def own_folder(directory: pathlib.Path) -> pathlib.Path:
    """The folder of the run on process 0; elsewhere one for what is written and not wanted."""
    if is_first():
        return directory
    kept = tempfile.TemporaryDirectory(prefix="haiku-posteriors-")
    _scratch.append(kept)
    return pathlib.Path(kept.name)


def go_on_alone() -> None:
    """From here on, process 0 computes with its own devices; the others have nothing left to do.

    It is a state of the process, and not a value that is passed on, since it is a fact about the
    process: devices of others are none of its own once these wait for its end, whoever asks for
    devices from here on. A mesh with them, made anywhere, would wait for ever.
    """
    _alone.append(True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within, process 0 computes with its own devices: for what it alone has."""
    go_on_alone()
    try:
        yield
    finally:
        _alone.pop()


def devices() -> list[jax.Device]:
    """Those that meshes are made of."""
    return jax.local_devices() if _alone else jax.devices()


def is_loss(error: BaseException) -> bool:
    """Whether an error is that of a process that has lost another."""
    return are_several() and any(sign in str(error) for sign in LOST)


# Folders of this process that go with it, its connections, and whether it is alone.
_watched: list[heartbeats.Heartbeats] = []
_scratch: list[tempfile.TemporaryDirectory] = []
_alone: list[bool] = []
