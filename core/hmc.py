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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import adaptation, likelihoods, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.hamiltonian import Progress, transition
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, repeat
from haiku_posteriors.core.trees import Params

MIN_BURN_IN_FOR_MASS = 20
MAX_HALVINGS = 40  # of the first step size


class HMCState(NamedTuple):
    """One chain.

    Attributes:
      params: the position; random parameters and point estimates.
      iteration: transitions so far.
      step_size: of the next transition.
      inverse_mass: in the structure of the random parameters; one a leaf, or, when adapted, one a
        parameter.
      dual_averaging: None when the step size is given.
      moments: None when the masses are not adapted.
    """

    params: Params
    iteration: jax.Array
    step_size: jax.Array
    inverse_mass: Params
    dual_averaging: adaptation.DualAveraging | None
    moments: adaptation.Moments | None


def hmc(
    log_joint: LogJoint,
    *,
    step_size: float | None = None,
    trajectory_length: float | None = None,
    num_burn_in: int = 100,
    target_accept: float = 0.8,
    adapt_mass_matrix: bool = False,
    trajectory_jitter: float = 0.0,
    max_num_leapfrog_steps: int = 10_000,
    metropolis: bool = True,
    divergence_threshold: float = 1000.0,
    progress: Progress | None = None,
) -> Method:
    """Hamiltonian Monte Carlo; one step is one transition of ceil(trajectory / step) leapfrogs.

    While the step size is adapted, the first quarter of burn-in limits the number of leapfrog
    steps, from 1 upwards by equal factors: far from the posterior, many short trajectories lose
    energy faster than few long ones, and a bad step size costs little.
    Chains adapt separately; vmapped chains run in lockstep, as long as the longest of them.

    Args:
      log_joint: the target.
      step_size: of a leapfrog step; adapted in burn-in when None.
      trajectory_length: integration time. By default pi/2 * sqrt(T) * the prior's largest
        standard deviation s: a Gaussian prior tempered by T is N(0, T s^2), and a quarter of its
        period carries a position to an independent one.
      num_burn_in: transitions during which things are adapted.
      target_accept: the mean acceptance probability that adaptation aims at.
      adapt_mass_matrix: whether to set a diagonal mass matrix, once, from the second and third
        quarters of burn-in. Inverse masses are variances in units of T s^2 (at first the prior's),
        so that the default trajectory is a quarter of the period of every parameter.
      trajectory_jitter: j; each trajectory is Uniform(1 - j, 1 + j) times the length.
      max_num_leapfrog_steps: limit of a trajectory; a given step size that needs more is refused,
        an adapted one makes shorter trajectories.
      metropolis: if False, every end point that is no divergence is accepted, and the target is
        met up to the integrator's error only.
      divergence_threshold: energy error above which a transition is divergent.
      progress: called with the number of leapfrog steps done, every PROGRESS_INTERVAL of them
        inside a trajectory; once for all vmapped chains.

    Returns:
      The method; it starts at `overdispersed_params` unless given parameters. `info` holds scalars:
      those of `transition`, step_size and num_leapfrog_steps.
    """
    shapes = log_joint.random_shapes
    prior_std = trees.map_with_name(
        lambda name, _: math.sqrt(log_joint.temperature) * log_joint.prior.scale(name), shapes
    )
    unit = max(jax.tree.leaves(prior_std))
    length = math.pi / 2 * unit if trajectory_length is None else trajectory_length
    positive = {"trajectory_length": length, "max_num_leapfrog_steps": max_num_leapfrog_steps}
    if step_size is not None:
        positive["step_size"] = step_size
    check_positive(**positive)
    if not 0 < target_accept < 1:
        raise UserError(f"target_accept must lie between 0 and 1, not {target_accept}.")
    if not 0 <= trajectory_jitter < 1:
        raise UserError(f"trajectory_jitter must lie in [0, 1), not {trajectory_jitter}.")
    if step_size is None and num_burn_in < 1:
        raise UserError("Without burn-in the step size cannot be adapted: give a step_size.")
    if adapt_mass_matrix and num_burn_in < MIN_BURN_IN_FOR_MASS:
        raise UserError(
            f"A mass matrix needs a num_burn_in of at least {MIN_BURN_IN_FOR_MASS}, "
            f"not {num_burn_in}."
        )
    if step_size is not None and length * (1 + trajectory_jitter) > step_size * (
        max_num_leapfrog_steps + 1e-6
    ):
        raise UserError(
            f"A trajectory of {length * (1 + trajectory_jitter):.6g} in steps of {step_size:.6g} "
            f"takes more than max_num_leapfrog_steps = {max_num_leapfrog_steps} leapfrog steps; "
            "raise step_size or max_num_leapfrog_steps, or lower trajectory_length."
        )
    first_quarter, last_quarter = num_burn_in // 4, num_burn_in - num_burn_in // 4

    def init(rng_key: jax.Array, params: Params | None) -> HMCState:
        params = overdispersed_params(rng_key, log_joint) if params is None else params
        random, _ = log_joint.partition(params)
        size = jnp.array(length if step_size is None else step_size, _dtype(random))
        inverse_mass = jax.tree.map(
            lambda leaf, std: jnp.full(
                leaf.shape if adapt_mass_matrix else (), (std / unit) ** 2, leaf.dtype
            ),
            random,
            prior_std,
        )
        zeros = jax.tree.map(jnp.zeros_like, random)
        return HMCState(
            params,
            jnp.zeros((), jnp.int32),
            size,
            inverse_mass,
            adaptation.start_dual_averaging(size) if step_size is None else None,
            adaptation.Moments(jnp.zeros_like(size), zeros, zeros) if adapt_mass_matrix else None,
        )

    def number_of_steps(rng_key: jax.Array, state: HMCState) -> jax.Array:
        size = state.step_size
        jitter = trajectory_jitter * jax.random.uniform(rng_key, (), size.dtype, -1.0, 1.0)
        limit = jnp.array(float(max_num_leapfrog_steps), size.dtype)
        if step_size is None:
            ramp = jnp.minimum(state.iteration.astype(size.dtype) / max(first_quarter, 1), 1.0)
            limit = jnp.round(limit**ramp)
        # The ceiling is deaf to rounding: 1e-3 / 1e-4 is 10 steps in float32, too.
        steps = jnp.ceil(length * (1 + jitter) / size * (1 - 1e-6))
        return jnp.clip(steps, 1.0, limit).astype(jnp.int32)

    def adapt(state: HMCState, acceptance: jax.Array) -> HMCState:
        """What burn-in learns from the transition that led to `state`."""
        done = state.iteration + 1
        _, _, size, inverse_mass, dual, moments = state
        changed = done == first_quarter  # the limit on steps is gone
        if moments is not None:
            random, _ = log_joint.partition(state.params)
            inside = (done > first_quarter) & (done <= last_quarter)
            moments = trees.select(inside, adaptation.add_to_moments(moments, random), moments)
            estimate = adaptation.relative_variances(moments, prior_std, unit)
            inverse_mass = trees.select(done == last_quarter, estimate, inverse_mass)
            changed |= done == last_quarter
        if dual is not None:
            dual = trees.select(done == 1, adaptation.start_dual_averaging(size), dual)
            size, dual = adaptation.update_dual_averaging(dual, acceptance, target_accept, length)
            size = jnp.where(changed | (done == num_burn_in), jnp.exp(dual.average), size)
            # Other trajectories or masses need another step size: start again from the best yet.
            dual = trees.select(changed, adaptation.start_dual_averaging(size), dual)
        adapted = HMCState(state.params, done, size, inverse_mass, dual, moments)
        return trees.select(done <= num_burn_in, adapted, state._replace(iteration=done))

    def step(rng_key: jax.Array, state: HMCState, data: Data) -> tuple[HMCState, Info]:
        transition_key, jitter_key = jax.random.fold_in(rng_key, 0), jax.random.fold_in(rng_key, 1)

        def attempt(size: jax.Array) -> tuple[Params, Info]:
            num_steps = number_of_steps(jitter_key, state._replace(step_size=size))
            params, info = transition(
                transition_key,
                log_joint,
                state.params,
                data,
                step_size=size,
                inverse_mass=state.inverse_mass,
                num_steps=num_steps,
                metropolis=metropolis,
                divergence_threshold=divergence_threshold,
                progress=progress,
            )
            return params, info | {"step_size": size, "num_leapfrog_steps": num_steps}

        if step_size is not None:
            params, info = attempt(state.step_size)
        else:
            # The very first transition, a single leapfrog, is tried with steps halved from the
            # trajectory's length on until it is likely to be accepted. Later ones are tried once;
            # that they run through the same loop keeps the program to one gradient.
            def unsettled(carry: tuple[jax.Array, Params, Info]) -> jax.Array:
                attempts, _, info = carry
                unlikely = info["acceptance_probability"] < 0.5
                again = (state.iteration == 0) & unlikely & (attempts <= MAX_HALVINGS)
                return (attempts == 0) | again

            def halve(carry: tuple[jax.Array, Params, Info]) -> tuple[jax.Array, Params, Info]:
                attempts = carry[0]
                return attempts + 1, *attempt(state.step_size / 2 ** attempts.astype(size_dtype))

            size_dtype = state.step_size.dtype
            nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(attempt, state.step_size))
            _, params, info = jax.lax.while_loop(unsettled, halve, (jnp.int32(0), *nothing))
        moved = state._replace(params=params, step_size=info["step_size"])
        return adapt(moved, info["acceptance_probability"]), info

    return Method(init, step, lambda rng_key, state, num_draws: repeat(state.params, num_draws))


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


def _dtype(tree: Params) -> jnp.dtype:
    return jax.tree.leaves(tree)[0].dtype
