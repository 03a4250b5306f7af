"""Parameters to start from, found by another method before the run."""

import itertools
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np
import optax

from haiku_posteriors.core import sgd
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, checkpoint_utils, devices, hosts, tasks
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.logging_utils import Sign, tell
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import DivergedError

PIECES = 50  # calls of the program, between which it can be said how far it is


def pretrain(
    method: Method,
    log_joint: LogJoint,
    dataset: Dataset,
    *,
    seed: int,
    num_chains: int,
    num_starts: int,
    num_epochs: int,
    time_limit: float | None = None,
    say: Callable[[str], None] = tell,
) -> Params:
    """Parameters to start from, (num_chains, ...): those a method has at the end of its epochs.

    Each chain gets the best of `num_starts`, by the log-joint that its last epoch has met.
    `time_limit` is in seconds; `say` is where progress goes.
    """
    total, began = num_chains * num_starts, time.monotonic()
    program, data = chains.compile_stage(log_joint, dataset, method, seed, total, chains.PRETRAIN)
    keys = jax.vmap(lambda chain: chains.chain_key(seed, chains.PRETRAIN_INIT, 0, chain))(
        np.arange(total)
    )
    starts = devices.to_host(jax.vmap(log_joint.init)(keys))
    state, sign = program.init(starts), Sign(say)
    pieces = np.unique(np.linspace(0, num_epochs, PIECES + 1).astype(int)).tolist()
    for first, last in itertools.pairwise(pieces):
        state, info, finite, _ = program.run(state, data, first, last)
        if not finite:
            raise DivergedError(
                "Pretraining met a number that is not finite; lower init_step_size."
            )
        sign(f"Pretraining: epoch {last} of {num_epochs} ...")
        is_late = time_limit is not None and time.monotonic() - began > time_limit
        if hosts.share(is_late) and last < num_epochs:
            say(f"Pretraining: cut short after {last} of {num_epochs} epochs.")
            break
    values = np.asarray(info["log_joint"]).reshape(num_chains, num_starts, -1).mean(axis=2)
    best = values.argmax(axis=1) + num_starts * np.arange(num_chains)
    return jax.tree.map(lambda leaf: leaf[best], devices.to_host(state.params))


def map_solutions(
    task: Task, directory: pathlib.Path, optimizer: optax.GradientTransformation
) -> Params | None:
    """MAP solutions, the best of some for each member; None if the run goes on or asks for none."""
    settings = task.settings
    resumed = hosts.share(checkpoint_utils.has_checkpoint(directory))
    if not settings.pretrain_epochs or resumed:
        return None
    print(
        f"Pretraining: {settings.num_members * settings.pretrain_starts} MAP solution(s), "
        f"{settings.pretrain_epochs} epochs.",
        flush=True,
    )
    return pretrain(
        sgd.sgd(task.log_joint, optimizer, settings.batch_size),
        task.log_joint,
        task.dataset,
        seed=settings.seed,
        num_chains=settings.num_members,
        num_starts=settings.pretrain_starts,
        num_epochs=settings.pretrain_epochs,
        time_limit=tasks.seconds_for_start(task),
    )
