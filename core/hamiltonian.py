"""Hamiltonian dynamics on a log-joint: the leapfrog integrator and one Metropolis transition.

    H(w, v) = -log p_T(w, D) + K(v),        K(v) = sum_i m_i v_i^2 / 2,        v_i ~ N(0, 1 / m_i),

with m the inverse masses (Neal 2011, arXiv 1206.1901), or momenta of heavier tails
(`core.momenta`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.method import Info
from haiku_posteriors.core.momenta import Momenta
from haiku_posteriors.core.trees import Params

Progress = Callable[[int], None]
PROGRESS_INTERVAL = 1000  # leapfrog steps between two calls of `progress`


class Target(Protocol):
    """A log-density to move on: a `LogJoint`, or anything with these three functions of one."""

    def __call__(self, params: Params, data: Data) -> jax.Array:
        """The log-density, up to a constant."""

    def difference(self, new: Params, old: Params, data: Data) -> jax.Array:
        """That at `new` less that at `old`, with more digits than their difference has."""

    def partition(self, params: Params) -> tuple[Params, Params]:
        """The parameters that move, and the others."""


class Position(NamedTuple):
    """Where a chain is, with the gradient there once a trajectory has ended there.

    Attributes:
      params: random parameters and point estimates.
      gradient: of the log-joint by the random parameters, on the same data.
      is_gradient_known: a boolean scalar.
    """

    params: Params
    gradient: Params
    is_gradient_known: jax.Array


def start(log_joint: Target, params: Params) -> Position:
    """A position whose gradient the first trajectory computes."""
    random, _ = log_joint.partition(params)
    return Position(params, jax.tree.map(jnp.zeros_like, random), jnp.array(False))


def transition(
    rng_key: jax.Array,
    log_joint: Target,
    position: Position,
    data: Data,
    *,
    step_size: jax.Array,
    inverse_mass: Params,
    num_steps: jax.Array,
    tail_weight: jax.Array | None = None,
    metropolis: bool = True,
    divergence_threshold: float = 1000.0,
    progress: Progress | None = None,
) -> tuple[Position, Info]:
    """One HMC transition, which leaves p_T(w | D) invariant; L gradients and three values.

    Args:
      rng_key: of this transition alone.
      log_joint: the target.
      position: see `start`.
      data: the whole data set.
      step_size: scalar.
      inverse_mass: in the structure of the random parameters; leaves are broadcast to theirs.
      num_steps: L, an integer scalar.
      tail_weight: b of `core.momenta`, a scalar; None for Gaussian momenta.
      metropolis, divergence_threshold, progress: see `core.hmc.hmc`.

    Returns:
      The next position and scalars: log_joint (there; not finite only if it was not before),
      acceptance_probability, accepted, energy_error (change of H along the trajectory),
      divergent, and energy (H once the momentum is drawn, for E-BFMI).
    """
    momenta = Momenta(inverse_mass, tail_weight)
    params = position.params
    random, _ = log_joint.partition(params)
    momentum = momenta.draw(rng_key, random)
    proposed, last_momentum = leapfrog(
        log_joint,
        position,
        momentum,
        data,
        step_size=step_size,
        momenta=momenta,
        num_steps=num_steps,
        progress=progress,
    )
    proposal = proposed.params
    value = log_joint(params, data)
    change = log_joint.difference(proposal, params, data)
    energy_error = momenta.energy_change(last_momentum, momentum) - change
    finite = jnp.isfinite(energy_error) & trees.all_finite(proposal)
    divergent = ~finite | (energy_error > divergence_threshold)
    probability = jnp.where(divergent, 0.0, jnp.exp(jnp.minimum(-energy_error, 0.0)))
    uniform = jax.random.uniform(jax.random.fold_in(rng_key, 1), (), probability.dtype)
    accepted = (uniform < probability) if metropolis else ~divergent
    return trees.select(accepted, proposed, position), {
        "log_joint": value + jnp.where(accepted, change, 0.0),
        "acceptance_probability": probability,
        "accepted": accepted,
        "energy_error": energy_error,
        "divergent": divergent,
        "energy": momenta.energy(momentum) - value,
    }


def leapfrog(
    log_joint: Target,
    position: Position,
    momentum: Params,
    data: Data,
    *,
    step_size: jax.Array,
    momenta: Momenta,
    num_steps: jax.Array,
    progress: Progress | None = None,
) -> tuple[Position, Params]:
    """L leapfrog steps: a kick of e/2, then L times a drift and a kick of e, the last of e/2.

        kick t:  v <- v + t grad log p_T(w, D),        drift e:  w <- w + e dK/dv

    dK/dv = m v for Gaussian momenta.
    Neighbouring half kicks are one. The gradient of the first kick is the one with which the last
    trajectory ended. Where it is not known, the loop has one more turn: gradients are taken at one
    place in the program, which so holds the network's, the slow part to compile, only once.

    Returns:
      Position and momentum at the end.
    """
    random, point_estimates = log_joint.partition(position.params)
    take_gradient = jax.grad(lambda moving: log_joint(trees.merge(moving, point_estimates), data))

    def kick(momentum: Params, time: jax.Array, gradient: Params) -> Params:
        return jax.tree.map(lambda v, g: v + time.astype(v.dtype) * g, momentum, gradient)

    def body(index: jax.Array, carry: tuple[Params, Params, Params]) -> tuple:
        random, momentum, _ = carry
        # vmapped chains share the loop: one whose own steps are done drifts and is kicked by 0.
        drift = jnp.where((index > 0) & (index <= num_steps), step_size, 0.0)
        half = (index == 0) | (index == num_steps)
        time = jnp.where(index <= num_steps, jnp.where(half, step_size / 2, step_size), 0.0)
        drift *= momenta.speed(momentum)
        random = jax.tree.map(
            lambda w, v, m: w + drift.astype(w.dtype) * m * v,
            random,
            momentum,
            momenta.inverse_mass,
        )
        gradient = take_gradient(random)
        tell_progress(progress, index)
        return random, kick(momentum, time, gradient), gradient

    longest = largest_over_chains(num_steps)
    num_unknown = largest_over_chains((~position.is_gradient_known).astype(jnp.int32))
    first_kick = jnp.where(num_unknown == 0, step_size / 2, 0.0)
    momentum = kick(momentum, first_kick, position.gradient)
    random, momentum, gradient = jax.lax.fori_loop(
        1 - num_unknown, longest + 1, body, (random, momentum, position.gradient)
    )
    end = trees.merge(random, point_estimates)
    return Position(end, gradient, jnp.array(True)), momentum


def tell_progress(progress: Progress | None, done: jax.Array) -> None:
    """Calls `progress`, if there is one, every PROGRESS_INTERVAL steps of a compiled loop."""
    if progress is not None:
        jax.lax.cond(
            (done > 0) & (done % PROGRESS_INTERVAL == 0),
            lambda: jax.debug.callback(lambda done: progress(int(done)), done),
            lambda: None,
        )


@jax.custom_batching.custom_vmap
def largest_over_chains(value: jax.Array) -> jax.Array:
    """The largest value among vmapped chains, itself not batched, so that their loop is one.

    With a batched bound `vmap` would select between old and new parameters at every leapfrog
    step, reduce the condition over devices at each, and call `progress` for every
    chain at every step.
    """
    return value


@largest_over_chains.def_vmap
def _(axis_size: int, in_batched: list[bool], value: jax.Array) -> tuple[jax.Array, bool]:
    return largest_over_chains(jnp.max(value, axis=0) if in_batched[0] else value), False
