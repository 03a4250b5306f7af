"""Every number of a comparison with a reference: quality, distances, their errors and their floor.

A distance between finite sets of draws is above zero even where both come from one distribution.
The chains of the reference are therefore halved. The candidate is measured against one half, with
as many of its draws as the other half has, or all of them if there are fewer. The floor is the
distance of that other half, thinned to the same number of draws: what draws from the reference
itself would score. Both are averaged over several ways to halve the chains.

The error of a distance has two parts. Test rows are a sample, which the bootstrap resamples. Draws
are a sample, too: at rows that see the same draws, all are off in the same direction, and no
resampling of rows shows it. So blocks of draws are left out, one after another, of the candidate
and of the reference (jackknife): whole chains where there are several, since the draws of a chain
are correlated, and else successive parts.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from haiku_posteriors.core.judging import distances, metrics
from haiku_posteriors.core.judging.bootstrap import Estimate, bootstrap_error
from haiku_posteriors.core.judging.predictions import Predictions, evenly

MAX_HALVINGS = 6
MAX_ROWS = 1000  # rows in the distances between functions; more would not change them visibly
MIN_DRAWS_TO_HALVE = 4  # a standard deviation needs two in each half
MIN_DRAWS_OF_PARAMETERS = 3  # two draws are always perfectly correlated
MIN_CHAINS_AS_BLOCKS, NUM_BLOCKS = 4, 8  # fewer chains are cut into so many parts in all
MAX_ROWS_OF_BLOCKS = 100  # at which distances are computed again for each block left out


class Matched(NamedTuple):
    """Indices of the draws that one halving of the reference compares.

    Attributes:
      candidate: draws of the candidate.
      held_out: as many draws of the half that gives the floor, or all if there are fewer.
      target: the draws of the other half, which both are compared with.
    """

    candidate: np.ndarray
    held_out: np.ndarray
    target: np.ndarray


class Distance(NamedTuple):
    """A distance by halvings of the reference, and how its terms become a number.

    Attributes:
      candidate: (halvings, terms), the candidate's; a term belongs to a test row or a parameter.
      floor: (halvings, terms), the reference's own.
      over_rows: whether terms belong to test rows, which the bootstrap may resample.
      summarise: from the terms to the number.
      draw_error: the standard error of the candidate's number by finite draws; NaN if not known.
    """

    candidate: np.ndarray
    floor: np.ndarray
    over_rows: bool
    summarise: Callable[[np.ndarray], float]
    draw_error: float = float("nan")


def quality(predictions: Predictions) -> dict[str, Estimate]:
    """Metrics of the mixture of all draws on the test rows, with bootstrap errors.

    The test rows are drawn again with replacement, the same rows for every method. The errors do
    not cover the randomness of training. Empty where the targets are not known.
    """
    targets = predictions.targets
    if targets is None or predictions.log_likelihoods is None:
        return {}
    task, outputs = predictions.task, predictions.flat_outputs
    values = metrics.evaluate(task, outputs, predictions.flat_log_likelihoods, targets)
    log_density = metrics.log_mean_exp(predictions.flat_log_likelihoods)
    statistics: dict[str, Callable[[np.ndarray], float]]
    if task == "classification":
        mean = outputs.mean(axis=0, dtype=np.float64)
        statistics = {
            "accuracy": lambda rows: metrics.accuracy(mean[rows], targets[rows]),
            "nll": lambda rows: -float(np.mean(log_density[rows])),
            "ece": lambda rows: metrics.expected_calibration_error(mean[rows], targets[rows]),
            "brier": lambda rows: metrics.brier_score(mean[rows], targets[rows]),
        }
    else:
        # The error of the mean is that of one draw which is the mean.
        mean = outputs.mean(axis=0, keepdims=True, dtype=np.float64)
        transform = metrics.probability_integral_transform(outputs, targets)
        statistics = {
            "rmse": lambda rows: metrics.root_mean_squared_error(mean[:, rows], targets[rows]),
            "nll": lambda rows: -float(np.mean(log_density[rows])),
            "coverage_90": lambda rows: metrics.interval_coverage(transform[rows], 0.9),
        }
    return {
        name: Estimate(values[name], bootstrap_error(statistic, len(targets)))
        for name, statistic in statistics.items()
    }


def likelihood_difference(candidate: Predictions, reference: Predictions) -> dict[str, Estimate]:
    """The candidate's NLL minus the reference's, row by row.

    Rows that are hard for one are hard for the other, so the difference is known far better than
    either. Empty for the reference itself, and where a likelihood is not known.
    """
    pair = (reference, candidate)
    if candidate is reference or any(part.log_likelihoods is None for part in pair):
        return {}
    terms = np.subtract(*(metrics.log_mean_exp(part.flat_log_likelihoods) for part in pair))
    error = bootstrap_error(lambda rows: float(np.mean(terms[rows])), len(terms))
    return {"nll_difference": Estimate(float(np.mean(terms)), error)}


def compare(
    candidate: Predictions,
    reference: Predictions,
    parameters: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Estimate]:
    """All distances of a candidate from the reference.

    Args:
      candidate: its predictions; the same object as `reference` asks for the floor itself.
      reference: predictions of the same rows.
      parameters: the same parameters of both, (draws, k) each, in the order of the draws. Without
        them the distances between parameters are left out.
    """
    halvings = halve(reference.num_draws, reference.num_chains)
    if not halvings:
        return _compare_means(candidate, reference)
    itself = candidate is reference
    matched = [
        Matched(
            held if itself else evenly(candidate.num_draws, len(held)),
            held[evenly(len(held), candidate.num_draws)],
            target,
        )
        for held, target in halvings
    ]
    found = _predictive_distances(candidate, reference, matched)
    if parameters is not None and len(matched[0].held_out) >= MIN_DRAWS_OF_PARAMETERS:
        found |= _parameter_distances(*parameters, matched)
    estimates = {name: _estimate(distance) for name, distance in found.items()}
    if not itself:
        return estimates
    return {
        name: Estimate(estimate.floor, estimate.floor_error) for name, estimate in estimates.items()
    }


def halve(num_draws: int, num_chains: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ways to split the draws into two halves, (held out, target); none for fewer than four draws.

    Several chains are split as whole chains. A single chain is cut in the middle, which shows less:
    both halves miss what the chain misses.

    Args:
      num_draws: of all chains, numbered chain by chain.
      num_chains: the number of chains.
    """
    if num_draws < MIN_DRAWS_TO_HALVE:
        return []
    draws = np.arange(num_draws)
    if num_chains == 1:
        first, second = np.array_split(draws, 2)
        return [(first, second), (second, first)]
    chains = draws.reshape(num_chains, -1)
    ways = list(itertools.combinations(range(num_chains), num_chains // 2))
    parts = []
    for way in (ways[index] for index in evenly(len(ways), MAX_HALVINGS)):
        held = np.isin(np.arange(num_chains), way)
        parts.append((chains[held].ravel(), chains[~held].ravel()))
    return parts


def is_at_floor(metric: str, estimate: Estimate) -> bool:
    """Whether a distance is within two standard errors of its floor, or better than it.

    Better is possible where draws are averaged: a few point estimates from the middle of the
    posterior have a more accurate average than as many exact draws. A ratio is not better for being
    lower.
    """
    excess = estimate.value - estimate.floor
    if metric == "agreement":
        excess = -excess
    elif metric.endswith("_ratio"):
        excess = abs(excess)
    return excess <= 2 * math.hypot(estimate.error, estimate.floor_error)  # False for NaN


def _compare_means(candidate: Predictions, reference: Predictions) -> dict[str, Estimate]:
    """Without draws of the reference: distances of the mean predictions, and no floor."""
    if candidate is reference or candidate.task == "regression":
        return {}
    ours, theirs = (p.flat_outputs.mean(axis=0, dtype=np.float64) for p in (candidate, reference))
    by_row = {
        "agreement": distances.agreements(ours, theirs),
        "total_variation": distances.total_variations(ours, theirs),
    }
    return {
        name: Estimate(
            float(terms.mean()),
            bootstrap_error(lambda rows, terms=terms: float(terms[rows].mean()), len(terms)),  # type: ignore[misc]
        )
        for name, terms in by_row.items()
    }


def _predictive_distances(
    candidate: Predictions, reference: Predictions, matched: Sequence[Matched]
) -> dict[str, Distance]:
    found = {}
    if reference.task == "classification":
        for name, function in (
            ("agreement", distances.agreements),
            ("total_variation", distances.total_variations),
        ):
            found[name] = _with_draw_error(
                _over_halvings(
                    _of_means(function), candidate.flat_outputs, reference.flat_outputs, matched
                ),
                _of_means(function),
                _at_few_rows(candidate, candidate.flat_outputs),
                _at_few_rows(reference, reference.flat_outputs),
            )
    rows = evenly(reference.outputs.shape[2], MAX_ROWS)
    ours, theirs = (
        distances.function_values(p.task, p.flat_outputs[:, rows]) for p in (candidate, reference)
    )
    unit = distances.standard_deviation(theirs)  # (rows, k)
    unit = np.where(unit > 0, unit, np.nan)

    def w1(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        return _mean_of_known(distances.wasserstein(draws, target) / unit, axis=1)

    def spread(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        pair = (distances.standard_deviation(part) for part in (draws, target))
        return _mean_of_known(distances.log_ratio(*pair), axis=1)

    few = evenly(len(rows), MAX_ROWS_OF_BLOCKS)
    blocks = (_at_few_rows(candidate, ours), _at_few_rows(reference, theirs))

    def w1_at_few(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        return _mean_of_known(distances.wasserstein(draws, target) / unit[few], axis=1)

    found["w1"] = _with_draw_error(_over_halvings(w1, ours, theirs, matched), w1_at_few, *blocks)
    if len(matched[0].held_out) > 1:
        ratios = _over_halvings(spread, ours, theirs, matched)
        found["std_ratio"] = _with_draw_error(
            ratios._replace(summarise=lambda terms: float(np.exp(_mean_of_known(terms)))),
            spread,
            *blocks,
        )
    return found


def _at_few_rows(predictions: Predictions, flat: np.ndarray) -> list[np.ndarray]:
    """The draws (draws, rows, ...) at a few rows, in the blocks that the jackknife leaves out."""
    values = flat[:, evenly(flat.shape[1], MAX_ROWS_OF_BLOCKS)]
    chains = predictions.num_chains
    parts = 1 if chains >= MIN_CHAINS_AS_BLOCKS else -(-NUM_BLOCKS // chains)
    by_chain = np.split(values, chains)
    return [part for chain in by_chain for part in np.array_split(chain, parts) if len(part)]


def _with_draw_error(
    distance: Distance,
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
) -> Distance:
    """The distance with the jackknife's error of all draws of both sides.

    With one block of K left out, the variance is (K - 1) / K sum_k (d_k - mean d)^2 for each side.
    """

    def number(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
        return distance.summarise(function(np.concatenate(ours), np.concatenate(theirs)))

    def variance(values: list[float]) -> float:
        return (len(values) - 1) * float(np.var(values))

    if any(sum(map(len, side)) - max(map(len, side)) < 2 for side in (ours, theirs)):
        return distance  # a standard deviation needs two draws that are left
    without_ours = [number(ours[:k] + ours[k + 1 :], theirs) for k in range(len(ours))]
    without_theirs = [number(ours, theirs[:k] + theirs[k + 1 :]) for k in range(len(theirs))]
    return distance._replace(
        draw_error=float(np.sqrt(variance(without_ours) + variance(without_theirs)))
    )


def _of_means(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda first, second: function(
        first.mean(axis=0, dtype=np.float64), second.mean(axis=0, dtype=np.float64)
    )


def _parameter_distances(
    ours: np.ndarray, theirs: np.ndarray, matched: Sequence[Matched]
) -> dict[str, Distance]:
    # Parameters that the posterior treats as point estimates do not vary in the reference.
    varying = np.ptp(theirs, axis=0) > 0
    ours, theirs = ours[:, varying], theirs[:, varying]

    def spread(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        return distances.log_ratio(*map(distances.standard_deviation, (draws, target)))

    def correlations(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        return np.array([distances.correlation_error(draws, target)])

    ratios = _over_halvings(spread, ours, theirs, matched)
    errors = _over_halvings(correlations, ours, theirs, matched)
    return {
        # The median: of a method that leaves some parameters fixed, the mean would be zero.
        "parameter_std_ratio": ratios._replace(
            over_rows=False, summarise=lambda terms: float(np.exp(np.median(terms)))
        ),
        "correlation_error": errors._replace(over_rows=False),
    }


def _over_halvings(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ours: np.ndarray,
    theirs: np.ndarray,
    matched: Sequence[Matched],
) -> Distance:
    """The function of two sets of draws, which gives a term per row, at every halving."""
    return Distance(
        np.stack([function(ours[m.candidate], theirs[m.target]) for m in matched]),
        np.stack([function(theirs[m.held_out], theirs[m.target]) for m in matched]),
        over_rows=True,
        summarise=lambda terms: float(_mean_of_known(terms)),
    )


def _mean_of_known(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean of what is not NaN, and NaN where there is nothing else, without a warning."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0.0).sum(axis=axis) / known.sum(axis=axis))


def _estimate(distance: Distance) -> Estimate:
    """The number with its error: of test rows and of draws, or else by the spread over halvings."""
    number = distance.summarise
    candidate, floor = distance.candidate.mean(axis=0), distance.floor.mean(axis=0)
    floors = [number(terms) for terms in distance.floor]
    if distance.over_rows:
        error = bootstrap_error(lambda rows: number(candidate[rows]), len(candidate))
        error = math.hypot(error, 0.0 if math.isnan(distance.draw_error) else distance.draw_error)
    else:
        error = float(np.std([number(terms) for terms in distance.candidate], ddof=1))
    return Estimate(number(candidate), error, number(floor), float(np.std(floors, ddof=1)))
