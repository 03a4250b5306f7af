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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from core import likelihoods, trees
from core.data import Data
from core.errors import UserError
from core.log_joint import LogJoint
from core.method import Info, Method, repeat
from core.trees import Params

Progress = Callable[[int], None]
PROGRESS_INTERVAL = 1000  # leapfrog steps between two calls of `progress`
MIN_BURN_IN_FOR_MASS = 20
MAX_HALVINGS = 40  # of the first step size
MASS_PSEUDO_DRAWS = 5  # weight of the prior's variance, times 1e-3, in an estimated one
# Dual averaging's gamma, t_0 and kappa (Hoffman & Gelman 2014, section 3.2.1). Their gamma is 0.05,
# for NUTS, whose acceptance is a mean over many points; with the one of a trajectory the iterates
# swing so far that their average accepts 0.92 where 0.8 was asked for. With 0.2 it is 0.78 to 0.85.
SHRINKAGE, STABILISATION, DECAY = 0.2, 10.0, 0.75


class DualAveraging(NamedTuple):
    """Scalars by which the log step size is found.

    Attributes:
      average: the averaged iterate, which is the result.
      error: running mean of (target - acceptance probability).
      center: where the log step size is drawn to.
      num_updates: as a float.
    """

    average: jax.Array
    error: jax.Array
    center: jax.Array
    num_updates: jax.Array


