"""Posterior predictive checks on rows with known targets, and Monte Carlo errors of predictions.

Regression: the probability integral transform u of a target under its predictive distribution is
uniform if the targets follow it (`metrics.probability_integral_transform`). Its largest distance
from uniform is the statistic D of Kolmogorov and Smirnov, and the share of targets in central
intervals of a stated probability is their coverage. Classification: with c_n the confidence in the
predicted class, the number of right answers has mean sum c_n and variance sum c_n (1 - c_n) if the
probabilities are right.

p-values take the rows as independent and the predictions as known: a small one says that the model
does not fit, a large one does not say that it does.

Monte Carlo error: the mean over draws of a prediction at a row has a standard error of its own,
std / sqrt(ESS), since draws are finite and those of a chain are correlated.

A posterior that fell back to its prior, as variational ones do where the divergence from the prior
outweighs what the rows have to say, predicts about the same everywhere, and no better than the one
distribution that fits all targets best: class frequencies, or a Gaussian of their moments.
"""

from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats

from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.judging.chain_statistics import effective_sample_size, halve_chains
from haiku_posteriors.core.judging.predictions import Predictions, evenly

MAX_QUANTITIES = 500  # predictions whose Monte Carlo errors are computed
MIN_DRAWS_PER_CHAIN = 8  # of which autocorrelations can be told
LEAST_VARIATION = 0.05  # of mean predictions over rows, as a share of the targets' variance


class MonteCarloError(NamedTuple):
    """Standard errors of mean predictions.

    Attributes:
      median, largest: over rows and outputs, in the units of the predictions.
      largest_share: the largest share of a prediction's standard deviation over draws.
    """

    median: float
    largest: float
    largest_share: float


class AgainstConstant(NamedTuple):
    """A predictive distribution beside the best one that is the same for all rows.

    Attributes:
      nll: of the mixture over draws.
      constant_nll: of the other.
      gain: their difference, positive where inputs help.
      gain_error: its standard error over rows.
      variation: variance of mean predictions over rows, as a share of the targets' variance.
    """

    nll: float
    constant_nll: float
    gain: float
    gain_error: float
    variation: float

    @property
    def is_constant(self) -> bool:
        """Whether predictions hardly depend on the inputs, and nothing is gained by it."""
        return self.variation < LEAST_VARIATION and self.gain <= 2 * self.gain_error


def against_constant(predictions: Predictions) -> AgainstConstant:
    """Compares on rows with targets, to which the constant is fitted."""
    targets = predictions.targets
    assert targets is not None
    mean = predictions.flat_outputs.mean(axis=0, dtype=np.float64)
    if predictions.task == "classification":
        seen = np.eye(mean.shape[1])[targets]
        # Rounded probabilities of 0 are those of classes that no row has.
        constant = np.log(np.maximum(seen.mean(axis=0), 1e-300))[targets]
    else:
        seen, mean = targets.astype(np.float64), mean[:, : targets.shape[1]]
        deviation = np.maximum(seen.std(axis=0), 1e-300)
        constant = scipy.stats.norm.logpdf(seen, seen.mean(axis=0), deviation).sum(axis=1)
    own = metrics.log_mean_exp(predictions.flat_log_likelihoods)
    gains = own - constant
    spread = np.sum(seen.var(axis=0))
    return AgainstConstant(
        -float(own.mean()),
        -float(constant.mean()),
        float(gains.mean()),
        float(gains.std() / np.sqrt(len(gains))),
        float(np.sum(mean.var(axis=0)) / spread) if spread > 0 else 0.0,
    )


def check(predictions: Predictions) -> dict[str, float]:
    """The checks of a task on rows with targets, by name.

    Regression: `pit_distance` D, `pit_p_value`, and `coverage_50`, `coverage_90`, `coverage_95`.
    Classification: `accuracy_expected`, `accuracy_observed`, and the `p_value` of their difference.
    """
    targets = predictions.targets
    assert targets is not None
    if predictions.task == "regression":
        transform = metrics.probability_integral_transform(predictions.flat_outputs, targets)
        test = scipy.stats.kstest(transform.ravel(), "uniform")
        coverages = {
            f"coverage_{round(100 * level)}": metrics.interval_coverage(transform, level)
            for level in metrics.COVERAGE_LEVELS
        }
        return {
            "pit_distance": float(test.statistic),
            "pit_p_value": float(test.pvalue),
            **coverages,
        }
    mean = predictions.flat_outputs.mean(axis=0, dtype=np.float64)
    confidence = np.minimum(mean.max(axis=1), 1.0)
    observed = metrics.accuracy(mean, targets)
    variance = np.sum(confidence * (1 - confidence))
    excess = len(targets) * (observed - confidence.mean())
    z = abs(excess) / np.sqrt(variance) if variance > 0 else (0.0 if excess == 0 else np.inf)
    return {
        "accuracy_expected": float(confidence.mean()),
        "accuracy_observed": observed,
        "p_value": float(2 * scipy.special.ndtr(-z)),
    }


def monte_carlo_error(predictions: Predictions) -> MonteCarloError | None:
    """Errors of mean predictions (means in regression) by finite draws.

    None where no error can be told: for one draw, or for chains too short.
    """
    outputs = predictions.outputs
    if predictions.task == "regression":
        outputs = outputs[..., : outputs.shape[-1] // 2]
    chains, draws = outputs.shape[:2]
    values = outputs.reshape(chains, draws, -1)
    values = values[:, :, evenly(values.shape[2], MAX_QUANTITIES)].astype(np.float64)
    if draws < MIN_DRAWS_PER_CHAIN:
        return None
    deviation = values.std(axis=(0, 1), ddof=1)
    varying = deviation > 0
    if not varying.any():
        return None
    sizes = effective_sample_size(halve_chains(values[:, :, varying]))
    errors = deviation[varying] / np.sqrt(sizes)
    shares = errors / deviation[varying]
    return MonteCarloError(float(np.median(errors)), float(errors.max()), float(shares.max()))
