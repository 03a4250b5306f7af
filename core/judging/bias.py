"""By how much draws are off, from what happens when exact transitions go on from some of them.

Draws of unadjusted steps have a law near the posterior; R-hat and effective sample sizes do not see
how near. A kernel that leaves the posterior invariant, started at such draws, leads to the
posterior, and the shift on the way there is minus the bias:

    shift of a mean = (E after - E before) / sd before,    of a spread = log(sd after / sd before)

each with a standard error. Quantities are first mapped to normal scores, by the ranks among the
draws before: nothing changes for a Gaussian, and a probability of 1e-9 whose rare large values
would decide over its standard deviation is judged like any other. Chains are compared with
themselves: what differs between chains that have not met is no bias. Where the kernel needs longer
than it was given, the shift is a part of it.
"""

from typing import NamedTuple

import numpy as np
import scipy.special
from numpy.typing import ArrayLike

from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.core.judging.chain_statistics import effective_sample_size, halve_chains

# In posterior standard deviations: half of the error that 100 effective draws leave in a mean is
# 0.05, so that a bias of 0.1 is what a larger run would show.
TOLERANCE = 0.1
SMALLEST_RATIO = 1e-4  # of variances after and before
NUM_ERRORS = 2  # a shift counts for what of it is beyond this many standard errors


class Shift(NamedTuple):
    """Shifts of quantities, (quantities,) each.

    Attributes:
      mean: in standard deviations of the draws before.
      mean_error: its standard error.
      spread: log of the ratio of standard deviations.
      spread_error: its standard error.
      effective_quantities: as how many independent ones the quantities count; a scalar.
    """

    mean: np.ndarray
    mean_error: np.ndarray
    spread: np.ndarray
    spread_error: np.ndarray
    effective_quantities: float


class BiasReport(NamedTuple):
    """What exact transitions say about a run.

    Attributes:
      shifts: by name, see `summarise`.
      problems, notes: sentences for the verdict.
      acceptance: of those transitions, on average.
      num_gradients: what they cost.
    """

    shifts: dict[str, Estimate]
    problems: list[str]
    notes: list[str]
    acceptance: float = float("nan")
    num_gradients: int = 0


def shift(before: ArrayLike, after: ArrayLike) -> Shift:
    """The shift of each quantity between draws and the exact transitions that start at some.

    Args:
      before: (chains, draws, quantities), at least four draws; every quantity varies.
      after: (chains, starts, transitions, quantities), with at least two starts in each chain.
    """
    before, after = _normal_scores(np.asarray(before), np.asarray(after))
    num_chains, num_draws = before.shape[:2]
    num_starts = after.shape[1]
    center = before.mean(axis=1, keepdims=True)
    squares = (before - center) ** 2
    ess = _ess_by_chain(before)
    variance = squares.mean(axis=1) * (1 + 1 / ess)  # (chains, quantities), of one chain's law
    by_start = after.mean(axis=2)
    after_mean = by_start.mean(axis=1)
    after_error = by_start.var(axis=1, ddof=1) / num_starts
    after_squares = ((after - after_mean[:, None, None]) ** 2).mean(axis=2)
    after_variance = after_squares.mean(axis=1) + after_error
    sd = before.std(axis=(0, 1))
    mean_error = np.sqrt((variance / ess + after_error).sum(axis=0)) / num_chains

    total, after_total = variance.mean(axis=0), after_variance.mean(axis=0)
    # Where all go beyond the draws before, scores have come to their end and do not vary.
    after_total = np.maximum(after_total, SMALLEST_RATIO * total)
    square_error = squares.var(axis=1) / _ess_by_chain(squares)
    after_square_error = after_squares.var(axis=1, ddof=1) / num_starts
    spread_error = (
        np.hypot(
            np.sqrt(square_error.sum(axis=0)) / total,
            np.sqrt(after_square_error.sum(axis=0)) / after_total,
        )
        / num_chains
        / 2
    )
    correlations = np.corrcoef((before - center).reshape(num_chains * num_draws, -1).T)
    return Shift(
        (after_mean - center[:, 0]).mean(axis=0) / sd,
        mean_error / sd,
        np.log(after_total / total) / 2,
        spread_error,
        float(np.size(sd) ** 2 / np.sum(np.square(correlations))),
    )


def typical(shifts: np.ndarray, errors: np.ndarray, effective_quantities: float) -> Estimate:
    """The root mean square of true shifts: what noise adds to that of the observed ones is removed.

    Returns:
      An estimate whose `error` is such that value - 2 error is the least that noise leaves likely.
    """
    noise = np.mean(errors**2)
    square = np.mean(shifts**2) - noise
    positive = max(square, 0.0)
    error = np.sqrt((2 * noise**2 + 4 * positive * noise) / effective_quantities)
    value = np.sqrt(positive)
    least = np.sqrt(max(square - NUM_ERRORS * error, 0.0))
    if least > 0:
        return Estimate(float(value), float((value - least) / NUM_ERRORS))
    most = np.sqrt(positive + NUM_ERRORS * error)
    return Estimate(float(value), float(max(value, most - value) / NUM_ERRORS))


def exceeds(estimate: Estimate) -> bool:
    """Whether a shift is beyond TOLERANCE by more than its error explains."""
    return abs(estimate.value) - NUM_ERRORS * estimate.error > TOLERANCE


def summarise(shifts: dict[str, Shift]) -> dict[str, Estimate]:
    """Two numbers for each group of quantities, `<name>, mean` and `<name>, spread`.

    Signed for a single quantity, `typical` for several.
    """
    found = {}
    for name, group in shifts.items():
        for kind, values, errors in (
            ("mean", group.mean, group.mean_error),
            ("spread", group.spread, group.spread_error),
        ):
            found[f"{name}, {kind}"] = (
                Estimate(float(values[0]), float(errors[0]))
                if values.size == 1
                else typical(values, errors, group.effective_quantities)
            )
    return found


def problems(summary: dict[str, Estimate], remedy: str) -> list[str]:
    """A sentence if any shift exceeds the tolerance, with what to change."""
    beyond = {name: found for name, found in summary.items() if exceeds(found)}
    if not beyond:
        return []
    listed = "; ".join(
        f"{name} {found.value:.2f} +- {found.error:.2f}" for name, found in beyond.items()
    )
    return [
        f"The draws are biased: exact transitions shift them, in posterior standard deviations, by "
        f"more than {TOLERANCE} ({listed}). {remedy}"
    ]


def _normal_scores(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blom's scores of both by their ranks among the values before; ties share their mean rank."""
    ordered = np.sort(before.reshape(-1, before.shape[-1]), axis=0)
    scores = []
    for values in (before, after):
        flat = values.reshape(-1, values.shape[-1])
        ranks = np.empty(flat.shape)
        for column, known in enumerate(ordered.T):
            sides = (np.searchsorted(known, flat[:, column], side) for side in ("left", "right"))
            ranks[:, column] = 0.5 + sum(sides) / 2
        score = scipy.special.ndtri((ranks - 0.375) / (len(ordered) + 0.25))
        scores.append(score.reshape(values.shape))
    return scores[0], scores[1]


def _ess_by_chain(draws: np.ndarray) -> np.ndarray:
    """Of every chain alone, in which halves must agree; (chains, quantities)."""
    return np.stack([effective_sample_size(halve_chains(chain[None])) for chain in draws])
