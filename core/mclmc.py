"""Microcanonical Langevin Monte Carlo: dynamics of constant speed, unadjusted and adjusted.

    unadjusted:  n steps of kick e/2, drift e, kick e/2, in the middle of each a refreshment
                 v <- sqrt(D) (v + a noise) / |v + a noise|,    a^2 = exp(2 e / L) - 1
    adjusted:    a new velocity, n steps without refreshment, accepted with probability
                 min(1, exp(-change of energy))

in the dynamics of `core.microcanonical` (Robnik, De Luca, Silverstein & Seljak 2022, arXiv
2212.08549; Langevin's form: Robnik & Seljak 2023, arXiv 2303.18221; adjusted: Robnik, Cohn-Gordon
& Seljak 2025, arXiv 2503.01707). Target: the adjusted transitions leave p_T(w | D) invariant, as
HMC's do. The unadjusted ones meet it up to an error that falls with the step size and that neither
R-hat nor effective sample sizes show; the step size is the one at which energy is conserved to a
stated variance. Over the random parameters; the point estimates beside `stochastic_params` stay
where they started. Burn-in, whose draws have no target, tunes; afterwards all is frozen.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import adaptation, hamiltonian, microcanonical, trajectories, trees
from haiku_posteriors.core.adaptation import Learned
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.hamiltonian import Position, Progress
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, repeat
from haiku_posteriors.core.trees import Params

# Mean squared energy error, per step and dimension, beyond which an unadjusted transition is
# taken back. An energy varies by sqrt(D / 2) in the posterior: such errors are as large.
DIVERGENT_VARIANCE = 1.0


class MCLMCState(NamedTuple):
    """One chain.

    Attributes:
      position: parameters, random ones and point estimates, and the gradient there.
      velocity: of length sqrt(D), in the structure of the random parameters; None if adjusted.
      iteration: transitions so far.
      step_size, inverse_mass, dual_averaging, moments, num_divergent: see
        `core.adaptation.Learned`.
      log_rate: of energy errors, see `core.adaptation.follow_energy_variance`.
    """

    position: Position
    velocity: Params | None
    iteration: jax.Array
    step_size: jax.Array
    inverse_mass: Params
    dual_averaging: adaptation.DualAveraging | None
    moments: adaptation.Moments | None
    num_divergent: jax.Array
    log_rate: jax.Array

    @property
    def learned(self) -> Learned:
        """What burn-in has found so far."""
        return Learned(*self[3:8])


def mclmc(
    log_joint: LogJoint,
    *,
    adjusted: bool = False,
    energy_variance: float = 2e-3,
    target_accept: float = 0.8,
    step_size: float | None = None,
    trajectory_length: float | None = None,
    decoherence_length: float | None = None,
    noise_in_drift: bool = True,
    num_burn_in: int = 100,
    adapt_mass_matrix: bool | None = None,
    max_num_leapfrog_steps: int = 10_000,
    divergence_threshold: float = 1000.0,
    progress: Progress | None = None,
) -> Method:
    """Microcanonical Langevin Monte Carlo; one step is one transition of about length / e steps.

    Burn-in is HMC's (`core.adaptation`): a first quarter whose transitions grow from one step; then
    the variances along each chain, averaged over chains, become the inverse masses; the last
    quarter finds the step size for these. An unadjusted transition whose energy errors are beyond
    adaptation.ROUGH of what an adapted step aims at is made again with half the step. One that is
    not finite, or whose errors are beyond DIVERGENT_VARIANCE, is taken back: the chain stays, with
    a new velocity.

    Args:
      log_joint: the target, with at least two random parameters.
      adjusted: whether there is a Metropolis test.
      energy_variance: unadjusted: the mean squared energy error, per step and dimension, that the
        adapted step size aims at.
      target_accept: adjusted: the mean acceptance probability that it aims at.
      step_size: in the units of HMC's; adapted in burn-in when None.
      trajectory_length: of a transition; by default that of HMC. Adjusted transitions vary in
        length by trajectories.DEFAULT_JITTER, as HMC's.
      decoherence_length: unadjusted: L; by default the transition's length.
      noise_in_drift: unadjusted: whether directions are forgotten in the middle of drifts, with
        least bias, and not between steps, which far from the posterior can be longer; there no
        transition is made again.
      num_burn_in: transitions in which step size and masses are adapted.
      adapt_mass_matrix: whether to set a diagonal mass matrix; by default if the step size is
        adapted, too, in a burn-in of at least
        trajectories.MIN_BURN_IN_FOR_MASS.
      max_num_leapfrog_steps: limit of a transition. An unadjusted one that meets it is continued by
        the next in the same direction, an adjusted one is not.
      divergence_threshold: adjusted: energy error above which a transition is divergent.
      progress: see `core.hmc.hmc`.

    Returns:
      The method; it starts at `core.trajectories.overdispersed_params` unless given parameters.
      `info` holds scalars by HMC's names, acceptance_probability being that of a test if there were
      one, and for unadjusted transitions energy_variance.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = mclmc(log_joint, step_size=0.01, trajectory_length=0.1, num_burn_in=0)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for iteration in range(2):
      ...     state, info = step(jax.random.key(iteration), state, data)
      >>> int(info["num_leapfrog_steps"])
      10
    """
    jitter = trajectories.DEFAULT_JITTER if adjusted else 0.0
    limits = trajectories.Limits(trajectory_length, jitter, max_num_leapfrog_steps)
    plan = trajectories.make_plan(
        log_joint, step_size, limits, num_burn_in, target_accept, adapt_mass_matrix
    )
    num_dimensions = trees.size(log_joint.random_shapes)
    decoherence = plan.trajectory.length if decoherence_length is None else decoherence_length
    check_positive(energy_variance=energy_variance, decoherence_length=decoherence)
    if num_dimensions < 2:
        raise UserError(
            "Microcanonical dynamics need at least two random parameters, since a velocity of "
            "constant length cannot turn in one dimension: use HMC there."
        )

    def init(rng_key: jax.Array, params: Params | None) -> MCLMCState:
        position_key, velocity_key = (jax.random.fold_in(rng_key, i) for i in range(2))
        if params is None:
            params = trajectories.overdispersed_params(position_key, log_joint)
        random, _ = log_joint.partition(params)
        return MCLMCState(
            hamiltonian.start(log_joint, params),
            None if adjusted else microcanonical.random_velocity(velocity_key, random),
            jnp.zeros((), jnp.int32),
            *plan.start(random, step_size, by_acceptance=adjusted),
            jnp.zeros((), jax.tree.leaves(random)[0].dtype),  # not read before it is found
        )

    def attempt(
        rng_key: jax.Array, state: MCLMCState, data: Data, size: jax.Array
    ) -> tuple[tuple[Position, Params | None], Info]:
        """One transition: the next position and velocity, and info."""
        keys = [jax.random.fold_in(rng_key, i) for i in range(3)]
        params = state.position.params
        random, _ = log_joint.partition(params)
        fresh = microcanonical.random_velocity(keys[0], random)
        num_steps = plan.trajectory.num_steps(size, state.iteration)
        finer = jnp.where(state.iteration == 0, 1.0, jnp.round(state.step_size / size))
        path = microcanonical.trajectory(
            keys[1],
            log_joint,
            state.position,
            fresh if adjusted else state.velocity,
            data,
            step_size=size,
            inverse_mass=state.inverse_mass,
            num_steps=num_steps,
            decoherence_length=None if adjusted else decoherence,
            noise_in_drift=noise_in_drift,
            finer=finer.astype(jnp.int32),
            progress=progress,
        )
        value = log_joint(params, data)
        change = log_joint.difference(path.position.params, params, data)
        energy_error = path.kinetic_change - change
        finite = jnp.isfinite(energy_error) & trees.all_finite((path.position, path.velocity))
        variance = path.squared_errors / (num_steps * num_dimensions).astype(size.dtype)
        too_large = (
            energy_error > divergence_threshold if adjusted else ~(variance < DIVERGENT_VARIANCE)
        )
        divergent = ~finite | too_large
        probability = jnp.where(divergent, 0.0, jnp.exp(jnp.minimum(-energy_error, 0.0)))
        uniform = jax.random.uniform(keys[2], (), probability.dtype)
        accepted = (uniform < probability) if adjusted else ~divergent
        info = {
            "log_joint": value + jnp.where(accepted, change, 0.0),
            "acceptance_probability": probability,
            "accepted": accepted,
            "energy_error": energy_error,
            "divergent": divergent,
            "step_size": size,
            "num_leapfrog_steps": num_steps,
        }
        if not adjusted:
            info["energy_variance"] = jnp.where(divergent, DIVERGENT_VARIANCE, variance)
        # A fresh velocity leads elsewhere than the one that led to a divergence.
        velocity = None if adjusted else trees.select(accepted, path.velocity, fresh)
        return (trees.select(accepted, path.position, state.position), velocity), info

    def is_rough(info: Info) -> jax.Array:
        return info["divergent"] | (info["energy_variance"] > adaptation.ROUGH * energy_variance)

    def step(rng_key: jax.Array, state: MCLMCState, data: Data) -> tuple[MCLMCState, Info]:
        try_size = functools.partial(attempt, rng_key, state, data)
        is_first = state.iteration == 0
        if plan.adapts_step_size:
            # By the same noise: fresh noise would lead away from stiff places, and make them rare.
            (position, velocity), info = trajectories.attempt_until_likely(
                try_size,
                state.step_size,
                is_first,
                is_rough if noise_in_drift and not adjusted else None,
            )
        else:
            (position, velocity), info = try_size(state.step_size)
        num_done = state.iteration + 1
        size = jnp.where(is_first, info["step_size"], state.step_size)
        learned = adaptation.adapt(
            plan.burn_in,
            num_done,
            state.learned._replace(step_size=size),
            log_joint.partition(position.params)[0],
            info["acceptance_probability"],
            info["divergent"],
        )
        log_rate = state.log_rate
        if plan.adapts_step_size and not adjusted:
            used, observed = info["step_size"], info["energy_variance"]
            size, log_rate = adaptation.follow_energy_variance(
                plan.burn_in, num_done, log_rate, size, used, observed, energy_variance
            )
            learned = learned._replace(step_size=size)
        return MCLMCState(position, velocity, num_done, *learned, log_rate), info

    def pool(states: MCLMCState) -> MCLMCState:
        learned = adaptation.pool(states.learned)
        log_rate = states.log_rate
        if not adjusted:
            size = adaptation.pool_step_sizes(states.step_size)
            learned = learned._replace(step_size=size)
            log_rate = adaptation.pool_energy_errors(log_rate)
        during_burn_in = states.iteration[0] <= num_burn_in
        pooled = states._replace(**learned._asdict(), log_rate=log_rate)
        return trees.select(during_burn_in, pooled, states)

    def sample(rng_key: jax.Array, state: MCLMCState, num_draws: int) -> Params:
        return repeat(state.position.params, num_draws)

    return Method(init, step, sample, pool if plan.adapts else None)
