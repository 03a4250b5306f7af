"""Optimisers that decrease their step when progress is noise, average, and end by themselves.

Around any method that maximises an objective by an optax optimizer. Epochs are counted in rounds of
NUM_BATCHES equal batches. At the end of a batch the objective is evaluated at the average of its
iterates, every time with the same rows and the same random numbers, so that differences show what
training gained and not what the draws were. The values of a round show whether the objective still
rises (`judging.trends`):

    at the end of a round    if the gain is below the tolerance, but for a chance of 2.5 %: a phase
                             is over, the iterate becomes the average over the round, and the step
                             is multiplied by DECREASE; if the objective rises, but for that chance:
                             the next round is twice as long; if noise hides whether it does: that
                             as well, from the average and with half the step, which is the same way
                             with half the noise
    at the end of a phase    if its mean objective is above that of the phase before by less than
                             the tolerance: training is over

With a constant step the iterate ends in a cloud around the optimum, whose cost in the objective is
proportional to the step: what the next decrease gains is less than what the last one gained. The
average over the cloud is nearer to the optimum than any iterate (Polyak & Juditsky 1992); to stop
at stationarity, average, decrease and go on is the scheme of arXiv 2009.00666 and 2203.15945, with
the objective's trend in place of their R-hat of iterates.

Target: that of the method inside. All of it is a function of the state, compiled with the steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.judging import trends
from haiku_posteriors.core.judging.trends import NUM_BATCHES, Trend
from haiku_posteriors.core.method import Info, Method, State
from haiku_posteriors.core.trees import Params

DECREASE = 0.3
LOWEST = -1e30  # below every objective, and finite, as all of a state has to be


class Rules(NamedTuple):
    """When training is over.

    Attributes:
      tolerance: nats by which the objective may still rise in a round.
      first_round: epochs of the first round, a multiple of NUM_BATCHES.
      num_waiting: epochs before it, in which the objective is still another.
      ends: where training does not end by itself: the last epochs of the NUM_BATCHES batches of its
        one round, increasing; the step is then the optimizer's own. None where it does.
      start: the epoch with which that round begins.
      num_evaluations: epochs without steps that an evaluation averages; one says all of an
        objective without random numbers.
    """

    tolerance: float
    first_round: int = NUM_BATCHES
    num_waiting: int = 0
    ends: tuple[int, ...] | None = None
    start: int = 0
    num_evaluations: int = 1


class Progress(NamedTuple):
    """Of one member: scalars, but for the batches and the average.

    Attributes:
      num_epochs: done, in all.
      epoch: done in this round.
      round_length: its epochs.
      values: the objective at the ends of batches, (NUM_BATCHES,).
      num_values: of this round, so far.
      batch_average: mean of the iterates of this batch, floating-point leaves.
      average: of this round; None where training does not end by itself.
      previous: mean objective of the phase before.
      num_phases: that are over.
      last: the trend of the last round that is over.
      objective: its mean.
      num_rounds: that are over.
      is_reached: whether training is over; it stays so.
    """

    num_epochs: jax.Array
    epoch: jax.Array
    round_length: jax.Array
    values: jax.Array
    num_values: jax.Array
    batch_average: Params
    average: Params | None
    previous: jax.Array
    num_phases: jax.Array
    last: Trend
    objective: jax.Array
    num_rounds: jax.Array
    is_reached: jax.Array


class WatchedState(NamedTuple):
    """The state of the method inside, and how far it has come."""

    state: State
    progress: Progress


class StepFactorState(NamedTuple):
    """`step_factor`: by which updates are multiplied."""

    step_factor: jax.Array


def scale_by_step_factor() -> optax.GradientTransformation:
    """Multiplies updates by a factor in its state, which starts at 1 and `watch` decreases."""

    def update(updates: Any, state: StepFactorState, params: Any = None) -> tuple:
        del params
        scaled = jax.tree.map(lambda u: u * state.step_factor.astype(u.dtype), updates)
        return scaled, state

    return optax.GradientTransformation(lambda params: StepFactorState(jnp.ones(())), update)


def objective_of(info: Info) -> jax.Array:
    """What training maximises, on average over the epoch: `objective`, `elbo` or `log_joint`."""
    name = next(name for name in ("objective", "elbo", "log_joint") if name in info)
    return jnp.mean(info[name])


def watch(method: Method, rules: Rules) -> Method:
    """A method that keeps an eye on its objective and, without `rules.ends`, ends by itself.

    Args:
      method: its state is a NamedTuple with an `optimizer_state`, in which there is that of a
        `scale_by_step_factor`; what else is floating-point in it is the iterate.
      rules: of the end.

    Returns:
      The method, with `WatchedState` as its state. Steps after the end change nothing.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> from haiku_posteriors.core import sgd
      >>> optimizer = optax.chain(optax.adam(1e-2), scale_by_step_factor())
      >>> method = watch(sgd.sgd(log_joint, optimizer, batch_size=8), Rules(tolerance=0.2))
      >>> state = method.init(jax.random.key(0), None)
      >>> state, info = jax.jit(method.step)(jax.random.key(1), state, data)
      >>> bool(state.progress.is_reached)
      False
    """
    by_itself = rules.ends is None
    marks = (rules.start, *(rules.ends or ()))  # where batches of a schedule begin and end

    def init(rng_key: jax.Array, params: Params | None) -> WatchedState:
        state = method.init(rng_key, params)
        dtype = jax.tree.leaves(_floats(state))[0].dtype
        zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        progress = Progress(
            num_epochs=none,
            epoch=none,
            round_length=jnp.full((), rules.first_round, jnp.int32),
            values=jnp.zeros(NUM_BATCHES, dtype),
            num_values=none,
            batch_average=optax.tree.zeros_like(_floats(state)),
            average=optax.tree.zeros_like(_floats(state)) if by_itself else None,
            previous=jnp.full((), LOWEST, dtype),
            num_phases=none,
            last=Trend(zero, zero),
            objective=zero,
            num_rounds=none,
            is_reached=jnp.array(False),
        )
        return WatchedState(state, progress)

    def evaluate(state: State, data: Data) -> jax.Array:
        """The objective, by epochs of steps of length 0."""
        still = optax.tree.set(state.optimizer_state, step_factor=jnp.zeros(()))
        state = state._replace(optimizer_state=still)

        def add(number: int, total: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(0), number)  # the same ones, always
            return total + objective_of(method.step(key, state, data)[1])

        zero = jnp.zeros_like(jax.tree.leaves(_floats(state))[0], shape=())
        return jax.lax.fori_loop(0, rules.num_evaluations, add, zero) / rules.num_evaluations

    def end_batch(watched: WatchedState, data: Data) -> WatchedState:
        state, progress = watched
        value = evaluate(_with_floats(state, progress.batch_average), data)
        number = progress.num_values
        batch_average = progress.batch_average
        if by_itself and method.align:
            batch_average = method.align(batch_average, progress.average)
        progress = progress._replace(
            values=progress.values.at[number].set(value, mode="drop"),
            num_values=number + 1,
            batch_average=optax.tree.zeros_like(progress.batch_average),
            average=(
                _running_mean(progress.average, batch_average, number + 1) if by_itself else None
            ),
        )
        if not by_itself:
            return WatchedState(state, progress)
        return jax.lax.cond(
            progress.epoch == progress.round_length,
            lambda watched: _end_round(watched, rules.tolerance),
            lambda watched: watched,
            WatchedState(state, progress),
        )

    def step(rng_key: jax.Array, watched: WatchedState, data: Data) -> tuple[WatchedState, Info]:
        state, info = method.step(rng_key, watched.state, data)
        before = watched.progress
        # Objectives that are still others are not counted.
        waits = before.num_epochs < (rules.num_waiting if by_itself else rules.start)
        epoch = before.epoch + jnp.where(waits, 0, 1)
        if by_itself:
            length = before.round_length // NUM_BATCHES
            in_batch = (epoch - 1) % length + 1
        else:
            begins = jnp.asarray(marks, jnp.int32)[jnp.minimum(before.num_values, NUM_BATCHES - 1)]
            ends = jnp.asarray(marks, jnp.int32)[jnp.minimum(before.num_values + 1, NUM_BATCHES)]
            in_batch, length = before.num_epochs + 1 - begins, ends - begins
        iterate = _floats(state)
        if method.align:
            iterate = method.align(iterate, before.batch_average)
        average = _running_mean(before.batch_average, iterate, jnp.maximum(in_batch, 1))
        new = WatchedState(
            state,
            before._replace(
                num_epochs=before.num_epochs + 1,
                epoch=epoch,
                batch_average=trees.select(waits, before.batch_average, average),
            ),
        )
        new = jax.lax.cond(
            ~waits & (in_batch == length) & (before.num_values < NUM_BATCHES),
            lambda new: end_batch(new, data),
            lambda new: new,
            new,
        )
        return trees.select(before.is_reached, watched, new), info

    def sample(rng_key: jax.Array, watched: WatchedState, num_draws: int) -> Params:
        return method.sample(rng_key, watched.state, num_draws)

    return method._replace(init=init, step=step, sample=sample)


def first_round(num_batches: int, num_updates: int = 1000) -> int:
    """Epochs, of `num_batches` minibatches, for about `num_updates` updates: a whole round."""
    return NUM_BATCHES * max(1, -(-num_updates // (NUM_BATCHES * num_batches)))


def schedule_ends(steps: np.ndarray, num_waiting: int = 0) -> tuple[tuple[int, ...], int]:
    """Batches of the last quarter of the way that a schedule leads, of equal ways each.

    A cosine schedule hardly moves in the last quarter of its epochs: what it gains there says
    little. Of the way, the sum of its steps, the last quarter says as much as any.

    Args:
      steps: step size of every epoch, (epochs,).
      num_waiting: first epochs that do not count, whatever way they have led.

    Returns:
      `ends` and `start` of `Rules`.
    """
    way = np.cumsum(steps) / np.sum(steps)
    first = max(0.75, way[num_waiting - 1] if num_waiting else 0.0)
    marks = np.searchsorted(way, np.linspace(first, 1, NUM_BATCHES + 1), side="left")
    ends = np.minimum(marks + 1, len(steps))
    ends[-1] = len(steps)
    return tuple(int(end) for end in ends[1:]), int(ends[0])


def _floats(state: State) -> Params:
    """The iterate: floating-point leaves of the state but for the optimizer's."""
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None,
        state._replace(optimizer_state=None),
    )


