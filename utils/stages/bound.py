"""The ELBO of posteriors with a density on all data, of each member and of their mixture.

With it members are weighed: evenly, by ELBO, or by stacking (`core.densities`).
"""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import densities
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import BoundedFamily, Posterior
from haiku_posteriors.core.implicit import mixtures
from haiku_posteriors.core.judging import loo
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.report import evidence
from haiku_posteriors.utils.stages import mixture
from haiku_posteriors.utils.tasks import Task

DRAWS_AT_ONCE = 20
WEIGHTS = (*mixtures.WEIGHTS, "stacking")
NAME = "ELBO of the mixture of members, a lower bound of the log-evidence"
TEMPERED_NAME = "ELBO at a temperature, a lower bound of log int p(w, D)^(1/T) dw"


class Bound(NamedTuple):
    """Lower bounds.

    Attributes:
      value: of the mixture.
      error: its standard error.
      values: of each member, (members,).
      errors: theirs.
      weights: of the members in the mixture.
    """

    value: float
    error: float
    values: np.ndarray
    errors: np.ndarray
    weights: np.ndarray


def stage(
    task: Task, directory: pathlib.Path, method: Method, family: BoundedFamily | None
) -> Callable[[State, Params], Params] | None:
    """What to do with the draws of the end (`Run.finish`); None if there is nothing to do."""
    settings, log_joint, dataset = task.settings, task.log_joint, task.dataset
    kind, num_draws = settings.member_weights, settings.num_evidence_draws
    if family is None or (not num_draws and kind == "even"):
        return None

    def change(state: State, draws: Params) -> Params:
        members = state[0]  # the posteriors: states of both families begin with them
        weights = mixtures.weigh("even", np.zeros(settings.num_members))
        arguments = (log_joint, dataset, family, members)
        if kind == "stacking":
            weights = stacking_weights(log_joint, dataset, draws)
        elif kind == "evidence":
            first = find(*arguments, weights, settings.seed, num_draws)
            weights = mixtures.weigh("evidence", first.values)
        if num_draws:
            print(tell(directory, find(*arguments, weights, settings.seed, num_draws), task))
        if kind == "even":
            return draws
        count = jax.tree.leaves(draws)[0].shape[1]
        return mixture.mixture_draws(method, state, weights, count, settings.seed)

    return change


def find(
    log_joint: LogJoint,
    dataset: Dataset,
    family: BoundedFamily,
    members: Posterior,
    weights: np.ndarray,
    seed: int,
    num_draws: int,
) -> Bound:
    """The ELBO of each member and of the mixture.

    Args:
      log_joint: the model.
      dataset: the data.
      family: of the members.
      members: with a leading axis.
      weights: of the mixture, (members,).
      seed: of the run.
      num_draws: of each member, about.
    """
    count = len(weights)
    data = _training_rows(log_joint, dataset, count)
    at_once = min(num_draws + num_draws % 2, DRAWS_AT_ONCE)

    @jax.jit
    def terms(members: Posterior, weights: jax.Array, data: Data, part: jax.Array) -> tuple:
        def of_member(member: jax.Array) -> tuple[jax.Array, jax.Array]:
            key = chains.chain_key(seed, chains.EVIDENCE, part, member)
            return densities.elbo_terms(key, family, members, weights, member, data, at_once)

        return jax.lax.map(of_member, jnp.arange(count))

    dtype = jnp.result_type(*jax.tree.leaves(members))
    parts = [
        devices.to_host(terms(members, np.asarray(weights, dtype), data, np.int32(part)))
        for part in range(-(-num_draws // at_once))
    ]
    elbos, gains = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    mixed = elbos + gains

    def error(values: np.ndarray) -> np.ndarray:
        return values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])

    return Bound(
        float(weights @ mixed.mean(axis=1)),
        float(np.sqrt(weights**2 @ error(mixed) ** 2)),
        elbos.mean(axis=1),
        error(elbos),
        weights,
    )


def stacking_weights(log_joint: LogJoint, dataset: Dataset, draws: Params) -> np.ndarray:
    """Weights of the members by the PSIS-LOO scores of the training rows under each.

    Args:
      log_joint: the model.
      dataset: the data.
      draws: of the members, (members, draws, ...), at least `loo.MIN_DRAWS` of each.
    """
    data = _training_rows(log_joint, dataset, 1)

    @jax.jit
    def log_likelihoods(params: Params, data: Data) -> jax.Array:
        return jax.lax.map(
            lambda w: log_joint.log_likelihoods(w, data.inputs, data.targets), params
        )

    scores = []
    for member in range(len(jax.tree.leaves(draws)[0])):
        own = jax.tree.map(lambda leaf: leaf[member], draws)  # noqa: B023
        values = devices.to_host(log_likelihoods(own, data))[:, : data.num_rows].astype(float)
        scores.append(loo.loo(values[None], temperature=log_joint.temperature).by_row)
    return densities.stacking_weights(np.stack(scores, axis=1))


def tell(directory: pathlib.Path, bound: Bound, task: Task) -> str:
    """Writes evidence.json; the sentence for the user."""
    temperature = task.settings.temperature
    name = NAME if temperature == 1 else TEMPERED_NAME
    evidence.write(
        directory,
        name,
        bound.value,
        bound.error,
        values=bound.values,
        errors=bound.errors,
        weights=bound.weights,
    )
    each = ", ".join(
        f"{value:.2f} (error {error:.2f})"
        for value, error in zip(bound.values, bound.errors, strict=True)
    )
    below = "the log-evidence" if temperature == 1 else "the tempered log-normaliser"
    if len(bound.values) == 1:
        return f"ELBO, a lower bound of {below}: {each}."
    return (
        f"ELBO of the mixture, a lower bound of {below}: {bound.value:.2f} (error "
        f"{bound.error:.2f}); of the members: {each}."
    )


def _training_rows(log_joint: LogJoint, dataset: Dataset, num_chains: int) -> Data:
    mesh = devices.make_mesh(num_chains)
    return devices.place_data(dataset.x_train, dataset.y_train, mesh, log_joint.num_microbatches)
