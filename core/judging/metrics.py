"""How good a predictive distribution is: accuracy, likelihood, calibration and uncertainty.

Everything here is a pure function of host arrays, computed in float64. Two layouts of predictions
occur, both with one entry per posterior draw on the leading axis:

- classification: class probabilities `(draws, rows, classes)` with targets `(rows,)`, integers;
- regression: means, then standard deviations, `(draws, rows, 2 * targets)`, with targets
  `(rows, targets)`, all in the original units of the data.

`log_likelihoods (draws, rows)` of the observed targets come separately, because a probability that
has saturated to 0 or 1 in float32 no longer knows its own logarithm. The predictive distribution is
always the equal mixture over draws, p(y | x) = 1/S Σ_s p(y | x, w_s).

Information is measured in nats. A NaN in the predictions makes the metric NaN: a diverged draw has
to be seen, not averaged away by a comparison that happens to be false.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from haiku_posteriors.core import errors
from haiku_posteriors.core.judging.predictions import Predictions

Array = NDArray[np.float64]

TASKS = ("classification", "regression")
COVERAGE_LEVELS = (0.50, 0.90, 0.95)
ROWS_AT_ONCE = 1000  # bounds memory, not results


class ReliabilityBins(NamedTuple):
    """Calibration by bin of confidence, each array `(num_bins,)`; an empty bin has weight 0."""

    confidence: Array  # Mean confidence of the bin's rows, NaN if there are none.
    accuracy: Array  # Fraction of the bin's rows classified correctly, NaN if there are none.
    weight: Array  # Fraction of all rows that are in the bin; sums to 1.


def evaluate(
    task: str, predictions: ArrayLike, log_likelihoods: ArrayLike, targets: ArrayLike
) -> dict[str, float]:
    """All metrics of a task at once.

    Classification: `accuracy`, `nll`, `ece`, `ece_equal_mass`, `brier`; `entropy` of the mean
    prediction = `aleatoric` (mean entropy of a draw) + `epistemic` (mutual information between
    label and weights).
    Regression: `rmse`, `nll`, `coverage_50`, `coverage_90`, `coverage_95`; `aleatoric`, the root of
    the draws' mean variance, and `epistemic`, the standard deviation over draws of their means,
    both averaged over rows and targets, in the units of the targets.
    In both, `disagreement` says how far the draws differ and equals `epistemic`; 0 means that the
    draws are copies of one another.

    Args:
      task: "classification" or "regression".
      predictions: `(draws, rows, classes)` or `(draws, rows, 2 * targets)`, as in the module's
        docstring.
      log_likelihoods: `(draws, rows)`, log p(y | x, w_s), summed over targets.
      targets: `(rows,)` integers or `(rows, targets)`.

    Returns:
      A metric's value by its name.

    Raises:
      UserError: the task is unknown or the shapes do not belong together.
    """
    return _summarise(task, _row_statistics(task, predictions, log_likelihoods, targets), targets)


def of_predictions(predictions: Predictions) -> dict[str, float]:
    """`evaluate` of the mixture over all draws of all chains, ROWS_AT_ONCE rows at a time."""
    task, outputs, log_likelihoods, targets = predictions
    if log_likelihoods is None or targets is None:
        raise errors.UserError("Without targets, predictions cannot be evaluated.")
    blocks = []
    for first in range(0, len(targets), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        block = Predictions(task, outputs[:, :, rows], log_likelihoods[:, :, rows])
        flat = (block.flat_outputs, block.flat_log_likelihoods)
        blocks.append(_row_statistics(task, *flat, targets[rows]))
    joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    return _summarise(task, joined, targets)


def by_target(predictions: Predictions) -> list[dict[str, float]]:
    """`of_predictions` of each target of a regression alone, whose noise is Gaussian."""
    assert predictions.task == "regression" and predictions.targets is not None
    num_targets = predictions.targets.shape[1]
    found = []
    for index in range(num_targets):
        outputs = predictions.outputs[..., [index, num_targets + index]]
        targets = predictions.targets[:, index : index + 1]
        mean, std = np.moveaxis(outputs.astype(np.float64), -1, 0)
        log_density = -0.5 * ((targets[:, 0] - mean) / std) ** 2 - np.log(std)
        log_likelihoods = log_density - 0.5 * np.log(2 * np.pi)
        found.append(
            of_predictions(Predictions(predictions.task, outputs, log_likelihoods, targets))
        )
    return found


def mean_over_draws(predictions: Predictions) -> dict[str, float]:
    """The mean of each draw's own metrics."""
    outputs, log_likelihoods = predictions.flat_outputs, predictions.flat_log_likelihoods
    assert predictions.targets is not None
    each = [
        evaluate(predictions.task, draw[None], row[None], predictions.targets)
        for draw, row in zip(outputs, log_likelihoods, strict=True)
    ]
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def log_mean_exp(values: ArrayLike, axis: int = 0) -> Array:
    """log(1/S Σ_s exp(v_s)) along `axis`, without overflow; all -inf gives -inf."""
    values = np.asarray(values, np.float64)
    return np.asarray(special.logsumexp(values, axis=axis) - np.log(values.shape[axis]))


