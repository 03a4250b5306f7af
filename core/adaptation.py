"""What gradient-based chains learn in burn-in: a step size by dual averaging, masses, tails.

Burn-in has four quarters. Through all of them the step size follows the acceptance probability
(Hoffman & Gelman 2014, arXiv 1111.4246, section 3.2); the second and third quarters collect the
variances along the chain, from which the masses and the tails of HMC's momenta are set once, at the
end of the third. Whatever makes the step size of the past obsolete restarts dual averaging from the
best one so far.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import momenta, trees
from haiku_posteriors.core.trees import Params

SMALLEST_STEP = 1e-10  # of the longest one
MASS_PSEUDO_DRAWS = 5  # weight of the prior's variance, times 1e-3, in an estimated one
# Dual averaging's gamma, t_0 and kappa (Hoffman & Gelman 2014, section 3.2.1). Their gamma is 0.05,
# for NUTS, whose acceptance is a mean over many points. The acceptance of a single trajectory is
# noisier: with 0.05 the iterates swing so far that their average accepts 0.92 where 0.8 was asked
# for; with 0.2 it accepts 0.78 to 0.85 on the small tanh network of the tests.
SHRINKAGE, STABILISATION, DECAY = 0.2, 10.0, 0.75
# Chosen on the toy regression: 11 to 15 divergences in 1,600 to 3,200 transitions without it, none
# in 2,400 with it. Logistic regressions, boston_0 and digits have none to begin with.
AFTER_DIVERGENCES = 0.5
# Energy variance over its target from which on an unadjusted transition is made again with half the
# step, whose errors are some 64 times smaller. That costs two times as much again, for at most an
# eighth of all transitions.
ROUGH = 8.0


class DualAveraging(NamedTuple):
    """Scalars by which the log step size is found.

    Attributes:
      average: the averaged iterate, which is the result.
      error: running mean of (target - acceptance probability).
      center: the value to which the log step size is shrunk.
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


class Tails(NamedTuple):
    """How heavy the tails of a chain's momenta are, see `core.momenta`.

    Attributes:
      moments: of the log-joint along the chain, scalars.
      weight: b, before `usable_weight`.
    """

    moments: Moments
    weight: jax.Array


class Learned(NamedTuple):
    """What burn-in learns for one chain.

    Attributes:
      step_size: of the next transition.
      inverse_mass: in the structure of the random parameters.
      dual_averaging: None when the step size is given.
      moments: None when the masses are not adapted.
      num_divergent: divergent transitions once the step size had settled, at a usual size.
    """

    step_size: jax.Array
    inverse_mass: Params
    dual_averaging: DualAveraging | None
    moments: Moments | None
    num_divergent: jax.Array


class BurnIn(NamedTuple):
    """How long burn-in is and what it aims at.

    Attributes:
      num_transitions: its length.
      target_accept: the mean acceptance probability to reach.
      longest_step: limit of the step size, e.g. the trajectory's length.
      prior_std: in the structure of the random parameters, the tempered prior's.
      unit: the largest of `prior_std`; inverse masses are variances in units of its square.
    """

    num_transitions: int
    target_accept: float
    longest_step: float
    prior_std: Params
    unit: float

    @property
    def first_quarter(self) -> int:
        """The last transition of the first quarter."""
        return self.num_transitions // 4

    def is_settled(self, num_done: jax.Array) -> jax.Array:
        """Whether the step size has had half a quarter to settle since its last restart."""
        half = self.num_transitions // 8
        before_masses = (num_done > self.first_quarter + half) & (num_done <= self.third_quarter)
        return before_masses | (num_done > self.third_quarter + half)

    def is_measured(self, num_done: jax.Array) -> jax.Array:
        """Whether this transition is of the quarters whose variances are taken."""
        return (num_done > self.first_quarter) & (num_done <= self.third_quarter)

    @property
    def third_quarter(self) -> int:
        """The last transition of the third quarter."""
        return self.num_transitions - self.num_transitions // 4


def adapt_tails(
    burn_in: BurnIn, num_done: jax.Array, tails: Tails, log_joint: jax.Array, num_dimensions: int
) -> Tails:
    """What one transition to a place of this log-joint tells; set when the masses are."""
    moments = trees.select(
        burn_in.is_measured(num_done), add_to_moments(tails.moments, log_joint), tails.moments
    )
    variance = moments.squares / jnp.maximum(moments.num_values - 1, 1.0)
    found = momenta.matching_weight(variance, num_dimensions)
    return Tails(moments, jnp.where(num_done == burn_in.third_quarter, found, tails.weight))


def pool_tails(tails: Tails) -> Tails:
    """The mean weight over chains, for each of them: that of their mean variance."""
    return tails._replace(weight=jnp.full_like(tails.weight, jnp.mean(tails.weight)))


