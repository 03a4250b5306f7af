"""Every number of a comparison with a reference: quality, distances, their errors and their floor.

A distance between finite sets of draws is above zero even where both come from one distribution.
So each is measured against one half of the reference's chains, by as many of the candidate's draws
as the other half has, or all if there are fewer; and its floor is the distance of that other half,
thinned to the same number. The floor is what draws from the reference itself would score. Both are
averaged over several ways to halve the chains.
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
MIN_DRAWS_OF_PARAMETERS = 3  # fewer have no correlations


class Distance(NamedTuple):
    """A distance by halvings of the reference, and how its terms become a number.

    Attributes:
      candidate: (halvings, terms), the candidate's; a term belongs to a test row or a parameter.
      floor: (halvings, terms), the reference's own.
      over_rows: whether terms belong to test rows, which the bootstrap may resample.
      summarise: from the terms to the number.
    """

    candidate: np.ndarray
    floor: np.ndarray
    over_rows: bool
    summarise: Callable[[np.ndarray], float]


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
    chosen = [
        (
            held if itself else evenly(candidate.num_draws, len(held)),
            held[evenly(len(held), candidate.num_draws)],
            target,
        )
        for held, target in halvings
    ]
    found = _predictive_distances(candidate, reference, chosen)
    if parameters is not None and len(chosen[0][1]) >= MIN_DRAWS_OF_PARAMETERS:
        found |= _parameter_distances(*parameters, chosen)
    estimates = {name: _estimate(distance) for name, distance in found.items()}
    if not itself:
        return estimates
    return {
        name: Estimate(estimate.floor, estimate.floor_error) for name, estimate in estimates.items()
    }


def halve(num_draws: int, num_chains: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ways to part the draws, chain by chain, into (held out, target); none for fewer than four.

    Several chains are parted as whole chains. One alone is cut in the middle, which shows less:
    both halves miss what the chain misses.
    """
    if num_draws < 4:
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
        "agreement": metrics.agreements(ours, theirs),
        "total_variation": metrics.total_variations(ours, theirs),
    }
    return {
        name: Estimate(
            float(terms.mean()),
            bootstrap_error(lambda rows, terms=terms: float(terms[rows].mean()), len(terms)),  # type: ignore[misc]
        )
        for name, terms in by_row.items()
    }


def _predictive_distances(
    candidate: Predictions, reference: Predictions, chosen: Sequence[tuple[np.ndarray, ...]]
) -> dict[str, Distance]:
    found = {}
    if reference.task == "classification":
        for name, function in (
            ("agreement", metrics.agreements),
            ("total_variation", metrics.total_variations),
        ):
            found[name] = _over_halvings(
                _of_means(function), candidate.flat_outputs, reference.flat_outputs, chosen
            )
    rows = evenly(reference.outputs.shape[2], MAX_ROWS)
    ours, theirs = (
        distances.function_values(p.task, p.flat_outputs[:, rows]) for p in (candidate, reference)
    )
    unit = distances.standard_deviation(theirs)  # (rows, k)
    unit = np.where(unit > 0, unit, np.nan)

    def w1(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        return mean_of_known(distances.wasserstein(draws, target) / unit, axis=1)

    def spread(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        pair = (distances.standard_deviation(part) for part in (draws, target))
        return mean_of_known(distances.log_ratio(*pair), axis=1)

    found["w1"] = _over_halvings(w1, ours, theirs, chosen)
    if len(chosen[0][1]) > 1:
        found["std_ratio"] = _over_halvings(spread, ours, theirs, chosen)._replace(
            summarise=lambda terms: float(np.exp(mean_of_known(terms)))
        )
    return found


def _of_means(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda first, second: function(
        first.mean(axis=0, dtype=np.float64), second.mean(axis=0, dtype=np.float64)
    )


def _parameter_distances(
    ours: np.ndarray, theirs: np.ndarray, chosen: Sequence[tuple[np.ndarray, ...]]
) -> dict[str, Distance]:
    # Point estimates do not vary, and are not for a method to get right.
    varying = np.ptp(theirs, axis=0) > 0
    ours, theirs = ours[:, varying], theirs[:, varying]

    def spread(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        return distances.log_ratio(*map(distances.standard_deviation, (draws, target)))

    def correlations(draws: np.ndarray, target: np.ndarray) -> np.ndarray:
        return np.array([distances.correlation_error(draws, target)])

    ratios = _over_halvings(spread, ours, theirs, chosen)
    errors = _over_halvings(correlations, ours, theirs, chosen)
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
    chosen: Sequence[tuple[np.ndarray, ...]],
) -> Distance:
    return Distance(
        np.stack([function(ours[draws], theirs[target]) for draws, _, target in chosen]),
        np.stack([function(theirs[held], theirs[target]) for _, held, target in chosen]),
        over_rows=True,
        summarise=lambda terms: float(mean_of_known(terms)),
    )


def mean_of_known(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean of what is not NaN, and NaN where there is nothing else, without a warning."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0.0).sum(axis=axis) / known.sum(axis=axis))


def _estimate(distance: Distance) -> Estimate:
    """Errors by bootstrap where terms are test rows'; else by the spread over halvings."""
    number = distance.summarise
    candidate, floor = distance.candidate.mean(axis=0), distance.floor.mean(axis=0)
    floors = [number(terms) for terms in distance.floor]
    if distance.over_rows:
        error = bootstrap_error(lambda rows: number(candidate[rows]), len(candidate))
    else:
        error = float(np.std([number(terms) for terms in distance.candidate], ddof=1))
    return Estimate(number(candidate), error, number(floor), float(np.std(floors, ddof=1)))
