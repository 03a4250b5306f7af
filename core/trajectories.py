"""What HMC and MCLMC share around their dynamics: lengths of trajectories, settings, starts."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import adaptation, likelihoods, trees
from haiku_posteriors.core.adaptation import BurnIn, Learned
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info
from haiku_posteriors.core.trees import Params

MIN_BURN_IN_FOR_MASS = 40  # of which half is averaged
DEFAULT_JITTER = 0.5
GOLDEN_FRACTION = np.uint32(2654435769)  # 2^32 times the fraction of the golden ratio
MAX_STEP_SIZE_HALVINGS = 40  # before the first transition
MAX_REFINEMENTS = 3  # halvings of later ones


class Trajectory(NamedTuple):
    """Integration time of a transition and the number of leapfrog steps it is divided into.

    Attributes:
      length: integration time.
      jitter: j; trajectories are between 1 - j and 1 + j times the length, evenly over iterations.
      max_num_steps: limit of the number of leapfrog steps.
      ramp: transitions in which that limit grows from 1, by equal factors; None if it is constant.
    """

    length: float
    jitter: float
    max_num_steps: int
    ramp: int | None

    def num_steps(self, step_size: jax.Array, iteration: jax.Array) -> jax.Array:
        """Leapfrog steps of the transition after `iteration` others, an integer scalar."""
        dtype = step_size.dtype
        # A sequence that fills (0, 1) evenly, in fixed point: float32 has no fraction of iteration
        # * GOLDEN_RATIO left after a million. It is the same for all chains, which so have
        # trajectories of equal lengths, and independent of their positions, so that every
        # transition leaves the target invariant.
        fraction = (iteration.astype(jnp.uint32) * GOLDEN_FRACTION).astype(dtype) / 2.0**32
        jitter = self.jitter * (2 * fraction - 1)
        limit = jnp.array(float(self.max_num_steps), dtype)
        if self.ramp is not None:
            limit = jnp.round(limit ** jnp.minimum(iteration.astype(dtype) / self.ramp, 1.0))
        # A ceiling that ignores rounding errors: 1e-3 / 1e-4 is 10 steps in float32, too.
        steps = jnp.ceil(self.length * (1 + jitter) / step_size * (1 - 1e-6))
        return jnp.clip(steps, 1.0, limit).astype(jnp.int32)


class Plan(NamedTuple):
    """Settings of a chain whose defaults depend on each other and on the prior.

    Attributes:
      burn_in: how long it is and what it aims at.
      trajectory: of every transition.
      adapts_step_size: whether none is given.
      adapts_mass: whether burn-in sets the masses, too.
    """

    burn_in: BurnIn
    trajectory: Trajectory
    adapts_step_size: bool
    adapts_mass: bool

    def start(self, random: Params, step_size: float | None, by_acceptance: bool = True) -> Learned:
        """What a chain knows before its first transition.

        Args:
          random: its random parameters.
          step_size: the given one; else it starts at the trajectory's length.
          by_acceptance: whether the acceptance leads an adapted step size.
        """
        burn_in, dtype = self.burn_in, jax.tree.leaves(random)[0].dtype
        size = jnp.array(self.trajectory.length if step_size is None else step_size, dtype)
        averages = by_acceptance and self.adapts_step_size
        return Learned(
            size,
            adaptation.prior_inverse_mass(
                random, burn_in.prior_std, burn_in.unit, self.adapts_mass
            ),
            adaptation.start_dual_averaging(size) if averages else None,
            adaptation.start_moments(random, dtype) if self.adapts_mass else None,
            jnp.zeros((), jnp.int32),
        )

    @property
    def adapts(self) -> bool:
        """Whether chains learn anything to be pooled."""
        return self.burn_in.num_transitions > 0 and (self.adapts_step_size or self.adapts_mass)


class Limits(NamedTuple):
    """What is asked of trajectories; the attributes of `Trajectory`, with no length by default."""

    length: float | None
    jitter: float
    max_num_steps: int


def make_plan(
    log_joint: LogJoint,
    step_size: float | None,
    limits: Limits,
    num_burn_in: int,
    target_accept: float,
    adapt_mass_matrix: bool | None,
) -> Plan:
    """Fills in what was not given, see `core.hmc.hmc`, and refuses what contradicts itself."""
    adapts_step_size = step_size is None
    if adapt_mass_matrix is None:
        adapt_mass_matrix = adapts_step_size and num_burn_in >= MIN_BURN_IN_FOR_MASS
    length = default_length(log_joint) if limits.length is None else limits.length
    burn_in = BurnIn(num_burn_in, target_accept, length, *tempered_prior_std(log_joint))
    ramp = max(burn_in.first_quarter, 1) if adapts_step_size else None
    trajectory = Trajectory(length, limits.jitter, limits.max_num_steps, ramp)
    check_settings(trajectory, burn_in, step_size, adapt_mass_matrix)
    return Plan(burn_in, trajectory, adapts_step_size, adapt_mass_matrix)


def check_settings(
    trajectory: Trajectory, burn_in: BurnIn, step_size: float | None, adapt_mass_matrix: bool
) -> None:
    """Refuses settings that contradict each other or the definitions of their quantities."""
    check_positive(
        trajectory_length=trajectory.length, max_num_leapfrog_steps=trajectory.max_num_steps
    )
    if not 0 < burn_in.target_accept < 1:
        raise UserError(f"target_accept must lie between 0 and 1, not {burn_in.target_accept}.")
    if not 0 <= trajectory.jitter < 1:
        raise UserError(f"trajectory_jitter must lie in [0, 1), not {trajectory.jitter}.")
    if adapt_mass_matrix and burn_in.num_transitions < MIN_BURN_IN_FOR_MASS:
        raise UserError(
            f"A mass matrix needs a num_burn_in of at least {MIN_BURN_IN_FOR_MASS}, "
            f"not {burn_in.num_transitions}."
        )
    if step_size is None:
        if burn_in.num_transitions < 1:
            raise UserError("Without burn-in the step size cannot be adapted: give a step_size.")
        return
    check_positive(step_size=step_size)
    longest = trajectory.length * (1 + trajectory.jitter)
    if longest > step_size * (trajectory.max_num_steps + 1e-6):
        raise UserError(
            f"A trajectory of {longest:.6g} in steps of {step_size:.6g} takes more than "
            f"max_num_leapfrog_steps = {trajectory.max_num_steps} leapfrog steps; "
            "raise step_size or max_num_leapfrog_steps, or lower trajectory_length."
        )


def attempt_until_likely(
    attempt: Callable[[jax.Array], tuple[Any, Info]],
    step_size: jax.Array,
    is_first: jax.Array,
    is_rough: Callable[[Info], jax.Array] | None = None,
) -> tuple[Any, Info]:
    """A transition, the first one with its step size halved until it is likely to be accepted.

    The first is a single leapfrog step, which starts at the trajectory's length. That later
    transitions run through the same loop keeps the program to one gradient.

    Args:
      attempt: step size -> (what the transition leads to, info with acceptance_probability and
        num_leapfrog_steps).
      step_size: to begin with.
      is_first: whether this is the first transition.
      is_rough: whether one by this info is to be made again with half the step, three times at
        most; None for never.

    Returns:
      Of the last attempt; its info has the num_leapfrog_steps of all of them.
    """

    def unsettled(carry: tuple[jax.Array, Any, Info]) -> jax.Array:
        attempts, _, info = carry
        unlikely = info["acceptance_probability"] < 0.5
        again = is_first & unlikely & (attempts <= MAX_STEP_SIZE_HALVINGS)
        if is_rough is not None:
            again |= ~is_first & is_rough(info) & (attempts <= MAX_REFINEMENTS)
        return (attempts == 0) | again

    def halve(carry: tuple[jax.Array, Any, Info]) -> tuple[jax.Array, Any, Info]:
        attempts, _, before = carry
        end, info = attempt(step_size / 2 ** attempts.astype(step_size.dtype))
        made = jnp.where(is_first, 0, before["num_leapfrog_steps"])
        info = info | {"num_leapfrog_steps": made + info["num_leapfrog_steps"]}
        return attempts + 1, end, info

    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(attempt, step_size))
    _, end, info = jax.lax.while_loop(unsettled, halve, (jnp.int32(0), *nothing))
    return end, info


def tempered_prior_std(log_joint: LogJoint) -> tuple[Params, float]:
    """sqrt(T) s of each random parameter, leaf by leaf, and the largest of them."""
    prior_std = jax.tree.map(
        lambda scale: math.sqrt(log_joint.temperature) * scale, log_joint.prior_scales
    )
    return prior_std, max(jax.tree.leaves(prior_std))


def default_length(log_joint: LogJoint) -> float:
    """pi/2 * sqrt(T) * the prior's largest standard deviation: see `trajectory_length` of `hmc`."""
    return math.pi / 2 * tempered_prior_std(log_joint)[1]


def overdispersed_params(rng_key: jax.Array, log_joint: LogJoint) -> Params:
    """The start of a chain: random parameters from the prior, the rest from the network's own init.

    The prior is wider than the posterior, so chains that agree have forgotten their starts.
    Values are clipped at three standard deviations: with heavy tails, single weights would start
    where the log-joint is steep beyond floating point. A learned noise scale starts at the stated
    one, since a start of tiny noise is as steep.
    """

    def clip(name: str, leaf: jax.Array) -> jax.Array:
        limit = 3 * log_joint.prior.scale(name)
        return jnp.clip(leaf, -limit, limit)

    params = log_joint.init(jax.random.fold_in(rng_key, 0))
    if log_joint.prior.is_whole:  # its draws are starts, see `problem.build_log_joint`
        return params
    random, point_estimates = log_joint.partition(params)
    random = dict(random)
    own = {key: random.pop(key) for key in list(random) if key == likelihoods.PARAMETER_GROUP}
    draw = log_joint.prior.sample(jax.random.fold_in(rng_key, 1), random)
    return trees.merge(trees.map_with_name(clip, draw) | own, point_estimates)