def adapt(
    burn_in: BurnIn,
    num_done: jax.Array,
    learned: Learned,
    random: Params,
    acceptance: jax.Array,
    divergent: jax.Array,
) -> Learned:
    """What is learned from one transition; nothing once burn-in is over.

    Divergences of a settled step size tell of places that are stiffer than most. No mean acceptance
    shows these, and a chain that comes to one stays for long: the step size of the end is then
    AFTER_DIVERGENCES of the one that meets the target.

    Args:
      burn_in: the settings.
      num_done: transitions done, this one included.
      learned: so far, with the step size of this transition.
      random: the random parameters after it.
      acceptance: its acceptance probability.
      divergent: whether it diverged.
    """
    size, inverse_mass, dual, moments, num_divergent = learned
    changed = num_done == burn_in.first_quarter  # the limit on the number of steps is gone
    if moments is not None:
        is_measured = burn_in.is_measured(num_done)
        moments = trees.select(is_measured, add_to_moments(moments, random), moments)
        estimate = relative_variances(moments, burn_in.prior_std, burn_in.unit)
        inverse_mass = trees.select(num_done == burn_in.third_quarter, estimate, inverse_mass)
        changed |= num_done == burn_in.third_quarter
    if dual is not None:
        # Trial sizes swing around their average; what a much larger one does is no news.
        usual = size <= 1.25 * jnp.exp(dual.average)
        counted = divergent & usual & burn_in.is_settled(num_done)
        num_divergent += counted.astype(num_divergent.dtype)
        dual = trees.select(num_done == 1, start_dual_averaging(size), dual)
        size, dual = update_dual_averaging(
            dual, acceptance, burn_in.target_accept, burn_in.longest_step
        )
        is_last = num_done == burn_in.num_transitions
        size = jnp.where(changed | is_last, jnp.exp(dual.average), size)
        is_stiff = is_last & (num_divergent > 0)
        size = jnp.where(is_stiff, AFTER_DIVERGENCES * size, size)
        # Other trajectories or masses need another step size: start again from the best yet.
        dual = trees.select(changed, start_dual_averaging(size), dual)
    adapted = Learned(size, inverse_mass, dual, moments, num_divergent)
    return trees.select(num_done <= burn_in.num_transitions, adapted, learned)


def pool(learned: Learned) -> Learned:
    """What all chains have learned together, given to each; leaves have a leading chain axis.

    Means over chains: of logarithms of step sizes, of the state of dual averaging (chains that
    share a state and average their updates have followed the mean of their acceptances) and of
    inverse masses, which are variances within a chain. Moments stay each chain's own; a divergence
    of one is known to all.
    """

    def mean(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.mean(leaf, axis=0, keepdims=True), leaf.shape)

    return Learned(
        jnp.exp(mean(jnp.log(learned.step_size))),
        jax.tree.map(mean, learned.inverse_mass),
        jax.tree.map(mean, learned.dual_averaging),
        learned.moments,
        jnp.broadcast_to(jnp.max(learned.num_divergent), learned.num_divergent.shape),
    )


def start_dual_averaging(step_size: jax.Array) -> DualAveraging:
    """Starts at a step size, shrunk to ten times it (section 3.1 there): too large costs less."""
    zero = jnp.zeros_like(step_size)
    return DualAveraging(jnp.log(step_size), zero, jnp.log(10 * step_size), zero)


def update_dual_averaging(
    dual: DualAveraging, acceptance: jax.Array, target: float, longest: float
) -> tuple[jax.Array, DualAveraging]:
    """The next step size to try, within [1e-10, 1] times `longest`, and the new state."""
    count = dual.num_updates + 1
    weight = 1 / (count + STABILISATION)
    error = (1 - weight) * dual.error + weight * (target - acceptance)
    log_size = dual.center - jnp.sqrt(count) / SHRINKAGE * error
    log_size = jnp.clip(log_size, math.log(SMALLEST_STEP * longest), math.log(longest))
    weight = count**-DECAY
    average = (1 - weight) * dual.average + weight * log_size
    return jnp.exp(log_size), DualAveraging(average, error, dual.center, count)


