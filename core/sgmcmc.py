"""Stochastic gradient MCMC: Langevin dynamics driven by minibatch gradients.

Both samplers target e^{-U(w)} with U(w) = -log p_T(w, D): the temperature is part of U, and the
noise here is that of unit temperature. Gradients g are of the *summed* U, so that step sizes eps
are of order 1 / N. M is a diagonal mass (preconditioner), 1 where there is none.

    sgld    w <- w - eps M^-1 g + sqrt(2 eps) M^-1/2 xi
    sghmc   the same with momentum: without its noise it is SGD with step eps and momentum beta.
            Over times longer than the momentum's it moves like SGLD with step eps / (1 - beta).

Bias on a Gaussian, U = a w^2 / 2 and M = 1, when gradients carry independent noise of variance C:

    sgld    a Var[w] = (1 + eps C / 2) / (1 - eps a / 2)                         eps a < 2
    sghmc   a Var[w] = 1 + eps C / (2 (1 - beta)) / (1 - eps a / (2 + 2 beta))   eps a < 2 + 2 beta

So discretisation costs SGLD O(eps), and SGHMC nothing on a Gaussian and O(eps) elsewhere.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import approximate_normals, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, repeat
from haiku_posteriors.core.trees import Params


class Preconditioner(NamedTuple):
    """A diagonal mass M that may depend on past gradients.

    Attributes:
      init: params -> state.
      scale: (state, gradient) -> M^-1/2, a tree like `gradient`; it may use the gradient's shapes
        but not its values.
      update: (state, gradient) -> state, for the next step's mass.
    """

    init: Callable[[Params], Any]
    scale: Callable[[Any, Params], Params]
    update: Callable[[Any, Params], Any]


class RMSpropState(NamedTuple):
    """The number of gradients seen, and the running mean of their squares."""

    num_seen: jax.Array
    second_moment: Params


def rmsprop(
    decay: float = 0.99, epsilon: float = 1e-7, adaptation_steps: int | None = None
) -> Preconditioner:
    """M = sqrt(V) + epsilon with V <- decay V + (1 - decay) g^2 (Li et al. 2016, arXiv 1512.07666).

    The mass at a step depends on earlier gradients only: if it included the current one, mass and
    drift would share their noise, and the mean drift would not be downhill. The first gradient
    sets V to the mean of its squares over all parameters and moves nothing; a single square may
    be tiny by chance (a dead unit), which would mean a huge step.

    Target: the sampler's own once V is constant, after `adaptation_steps` gradients. Until then
    (by default, always) the paper's term Gamma_i = d(1 / M_i) / dw_i is left out, as M does not
    depend on the current w given the past. The cost is a bias that smaller steps do not cure: of
    a chain slower than V's memory of 1 / (1 - decay) steps, M is in effect a function of w, and in
    one dimension the target is M(w) e^{-U(w)}.
    """
    if not 0 < decay < 1:
        raise UserError(f"The preconditioner's decay must lie between 0 and 1, not {decay}.")
    last = jnp.iinfo(jnp.int32).max if adaptation_steps is None else adaptation_steps

    def init(params: Params) -> RMSpropState:
        return RMSpropState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def scale(state: RMSpropState, gradient: Params) -> Params:
        def inverse_root(v: jax.Array) -> jax.Array:
            return jnp.where(state.num_seen > 0, jax.lax.rsqrt(jnp.sqrt(v) + epsilon), 0.0)

        return jax.tree.map(inverse_root, state.second_moment)

    def update(state: RMSpropState, gradient: Params) -> RMSpropState:
        def begin() -> Params:
            squares = jax.tree.map(jnp.square, gradient)
            mean = trees.total(squares) / trees.size(squares)
            return jax.tree.map(lambda v: jnp.full_like(v, mean), state.second_moment)

        def go_on() -> Params:
            rate = jnp.where(state.num_seen < last, 1 - decay, 0.0)
            return jax.tree.map(lambda v, g: v + rate * (g**2 - v), state.second_moment, gradient)

        second_moment = jax.lax.cond(state.num_seen > 0, go_on, begin)
        return RMSpropState(optax.safe_increment(state.num_seen), second_moment)

    return Preconditioner(init, scale, update)


_NO_PRECONDITIONER = Preconditioner(
    lambda params: (),
    lambda state, gradient: jax.tree.map(lambda leaf: 1.0, gradient),
    lambda state, gradient: state,
)


def fixed_mass(mass: Params) -> Preconditioner:
    """A mass that is known beforehand, such as the diagonal curvature at a mode."""
    scales = jax.tree.map(jax.lax.rsqrt, mass)
    return Preconditioner(
        lambda params: (), lambda state, gradient: scales, lambda state, gradient: state
    )


def noise_bias(step_size: float, momentum_decay: float, noise: Params, scale: Params) -> jax.Array:
    """Excess of the variance by gradient noise, relative, on average over the coordinates.

        mean_i eps C_i / (2 (1 - beta) M_i)

    to first order in eps, by the formulas at the head of this file, of both samplers (SGLD is
    beta = 0). C is the noise of a minibatch by itself; those of an epoch share the rows, and their
    errors cancel over times longer than an epoch: slow directions have less of it.

    Args:
      step_size: eps.
      momentum_decay: beta.
      noise: C, see `core.curvature.gradient_noise`.
      scale: M^-1/2.
    """
    excess = trees.total(jax.tree.map(lambda c, s: c * jnp.square(s), noise, scale))
    return step_size * excess / (2 * (1 - momentum_decay) * trees.size(noise))


class SamplerState(NamedTuple):
    """The number of steps done, the velocity in units of M^-1/2, the preconditioner's state."""

    num_steps: jax.Array
    velocity: Params
    preconditioner_state: Any