def negative_log_likelihood(log_likelihoods: ArrayLike) -> float:
    """NLL of the mixture over draws: -1/N Σ_n log(1/S Σ_s p(y_n | x_n, w_s)).

    This is the density of the mixture itself, not of one Gaussian with the mixture's moments.
    `log_likelihoods (draws, rows)` are of the observed targets.
    """
    return -float(np.mean(log_mean_exp(log_likelihoods, axis=0)))


def accuracy(probabilities: ArrayLike, targets: ArrayLike) -> float:
    """Fraction of rows whose most probable class (the first, if tied) is the target.

    `probabilities (rows, classes)` are averaged over draws; `targets (rows,)` are integers.
    """
    return float(np.mean(_correct(*_classification(probabilities, targets))))


def reliability_bins(
    probabilities: ArrayLike, targets: ArrayLike, num_bins: int = 15, equal_mass: bool = False
) -> ReliabilityBins:
    """Mean confidence max_k p_k and accuracy of the rows, by bin of confidence.

    Equal-width bins are [0, 1/B], (1/B, 2/B], ..., ((B-1)/B, 1]: every confidence, saturated or on
    an edge, is in exactly one. Equal-mass bins hold the rows sorted by confidence, cut into B parts
    whose sizes differ by at most one. Rows of equal confidence that a cut separates share their
    accuracy, so that the result does not depend on the order of the rows.

    Args:
      probabilities: `(rows, classes)`, averaged over draws.
      targets: `(rows,)` integers.
      num_bins: B.
      equal_mass: cut by number of rows instead of by width.
    """
    probabilities, targets = _classification(probabilities, targets)
    confidence, correct = probabilities.max(axis=1), _correct(probabilities, targets)
    rows = len(confidence)
    if equal_mass:
        _, group = np.unique(confidence, return_inverse=True)
        correct = (np.bincount(group, weights=correct) / np.bincount(group))[group]
        order = np.argsort(confidence, kind="stable")
        bins = np.empty(rows, np.intp)
        for index, members in enumerate(np.array_split(order, num_bins)):
            bins[members] = index
    else:
        # Only the inner edges: below the first and above the last there is nowhere else to go,
        # which also keeps a confidence of 1 + 1e-7 (float32 rounding) in the last bin.
        inner_edges = np.arange(1, num_bins) / num_bins
        bins = np.searchsorted(inner_edges, confidence, side="left")
    count = np.bincount(bins, minlength=num_bins)

    def bin_mean(values: Array) -> Array:
        total = np.bincount(bins, weights=values, minlength=num_bins)
        return np.divide(total, count, out=np.full(num_bins, np.nan), where=count > 0)

    return ReliabilityBins(bin_mean(confidence), bin_mean(correct), count / rows)


