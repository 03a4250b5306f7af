"""Sequential Monte Carlo from the prior to the posterior: draws, and the log-evidence with them.

    log gamma_b(w) = (1 - b) log p(w) + b log p_T(w, D),        0 = b_0 < b_1 < ... < b_n = 1
    log Z = sum_t log (1/P) sum_i exp((b_t - b_{t-1}) u_i),      u = log p_T(w, D) - log p(w)

P particles start as draws of the prior. A step weighs them by exp((b_t - b_{t-1}) u), draws P of
them anew by these weights (systematic resampling), and moves each by HMC transitions that leave
gamma_b invariant (Del Moral, Doucet & Jasra 2006, arXiv cond-mat/0212648; Neal 2001, arXiv
physics/9803008). Target: p_T(w | D) as P grows, whatever the moves; Z = int exp(log p_T(w, D)) dw
is the evidence p(D) at T = 1, and at any T the number that an ELBO at that T stays below. With
fractions, step size and masses given, the estimate of Z is unbiased for any P, so that of log Z is
below the truth on average. Chosen from the particles themselves, as by default, they add a bias
that vanishes as 1 / P (Beskos, Jasra, Kantas & Thiery 2016, arXiv 1306.6462). Populations that run
side by side show the error.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import adaptation, hamiltonian, tempered_path, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.hamiltonian import Progress
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method
from haiku_posteriors.core.trajectories import DEFAULT_JITTER, Trajectory
from haiku_posteriors.core.trees import Params

STEP_SIZE_GAIN = 1.0  # change of the log step size for a change of 1 in the acceptance


class SMCState(NamedTuple):
    """One population.

    Attributes:
      particles: random parameters, leaves (P, ...), equally weighted.
      point_estimates: the other parameters, the same for all particles.
      ancestors: (P,), the particle of the start that each comes from.
      iteration: steps so far.
      fraction: b, 0 at the prior and 1 at the target.
      log_evidence: log Z of gamma_b so far.
      step_size: of the next transition.
      inverse_mass: in the structure of the random parameters.
      num_final_steps: steps made with all particles at b = 1.
    """

    particles: Params
    point_estimates: Params
    ancestors: jax.Array
    iteration: jax.Array
    fraction: jax.Array
    log_evidence: jax.Array
    step_size: jax.Array
    inverse_mass: Params
    num_final_steps: jax.Array


def smc(
    log_joint: LogJoint,
    *,
    num_particles: int = 250,
    target_ess: float = 0.9,
    fractions: Sequence[float] | None = None,
    num_moves: int = 1,
    step_size: float | None = None,
    target_accept: float = 0.8,
    trajectory_length: float | None = None,
    trajectory_jitter: float = DEFAULT_JITTER,
    max_num_leapfrog_steps: int = 250,
    adapt_mass_matrix: bool = False,
    particles_at_once: int | None = None,
    place: Callable[[jax.Array], jax.Array] = lambda array: array,
    progress: Progress | None = None,
) -> Method:
    """Sequential Monte Carlo; one step is one fraction b, or, at b = 1, further moves there.

    A chain of the loop is one population. `init` takes the point estimates from the parameters it
    is given; the random ones always start as draws of the prior, without which there would be no
    evidence.

    Args:
      log_joint: the target.
      num_particles: P.
      target_ess: the next b is the largest at which the effective sample size of the weights,
        (sum w)^2 / sum w^2, is at least this part of P.
      fractions: the values of b, ascending to 1, in place of those chosen by `target_ess`.
      num_moves: HMC transitions of each particle at each b.
      step_size: of a leapfrog step. By default it follows the mean acceptance over particles, from
        move to move, until b = 1 is reached and for the moves of that step; then it stays.
      target_accept: the mean acceptance that it aims at.
      trajectory_length: as in `core.hmc.hmc`, with the prior not tempered.
      trajectory_jitter: as there; the number of leapfrog steps is the same for all particles.
      max_num_leapfrog_steps: limit of a trajectory; shorter ones are as exact but move less.
      adapt_mass_matrix: whether inverse masses are the variances over the resampled particles at
        every b < 1, in units of the prior's, and not the prior's. For posteriors of one mode and
        unequal scales: in a network the variances are also distances between relabelled modes.
      particles_at_once: how many particles move side by side; all by default. On CPUs fewer can be
        faster.
      place: spreads an array with a leading axis of all particles over devices; it acts where they
        move side by side.
      progress: see `core.hmc.hmc`.

    Returns:
      The method. `info` holds scalars: log_joint (mean of log p_T(w, D) over particles), fraction,
      log_evidence, relative_ess (of this step's weights, in units of P), num_ancestors (how many
      particles of the start have descendants), acceptance_probability (mean over particles and
      moves), num_divergent, step_size and num_gradients, of all particles in this step.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = smc(log_joint, num_particles=20)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> while state.fraction < 1:
      ...     key = jax.random.fold_in(jax.random.key(1), state.iteration)
      ...     state, info = step(key, state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    _check(num_particles, target_ess, fractions, num_moves, particles_at_once)
    prior_std = log_joint.prior_scales
    unit = max(jax.tree.leaves(prior_std))
    length = math.pi / 2 * unit if trajectory_length is None else trajectory_length
    check_positive(
        trajectory_length=length,
        max_num_leapfrog_steps=max_num_leapfrog_steps,
        step_size=length if step_size is None else step_size,
    )
    if not 0 <= trajectory_jitter < 1:
        raise UserError(f"trajectory_jitter must lie in [0, 1), not {trajectory_jitter}.")
    trajectory = Trajectory(length, trajectory_jitter, max_num_leapfrog_steps, None)
    temperature = log_joint.temperature

    def over_particles(function: Callable, *arguments: Any) -> Any:
        if particles_at_once is None or particles_at_once >= num_particles:
            return jax.vmap(function)(*jax.tree.map(place, arguments))
        batch_size = None if particles_at_once == 1 else particles_at_once
        return jax.lax.map(lambda row: function(*row), arguments, batch_size=batch_size)

    def init(rng_key: jax.Array, params: Params | None) -> SMCState:
        params = log_joint.init(jax.random.fold_in(rng_key, 0)) if params is None else params
        keys = _keys(jax.random.fold_in(rng_key, 1), num_particles)
        particles = jax.vmap(log_joint.sample_prior)(keys)
        dtype = jax.tree.leaves(particles)[0].dtype
        integer, zero = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
        inverse_mass = jax.tree.map(
            lambda leaf, std: jnp.full(leaf.shape[1:], (std / unit) ** 2, leaf.dtype),
            particles,
            prior_std,
        )
        return SMCState(
            particles,
            log_joint.partition(params)[1],
            jnp.arange(num_particles, dtype=jnp.int32),
            integer,
            zero,
            zero,
            jnp.array(length / 4 if step_size is None else step_size, dtype),
            inverse_mass,
            integer,
        )

    def terms(particles: Params, state: SMCState, data: Data) -> tuple[jax.Array, jax.Array]:
        """log p_T(w, D) and u of each particle, (P,) both."""

        def terms_of(particle: Params) -> tuple[jax.Array, jax.Array]:
            params = trees.merge(particle, state.point_estimates)
            log_prior, log_likelihood = log_joint.terms(params, data)
            # log p(w) is T times its term; at T = 1 nothing of it is left to lose digits.
            return log_prior + log_likelihood, log_likelihood - (temperature - 1) * log_prior

        return over_particles(terms_of, particles)

    def resample(
        rng_key: jax.Array, state: SMCState, data: Data
    ) -> tuple[SMCState, dict[str, jax.Array]]:
        """To the next b."""
        _, slopes = terms(state.particles, state, data)
        was_final = state.fraction >= 1
        if fractions is None:
            increment = tempered_path.largest_increment(slopes, 1 - state.fraction, target_ess)
        else:
            path = jnp.asarray(fractions, state.fraction.dtype)
            increment = path[jnp.minimum(state.iteration, len(fractions) - 1)] - state.fraction
        # However small the increment, b moves on, and it ends at 1 exactly.
        following = jnp.nextafter(state.fraction, jnp.ones_like(state.fraction))
        fraction = jnp.clip(state.fraction + increment, following, 1.0)
        log_weights = tempered_path.log_weights(slopes, fraction - state.fraction)
        chosen = tempered_path.systematic_indices(rng_key, log_weights)
        chosen = jnp.where(was_final, jnp.arange(num_particles, dtype=jnp.int32), chosen)
        particles = jax.tree.map(lambda leaf: leaf[chosen], state.particles)
        inverse_mass = state.inverse_mass
        if adapt_mass_matrix:
            inverse_mass = trees.select(was_final, inverse_mass, variances(particles))
        state = state._replace(
            particles=particles,
            ancestors=state.ancestors[chosen],
            fraction=fraction,
            log_evidence=state.log_evidence + tempered_path.log_mean_exp(log_weights),
            inverse_mass=inverse_mass,
            num_final_steps=state.num_final_steps + was_final.astype(jnp.int32),
        )
        return state, {"relative_ess": tempered_path.relative_ess(log_weights)}

    def variances(particles: Params) -> Params:
        count = jnp.array(num_particles, jax.tree.leaves(particles)[0].dtype)
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), particles)
        squares = jax.tree.map(lambda leaf, m: jnp.sum((leaf - m) ** 2, axis=0), particles, mean)
        return adaptation.relative_variances(
            adaptation.Moments(count, mean, squares), prior_std, unit
        )

    def move(rng_key: jax.Array, state: SMCState, data: Data) -> tuple[SMCState, Info]:
        """`num_moves` transitions of every particle."""
        target = tempered_path.PathTarget(log_joint, state.fraction)
        adapts = (step_size is None) & (state.num_final_steps == 0)

        def body(carry: tuple[Params, jax.Array], number: jax.Array) -> tuple[tuple, Info]:
            particles, size = carry
            num_steps = trajectory.num_steps(size, state.iteration * num_moves + number)

            def move_one(key: jax.Array, particle: Params) -> tuple[Params, Info]:
                params = trees.merge(particle, state.point_estimates)
                position, info = hamiltonian.transition(
                    key,
                    target,
                    hamiltonian.start(target, params),
                    data,
                    step_size=size,
                    inverse_mass=state.inverse_mass,
                    num_steps=num_steps,
                    progress=progress,
                )
                return log_joint.partition(position.params)[0], info

            keys = _keys(jax.random.fold_in(rng_key, number), num_particles)
            particles, info = over_particles(move_one, keys, particles)
            acceptance = jnp.mean(info["acceptance_probability"])
            change = jnp.exp(STEP_SIZE_GAIN * (acceptance - target_accept))
            size = jnp.where(adapts, jnp.minimum(size * change, length), size)
            return (particles, size), {
                "acceptance_probability": acceptance,
                "num_divergent": jnp.sum(info["divergent"]),
                "num_gradients": num_particles * (num_steps + 1),
            }

        start = (state.particles, state.step_size)
        (particles, size), info = jax.lax.scan(body, start, jnp.arange(num_moves))
        info = {name: jnp.sum(values) for name, values in info.items()}
        info["acceptance_probability"] /= num_moves
        return state._replace(particles=particles, step_size=size), info

    def step(rng_key: jax.Array, state: SMCState, data: Data) -> tuple[SMCState, Info]:
        state, reweighted = resample(jax.random.fold_in(rng_key, 0), state, data)
        state, moved = move(jax.random.fold_in(rng_key, 1), state, data)
        values, _ = terms(state.particles, state, data)
        survivors = jnp.zeros(num_particles, jnp.int32).at[state.ancestors].set(1)
        info = {
            "log_joint": jnp.mean(values),
            "fraction": state.fraction,
            "log_evidence": state.log_evidence,
            "num_ancestors": jnp.sum(survivors),
            "step_size": state.step_size,
        }
        return state._replace(iteration=state.iteration + 1), info | reweighted | moved

    def sample(rng_key: jax.Array, state: SMCState, num_draws: int) -> Params:
        """Particles in random order, each once before any comes again."""
        order = jax.random.permutation(rng_key, num_particles)
        chosen = order[np.arange(num_draws) % num_particles]
        drawn = jax.tree.map(lambda leaf: leaf[chosen], state.particles)
        fixed = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_draws, *leaf.shape)), state.point_estimates
        )
        return trees.merge(drawn, fixed)

    return Method(init, step, sample)


def _keys(rng_key: jax.Array, count: int) -> jax.Array:
    """A key for each particle, by its index."""
    return jax.vmap(lambda index: jax.random.fold_in(rng_key, index))(jnp.arange(count))


def _check(
    num_particles: int,
    target_ess: float,
    fractions: Sequence[float] | None,
    num_moves: int,
    particles_at_once: int | None,
) -> None:
    if num_particles < 2:
        raise UserError(f"num_particles must be at least 2, not {num_particles}.")
    if not 0 < target_ess < 1:
        raise UserError(f"target_ess must lie between 0 and 1, not {target_ess}.")
    if num_moves < 1:
        raise UserError(f"num_moves must be at least 1, not {num_moves}.")
    if particles_at_once is not None and particles_at_once < 1:
        raise UserError(f"particles_at_once must be at least 1, not {particles_at_once}.")
    if fractions is not None:
        path = [0.0, *fractions]
        if path[-1] != 1 or not all(a < b for a, b in itertools.pairwise(path)):
            raise UserError("fractions must rise from above 0 to 1, the last of them.")
