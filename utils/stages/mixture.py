"""Several implicit posteriors as one (`core.implicit.mixtures`): their ELBOs, and draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.implicit import implicit_vi, mixtures
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices
from haiku_posteriors.utils.data_utils import Dataset

DRAWS_AT_ONCE = 50


def member_elbos(
    log_joint: LogJoint,
    dataset: Dataset,
    generator: Generator,
    estimator: implicit_vi.Estimator,
    samplers: Sampler,
    seed: int,
    num_draws: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Each member's ELBO on all training data, with standard errors; (members,) both.

    Args:
      log_joint: the model.
      dataset: the data.
      generator, estimator: of the members.
      samplers: with a leading member axis.
      seed: of the run.
      num_draws: of (z, e), about.
    """
    members = len(jax.tree.leaves(samplers.log_scale)[0])
    mesh = devices.make_mesh(members)
    pieces = log_joint.num_microbatches
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh, pieces)
    at_once = min(num_draws, DRAWS_AT_ONCE)
    place = devices.draw_placement(mesh, at_once)
    samplers = devices.place_chains(samplers, mesh)

    @functools.partial(jax.jit, out_shardings=devices.replicated(mesh))
    def elbos(samplers: Sampler, data: Data, part: jax.Array) -> jax.Array:
        def elbo(sampler: Sampler, member: jax.Array) -> jax.Array:
            key = chains.chain_key(seed, chains.EVIDENCE, part, member)
            terms, _ = implicit_vi.evidence_terms(
                key, log_joint, generator, estimator, sampler, data, at_once, place=place
            )
            return terms.elbo

        return jax.vmap(elbo)(samplers, jnp.arange(members))

    parts = [np.asarray(elbos(samplers, data, part)) for part in range(-(-num_draws // at_once))]
    values = np.concatenate(parts, axis=1)
    return values.mean(axis=1), values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])


def describe_elbos(elbos: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> str:
    """The members' ELBOs, and what they say of the mixture."""
    each = ", ".join(f"{v:.2f} (error {e:.2f})" for v, e in zip(elbos, errors, strict=True))
    if len(elbos) == 1:
        return f"ELBO: {each}."
    lower, upper = mixtures.elbo_bounds(elbos, weights)
    return (
        f"ELBOs of the members: {each}. The mixture's is between {lower:.2f} and {upper:.2f}, the "
        "latter if members do not overlap."
    )


def mixture_draws(
    method: Method, state: State, weights: np.ndarray, num_draws: int, seed: int
) -> Params:
    """Draws of the mixture in the shape (members, num_draws, ...), with no meaning to the axes.

    Member k gives pi_k of all draws, rounded so that they add up (the largest remainders get one).
    """
    total = len(weights) * num_draws
    counts = np.floor(weights * total).astype(int)
    order = np.argsort(counts - weights * total)
    counts[order[: total - counts.sum()]] += 1
    parts = []
    for member in np.flatnonzero(counts):
        own = jax.tree.map(lambda leaf: leaf[member], state)  # noqa: B023
        key = chains.chain_key(seed, chains.MIX, 0, jnp.asarray(member))
        parts.append(devices.to_host(method.sample(key, own, int(counts[member]))))
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return jax.tree.map(lambda leaf: leaf.reshape(len(weights), num_draws, *leaf.shape[1:]), joined)