def expected_calibration_error(
    probabilities: ArrayLike, targets: ArrayLike, num_bins: int = 15, equal_mass: bool = False
) -> float:
    """ECE = Σ_b weight_b |accuracy_b - confidence_b| over the bins of `reliability_bins`.

    Source: Naeini, Cooper and Hauskrecht (2015); Guo et al. (2017), arXiv:1706.04599.
    """
    bins = reliability_bins(probabilities, targets, num_bins, equal_mass)
    filled = bins.weight > 0
    gap = np.abs(bins.accuracy - bins.confidence)[filled]
    return float(np.sum(bins.weight[filled] * gap))


def brier_score(probabilities: ArrayLike, targets: ArrayLike) -> float:
    """1/N Σ_n Σ_k (p_nk - [k = y_n])², between 0 and 2.

    Source: Brier (1950), in its original form; for two classes it is twice the binary score.
    `probabilities (rows, classes)` are averaged over draws; `targets (rows,)` are integers.
    """
    probabilities, targets = _classification(probabilities, targets)
    one_hot = np.arange(probabilities.shape[1]) == targets[:, None]
    return float(np.mean(np.sum((probabilities - one_hot) ** 2, axis=1)))


def entropy(probabilities: ArrayLike) -> Array:
    """-Σ_k p_k log p_k over the last axis, with 0 log 0 = 0; `(..., classes)` to `(...)`."""
    return np.asarray(special.entr(np.asarray(probabilities, np.float64)).sum(axis=-1))


def mutual_information(probabilities: ArrayLike) -> Array:
    """Information the label holds on the weights: H[1/S Σ_s p_s] - 1/S Σ_s H[p_s], at least 0.

    `(draws, rows, classes)` to `(rows,)`. Zero when all draws agree, log(classes) when they are
    each certain of another class. Source: Houlsby et al. (2011), arXiv:1112.5745.
    """
    probabilities = np.asarray(probabilities)
    total = entropy(probabilities.mean(axis=0, dtype=np.float64))
    # Non-negative by Jensen's inequality; only rounding can take it below.
    return np.maximum(total - _mean_draw_entropy(probabilities), 0.0)


def root_mean_squared_error(predictions: ArrayLike, targets: ArrayLike) -> float:
    """sqrt(mean (y - 1/S Σ_s m_s)²) over rows and targets: the error of the mixture's mean.

    Shapes: `predictions (draws, rows, 2 * targets)`, `targets (rows, targets)`.
    """
    means, _, observed = _regression(predictions, targets)
    return float(np.sqrt(np.mean((observed - means.mean(axis=0)) ** 2)))


def probability_integral_transform(predictions: ArrayLike, targets: ArrayLike) -> Array:
    """u = 1/S Σ_s Φ((y - m_s) / σ_s), the mixture's distribution function at the observed target.

    Uniform on [0, 1] if the targets follow the predictive distribution.
    Source: Gneiting, Balabdaoui and Raftery (2007), "Probabilistic forecasts, calibration and
    sharpness".
    `predictions (draws, rows, 2 * targets)` and `targets (rows, targets)` give `(rows, targets)`.
    """
    means, deviations, observed = _regression(predictions, targets)
    return np.asarray(special.ndtr((observed - means) / deviations).mean(axis=0))


def interval_coverage(transform: ArrayLike, level: float) -> float:
    """Fraction of targets within the central predictive interval of probability `level`.

    The interval between the mixture's quantiles (1 ± level) / 2 holds y iff |u - 1/2| ≤ level / 2,
    so no quantile of the mixture has to be solved for. With several targets, each is one count.
    `transform` is u of `probability_integral_transform`, of any shape; `level` is in [0, 1].
    """
    distance = np.abs(np.asarray(transform, np.float64) - 0.5)
    return float(np.mean(np.where(np.isnan(distance), np.nan, distance <= level / 2)))


