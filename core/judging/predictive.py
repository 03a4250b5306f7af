"""The predictive distribution of new rows: the equal mixture over draws, in the units of y.

    p(y | x) = 1/S Σ_s p(y | x, w_s)

Pure functions of host arrays, computed in float64. Moments are the mixture's (law of total
variance), quantiles are those of the mixture itself and not of a Gaussian with its moments.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics

Array = NDArray[np.float64]

MAX_ITERATIONS = 200
TOLERANCE = 1e-12  # of the bracket at the start


@dataclasses.dataclass(frozen=True)
class Predictive:
    """What a run says of rows.

    Attributes:
      task: "classification" or "regression".
      outputs: (draws, rows, p): class probabilities, or means and then standard deviations.
      classes: names of the classes.
      target_names: names of the targets, where they have some.
    """

    task: str
    outputs: NDArray
    classes: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()

    @functools.cached_property
    def mean(self) -> Array:
        """E[y], (rows, targets), of regression; class probabilities (rows, classes) otherwise."""
        return self._means.mean(axis=0, dtype=np.float64)

    @functools.cached_property
    def std(self) -> Array:
        """Standard deviation of a new observation, (rows, targets): the square root of the
        aleatoric variance plus the epistemic one."""
        return np.hypot(self.aleatoric_std, self.epistemic_std)

    @functools.cached_property
    def aleatoric_std(self) -> Array:
        """Root of the draws' mean noise variance, (rows, targets)."""
        return np.sqrt(np.mean(np.square(self._stds, dtype=np.float64), axis=0))

    @functools.cached_property
    def epistemic_std(self) -> Array:
        """Standard deviation over draws of their means, (rows, targets)."""
        self._check_task("regression", "standard deviations")
        return self._means.std(axis=0, dtype=np.float64)

    def quantile(self, level: float | Sequence[float]) -> Array:
        """The mixture's quantiles, (rows, targets), or (levels, rows, targets) for several."""
        found = mixture_quantiles(self._means, self._stds, np.atleast_1d(level))
        return found[0] if np.ndim(level) == 0 else found

    @property
    def probabilities(self) -> Array:
        """Class probabilities of the mixture, (rows, classes)."""
        self._check_task("classification", "class probabilities")
        return self.mean

    @functools.cached_property
    def labels(self) -> NDArray[np.str_]:
        """Names of the most probable classes, (rows,)."""
        return np.array(self.classes)[self.probabilities.argmax(axis=1)]

    @functools.cached_property
    def entropy(self) -> Array:
        """Entropy of the class probabilities in nats, (rows,)."""
        return metrics.entropy(self.probabilities)

    @functools.cached_property
    def mutual_information(self) -> Array:
        """Mutual information of label and weights in nats, (rows,): the epistemic part of it."""
        self._check_task("classification", "mutual information")
        return metrics.mutual_information(self.outputs)

    @property
    def functions(self) -> NDArray:
        """The network's function in every draw, (draws, rows, targets or classes)."""
        return self._means

    @property
    def _means(self) -> NDArray:
        if self.task == "classification":
            return self.outputs
        return self.outputs[..., : self.outputs.shape[-1] // 2]

    @property
    def _stds(self) -> NDArray:
        self._check_task("regression", "standard deviations and quantiles")
        return self.outputs[..., self.outputs.shape[-1] // 2 :]

    def _check_task(self, task: str, what: str) -> None:
        if self.task != task:
            raise UserError(f"A prediction of {self.task} has no {what}; these are of {task}.")


def mixture_quantiles(means: ArrayLike, stds: ArrayLike, levels: ArrayLike) -> Array:
    """Quantiles of 1/S Σ_s N(m_s, σ_s²): y with 1/S Σ_s Φ((y - m_s) / σ_s) = q.

    The components' own quantiles enclose the mixture's. The bracket is halved, or a Newton step is
    made where that shrinks it faster (as in "rtsafe" of Press et al., Numerical Recipes).

    Args:
      means: (draws, ...).
      stds: (draws, ...), positive.
      levels: (levels,), each strictly between 0 and 1.

    Returns:
      (levels, ...).

    Example:

      >>> mixture_quantiles([[-1.0], [1.0]], [[0.1], [0.1]], [0.25, 0.5]).round(6).tolist()
      [[-1.0], [0.0]]
    """
    means, stds = (np.asarray(values, np.float64) for values in (means, stds))
    levels = np.asarray(levels, np.float64)
    if not (levels.size and np.all((levels > 0) & (levels < 1))):
        raise UserError(f"Quantiles are of levels between 0 and 1, not {levels.tolist()}.")
    return np.stack([_one_quantile(means, stds, level) for level in levels])


def _one_quantile(means: Array, stds: Array, level: float) -> Array:
    own = means + stds * special.ndtri(level)
    low, high = own.min(axis=0), own.max(axis=0)
    tolerance = TOLERANCE * (high - low)
    quantile = (low + high) / 2
    step = before = high - low
    for _ in range(MAX_ITERATIONS):
        standardized = (quantile - means) / stds
        excess = special.ndtr(standardized).mean(axis=0) - level
        density = (np.exp(-0.5 * standardized**2) / stds).mean(axis=0) / np.sqrt(2 * np.pi)
        low = np.where(excess < 0, quantile, low)
        high = np.where(excess < 0, high, quantile)
        with np.errstate(divide="ignore", invalid="ignore"):
            newton = quantile - excess / density
        # A step must halve the one before the last, or the bracket is halved instead.
        good = (newton >= low) & (newton <= high) & (2 * np.abs(newton - quantile) <= before)
        following = np.where(good, newton, (low + high) / 2)
        before, step = step, np.abs(following - quantile)
        quantile = following
        if np.all(step <= tolerance):
            break
    return quantile
