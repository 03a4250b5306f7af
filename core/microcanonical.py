"""Microcanonical (isokinetic) dynamics on a log-joint: a speed that never changes.

    dz/dt = v,    dv/dt = D / (D - 1) (1 - v v' / D) grad log p,    |v|^2 = D,

for D random parameters w in the coordinates z = w / s, with s^2 the inverse masses. A gradient
turns the velocity and never makes it longer, so that steep places do not throw a chain out. With
directions refreshed by noise, z has the density p (Robnik, De Luca, Silverstein & Seljak 2022,
arXiv 2212.08549). In the papers |v| is 1 and time is path length; with |v|^2 = D, a step size and a
trajectory's length mean what they mean in `core.hamiltonian`, to which this tends as D grows.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.hamiltonian import (
    Position,
    Progress,
    largest_over_chains,
    tell_progress,
)
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

REFRESHMENTS = 32  # of a direction, at least, along the length in which it is forgotten


class Path(NamedTuple):
    """Where a trajectory ends, and what it did to the energy.

    Attributes:
      position: the end, with the gradient there.
      velocity: there, in the structure of the random parameters.
      kinetic_change: the sum over kicks of -log |their Jacobian|, so that the energy's change is
        kinetic_change - (log p at the end - log p at the start).
      squared_errors: the sum over steps of the square of that change in each.
    """

    position: Position
    velocity: Params
    kinetic_change: jax.Array
    squared_errors: jax.Array


def random_velocity(rng_key: jax.Array, random: Params) -> Params:
    """A velocity in a uniform direction, of length sqrt(D), in the structure of `random`."""
    return _to_speed(trees.normal_like(rng_key, random))


def refresh(rng_key: jax.Array, velocity: Params, fraction: jax.Array) -> Params:
    """v <- sqrt(D) z / |z|,  z = exp(-f) v + sqrt(1 - exp(-2 f)) noise, with standard normal noise.

    f is the time over the length in which a direction is forgotten. The density of the new
    direction given the old one depends on the angle between them alone: the step is reversible with
    respect to the uniform distribution (arXiv 2303.18221, equation 12).
    """
    kept, added = jnp.exp(-fraction), jnp.sqrt(-jnp.expm1(-2 * fraction))
    noise = trees.normal_like(rng_key, velocity)
    return _to_speed(jax.tree.map(lambda v, n: kept * v + added * n, velocity, noise))


def kick(velocity: Params, gradient: Params, times: jax.Array) -> tuple[Params, jax.Array]:
    """The exact flow of the velocity at a fixed gradient, and -log of its Jacobian determinants.

        u <- (u + n (sinh d + c (cosh d - 1))) / (cosh d + c sinh d),    u = v / sqrt(D),
        kinetic change = (D - 1) log(cosh d + c sinh d),

    with n the gradient's direction, c = n'u and d = time sqrt(D) |gradient| / (D - 1). Written in
    exp(-d), which neither overflows at a huge d nor loses the digits of a tiny one.

    Args:
      velocity: of length sqrt(D).
      gradient: of the log-joint by z, in the same structure.
      times: (k,), positive or 0: of parts that follow each other.

    Returns:
      The velocity after all of them, of the same length, and the kinetic change of each, (k,).
    """
    num_dimensions = trees.size(velocity)
    root = math.sqrt(num_dimensions)
    norm = _norm(gradient)
    safe_norm = jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)
    along = trees.total(jax.tree.map(lambda v, g: v * (g / safe_norm), velocity, gradient)) / root
    # A velocity straight against the gradient stays so for ever in exact arithmetic. Within
    # rounding it is taken for one that turns.
    cosine = jnp.clip(along, jnp.finfo(norm.dtype).eps - 1, 1.0)
    angles = jnp.cumsum(times) * norm * (root / (num_dimensions - 1))
    decays, lost = jnp.exp(-angles), -jnp.expm1(-angles[-1])
    sizes = 1 + cosine + (1 - cosine) * decays**2  # (cosh d + c sinh d) 2 exp(-d)
    keep = 2 * decays[-1] / sizes[-1]
    turn = root * lost * (1 + decays[-1] + cosine * lost) / sizes[-1]
    turned = jax.tree.map(lambda v, g: keep * v + turn * (g / safe_norm), velocity, gradient)
    # cosh d + c sinh d - 1 has no digits left in the other form where d is small.
    small = jnp.minimum(angles, 1.0)
    growth = 2 * jnp.sinh(small / 2) ** 2 + cosine * jnp.sinh(small)
    log_sizes = jnp.where(angles < 1, jnp.log1p(growth), angles + jnp.log(sizes / 2))
    return _to_speed(turned), (num_dimensions - 1) * jnp.diff(log_sizes, prepend=0.0)


def trajectory(
    rng_key: jax.Array,
    log_joint: LogJoint,
    position: Position,
    velocity: Params,
    data: Data,
    *,
    step_size: jax.Array,
    inverse_mass: Params,
    num_steps: jax.Array,
    decoherence_length: float | None = None,
    noise_in_drift: bool = True,
    finer: jax.Array | int = 1,
    progress: Progress | None = None,
) -> Path:
    """Steps of a kick of e/2, a drift of e and a kick of e/2, the velocity refreshed in some.

        drift e:  w <- w + e s v,        kick and refresh:  see there

    In the middle of a drift is where a refreshment does least harm (Leimkuhler & Matthews 2013,
    arXiv 1203.5428, for Langevin dynamics): all widths of a Gaussian are then wrong by the same
    factor, 1 + e^2 E|gradient|^2 / (24 D). Kicks are stretched to mend that. Newton's kick changes
    the velocity by a sqrt(D), a = e |gradient| / sqrt(D); the flow on the sphere from a velocity to
    its mirror image does so by 2 tanh(d / 2) sqrt(D), so that it takes d = 2 artanh(a / 2) =
    a (1 + a^2 / 12 + a^4 / 80 + ...). What is left on Gaussians is of the order of 1 / D. Where the
    gradient is much larger than in the posterior, such steps must be short: refreshed between steps
    by kicks that are not stretched, energy is kept exactly on a slope that does not bend.

    Without refreshment it is deterministic, and run backwards (from the end, with the velocity
    turned round) it returns to its start. With refreshment, every path is as likely as the same one
    backwards, but for the kicks' Jacobians: the change of energy is the same in both cases.
    The first gradient is known from the trajectory before, as in `core.hamiltonian.leapfrog`.

    Args:
      rng_key: of this trajectory alone.
      log_joint: the target.
      position: see `core.hamiltonian.start`.
      velocity: of length sqrt(D), in the structure of the random parameters.
      data: the whole data set.
      step_size: e, a scalar.
      inverse_mass: s^2, in the structure of the random parameters, or broadcast to it.
      num_steps: an integer scalar.
      decoherence_length: L, after which a velocity is forgotten by noise; infinite if None.
      noise_in_drift: whether it is refreshed in the middle of drifts and not between steps.
      finer: number of these steps in one step of the coarser path that this one repeats. By the
        same key both have the same noise at the same times. 1 for a path of its own.
      progress: see `core.hmc.hmc`.

    Returns:
      The end; after as many gradients as steps.
    """
    random, point_estimates = log_joint.partition(position.params)
    scale = jax.tree.map(jnp.sqrt, inverse_mass)
    root = math.sqrt(trees.size(random))
    length = decoherence_length or math.inf
    # Noise costs as much as the gradient of a small network. Many short steps share one draw of it.
    coarse_step = step_size * jnp.asarray(finer, step_size.dtype)
    wished = (length / (REFRESHMENTS * coarse_step)).astype(jnp.int32)
    period = finer * jnp.clip(wished, 1, jnp.maximum(-(-num_steps // finer) // 4, 1))
    forgotten = period.astype(step_size.dtype) * step_size / length
    in_drift = noise_in_drift and decoherence_length is not None
    between_steps = not noise_in_drift and decoherence_length is not None

    def terms(moving: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        log_prior, log_likelihood = log_joint.terms(trees.merge(moving, point_estimates), data)
        return log_prior + log_likelihood, (log_prior, log_likelihood)

    def turn(velocity: Params, gradient: Params, *times: jax.Array) -> tuple[Params, jax.Array]:
        scaled, lasting = jax.tree.map(jnp.multiply, gradient, scale), jnp.stack(times)
        if in_drift:  # At 2 and beyond, steps are not stable.
            turned_by = jnp.minimum(step_size * _norm(scaled) / root, 2.0)
            lasting *= 1 + turned_by**2 / 12 + turned_by**4 / 80
        return kick(velocity, scaled, lasting)

    def drift(random: Params, velocity: Params, time: jax.Array) -> Params:
        return jax.tree.map(lambda w, v, s: w + time * s * v, random, velocity, scale)

    def forget(index: jax.Array, velocity: Params, ends_step: jax.Array) -> Params:
        def refreshed(velocity: Params) -> Params:
            key = jax.random.fold_in(rng_key, index // period)
            return refresh(key, velocity, forgotten)

        is_due = ends_step & (index % period == 0)
        return jax.lax.cond(is_due, refreshed, lambda velocity: velocity, velocity)

    def body(index: jax.Array, carry: tuple) -> tuple:
        random, velocity, _, kinetic, opening, squares, before = carry
        # vmapped chains share the loop: one whose own steps are done stands still.
        ends_step, begins_step = (index > 0) & (index <= num_steps), index < num_steps
        last = jnp.where(ends_step, step_size / 2, 0.0)
        first = jnp.where(begins_step, step_size / 2, 0.0)
        if in_drift:
            random = drift(random, velocity, last)
            velocity = forget(index, velocity, ends_step)
            random = drift(random, velocity, last)
        else:
            random = drift(random, velocity, 2 * last)
        (_, now), gradient = jax.value_and_grad(terms, has_aux=True)(random)
        if between_steps:
            velocity, (closing,) = turn(velocity, gradient, last)
            velocity = forget(index, velocity, ends_step)
            velocity, (following,) = turn(velocity, gradient, first)
        else:  # kicks by the same gradient are one
            velocity, (closing, following) = turn(velocity, gradient, last, first)
        # Prior and likelihood apart. Their sums resolve some 1e-7 of themselves, which is
        # enough for an error that is itself a small part of sqrt(D).
        gained = sum(jax.tree.leaves(jax.tree.map(jnp.subtract, now, before)))
        squares += jnp.where(ends_step, (opening + closing - gained) ** 2, 0.0)
        tell_progress(progress, index)
        return random, velocity, gradient, kinetic + closing + following, following, squares, now

    longest = largest_over_chains(num_steps)
    num_unknown = largest_over_chains((~position.is_gradient_known).astype(jnp.int32))
    first = jnp.where(num_unknown == 0, step_size / 2, 0.0)
    velocity, (opening,) = turn(velocity, position.gradient, first)
    start = (random, velocity, position.gradient, opening, opening, jnp.zeros_like(step_size))
    random, velocity, gradient, kinetic, _, squares, _ = jax.lax.fori_loop(
        1 - num_unknown, longest + 1, body, (*start, terms(random)[1])
    )
    end = Position(trees.merge(random, point_estimates), gradient, jnp.array(True))
    return Path(end, velocity, kinetic, squares)


def _to_speed(velocity: Params) -> Params:
    """The same direction, with length sqrt(D); values are of the order of 1."""
    factor = jnp.sqrt(trees.size(velocity) / trees.total(jax.tree.map(jnp.square, velocity)))
    return jax.tree.map(lambda v: factor * v, velocity)


def _norm(tree: Params) -> jax.Array:
    """The length of all values together, where their squares may over- or underflow."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)]))
    unit = jnp.maximum(largest, jnp.finfo(largest.dtype).tiny)
    return unit * jnp.sqrt(trees.total(jax.tree.map(lambda leaf: (leaf / unit) ** 2, tree)))