# A diverged run has infinities; they belong in the numbers returned, not in a warning each.
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _row_statistics(
    task: str, predictions: ArrayLike, log_likelihoods: ArrayLike, targets: ArrayLike
) -> dict[str, Array]:
    """What the metrics need to know of each row, once the draws are averaged out."""
    if task not in TASKS:
        raise errors.unknown_name("task", task, TASKS)
    predictions, log_likelihoods = np.asarray(predictions), np.asarray(log_likelihoods)
    if predictions.ndim != 3 or 0 in predictions.shape:
        raise errors.UserError(
            f"Predictions must be (draws, rows, outputs) and not empty, not {predictions.shape}."
        )
    if log_likelihoods.shape != predictions.shape[:2]:
        raise errors.UserError(
            f"Log-likelihoods of shape {log_likelihoods.shape} do not belong to predictions of "
            f"shape {predictions.shape}: they must be (draws, rows)."
        )
    log_density = log_mean_exp(log_likelihoods, axis=0)
    if task == "classification":
        return {
            "log_density": log_density,
            "mean": predictions.mean(axis=0, dtype=np.float64),
            "aleatoric": _mean_draw_entropy(predictions),
            "epistemic": mutual_information(predictions),
        }
    means, deviations, observed = _regression(predictions, targets)
    return {
        "log_density": log_density,
        "mean": means.mean(axis=0),
        "transform": probability_integral_transform(predictions, observed),
        "aleatoric": np.sqrt(np.mean(deviations**2, axis=0)),
        "epistemic": means.std(axis=0),
    }


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _summarise(task: str, rows: dict[str, Array], targets: ArrayLike) -> dict[str, float]:
    """The metrics of `evaluate` from statistics of all rows."""
    mean, epistemic = rows["mean"], float(np.mean(rows["epistemic"]))
    shared = {
        "nll": -float(np.mean(rows["log_density"])),
        "aleatoric": float(np.mean(rows["aleatoric"])),
        "epistemic": epistemic,
        "disagreement": epistemic,
    }
    if task == "classification":
        return shared | {
            "accuracy": accuracy(mean, targets),
            "ece": expected_calibration_error(mean, targets),
            "ece_equal_mass": expected_calibration_error(mean, targets, equal_mass=True),
            "brier": brier_score(mean, targets),
            "entropy": float(np.mean(entropy(mean))),
        }
    coverage = {
        f"coverage_{round(100 * level)}": interval_coverage(rows["transform"], level)
        for level in COVERAGE_LEVELS
    }
    error = np.asarray(targets, np.float64) - mean
    return shared | coverage | {"rmse": float(np.sqrt(np.mean(error**2)))}


def _mean_draw_entropy(probabilities: NDArray) -> Array:
    # One draw at a time: a float64 copy of every draw would double the largest array of a run.
    return np.mean([entropy(draw) for draw in probabilities], axis=0)


def _correct(probabilities: Array, targets: NDArray) -> Array:
    # argmax picks the NaN of a row that has one, which would count as an ordinary right or wrong.
    hit = (probabilities.argmax(axis=1) == targets).astype(np.float64)
    return np.where(np.isnan(probabilities).any(axis=1), np.nan, hit)


# Without these checks, (rows,) against (rows, 1) would broadcast to (rows, rows) and be averaged.
def _classification(probabilities: ArrayLike, targets: ArrayLike) -> tuple[Array, NDArray]:
    probabilities, targets = np.asarray(probabilities, np.float64), np.asarray(targets)
    if probabilities.ndim != 2 or targets.shape != probabilities.shape[:1]:
        raise errors.UserError(
            f"Targets of shape {targets.shape} do not belong to mean class probabilities of shape "
            f"{probabilities.shape}: they must be (rows,) and (rows, classes)."
        )
    return probabilities, targets


def _regression(predictions: ArrayLike, targets: ArrayLike) -> tuple[Array, Array, Array]:
    predictions = np.asarray(predictions, np.float64)
    targets = np.asarray(targets, np.float64)
    *_, rows, outputs = (0, 0, *predictions.shape)
    if predictions.ndim != 3 or targets.shape != (rows, outputs / 2):
        raise errors.UserError(
            f"Targets of shape {targets.shape} do not belong to predictions of shape "
            f"{predictions.shape}: they must be (rows, targets) and (draws, rows, 2 * targets)."
        )
    means, deviations = np.split(predictions, 2, axis=-1)
    return means, deviations, targets