def _with_floats(state: State, iterate: Params) -> State:
    """The state with another iterate."""
    changed = jax.tree.map(
        lambda leaf, other: leaf if other is None else other,
        state._replace(optimizer_state=None),
        iterate,
        is_leaf=lambda leaf: leaf is None,
    )
    return changed._replace(optimizer_state=state.optimizer_state)


def _running_mean(mean: Params, new: Params, count: jax.Array) -> Params:
    """The mean of `count` trees, of which `new` is the last."""
    return jax.tree.map(lambda m, leaf: m + (leaf - m) / count.astype(leaf.dtype), mean, new)


def _end_round(watched: WatchedState, tolerance: float) -> WatchedState:
    state, progress = watched
    last = trends.trend(progress.values)
    is_settled = last.highest < tolerance
    mean = jnp.mean(progress.values)
    # An objective that falls, by steps that are too large, is at no end either.
    is_quiet = is_settled & (last.gain > -tolerance) & (last.highest - last.gain < tolerance)
    is_reached = is_quiet & (mean - progress.previous < tolerance)
    averaged = trees.select(
        last.is_rising & ~is_settled, state, _with_floats(state, progress.average)
    )
    factor = optax.tree.get(state.optimizer_state, "step_factor")
    decrease = jnp.where(is_settled, DECREASE, jnp.where(last.is_rising, 1.0, 0.5))
    optimizer_state = optax.tree.set(
        state.optimizer_state, step_factor=factor * decrease.astype(factor.dtype)
    )
    return WatchedState(
        averaged._replace(optimizer_state=optimizer_state),
        progress._replace(
            epoch=jnp.zeros_like(progress.epoch),
            round_length=progress.round_length * jnp.where(is_settled, 1, 2),
            values=jnp.zeros_like(progress.values),
            num_values=jnp.zeros_like(progress.num_values),
            average=optax.tree.zeros_like(progress.average),
            previous=jnp.where(is_settled, mean, progress.previous),
            num_phases=progress.num_phases + is_settled.astype(jnp.int32),
            last=last,
            objective=mean,
            num_rounds=progress.num_rounds + 1,
            is_reached=is_reached,
        ),
    )


def all_reached(states: WatchedState) -> jax.Array:
    """Whether training of all members is over, for `Run`'s `is_finished`."""
    return jnp.all(states.progress.is_reached)
