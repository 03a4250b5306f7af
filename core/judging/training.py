"""Has training arrived? A verdict on the trend of its objective, its gradient and its members."""

from typing import NamedTuple

import numpy as np

from haiku_posteriors.core.judging import trends
from haiku_posteriors.core.judging.diagnostics import Verdict
from haiku_posteriors.core.judging.trends import Trend
from haiku_posteriors.core.progress import Progress

# From here on, importance weights say that q leaves out more of the posterior than they can mend.
PARETO_LIMIT = 0.7
NOISE_SHARE = 0.25  # of a rise, from which on it is the noise's: what else rises follows it
GAP_LIMIT = 1.0  # nats between an objective and a bound that are worth a word


class Objective(NamedTuple):
    """What is maximised, in words.

    Attributes:
      name: such as "ELBO".
      noise_remedy: what makes its values less noisy.
      num_evaluations: minibatches that an evaluation takes at least, by whole epochs (see
        `core.progress`): more for an objective that is estimated by random numbers.
    """

    name: str
    noise_remedy: str
    num_evaluations: int = 1

    def evaluation_epochs(self, num_batches: int) -> int:
        """Epochs of `num_batches` minibatches, each with random numbers of its own."""
        return -(-self.num_evaluations // num_batches)


class Training(NamedTuple):
    """How far members have come, (members,) each.

    Attributes:
      last: the trend of the objective over the last round, or the last quarter of a schedule's way.
      num_epochs: of that round; 0 where there is none.
      is_reached: whether training ended by itself; None where its length was given.
      objectives: mean of the objective over the last round; NaN where none has ended.
    """

    last: Trend
    num_epochs: np.ndarray
    is_reached: np.ndarray | None
    objectives: np.ndarray


class FallingNoise(NamedTuple):
    """A learned noise, the same everywhere, in the round that training was in at its end.

    Where the noise has followed the residuals, RSS / sigma^2 = n of n numbers, the log-likelihood
    is -n log sigma but for a constant: of its rise a fall of sigma is n log(before / now) nats.

    Attributes:
      before: its standard deviation at the average of the round's full batches, (members,).
      now: at the average of the last, unfinished one, (members,).
      share: of the objective's rise that the fall makes up, over the same epochs; 0 where the round
        is too short to tell, (members,).
      num_weights, num_numbers: of the network, and n.
      unlikely: a noise below which the prior has a probability of 0.05.
    """

    before: np.ndarray
    now: np.ndarray
    share: np.ndarray
    num_weights: int
    num_numbers: int
    unlikely: float


class Bound(NamedTuple):
    """Lower bounds of log p_T(D) by q, (members,) each.

    Attributes:
      values: in nats.
      errors: their standard errors.
    """

    values: np.ndarray
    errors: np.ndarray


def verdict(
    training: Training,
    objective: Objective,
    tolerance: float,
    *,
    remaining: np.ndarray | None = None,
    pareto_k: np.ndarray | None = None,
    bound: Bound | None = None,
    gap: np.ndarray | None = None,
    noise: FallingNoise | None = None,
) -> Verdict:
    """Whether optimisers are at their own optimum, and if not, what to change.

    An optimum of its family is not the posterior: how far that is, `pareto_k` says where a density
    is known, `bound` where the objective is none, and compare_posteriors.py where there is a
    reference.

    Args:
      training: of all members.
      objective: of theirs.
      tolerance: nats that a round may gain.
      remaining: nats that a step along the gradient would gain at the end, by a quadratic with the
        diagonal curvature there; (members,). For point estimates.
      pareto_k: shape of the importance weights of q's draws; (members,).
      bound: of log p_T(D) by the q that was found, where the objective bounds nothing.
      gap: nats by which what is maximised may be above the values that were watched, where these
        are lower bounds of it alone; (members,).
      noise: that is learned, of point estimates.
    """
    problems, notes = [], []
    gain, highest = np.asarray(training.last.gain), np.asarray(training.last.highest)
    margin = highest - gain
    longer = (
        "train longer (num_epochs), or until it is over (num_epochs=auto)"
        if training.is_reached is None
        else "train longer (until_converged with more num_epochs, or time_limit)"
    )
    known = training.num_epochs > 0
    if not known.all():
        problems.append(
            f"Training was cut short: of {_members(~known)} there are not {trends.NUM_BATCHES} "
            f"batches of epochs to tell whether the {objective.name} still rises. Train longer "
            "(num_epochs, time_limit)."
        )
    falling = known & (gain + margin < -tolerance)
    if falling.any():
        problems.append(
            f"The {objective.name} of {_members(falling)} falls, by {-gain[falling].min():.3g} "
            "nats in the last round: lower init_step_size."
        )
    rising = known & ~falling & (gain - margin > 0) & (highest > tolerance)
    without_end = np.zeros_like(rising)
    if noise is not None and noise.num_weights >= noise.num_numbers:
        without_end = rising & (noise.share > NOISE_SHARE) & (noise.now < noise.unlikely)
    for which in (without_end, rising & ~without_end):
        if not which.any():
            continue
        worst = np.flatnonzero(which)[np.argmax(gain[which])]
        remedy = longer
        if noise is not None and without_end[worst]:
            remedy = _why_noise_falls(noise, worst)
        problems.append(
            f"The {objective.name} of {_members(which)} still rises, by {gain[worst]:.3g} +- "
            f"{margin[worst]:.2g} nats in the last {training.num_epochs[worst]} epochs (tolerance "
            f"{tolerance:.2g}): {remedy}."
        )
    hidden = known & ~falling & ~rising & ~(highest < tolerance)
    if hidden.any():
        worst = np.flatnonzero(hidden)[np.argmax(highest[hidden])]
        problems.append(
            f"Noise hides whether the {objective.name} of {_members(hidden)} still rises: by "
            f"{gain[worst]:.2g} +- {margin[worst]:.2g} nats in the last "
            f"{training.num_epochs[worst]} epochs (tolerance {tolerance:.2g}). "
            f"{objective.noise_remedy}, or train longer."
        )
    if training.is_reached is not None:
        cut = known & ~training.is_reached & ~falling & ~rising & ~hidden
        if cut.any():
            problems.append(
                f"Training of {_members(cut)} was cut short while smaller steps still paid: train "
                "longer (num_epochs, time_limit)."
            )
    if gap is not None and np.max(gap) > tolerance:
        problems.append(
            f"The {objective.name} is watched by a lower bound, above which it may be by up to "
            f"{np.max(gap):.2g} nats at the end (tolerance {tolerance:.2g}): whether it still "
            "rises cannot be told. Raise num_mixture_draws, or judge by compare_posteriors.py."
        )
    if remaining is not None:
        most = float(np.max(remaining))
        sentence = (
            f"By gradient and diagonal curvature at the end, {most:.2g} nats are left to gain"
        )
        if most > max(10 * tolerance, 1.0) and not without_end.any():
            problems.append(f"{sentence}: train longer, with smaller steps at the end.")
        else:
            notes.append(f"{sentence}.")
    if len(training.objectives) > 1 and known.all():
        low, high = np.min(training.objectives), np.max(training.objectives)
        notes.append(
            f"The {objective.name} of the members is {low:.6g} to {high:.6g}: "
            + (
                "they have found optima of different height, or are not there yet."
                if high - low > max(10 * tolerance, 1.0)
                else "optima of the same height."
            )
        )
    if pareto_k is not None:
        worst_k = float(np.max(pareto_k))
        notes.append(
            f"Pareto k of the importance weights is {worst_k:.2f}: "
            + (
                "q is near enough to the posterior for them to correct it."
                if worst_k < PARETO_LIMIT
                else "q is far from the posterior, even at its own optimum; a richer family, "
                "refinement or HMC comes nearer."
            )
        )
    if bound is not None and known.all():
        notes.append(_gap(training.objectives, bound, objective.name))
    return Verdict(not problems, tuple(problems), tuple(notes))


def falling_noise(
    progress: Progress,
    before: np.ndarray,
    now: np.ndarray,
    num_weights: int,
    num_numbers: int,
    unlikely: float,
    temperature: float = 1.0,
) -> FallingNoise:
    """What a learned noise has to do with the rise of the log-joint in the round of the end.

    Args:
      progress: of all members, at the end, of training that ends by itself.
      before: standard deviation of the noise at `progress.average`, (members,).
      now: at `progress.batch_average`, or at the last iterate if a batch is just over, (members,).
      num_weights: random parameters.
      num_numbers: n, rows times targets.
      unlikely: a noise below which the prior has a probability of 0.05.
      temperature: by which the log-likelihood is divided.
    """
    batches, epoch = np.asarray(progress.num_values), np.asarray(progress.epoch)
    values = np.asarray(progress.values, np.float64)
    last = np.take_along_axis(values, np.maximum(batches - 1, 0)[:, None], axis=1)[:, 0]
    rate = (last - values[:, 0]) / np.maximum(batches - 1, 1)  # nats a batch
    # From the middle of the full batches to that of the last: half the epochs of the round.
    risen = rate * epoch * trends.NUM_BATCHES / (2 * np.asarray(progress.round_length))
    is_known = (batches > 1) & (risen > 0)
    ratio = np.where(is_known, np.asarray(before, np.float64) / np.asarray(now), 1.0)
    nats = num_numbers * np.log(ratio) / temperature
    share = np.where(is_known, nats / np.where(is_known, risen, 1.0), 0.0)
    before, now = np.asarray(before), np.asarray(now)
    return FallingNoise(before, now, share, num_weights, num_numbers, unlikely)


def _why_noise_falls(noise: FallingNoise, member: int) -> str:
    share = min(1.0, float(noise.share[member]))
    return (
        f"the learned noise falls, in this round from {noise.before[member]:.3g} on average to "
        f"{noise.now[member]:.3g} in the units of training, and carries {100 * share:.0f} % of "
        f"the rise. A network of {noise.num_weights:,} weights can pass through "
        f"{noise.num_numbers:,} numbers, and then its mode is where the noise is next to "
        "nothing: longer training goes there. Fix the noise (noise_std), give a stronger prior "
        "(weight_decay), stop early on purpose (num_epochs), or infer a posterior of the noise "
        "(run_hmc.py, run_vi.py)"
    )


def _gap(objectives: np.ndarray, bound: Bound, name: str) -> str:
    """What an objective that is no bound says beyond one; of the member with the best bound."""
    best = int(np.argmax(bound.values))
    value, error = bound.values[best], bound.errors[best]
    gap = objectives[best] - value
    said = f"The hierarchical lower bound is {value:.2f} +- {error:.2f} nats, the {name} "
    said += f"{objectives[best]:.2f}: "
    if gap > GAP_LIMIT + 2 * error:
        return (
            f"{said}{gap:.1f} nats of it are no part of the bound, be it that q's entropy is "
            "overestimated or that the bound is loose (num_inner_draws)."
        )
    return f"{said}what was maximised is as good as a bound."


def _members(which: np.ndarray) -> str:
    if which.size == 1:
        return "the run"
    numbers = ", ".join(map(str, np.flatnonzero(which)))
    return f"member(s) {numbers} of {which.size}"
