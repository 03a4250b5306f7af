"""Does uncertainty know where the network is wrong? Detection of foreign inputs, and abstention.

Pure functions of host arrays. A score is an uncertainty: the higher, the less sure.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics

Array = NDArray[np.float64]


def scores(task: str, outputs: NDArray) -> dict[str, Array]:
    """Uncertainties of each row, from draws (draws, rows, p).

    Classification: `entropy` of the mean prediction, `one_minus_confidence`, and `epistemic`, the
    mutual information of label and weights. Regression: `total`, the standard deviation of a new
    observation, and `epistemic`, that of the draws' means; averaged over targets.
    """
    if task == "classification":
        mean = outputs.mean(axis=0, dtype=np.float64)
        return {
            "entropy": metrics.entropy(mean),
            "one_minus_confidence": 1 - mean.max(axis=1),
            "epistemic": metrics.mutual_information(outputs),
        }
    means, deviations = np.split(outputs.astype(np.float64), 2, axis=-1)
    total = np.sqrt(means.var(axis=0) + np.mean(deviations**2, axis=0))
    return {"total": total.mean(axis=1), "epistemic": means.std(axis=0).mean(axis=1)}


def auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """P(a foreign row scores higher than an ordinary one), ties counting half.

    The area under the receiver operating characteristic; 1/2 is chance. `inside` and `outside`
    are the scores of ordinary and of foreign rows.
    """
    inside, outside = _two_samples(inside, outside)
    ranks = stats.rankdata(np.concatenate([inside, outside]))[len(inside) :]
    pairs = len(inside) * len(outside)
    return float((ranks.sum() - len(outside) * (len(outside) + 1) / 2) / pairs)


def false_positive_rate(inside: ArrayLike, outside: ArrayLike, kept: float = 0.95) -> float:
    """Share of foreign rows that pass when the threshold lets `kept` of the ordinary ones pass.

    FPR95 of the literature, where an ordinary row is the positive. The threshold is the lowest
    score below or at which at least that share of `inside` lies.
    """
    inside, outside = _two_samples(inside, outside)
    threshold = np.sort(inside)[int(np.ceil(kept * len(inside))) - 1]
    return float(np.mean(outside <= threshold))


def risk_coverage(uncertainty: ArrayLike, losses: ArrayLike) -> tuple[Array, Array]:
    """Mean loss of the surest rows, for every number of them kept.

    Rows of equal uncertainty share their mean loss, so that the order of the rows does not matter.

    Returns:
      Coverage k / n and risk, both (rows,), from the surest row to all of them.
    """
    uncertainty, losses = _two_samples(uncertainty, losses)
    if len(uncertainty) != len(losses):
        raise UserError(f"{len(uncertainty)} uncertainties do not belong to {len(losses)} losses.")
    _, group = np.unique(uncertainty, return_inverse=True)
    shared = (np.bincount(group, weights=losses) / np.bincount(group))[group]
    order = np.argsort(uncertainty, kind="stable")
    count = np.arange(1, len(losses) + 1)
    return count / len(losses), np.cumsum(shared[order]) / count


def area_under_risk_coverage(uncertainty: ArrayLike, losses: ArrayLike) -> float:
    """Mean of the risk over all coverages; lower is better."""
    return float(np.mean(risk_coverage(uncertainty, losses)[1]))


def losses_of_rows(task: str, outputs: NDArray, targets: NDArray) -> Array:
    """Zero-one loss of the mean prediction, or squared error of the mean; (rows,)."""
    mean = outputs.mean(axis=0, dtype=np.float64)
    if task == "classification":
        return (mean.argmax(axis=1) != targets).astype(np.float64)
    return np.mean((mean[:, : targets.shape[1]] - targets) ** 2, axis=1)


def _two_samples(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    first, second = (np.asarray(values, np.float64) for values in (first, second))
    if first.ndim != 1 or second.ndim != 1 or not first.size or not second.size:
        raise UserError(f"Two lists of numbers are needed, not {first.shape} and {second.shape}.")
    return first, second
