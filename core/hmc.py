"""Full-batch Hamiltonian Monte Carlo: the reference by which every other method is judged.

    H(w, v) = -log p_T(w, D) + sum_i m_i v_i^2 / 2,        v_i ~ N(0, 1 / m_i),

with m the inverse masses (and, where the log-joint varies much, momenta of heavier tails:
`core.momenta`). A transition draws a momentum v, integrates Hamilton's equations by L
leapfrog steps of size e, and accepts the end point with probability min(1, exp(-change of H)); a
rejected transition leaves the state where it was, and that state counts again.
Target: p_T(w | D) exactly (Neal 2011, arXiv 1206.1901), over the random parameters; the point
estimates beside `stochastic_params` stay where they started. During burn-in the step size is
adapted by dual averaging (Hoffman & Gelman 2014, arXiv 1111.4246) and, on request, the masses by
the variances along the chain; all are frozen afterwards. Draws of burn-in have no target.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import adaptation, hamiltonian, momenta, trajectories, trees
from haiku_posteriors.core.adaptation import Learned
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.hamiltonian import Position, Progress, transition
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, repeat
from haiku_posteriors.core.trees import Params


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
      tails: of the momenta; None where they are Gaussian or given.
    """

    position: Position
    iteration: jax.Array
    step_size: jax.Array
    inverse_mass: Params
    dual_averaging: adaptation.DualAveraging | None
    moments: adaptation.Moments | None
    num_divergent: jax.Array
    tails: adaptation.Tails | None

    @property
    def learned(self) -> Learned:
        """What burn-in has found so far, but for the tails."""
        return Learned(*self[2:7])


def hmc(
    log_joint: LogJoint,
    *,
    step_size: float | None = None,
    trajectory_length: float | None = None,
    num_burn_in: int = 100,
    target_accept: float = 0.8,
    adapt_mass_matrix: bool | None = None,
    trajectory_jitter: float | None = None,
    degrees_of_freedom: float | None = None,
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
        trajectories.MIN_BURN_IN_FOR_MASS. Inverse masses are variances in units of T s^2 (at first
        the prior's), so that the default trajectory is a quarter of the period of every parameter.
      trajectory_jitter: j; trajectories are between 1 - j and 1 + j times the length, evenly over
        iterations. Of fixed length, those that are near a multiple of a parameter's period bring it
        back to where it was: on a Gaussian of a quarter of the prior's deviation, every time. By
        default trajectories.DEFAULT_JITTER; 0 if a step size is given, as in the HMC study (arXiv
        2104.14421).
      degrees_of_freedom: of the momenta, which have a multivariate t distribution (`core.momenta`);
        math.inf for a Gaussian. By default found with the masses: Gaussian, unless the log-joint
        varies so much along the chains that Gaussian momenta would take a random walk through its
        heights.
      max_num_leapfrog_steps: limit of a trajectory; a given step size that needs more is refused,
        an adapted one makes shorter trajectories.
      metropolis: if False, every end point that is not divergent is accepted, and the target is
        met up to the integrator's error only.
      divergence_threshold: energy error above which a transition is divergent.
      progress: called with the number of leapfrog steps done, every PROGRESS_INTERVAL of them
        inside a trajectory; once for all vmapped chains.

    Returns:
      The method; it starts at `trajectories.overdispersed_params` unless given parameters. `info`
      holds scalars: those of `transition`, step_size, num_leapfrog_steps and, unless momenta are
      Gaussian from the start, tail_weight.

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
    if trajectory_jitter is None:
        trajectory_jitter = trajectories.DEFAULT_JITTER if step_size is None else 0.0
    if degrees_of_freedom is not None and not degrees_of_freedom > 0:
        raise UserError(f"degrees_of_freedom must be positive, not {degrees_of_freedom}.")
    limits = trajectories.Limits(trajectory_length, trajectory_jitter, max_num_leapfrog_steps)
    plan = trajectories.make_plan(
        log_joint, step_size, limits, num_burn_in, target_accept, adapt_mass_matrix
    )
    adapts_tails = plan.adapts_mass and degrees_of_freedom is None
    num_dimensions = trees.size(log_joint.random_shapes)

    def init(rng_key: jax.Array, params: Params | None) -> HMCState:
        if params is None:
            params = trajectories.overdispersed_params(rng_key, log_joint)
        random, _ = log_joint.partition(params)
        learned = plan.start(random, step_size)
        zero = jnp.zeros_like(learned.step_size)
        tails = adaptation.Tails(adaptation.start_moments(zero, zero.dtype), zero)
        return HMCState(
            hamiltonian.start(log_joint, params),
            jnp.zeros((), jnp.int32),
            *learned,
            tails if adapts_tails else None,
        )

    def tail_weight(state: HMCState) -> jax.Array | None:
        if state.tails is not None:
            return momenta.usable_weight(state.tails.weight, num_dimensions)
        if degrees_of_freedom is None or degrees_of_freedom == math.inf:
            return None
        return jnp.full_like(state.step_size, 1 / degrees_of_freedom)

    def step(rng_key: jax.Array, state: HMCState, data: Data) -> tuple[HMCState, Info]:
        weight = tail_weight(state)

        def attempt(size: jax.Array) -> tuple[Position, Info]:
            num_steps = plan.trajectory.num_steps(size, state.iteration)
            position, info = transition(
                rng_key,
                log_joint,
                state.position,
                data,
                step_size=size,
                inverse_mass=state.inverse_mass,
                num_steps=num_steps,
                tail_weight=weight,
                metropolis=metropolis,
                divergence_threshold=divergence_threshold,
                progress=progress,
            )
            info |= {"step_size": size, "num_leapfrog_steps": num_steps}
            return position, info if weight is None else info | {"tail_weight": weight}

        if plan.adapts_step_size:
            position, info = trajectories.attempt_until_likely(
                attempt, state.step_size, state.iteration == 0
            )
        else:
            position, info = attempt(state.step_size)
        learned = state.learned._replace(step_size=info["step_size"])
        random, _ = log_joint.partition(position.params)
        num_done = state.iteration + 1
        acceptance, divergent = info["acceptance_probability"], info["divergent"]
        learned = adaptation.adapt(plan.burn_in, num_done, learned, random, acceptance, divergent)
        tails = state.tails
        if tails is not None:
            value = info["log_joint"]
            tails = adaptation.adapt_tails(plan.burn_in, num_done, tails, value, num_dimensions)
        return HMCState(position, num_done, *learned, tails), info

    def pool(states: HMCState) -> HMCState:
        pooled = states._replace(**adaptation.pool(states.learned)._asdict())
        if states.tails is not None:
            pooled = pooled._replace(tails=adaptation.pool_tails(states.tails))
        return trees.select(states.iteration[0] <= num_burn_in, pooled, states)

    def sample(rng_key: jax.Array, state: HMCState, num_draws: int) -> Params:
        return repeat(state.position.params, num_draws)

    return Method(init, step, sample, pool if plan.adapts else None)