class Moments(NamedTuple):
    """Welford's running mean and sum of squared deviations of the random parameters."""

    num_values: jax.Array
    mean: Params
    squares: Params


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
    dual_averaging: DualAveraging | None
    moments: Moments | None


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
      The method; it starts at `overdispersed_init` unless given parameters. `info` holds scalars:
      those of `transition`, step_size and num_leapfrog_steps.
    """
    shapes = log_joint.partition(jax.eval_shape(log_joint.init, jax.random.key(0)))[0]
    prior_std = trees.map_with_name(
        lambda name, _: math.sqrt(log_joint.temperature) * log_joint.prior.scale(name), shapes
    )
    unit = max(jax.tree.leaves(prior_std))
    length = math.pi / 2 * unit if trajectory_length is None else trajectory_length
    positive = {"trajectory_length": length, "max_num_leapfrog_steps": max_num_leapfrog_steps}
    if step_size is not None:
        positive["step_size"] = step_size
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} must be positive and finite, not {value}.")
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
        params = overdispersed_init(log_joint)(rng_key) if params is None else params
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
            _start_dual_averaging(size) if step_size is None else None,
            Moments(jnp.zeros_like(size), zeros, zeros) if adapt_mass_matrix else None,
        )

    def number_of_steps(state: HMCState, rng_key: jax.Array) -> jax.Array:
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
            moments = _select(inside, _add_to_moments(moments, random), moments)
            estimate = _relative_variances(moments, prior_std, unit)
            inverse_mass = _select(done == last_quarter, estimate, inverse_mass)
            changed |= done == last_quarter
        if dual is not None:
            dual = _select(done == 1, _start_dual_averaging(size), dual)
            size, dual = _update_dual_averaging(dual, acceptance, target_accept, length)
            size = jnp.where(changed | (done == num_burn_in), jnp.exp(dual.average), size)
            # Other trajectories or masses need another step size: start again from the best yet.
            dual = _select(changed, _start_dual_averaging(size), dual)
        adapted = HMCState(state.params, done, size, inverse_mass, dual, moments)
        return _select(done <= num_burn_in, adapted, state._replace(iteration=done))

    def step(state: HMCState, data: Data, rng_key: jax.Array) -> tuple[HMCState, Info]:
        transition_key, jitter_key = jax.random.fold_in(rng_key, 0), jax.random.fold_in(rng_key, 1)

        def attempt(size: jax.Array) -> tuple[Params, Info]:
            num_steps = number_of_steps(state._replace(step_size=size), jitter_key)
            params, info = transition(
                log_joint,
                state.params,
                data,
                transition_key,
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

    return Method(init, step, lambda state, rng_key, num_draws: repeat(state.params, num_draws))


def transition(
    log_joint: LogJoint,
    params: Params,
    data: Data,
    rng_key: jax.Array,
    *,
    step_size: jax.Array,
    inverse_mass: Params,
    num_steps: jax.Array,
    metropolis: bool = True,
    divergence_threshold: float = 1000.0,
    progress: Progress | None = None,
) -> tuple[Params, Info]:
    """One HMC transition, which leaves p_T(w | D) invariant; L + 1 gradients and three values.

    Args:
      log_joint: the target.
      params: the position.
      data: the whole data set.
      rng_key: of this transition alone.
      step_size: scalar.
      inverse_mass: in the structure of the random parameters; leaves are broadcast to theirs.
      num_steps: L, an integer scalar.
      metropolis, divergence_threshold, progress: see `hmc`.

    Returns:
      The next position and scalars: log_joint (there; not finite only if it was not before),
      acceptance_probability, accepted, energy_error (change of H along the trajectory),
      divergent, and energy (H once the momentum is drawn, for E-BFMI).
    """
    momentum_key, accept_key = jax.random.fold_in(rng_key, 0), jax.random.fold_in(rng_key, 1)
    random, _ = log_joint.partition(params)
    momentum = jax.tree.map(
        lambda normal, m: normal / jnp.sqrt(m),
        trees.normal_like(momentum_key, random),
        inverse_mass,
    )
    proposal, last_momentum = leapfrog(
        log_joint,
        params,
        momentum,
        data,
        step_size=step_size,
        inverse_mass=inverse_mass,
        num_steps=num_steps,
        progress=progress,
    )
    value = log_joint(params, data)
    change = log_joint.difference(proposal, params, data)
    # Differences of single terms, then the sum, as in `LogJoint.difference`: at millions of
    # parameters a kinetic energy is too large for float32 to resolve the change of it.
    kinetic_change = trees.total(
        jax.tree.map(
            lambda v, new, m: (new - v) * (new + v) * m / 2, momentum, last_momentum, inverse_mass
        )
    )
    kinetic = trees.total(jax.tree.map(lambda v, m: v**2 * m / 2, momentum, inverse_mass))
    energy_error = kinetic_change - change
    finite = jnp.isfinite(energy_error) & trees.all_finite(proposal)
    divergent = ~finite | (energy_error > divergence_threshold)
    probability = jnp.where(divergent, 0.0, jnp.exp(jnp.minimum(-energy_error, 0.0)))
    uniform = jax.random.uniform(accept_key, (), probability.dtype)
    accepted = (uniform < probability) if metropolis else ~divergent
    return _select(accepted, proposal, params), {
        "log_joint": value + jnp.where(accepted, change, 0.0),
        "acceptance_probability": probability,
        "accepted": accepted,
        "energy_error": energy_error,
        "divergent": divergent,
        "energy": kinetic - value,
    }


def leapfrog(
    log_joint: LogJoint,
    params: Params,
    momentum: Params,
    data: Data,
    *,
    step_size: jax.Array,
    inverse_mass: Params,
    num_steps: jax.Array,
    progress: Progress | None = None,
) -> tuple[Params, Params]:
    """L leapfrog steps: a kick of e/2, then L times a drift and a kick of e, the last of e/2.

        kick t:  v <- v + t grad log p_T(w, D),        drift e:  w <- w + e m v

    Neighbouring half kicks are one. The L + 1 gradients are taken at one place in the program,
    which so holds the network's gradient, the slow part to compile, only once.

    Returns:
      Parameters and momentum at the end.
    """
    random, point_estimates = log_joint.partition(params)
    gradient = jax.grad(lambda moving: log_joint(trees.merge(moving, point_estimates), data))

    def body(index: jax.Array, carry: tuple[Params, Params]) -> tuple[Params, Params]:
        position, momentum = carry
        # vmapped chains share the loop: one whose own steps are done drifts and is kicked by 0.
        drift = jnp.where((index > 0) & (index <= num_steps), step_size, 0.0)
        half = (index == 0) | (index == num_steps)
        kick = jnp.where(index <= num_steps, jnp.where(half, step_size / 2, step_size), 0.0)
        position = jax.tree.map(
            lambda w, v, m: w + drift.astype(w.dtype) * m * v, position, momentum, inverse_mass
        )
        momentum = jax.tree.map(
            lambda v, g: v + kick.astype(v.dtype) * g, momentum, gradient(position)
        )
        if progress is not None:
            jax.lax.cond(
                (index > 0) & (index % PROGRESS_INTERVAL == 0),
                lambda: jax.debug.callback(lambda done: progress(int(done)), index),
                lambda: None,
            )
        return position, momentum

    longest = _largest_over_chains(num_steps)
    random, momentum = jax.lax.fori_loop(0, longest + 1, body, (random, momentum))
    return trees.merge(random, point_estimates), momentum


@jax.custom_batching.custom_vmap
def _largest_over_chains(value: jax.Array) -> jax.Array:
    """The largest value among vmapped chains, itself not batched, so that their loop is one.

    With a batched bound `vmap` would select between old and new parameters at every leapfrog
    step, reduce the condition over devices at each, and call `progress` once a step and chain.
    """
    return value


@_largest_over_chains.def_vmap
def _(axis_size: int, in_batched: list[bool], value: jax.Array) -> tuple[jax.Array, bool]:
    return _largest_over_chains(jnp.max(value, axis=0) if in_batched[0] else value), False


def overdispersed_init(log_joint: LogJoint) -> Callable[[jax.Array], Params]:
    """Starts for chains: random parameters from the prior, the rest from the network's own init.

    The prior is wider than the posterior, so chains that agree have forgotten their starts.
    Values are clipped at three standard deviations: with heavy tails, single weights would start
    where the log-joint is steep beyond floating point. A learned noise scale starts at the median
    of its prior, since a start of tiny noise is as steep.
    """

    def clip(name: str, leaf: jax.Array) -> jax.Array:
        limit = 3 * log_joint.prior.scale(name)
        return jnp.clip(leaf, -limit, limit)

    def init(rng_key: jax.Array) -> Params:
        params = log_joint.init(jax.random.fold_in(rng_key, 0))
        random, point_estimates = log_joint.partition(params)
        random = dict(random)
        own = {key: random.pop(key) for key in list(random) if key == likelihoods.PARAMETER_GROUP}
        draw = log_joint.prior.sample(jax.random.fold_in(rng_key, 1), random)
        return trees.merge(trees.map_with_name(clip, draw) | own, point_estimates)

    return init


def _start_dual_averaging(step_size: jax.Array) -> DualAveraging:
    zero = jnp.zeros_like(step_size)
    return DualAveraging(jnp.log(step_size), zero, jnp.log(10 * step_size), zero)


def _update_dual_averaging(
    dual: DualAveraging, acceptance: jax.Array, target: float, longest: float
) -> tuple[jax.Array, DualAveraging]:
    """The next step size to try, within [1e-10, 1] times `longest`, and the new state."""
    count = dual.num_updates + 1
    weight = 1 / (count + STABILISATION)
    error = (1 - weight) * dual.error + weight * (target - acceptance)
    log_size = dual.center - jnp.sqrt(count) / SHRINKAGE * error
    log_size = jnp.clip(log_size, math.log(1e-10 * longest), math.log(longest))
    weight = count**-DECAY
    average = (1 - weight) * dual.average + weight * log_size
    return jnp.exp(log_size), DualAveraging(average, error, dual.center, count)


def _add_to_moments(moments: Moments, random: Params) -> Moments:
    count = moments.num_values + 1
    mean = jax.tree.map(lambda m, w: m + (w - m) / count.astype(w.dtype), moments.mean, random)
    squares = jax.tree.map(
        lambda s, old, new, w: s + (w - old) * (w - new),
        moments.squares,
        moments.mean,
        mean,
        random,
    )
    return Moments(count, mean, squares)


def _relative_variances(moments: Moments, prior_std: Params, unit: float) -> Params:
    """Variances in units of `unit`^2, drawn to 1e-3 of the prior's.

    The pull is downwards because too small an inverse mass makes one parameter slow, while too
    large a one forces small steps on all.
    """

    def relative_variance(squares: jax.Array, std: float) -> jax.Array:
        count = moments.num_values.astype(squares.dtype)
        unbiased = squares / jnp.maximum(count - 1, 1.0)
        pulled = count * unbiased + MASS_PSEUDO_DRAWS * 1e-3 * std**2
        return pulled / ((count + MASS_PSEUDO_DRAWS) * unit**2)

    return jax.tree.map(relative_variance, moments.squares, prior_std)


def _dtype(tree: Params) -> jnp.dtype:
    return jax.tree.leaves(tree)[0].dtype


def _select(condition: jax.Array, if_true: Params, if_false: Params) -> Params:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)
