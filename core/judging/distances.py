"""How far two posteriors are apart, by their draws or by their mean predictions.

Draws are on the leading axis throughout, and everything is computed on the host in float64. Two
finite sets of draws of the *same* distribution are not at distance zero: W1 between n and m draws,
for one, is of order sqrt(1/n + 1/m) standard deviations. `core.judging.floors` therefore sets
every distance beside one between draws of the reference alone, in equal numbers.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from haiku_posteriors.core.errors import UserError

Array = NDArray[np.float64]

BLOCK_SIZE = 2**22  # values sorted at once, so that memory does not grow with the quantities
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)


def function_values(task: str, outputs: ArrayLike) -> Array:
    """The function that each draw is, at each row; (draws, rows, p) to (draws, rows, k).

    Regression: the network's means. Classification: log p_k - 1/K Σ_j log p_j, the logits up to the
    constant that the softmax forgets. A logit has a spread where its probability has saturated; a
    probability that float32 has rounded to 0 counts as its smallest normal number, 1e-38.
    """
    outputs = np.asarray(outputs)
    if task == "regression":
        return outputs[..., : outputs.shape[-1] // 2].astype(np.float64)
    logits = np.log(np.maximum(outputs.astype(np.float64), SMALLEST_PROBABILITY))
    return logits - logits.mean(axis=-1, keepdims=True)


def wasserstein(first: ArrayLike, second: ArrayLike) -> Array:
    """W1 = ∫ |F⁻¹(u) - G⁻¹(u)| du of the draws of each quantity; (draws, ...) twice to (...).

    The two may have different numbers of draws. Both quantile functions are constant between the
    multiples of 1/n and of 1/m, which are the same for all quantities: no loop over them is needed.
    """
    first, second = np.asarray(first), np.asarray(second)
    if first.shape[1:] != second.shape[1:] or 0 in (*first.shape, *second.shape):
        raise UserError(
            f"Draws of shapes {first.shape} and {second.shape} cannot be compared: all axes but "
            "the first must be equal, and none empty."
        )
    n, m = len(first), len(second)
    # Whole numbers in units of 1/(n m), so that equal steps of both meet exactly.
    steps = np.unique(np.concatenate([np.arange(n + 1) * m, np.arange(m + 1) * n]))
    weights = np.diff(steps) / (n * m)
    in_first, in_second = steps[:-1] // m, steps[:-1] // n
    flat = first.reshape(n, -1), second.reshape(m, -1)
    result = np.empty(flat[0].shape[1])
    width = max(1, BLOCK_SIZE // len(weights))
    for start in range(0, len(result), width):
        block = slice(start, start + width)
        ours, theirs = (np.sort(part[:, block].astype(np.float64), axis=0) for part in flat)
        result[block] = weights @ np.abs(ours[in_first] - theirs[in_second])
    return result.reshape(first.shape[1:])


def standard_deviation(draws: ArrayLike) -> Array:
    """Over draws, with n - 1: what few draws miss of a variance is not taken for narrowness."""
    return np.asarray(np.std(np.asarray(draws, np.float64), axis=0, ddof=1))


def log_ratio(first: Array, second: Array) -> Array:
    """log(first / second), with -inf where draws are copies, and NaN where the second's are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(second > 0, np.log(first) - np.log(second), np.nan)


def correlation_error(first: ArrayLike, second: ArrayLike) -> float:
    """Root mean square of the differences of all correlations of two quantities.

    Both are (draws, quantities). Quantities that do not vary in either have no correlation and are
    left out; NaN if fewer than two are left.
    """
    parts = [np.asarray(part, np.float64) for part in (first, second)]
    varies = np.all([np.ptp(part, axis=0) > 0 for part in parts], axis=0)
    if varies.sum() < 2 or min(map(len, parts)) < 3:
        return float("nan")
    ours, theirs = (np.asarray(np.corrcoef(part[:, varies], rowvar=False)) for part in parts)
    above = np.triu_indices(len(ours), k=1)
    return float(np.sqrt(np.mean((ours - theirs)[above] ** 2)))


def agreement(first: ArrayLike, second: ArrayLike) -> float:
    """Fraction of rows where two mean predictions name the same most probable class.

    Both are `(rows, classes)`, averaged over draws. Source: Izmailov et al. (2021),
    arXiv:2104.14421.
    """
    return float(np.mean(agreements(first, second)))


def agreements(first: ArrayLike, second: ArrayLike) -> Array:
    """`agreement` of each row, 0 or 1; `(rows,)`."""
    first, second = _pair(first, second)
    same = (first.argmax(axis=1) == second.argmax(axis=1)).astype(np.float64)
    return np.where(np.isnan(first + second).any(axis=1), np.nan, same)


def total_variation(first: ArrayLike, second: ArrayLike) -> float:
    """1/N Σ_n 1/2 Σ_k |p_nk - q_nk|, between 0 and 1, of two mean predictions.

    Both are `(rows, classes)`, averaged over draws. Source: Izmailov et al. (2021),
    arXiv:2104.14421.
    """
    return float(np.mean(total_variations(first, second)))


def total_variations(first: ArrayLike, second: ArrayLike) -> Array:
    """`total_variation` of each row; `(rows,)`."""
    first, second = _pair(first, second)
    return np.asarray(0.5 * np.abs(first - second).sum(axis=1))


def _pair(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.ndim != 2 or first.shape != second.shape:
        raise UserError(
            f"Mean predictions of shapes {first.shape} and {second.shape} cannot be compared: both "
            "must be (rows, classes) of the same rows."
        )
    return first, second
