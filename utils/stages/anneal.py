"""Draws of posteriors with a density, moved by annealed Hamiltonian steps, and the tighter bound.

See `core.annealing`. For every member a schedule is learned on all rows; then each draw is the end
of a path of its own, and the mean of log W over these paths is a lower bound of the log-evidence.
Members are mixed evenly: the mixture's ELBO is at least the mean of theirs.
"""

import itertools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_posteriors.core import annealing
from haiku_posteriors.core.annealing import AnnealedState
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import Family, Posterior
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.logging_utils import Sign, tell
from haiku_posteriors.utils.report import evidence
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import DivergedError

NUM_UPDATES, STEP_SIZE, PIECES = 200, 0.05, 20


def check(settings: Settings) -> None:
    """Refuses what cannot be annealed."""
    if not settings.anneal_steps:
        return
    if settings.vi_family == "mnf":
        raise UserError("anneal_steps needs a density, which --vi_family=mnf does not have.")
    if settings.learn_prior_scale != "None":
        raise UserError("anneal_steps needs a fixed prior: learn_prior_scale must be None.")
    if settings.member_weights != "even":
        raise UserError("Members that are annealed are mixed evenly: leave out member_weights.")


def stage(
    task: Task, directory: pathlib.Path, family: Family | None
) -> Callable[[State, Params], Params] | None:
    """The stage after the last step, as `tasks.execute` takes it; None if none was asked for."""
    settings = task.settings
    num_steps = settings.anneal_steps
    if not num_steps or family is None:
        return None

    def change(state: State, draws: Params) -> Params:
        members = state[0]  # the posteriors: states of both families begin with them
        moved, log_weights = anneal(
            task.log_joint,
            task.dataset,
            family,
            members,
            num_steps=num_steps,
            num_draws=jax.tree.leaves(draws)[0].shape[1],
            seed=settings.seed,
        )
        print(report(directory, log_weights, num_steps, settings.temperature))
        return moved

    return change


def anneal(
    log_joint: LogJoint,
    dataset: Dataset,
    family: Family,
    members: Posterior,
    *,
    num_steps: int,
    num_draws: int,
    seed: int,
    num_updates: int = NUM_UPDATES,
    say: Callable[[str], None] = tell,
) -> tuple[Params, np.ndarray]:
    """Learns a schedule for each member and follows its paths.

    Args:
      log_joint: the target.
      dataset: of which the training rows are the data.
      family: of the members.
      members: with a leading axis.
      num_steps: of a path.
      num_draws: of each member.
      seed: of the run.
      num_updates: of the schedules.
      say: where progress goes.

    Returns:
      Draws, host arrays (members, num_draws, ...), and log W of their paths, (members, num_draws).
    """
    count = jax.tree.leaves(members)[0].shape[0]
    # A memory of twenty updates: differences of paths become smaller as steps become right.
    optimizer = optax.adam(
        optax.cosine_decay_schedule(STEP_SIZE, max(num_updates, 1)), b1=0.8, b2=0.95
    )
    method = annealing.annealing(log_joint, family, num_steps, optimizer)
    program, data = chains.compile_stage(log_joint, dataset, method, seed, count, chains.ANNEAL)
    state, sign = program.init(members), Sign(say)
    pieces = np.unique(np.linspace(0, num_updates, PIECES + 1).astype(int)).tolist()
    for first, last in itertools.pairwise(pieces):
        state, _, finite, _ = program.run(state, data, first, last)
        if not finite:
            raise DivergedError("The schedule of annealed steps met a number that is not finite.")
        sign(f"Annealing: update {last} of {num_updates} of the schedule ...")

    @jax.jit
    def follow(state: AnnealedState, data: Data) -> tuple[jax.Array, Params]:
        def one(argument: tuple[AnnealedState, jax.Array]) -> tuple[jax.Array, Params]:
            state, member = argument
            return annealing.paths(
                chains.chain_key(seed, chains.ANNEALED, 0, member),
                log_joint,
                family,
                state.posterior,
                state.schedule,
                data,
                num_steps=num_steps,
                num_draws=num_draws,
            )

        return jax.lax.map(one, (state, jnp.arange(count)))

    say(f"Annealing: {num_steps} steps of each of {count * num_draws} draws ...")
    log_weights, draws = devices.to_host(follow(state, data))
    return draws, log_weights.astype(np.float64)


def report(
    directory: pathlib.Path, log_weights: np.ndarray, num_steps: int, temperature: float
) -> str:
    """Writes evidence.json; the sentence for the user."""
    values = log_weights.mean(axis=1)
    # NaN where a single draw has no spread.
    spreads = log_weights.std(axis=1, ddof=1) if log_weights.shape[1] > 1 else values * np.nan
    errors = spreads / np.sqrt(log_weights.shape[1])
    value, error = values.mean(), np.sqrt(np.sum(errors**2)) / len(values)
    of = "the log-evidence" if temperature == 1 else "log int p(w, D)^(1/T) dw"
    evidence.write(
        directory,
        f"lower bound of {of} by {num_steps} annealed steps",
        float(value),
        float(error),
        values=values,
        errors=errors,
        weights=np.full(len(values), 1 / len(values)),
    )
    each = ", ".join(f"{v:.2f} (error {e:.2f})" for v, e in zip(values, errors, strict=True))
    return (
        f"Draws are annealed by {num_steps} steps each. Lower bound of {of} that they give, by "
        f"member: {each}."
    )