def sgld(
    step_size: float | optax.Schedule, preconditioner: Preconditioner | None = None
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient Langevin dynamics (Welling & Teh 2011; with a mass, arXiv 1512.07666).

        w <- w - eps M^-1 g + sqrt(2 eps) M^-1/2 xi,        xi ~ N(0, I) anew at every step

    Target: e^{-U(w)}, with the bias stated at the head of this file.

    Args:
      step_size: eps, a number or an optax schedule.
      preconditioner: M; 1 by default.

    Returns:
      A transformation of gradients of U. Its `update` also takes `rng_key`, a new one at each step,
      and optionally `random`, the part of the parameters that gets noise (default all), as
      `core.trees.partition` gives it; the rest descend the gradient in the same way without noise.
    """

    def move(eps: jax.Array, g: jax.Array, s: jax.Array, xi: jax.Array) -> jax.Array:
        return s * (jnp.sqrt(2 * eps) * xi - eps * s * g)

    def integrate(velocity: Params, *quantities: Params) -> tuple[Params, Params]:
        return jax.tree.map(move, *quantities), velocity

    return _langevin(step_size, preconditioner, lambda params: (), integrate)


def sghmc(
    step_size: float | optax.Schedule,
    momentum_decay: float,
    preconditioner: Preconditioner | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient HMC (Chen et al. 2014, arXiv 1402.4102), integrated by BAOAB.

        v' = v - h M^-1/2 g                            kick          h = sqrt(2 eps / (1 + beta))
        v <- beta v' + sqrt(1 - beta^2) xi             friction and noise, exact for any beta
        w <- w + h M^-1/2 (v' + v) / 2                 half the drift before the noise, half after

    Target: e^{-U(w)} N(v; 0, I), with the bias stated at the head of this file. It is the splitting
    of Leimkuhler & Matthews (2013, arXiv 1203.5428) for friction -log(beta) / h, the half kicks
    that meet at one w joined, so that a step costs one gradient. v is kept as it is before the
    kick, where its variance is 1 for U flat or Gaussian at any stable step.

    Without noise, m = (1 + beta) h v' / 2 (M = 1) obeys m <- beta m - eps g, w <- w + m: SGD with
    momentum. Noise added to that m must have variance 2 (1 - beta) eps for w to be right, which
    makes m's 2 eps / (1 + beta); (1 - beta^2) eps would make m's eps but cool w to (1 + beta) / 2.
    Here v and w are both right. At beta = 0 it is SGLD, same eps, with noise (xi_n + xi_{n+1}) / 2.

    Args:
      step_size: eps, a number or an optax schedule; v has variance 1 whatever it is.
      momentum_decay: beta, in [0, 1).
      preconditioner: M; 1 by default.

    Returns:
      A transformation of gradients of U, with the further arguments of `sgld`. v starts at 0.
    """
    if not 0 <= momentum_decay < 1:
        raise UserError(f"momentum_decay must be at least 0 and below 1, not {momentum_decay}.")
    beta, noise_scale = momentum_decay, math.sqrt(1 - momentum_decay**2)

    def integrate(
        velocity: Params, steps: Params, gradient: Params, scales: Params, noise: Params
    ) -> tuple[Params, Params]:
        strides = jax.tree.map(lambda eps, s: jnp.sqrt(2 * eps / (1 + beta)) * s, steps, scales)
        kicked = jax.tree.map(lambda v, h, g: v - h * g, velocity, strides, gradient)
        velocity = jax.tree.map(lambda v, xi: beta * v + noise_scale * xi, kicked, noise)
        return jax.tree.map(lambda h, a, b: h * (a + b) / 2, strides, kicked, velocity), velocity

    return _langevin(step_size, preconditioner, optax.tree.zeros_like, integrate)


def _langevin(
    step_size: float | optax.Schedule,
    preconditioner: Preconditioner | None,
    init_velocity: Callable[[Params], Params],
    integrate: Callable[..., tuple[Params, Params]],
) -> optax.GradientTransformationExtraArgs:
    """`integrate` maps trees: velocity, steps, gradient, M^-1/2, noise -> moves, velocity."""
    if not callable(step_size):
        check_positive(step_size=step_size)
    schedule = step_size if callable(step_size) else lambda count: step_size
    mass = _NO_PRECONDITIONER if preconditioner is None else preconditioner

    def init(params: Params) -> SamplerState:
        return SamplerState(jnp.zeros((), jnp.int32), init_velocity(params), mass.init(params))

    def update(
        updates: Params,
        state: SamplerState,
        params: Params | None = None,
        *,
        rng_key: jax.Array,
        random: Params | None = None,
        **extra_args: Any,
    ) -> tuple[Params, SamplerState]:
        step = schedule(state.num_steps)
        steps = jax.tree.map(lambda leaf: jnp.asarray(step, leaf.dtype), updates)
        xi = approximate_normals.approximate_normal_like(
            rng_key, updates if random is None else random
        )
        xi = trees.merge(xi, optax.tree.zeros_like(updates))
        scales = mass.scale(state.preconditioner_state, updates)
        moves, velocity = integrate(state.velocity, steps, updates, scales, xi)
        mass_state = mass.update(state.preconditioner_state, updates)
        return moves, SamplerState(optax.safe_increment(state.num_steps), velocity, mass_state)

    return optax.GradientTransformationExtraArgs(init, update)


def constant_with_burn_in(init: float, final: float, burn_in_steps: int) -> optax.Schedule:
    """From `init` to `final` along half a cosine in `burn_in_steps` steps, then `final`."""

    def schedule(count: jax.Array) -> jax.Array:
        done = jnp.minimum(count / burn_in_steps, 1.0) if burn_in_steps else jnp.ones(())
        return final + (init - final) * (1 + jnp.cos(jnp.pi * done)) / 2

    return schedule


def cyclical(init: float, burn_in_steps: int, cycle_steps: int) -> optax.Schedule:
    """`init` for `burn_in_steps` steps, then cosine cycles from `init` towards 0.

    Step k = 0, 1, ... of a cycle has init (1 + cos(pi k / cycle_steps)) / 2 (Zhang et al. 2020,
    arXiv 1902.03932). `collects` finds the ends of cycles, where draws are to be taken.
    """
    if cycle_steps < 1:
        raise UserError(f"A step-size cycle must have at least one step, not {cycle_steps}.")

    def schedule(count: jax.Array) -> jax.Array:
        done = jnp.maximum(count - burn_in_steps, 0) % cycle_steps / cycle_steps
        return init * (1 + jnp.cos(jnp.pi * done)) / 2

    return schedule


def collects(epochs_done: int, burn_in_epochs: int, period: int) -> bool:
    """Whether a draw is taken after `epochs_done` epochs: every `period` epochs after burn-in.

    For `cyclical` that is a cycle's length, so that draws fall where the step size is near 0.
    """
    return epochs_done > burn_in_epochs and (epochs_done - burn_in_epochs) % period == 0


class SGMCMCState(NamedTuple):
    """The position and the state of the sampler, which counts the steps for its schedule."""

    params: Params
    sampler_state: Any


def sgmcmc(
    log_joint: LogJoint,
    sampler: optax.GradientTransformationExtraArgs | None = None,
    batch_size: int = 32,
) -> Method:
    """Samples the posterior with minibatch gradients; one step is one epoch.

    Args:
      log_joint: what to sample. Its point estimates follow the sampler without the noise.
      sampler: `sgld`, `sghmc` or an optax chain that ends in one; preconditioned SGHMC by default,
        since its step size depends least on the problem's scale.
      batch_size: maximum rows per minibatch.

    Returns:
      The method. Its draws are copies of the current parameters. Beside `log_joint` the infos have
      `kinetic_temperature`, mean v^2, for samplers with a velocity: 1 but for noise.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = sgmcmc(log_joint, sghmc(step_size=1e-4, momentum_decay=0.9), batch_size=4)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    sampler = sampler or sghmc(1e-4, 0.9, rmsprop(adaptation_steps=1000))

    def init(rng_key: jax.Array, params: Params | None) -> SGMCMCState:
        params = log_joint.init(rng_key) if params is None else params
        return SGMCMCState(params, sampler.init(params))

    def update(rng_key: jax.Array, state: SGMCMCState, batch: Data) -> tuple[SGMCMCState, Info]:
        loss, gradient = jax.value_and_grad(lambda params: -log_joint(params, batch))(state.params)
        random, _ = log_joint.partition(state.params)
        moves, sampler_state = sampler.update(
            gradient, state.sampler_state, state.params, rng_key=rng_key, random=random
        )
        params = optax.apply_updates(state.params, moves)
        info = {"log_joint": -loss}
        if isinstance(sampler_state, SamplerState) and jax.tree.leaves(sampler_state.velocity):
            velocity, _ = log_joint.partition(sampler_state.velocity)
            squares = jax.tree.map(jnp.square, velocity)
            info["kinetic_temperature"] = trees.total(squares) / trees.size(squares)
        return SGMCMCState(params, sampler_state), info

    def step(rng_key: jax.Array, state: SGMCMCState, data: Data) -> tuple[SGMCMCState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    def sample(rng_key: jax.Array, state: SGMCMCState, num_draws: int) -> Params:
        return repeat(state.params, num_draws)

    return Method(init, step, sample, in_minibatches=True)
