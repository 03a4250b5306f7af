"""Several implicit posteriors as one (`core.implicit.mixtures`): their evidence, and draws."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.implicit import bounds, encoders, mixtures, objectives
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices
from haiku_posteriors.utils.data_utils import Dataset

DRAWS_AT_ONCE = 50
HIERARCHICAL = "hierarchical lower bound"  # the kind of evidence begins with it
Place = Callable[[jax.Array], jax.Array]  # see `devices.draw_placement`


class Evidence(NamedTuple):
    """What members say of log p_T(D), in nats.

    Attributes:
      kind: what the numbers are; evidence.json says it.
      values: of each member, (members,).
      errors: their standard errors.
    """

    kind: str
    values: np.ndarray
    errors: np.ndarray


def linearised_estimates(
    log_joint: LogJoint,
    dataset: Dataset,
    generator: Generator,
    estimator: objectives.Estimator,
    samplers: Sampler,
    seed: int,
    num_draws: int,
) -> Evidence:
    """Each member's linearised estimate on all training data: no bound of anything.

    Args:
      log_joint: the model.
      dataset: the data.
      generator, estimator: of the members.
      samplers: with a leading member axis.
      seed: of the run.
      num_draws: of (z, e), about.
    """

    def estimate(
        key: jax.Array, sampler: Sampler, data: Data, at_once: int, place: Place
    ) -> jax.Array:
        terms, _ = objectives.evidence_terms(
            key, log_joint, generator, estimator, sampler, data, at_once, place=place
        )
        return terms.total

    values = _of_members(estimate, log_joint, dataset, samplers, seed, num_draws)
    return Evidence("linearised estimate, no bound", *values)


def hierarchical_bounds(
    log_joint: LogJoint,
    dataset: Dataset,
    generator: Generator,
    samplers: Sampler,
    seed: int,
    num_draws: int,
    num_inner: int,
) -> Evidence:
    """Each member's lower bound L_K on all training data, see `core.implicit.bounds`.

    The reverse model is the mixture of Laplace approximations for small latents, and an encoder for
    larger ones: the one that was trained with the sampler, or one that is trained here.

    Args:
      log_joint, dataset, generator, samplers, seed: as above.
      num_draws: of (z_0, e), about.
      num_inner: K.
    """
    size = generator.latent_size

    def bound(
        key: jax.Array, sampler: Sampler, data: Data, at_once: int, place: Place
    ) -> jax.Array:
        if size <= encoders.LAPLACE_LIMIT:
            make_reverse = bounds.laplace_reverse(size, jax.tree.leaves(sampler.log_scale)[0].dtype)
        else:
            assert sampler.encoder is not None
            make_reverse = encoders.encoded_reverse(sampler.encoder, size)
        return bounds.hierarchical_bound(
            key,
            log_joint,
            generator,
            sampler,
            data,
            make_reverse,
            num_samples=at_once,
            num_inner=num_inner,
        )

    if size > encoders.LAPLACE_LIMIT and samplers.encoder is None:
        samplers = _with_encoders(generator, samplers, seed)
    values = _of_members(bound, log_joint, dataset, samplers, seed, num_draws)
    return Evidence(f"{HIERARCHICAL}, K = {num_inner}", *values)


def _with_encoders(generator: Generator, samplers: Sampler, seed: int) -> Sampler:
    @jax.jit
    def fit(sampler: Sampler, member: jax.Array) -> Params:
        key = chains.chain_key(seed, chains.ENCODER, 0, member)
        return encoders.fit_encoder(key, generator, sampler)

    members = len(jax.tree.leaves(samplers.log_scale)[0])
    found = [
        fit(jax.tree.map(lambda leaf: leaf[member], samplers), jnp.asarray(member))  # noqa: B023
        for member in range(members)
    ]
    return samplers._replace(encoder=jax.tree.map(lambda *leaves: jnp.stack(leaves), *found))


def over_draws(
    function: Callable[[jax.Array, Sampler, Data, int, Place], Any],
    log_joint: LogJoint,
    dataset: Dataset,
    samplers: Sampler,
    seed: int,
    num_draws: int,
) -> Any:
    """A function to leaves (draws, ...), of all members and draws: (members, draws, ...), float64.

    Args:
      function: (rng_key, sampler, training rows, draws at once, placement of draws) -> leaves.
      log_joint, dataset, samplers, seed, num_draws: as in `linearised_estimates`.
    """
    members = len(jax.tree.leaves(samplers.log_scale)[0])
    mesh = devices.make_mesh(members)
    pieces = log_joint.num_microbatches
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh, pieces)
    at_once = min(num_draws, DRAWS_AT_ONCE)
    place = devices.draw_placement(mesh, at_once)
    samplers = devices.place_chains(samplers, mesh)

    @functools.partial(jax.jit, out_shardings=devices.replicated(mesh))
    def some(samplers: Sampler, data: Data, part: jax.Array) -> Any:
        def one(sampler: Sampler, member: jax.Array) -> Any:
            key = chains.chain_key(seed, chains.EVIDENCE, part, member)
            return function(key, sampler, data, at_once, place)

        return jax.vmap(one)(samplers, jnp.arange(members))

    parts = [some(samplers, data, part) for part in range(-(-num_draws // at_once))]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1).astype(np.float64), *parts)


def _of_members(
    function: Callable[[jax.Array, Sampler, Data, int, Place], jax.Array], *arguments: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Means over draws of a function to (draws,), and their standard errors, by member."""
    values = over_draws(function, *arguments)
    return values.mean(axis=1), values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])


def describe(evidence: Evidence, weights: np.ndarray) -> str:
    """The members' numbers, and what they say of the mixture."""
    each = ", ".join(
        f"{v:.2f} (error {e:.2f})" for v, e in zip(evidence.values, evidence.errors, strict=True)
    )
    said = f"Evidence ({evidence.kind}): {each}."
    if len(weights) == 1:
        return said
    value, error = mixtures.of_mixture(evidence.values, evidence.errors, weights)
    return f"{said} Of the mixture of the members: {value:.2f} (error {error:.2f})."


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