def follow_energy_variance(
    burn_in: BurnIn,
    num_done: jax.Array,
    log_rate: jax.Array,
    step_size: jax.Array,
    used: jax.Array,
    energy_variance: jax.Array,
    target: float,
) -> tuple[jax.Array, jax.Array]:
    """The next step size of unadjusted dynamics; the same one once burn-in is over.

    The squared energy error of a second-order integrator's step grows with the sixth power of the
    step size, v = r e^6, so that the step of the target is (target / r)^(1/6) for the mean r along
    the chain: the *mean* squared error is to be the target. Errors have heavy tails. A transition
    that was made again with shorter steps, since its errors were beyond ROUGH of the target, counts
    as one of ROUGH, so that not more than 1 / ROUGH of all are. The mean begins anew where the step
    is right for nothing that went before: at every transition of the first quarter, at its end, and
    when the masses have changed; later transitions count more, as the n-th of n (n + 1) / 2. A step
    is at most doubled or halved at a time, in the first quarter divided by 8.

    Args:
      burn_in: the settings; `longest_step` limits the step size.
      num_done: transitions done, this one included.
      log_rate: the logarithm of the mean r so far, in units of the target.
      step_size: so far.
      used: that of this transition, which is shorter where it had to be made again.
      energy_variance: its mean squared energy error, per step and dimension.
      target: of the same.

    Returns:
      The step size and the logarithm of the mean r.
    """
    dtype = step_size.dtype
    settling = num_done <= burn_in.first_quarter
    start = jnp.where(
        num_done > burn_in.third_quarter, burn_in.third_quarter, burn_in.first_quarter
    )
    updates = jnp.maximum(num_done - start, 1).astype(dtype)
    weight = jnp.where(settling, 1.0, 2 / (updates + 1))
    ratio = jnp.maximum(energy_variance, 1e-12 * target) / target
    at_once = settling | (updates <= 5)  # a step that is wrong by much is not for long
    rough = jnp.where(at_once, ratio * (step_size / used) ** 6, ROUGH)
    ratio = jnp.where(used < 0.75 * step_size, jnp.maximum(rough, ROUGH), ratio)
    found = jnp.log(ratio) - 6 * jnp.log(step_size)
    kept = jnp.where(weight < 1, log_rate + jnp.log1p(-jnp.minimum(weight, 0.999)), -jnp.inf)
    log_rate = jnp.where(
        num_done <= burn_in.num_transitions, jnp.logaddexp(kept, jnp.log(weight) + found), log_rate
    )
    shortest = jnp.where(settling, step_size / 8, step_size / 2)
    size = jnp.clip(jnp.exp(-log_rate / 6), shortest, 2 * step_size)
    size = jnp.clip(size, SMALLEST_STEP * burn_in.longest_step, burn_in.longest_step)
    return jnp.where(num_done <= burn_in.num_transitions, size, step_size), log_rate


def pool_energy_errors(log_rates: jax.Array) -> jax.Array:
    """The logarithm of the mean over chains of r, for each of them: none is left unheard."""
    mean = jax.nn.logsumexp(log_rates) - math.log(log_rates.size)
    return jnp.broadcast_to(mean, log_rates.shape)


def pool_step_sizes(step_sizes: jax.Array) -> jax.Array:
    """One step size for all chains: of the mean of their energy variances, see above.

        (mean over chains of e^-6)^(-1/6)

    A chain that asks for a much smaller step than the others is heard.
    """
    log_sum = jax.nn.logsumexp(-6 * jnp.log(step_sizes))  # e^-6 itself may overflow
    size = jnp.exp((math.log(step_sizes.size) - log_sum) / 6)
    return jnp.broadcast_to(size, step_sizes.shape)


def start_moments(random: Params, dtype: jnp.dtype) -> Moments:
    """No values yet; `dtype` is that of their number."""
    zeros = jax.tree.map(jnp.zeros_like, random)
    return Moments(jnp.zeros((), dtype), zeros, zeros)


def add_to_moments(moments: Moments, random: Params) -> Moments:
    """Welford's update by one more value."""
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


def prior_inverse_mass(random: Params, prior_std: Params, unit: float, adapts: bool) -> Params:
    """The prior's variances in units of `unit`^2; one per leaf, or per parameter if it `adapts`."""
    return jax.tree.map(
        lambda leaf, std: jnp.full(leaf.shape if adapts else (), (std / unit) ** 2, leaf.dtype),
        random,
        prior_std,
    )


def relative_variances(moments: Moments, prior_std: Params, unit: float) -> Params:
    """Variances in units of `unit`^2, shrunk to 1e-3 of the prior's.

    The shrinkage is downwards because an inverse mass that is too small makes one parameter slow,
    while one that is too large forces small steps on all.
    """

    def relative_variance(squares: jax.Array, std: float) -> jax.Array:
        count = moments.num_values.astype(squares.dtype)
        unbiased = squares / jnp.maximum(count - 1, 1.0)
        pulled = count * unbiased + MASS_PSEUDO_DRAWS * 1e-3 * std**2
        return pulled / ((count + MASS_PSEUDO_DRAWS) * unit**2)

    return jax.tree.map(relative_variance, moments.squares, prior_std)
