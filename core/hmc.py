"""Full-batch Hamiltonian Monte Carlo: the reference by which every other method is judged.

    H(w, v) = -log p_T(w, D) + sum_i m_i v_i^2 / 2,        v_i ~ N(0, 1 / m_i),

with m the inverse masses. A transition draws a momentum v, integrates Hamilton's equations by L
leapfrog steps of size e, and accepts the end point with probability min(1, exp(-change of H)); a
rejected transition leaves the state where it was, and that state counts again.
Target: p_T(w | D) exactly (Neal 2011, arXiv 1206.1901), over the random parameters; the point
estimates beside `stochastic_params` stay where they started. During burn-in the step size is
adapted by dual averaging (Hoffman & Gelman 2014, arXiv 1111.4246) and, on request, the masses by
the variances along the chain; both are frozen afterwards. Draws of burn-in have no target.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import adaptation, hamiltonian, likelihoods, trees
from haiku_posteriors.core.adaptation import BurnIn, Learned
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.hamiltonian import Position, Progress, transition
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, repeat
from haiku_posteriors.core.trees import Params

MIN_BURN_IN_FOR_MASS = 40  # of which half is averaged
DEFAULT_JITTER = 0.5
GOLDEN_FRACTION = np.uint32(2654435769)  # 2^32 times the fraction of the golden ratio
MAX_STEP_SIZE_HALVINGS = 40  # before the first transition


class HMCState(NamedTuple):
    """One chain.

    Attributes:
      position: parameters, random ones and point estimates, and the gradient there.
      iteration: transitions so far.
      step_size: of the next transition.
      inverse_mass: in the structure of the random parameters; one per leaf, or, when adapted, one
        per parameter.
      dual_averaging: None when the step size is given.
      moments: None when the masses are not adapted.
      num_divergent: see `core.adaptation.Learned`.
    """

    position: Position
    iteration: jax.Array
    step_size: jax.Array
    inverse_mass: Params
    dual_averaging: adaptation.DualAveraging | None
    moments: adaptation.Moments | None
    num_divergent: jax.Array


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


def hmc(
    log_joint: LogJoint,
    *,
    step_size: float | None = None,
    trajectory_length: float | None = None,
    num_burn_in: int = 100,
    target_accept: float = 0.8,
    adapt_mass_matrix: bool | None = None,
    trajectory_jitter: float | None = None,
    max_num_leapfrog_steps: int = 10_000,
    metropolis: bool = True,
    divergence_threshold: float = 1000.0,
    progress: Progress | None = None,
) -> Method:
    """Hamiltonian Monte Carlo; one step is one transition of ceil(trajectory / step) leapfrogs.

    While the step size is adapted, the first quarter of burn-in limits the number of leapfrog
    steps, from 1 upwards by equal factors: far from the posterior, many short trajectories lose
    energy faster than few long ones, and a bad step size costs little.
    Chains that the loop runs together pool what they learn, see `pool`: one step size, and masses
    from the mean of the variances within each chain. (Variances of all chains' draws together would
    mistake the distance between two modes for a width.) A chain alone learns alone.

    Args:
      log_joint: the target.
      step_size: of a leapfrog step; adapted in burn-in when None.
      trajectory_length: integration time. By default pi/2 * sqrt(T) * the prior's largest
        standard deviation s: a Gaussian prior tempered by T is N(0, T s^2), and a quarter of its
        period carries a position to an independent one.
      num_burn_in: transitions in which step size and masses are adapted.
      target_accept: the mean acceptance probability that adaptation aims at.
      adapt_mass_matrix: whether to set a diagonal mass matrix, once, from the second and third
        quarters of burn-in. By default if the step size is adapted, too, in a burn-in of at least
        MIN_BURN_IN_FOR_MASS. Inverse masses are variances in units of T s^2 (at first the prior's),
        so that the default trajectory is a quarter of the period of every parameter.
      trajectory_jitter: j; trajectories are between 1 - j and 1 + j times the length, evenly over
        iterations. Of fixed length, those that are near a multiple of a parameter's period bring it
        back to where it was: on a Gaussian of a quarter of the prior's deviation, every time. By
        default DEFAULT_JITTER; 0 if a step size is given, as in the HMC study (arXiv 2104.14421).
      max_num_leapfrog_steps: limit of a trajectory; a given step size that needs more is refused,
        an adapted one makes shorter trajectories.
      metropolis: if False, every end point that is not divergent is accepted, and the target is
        met up to the integrator's error only.
      divergence_threshold: energy error above which a transition is divergent.
      progress: called with the number of leapfrog steps done, every PROGRESS_INTERVAL of them
        inside a trajectory; once for all vmapped chains.

    Returns:
      The method; it starts at `overdispersed_params` unless given parameters. `info` holds
      scalars: those of `transition`, step_size and num_leapfrog_steps.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = hmc(log_joint, step_size=0.01, trajectory_length=0.1, num_burn_in=0)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for iteration in range(2):
      ...     state, info = step(jax.random.key(iteration), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    adapts_step_size = step_size is None
    if adapt_mass_matrix is None:
        adapt_mass_matrix = adapts_step_size and num_burn_in >= MIN_BURN_IN_FOR_MASS
    if trajectory_jitter is None:
        trajectory_jitter = DEFAULT_JITTER if adapts_step_size else 0.0
    prior_std, unit = tempered_prior_std(log_joint)
    length = default_length(log_joint) if trajectory_length is None else trajectory_length
    burn_in = BurnIn(num_burn_in, target_accept, length, prior_std, unit)
    ramp = max(burn_in.first_quarter, 1) if adapts_step_size else None
    trajectory = Trajectory(length, trajectory_jitter, max_num_leapfrog_steps, ramp)
    check_settings(trajectory, burn_in, step_size, adapt_mass_matrix)

    def init(rng_key: jax.Array, params: Params | None) -> HMCState:
        params = overdispersed_params(rng_key, log_joint) if params is None else params
        random, _ = log_joint.partition(params)
        dtype = jax.tree.leaves(random)[0].dtype
        size = jnp.array(length if step_size is None else step_size, dtype)
        return HMCState(
            hamiltonian.start(log_joint, params),
            jnp.zeros((), jnp.int32),
            size,
            adaptation.prior_inverse_mass(random, prior_std, unit, adapt_mass_matrix),
            adaptation.start_dual_averaging(size) if adapts_step_size else None,
            adaptation.start_moments(random, dtype) if adapt_mass_matrix else None,
            jnp.zeros((), jnp.int32),
        )

    def step(rng_key: jax.Array, state: HMCState, data: Data) -> tuple[HMCState, Info]:
        def attempt(size: jax.Array) -> tuple[Position, Info]:
            num_steps = trajectory.num_steps(size, state.iteration)
            position, info = transition(
                rng_key,
                log_joint,
                state.position,
                data,
                step_size=size,
                inverse_mass=state.inverse_mass,
                num_steps=num_steps,
                metropolis=metropolis,
                divergence_threshold=divergence_threshold,
                progress=progress,
            )
            return position, info | {"step_size": size, "num_leapfrog_steps": num_steps}

        if adapts_step_size:
            position, info = attempt_until_likely(attempt, state.step_size, state.iteration == 0)
        else:
            position, info = attempt(state.step_size)
        learned = Learned(info["step_size"], *state[3:])
        random, _ = log_joint.partition(position.params)
        num_done = state.iteration + 1
        acceptance, divergent = info["acceptance_probability"], info["divergent"]
        learned = adaptation.adapt(burn_in, num_done, learned, random, acceptance, divergent)
        return HMCState(position, num_done, *learned), info

    def pool(states: HMCState) -> HMCState:
        learned = adaptation.pool(Learned(*states[2:]))
        during_burn_in = states.iteration[0] <= num_burn_in
        return trees.select(during_burn_in, states._replace(**learned._asdict()), states)

    def sample(rng_key: jax.Array, state: HMCState, num_draws: int) -> Params:
        return repeat(state.position.params, num_draws)

    adapts = num_burn_in > 0 and (adapts_step_size or adapt_mass_matrix)
    return Method(init, step, sample, pool if adapts else None)


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
    attempt: Callable[[jax.Array], tuple[Any, Info]], step_size: jax.Array, is_first: jax.Array
) -> tuple[Any, Info]:
    """The first transition, with its step size halved until it is likely to be accepted.

    It is a single leapfrog step, which starts at the trajectory's length. Later transitions are
    attempted once; that they run through the same loop keeps the program to one gradient.

    Args:
      attempt: step size -> (what the transition leads to, info with acceptance_probability).
      step_size: to begin with.
      is_first: whether this is the first transition.
    """

    def unsettled(carry: tuple[jax.Array, Any, Info]) -> jax.Array:
        attempts, _, info = carry
        unlikely = info["acceptance_probability"] < 0.5
        return (attempts == 0) | (is_first & unlikely & (attempts <= MAX_STEP_SIZE_HALVINGS))

    def halve(carry: tuple[jax.Array, Any, Info]) -> tuple[jax.Array, Any, Info]:
        attempts = carry[0]
        return attempts + 1, *attempt(step_size / 2 ** attempts.astype(step_size.dtype))

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
    where the log-joint is steep beyond floating point. A learned noise scale starts at the median
    of its prior, since a start of tiny noise is as steep.
    """

    def clip(name: str, leaf: jax.Array) -> jax.Array:
        limit = 3 * log_joint.prior.scale(name)
        return jnp.clip(leaf, -limit, limit)

    params = log_joint.init(jax.random.fold_in(rng_key, 0))
    random, point_estimates = log_joint.partition(params)
    random = dict(random)
    own = {key: random.pop(key) for key in list(random) if key == likelihoods.PARAMETER_GROUP}
    draw = log_joint.prior.sample(jax.random.fold_in(rng_key, 1), random)
    return trees.merge(trees.map_with_name(clip, draw) | own, point_estimates)
