"""How predictions get better with the number of draws that are mixed.

Of k draws chosen at random without replacement from those of a run, the NLL and the accuracy (or
root mean square error) of their mixture, on average over REPEATS choices. Accuracy is saturated
after a few draws, while the NLL goes on falling: its expectation falls with every draw (Jensen).
"""

import numpy as np
from scipy.special import logsumexp

from haiku_posteriors.core.judging.predictions import Predictions

REPEATS = 10
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def scores_by_count(predictions: Predictions, seed: int = 0) -> dict[str, np.ndarray]:
    """`draws`, `nll` and `accuracy` or `rmse`, (numbers of draws,) each; the targets are known."""
    outputs, log_likelihoods = predictions.flat_outputs, predictions.flat_log_likelihoods
    targets, total = np.asarray(predictions.targets), len(outputs)
    is_classification = predictions.task == "classification"
    counts = sorted({*(count for count in COUNTS if count < total), min(total, COUNTS[-1])})
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {"nll": [], "accuracy" if is_classification else "rmse": []}
    for count in counts:
        values = []
        for _ in range(1 if count == total else REPEATS):
            chosen = rng.permutation(total)[:count]
            nll = -np.mean(logsumexp(log_likelihoods[chosen], axis=0) - np.log(count))
            mean = outputs[chosen].mean(axis=0)
            if is_classification:
                score = np.mean(mean.argmax(axis=1) == targets)
            else:
                score = np.sqrt(np.mean((mean[:, : targets.shape[1]] - targets) ** 2))
            values.append((nll, score))
        for name, value in zip(found, np.mean(values, axis=0), strict=True):
            found[name].append(float(value))
    return {"draws": np.array(counts), **{name: np.array(v) for name, v in found.items()}}
