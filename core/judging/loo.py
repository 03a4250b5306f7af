"""Expected log predictive density of new rows (elpd), from the training rows alone.

Of log-likelihoods l[s, i] = log p(y_i | x_i, w_s) of N training rows under S posterior draws:

    elpd = sum_i log p(y_i | x_i, D without i),  estimated in two ways

    PSIS-LOO  log sum_s v[s, i] exp(l[s, i]) / sum_s v[s, i],   v = exp(-l / T), Pareto-smoothed
    WAIC      log mean_s exp(l[s, i]) - Var_s l[s, i]

(Vehtari, Gelman & Gabry 2017, arXiv 1507.04544.) Leaving a row out divides p_T(w | D), at a
temperature T, by p(y_i | x_i, w)^(1/T): the raw importance weights v. Their tail, the largest
M = min(S / 5, 3 sqrt(S / r)) with r the draws' relative efficiency, is replaced by quantiles of a
generalised Pareto distribution fitted to it (Vehtari, Simpson, Gelman, Yao & Gabry 2024, JMLR 25,
arXiv 1507.02646). The fitted shape k says whether that is to be trusted: below
min(1 - 1 / log10 S, 0.7) the estimate is good; above it the row has more influence than the draws
can show. WAIC has no such sign, except that its variance exceeds 0.4.

The draws must be the posterior's. Of an approximation q, the same numbers say how well q would do
if leaving a row out changed it as it changes the posterior.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.judging.chain_statistics import effective_sample_size, halve_chains

Array = NDArray[np.float64]

MIN_TAIL = 5  # fewer values do not tell a shape
MIN_DRAWS = 25  # of which a fifth is a tail
WAIC_VARIANCE_LIMIT = 0.4
ROWS_AT_ONCE = 1000  # bounds memory, not results


class Elpd(NamedTuple):
    """An estimate of the elpd.

    Attributes:
      value: the sum over rows; the larger the better.
      error: its standard error over rows, sqrt(N Var_i).
      num_effective: the effective number of parameters: what the same rows in training were worth.
      by_row: (rows,), the terms of the sum.
      pareto_k: (rows,), the fitted shapes; for WAIC, the variances that are to be below 0.4.
      limit: above which a row's `pareto_k` says that its term is not to be trusted.
    """

    value: float
    error: float
    num_effective: float
    by_row: Array
    pareto_k: Array
    limit: float

    @property
    def num_doubtful(self) -> int:
        """Rows whose terms are not to be trusted."""
        return int(np.sum(~(self.pareto_k <= self.limit)))


def loo(
    log_likelihoods: ArrayLike,
    relative_efficiency: float | None = None,
    temperature: float = 1.0,
) -> Elpd:
    """The elpd by Pareto-smoothed importance sampling.

    Args:
      log_likelihoods: (chains, draws, rows), of training rows, not tempered.
      relative_efficiency: effective over actual number of draws; that of the likelihoods, averaged
        over rows, by default.
      temperature: T of the posterior that was drawn from.

    Returns:
      The estimate.

    Example:

      >>> import numpy as np
      >>> from haiku_posteriors.core.judging.loo import loo
      >>> draws = np.random.default_rng(0).normal(size=(4, 250, 1))
      >>> targets = np.array([0.3, -0.5, 1.2])
      >>> log_likelihoods = -0.5 * (targets - 0.5 * draws) ** 2 - 0.5 * np.log(2 * np.pi)
      >>> found = loo(log_likelihoods)
      >>> found.num_doubtful
      0
    """
    values = _checked(log_likelihoods)
    check_positive(temperature=temperature)
    efficiency = relative_efficiency
    if efficiency is None:
        efficiency = likelihood_efficiency(values)
    flat = values.reshape(-1, values.shape[2])
    by_row, shapes = np.empty(flat.shape[1]), np.empty(flat.shape[1])
    for row in range(flat.shape[1]):
        weights, shapes[row] = smooth_weights(-flat[:, row] / temperature, efficiency)
        by_row[row] = special.logsumexp(weights + flat[:, row])
    limit = min(1 - 1 / math.log10(len(flat)), 0.7)
    return _summarise(by_row, flat, shapes, limit)


def waic(log_likelihoods: ArrayLike) -> Elpd:
    """The elpd by the widely applicable information criterion (Watanabe 2010), at temperature 1.

    Args:
      log_likelihoods: (chains, draws, rows), of training rows.
    """
    values = _checked(log_likelihoods)
    flat = values.reshape(-1, values.shape[2])
    variances = flat.var(axis=0)
    return _summarise(_log_mean_exp(flat) - variances, flat, variances, WAIC_VARIANCE_LIMIT)


def difference(first: Elpd, second: Elpd) -> tuple[float, float]:
    """elpd of the first minus that of the second, on the same rows, and its standard error.

    Rows that are hard for one are hard for the other: the error is that of the paired differences.
    """
    if first.by_row.shape != second.by_row.shape:
        raise UserError(
            f"Runs on {len(first.by_row)} and {len(second.by_row)} training rows have no paired "
            "differences."
        )
    terms = first.by_row - second.by_row
    return float(terms.sum()), _error_of_sum(terms)


def smooth_weights(log_ratios: Array, relative_efficiency: float = 1.0) -> tuple[Array, float]:
    """Normalised log-weights whose tail is smoothed, and the shape k that was fitted to it.

    k is infinite where the tail is too short, or all of one value, to be fitted; the weights are
    then as they are.
    """
    weights = log_ratios - log_ratios.max()
    count = len(weights)
    tail_length = math.ceil(min(0.2 * count, 3 * math.sqrt(count / relative_efficiency)))
    shape = math.inf
    if tail_length >= MIN_TAIL:
        order = np.argsort(weights, kind="stable")
        tail = order[-tail_length:]
        # Below what float64 tells from 0, exceedances would be differences of rounding errors.
        cutoff = max(weights[order[-tail_length - 1]], math.log(np.finfo(np.float64).tiny))
        tail = tail[weights[tail] > cutoff]
        exceedances = np.exp(weights[tail]) - math.exp(cutoff)
        if len(tail) >= MIN_TAIL and exceedances[-1] > exceedances[0]:
            shape, scale = fit_generalised_pareto(exceedances)
            if math.isfinite(shape):
                levels = (np.arange(len(tail)) + 0.5) / len(tail)
                quantiles = _pareto_quantiles(levels, shape, scale) + math.exp(cutoff)
                # No weight may exceed the largest raw one, which is 1 here.
                weights = weights.copy()
                weights[tail] = np.minimum(np.log(quantiles), 0.0)
    return weights - special.logsumexp(weights), shape


def fit_generalised_pareto(exceedances: Array) -> tuple[float, float]:
    """Shape and scale of a generalised Pareto distribution, from sorted values above 0.

    The posterior mean of theta = -k / sigma on a grid under the empirical prior of Zhang & Stephens
    (2009, Technometrics 51), and the shape that maximises the likelihood given theta; then, as in
    arXiv 1507.02646, appendix C, the shape is drawn towards 1/2 as if by ten further values.
    """
    count = len(exceedances)
    num_points = 30 + math.isqrt(count)
    quartile = exceedances[math.floor(count / 4 + 0.5) - 1]
    positions = np.arange(1, num_points + 1) - 0.5
    theta = 1 / exceedances[-1] + (1 - np.sqrt(num_points / positions)) / (3 * quartile)
    shapes = np.log1p(-theta[:, None] * exceedances).mean(axis=1)
    profile = count * (np.log(-theta / shapes) - shapes - 1)
    weights = special.softmax(profile)
    kept = weights >= 10 * np.finfo(np.float64).eps
    mean_theta = float(np.sum(theta[kept] * weights[kept]) / np.sum(weights[kept]))
    shape = float(np.log1p(-mean_theta * exceedances).mean())
    scale = -shape / mean_theta
    return (count * shape + 10 * 0.5) / (count + 10), scale


def likelihood_efficiency(log_likelihoods: Array) -> float:
    """Effective over actual number of draws of the likelihoods, averaged over rows.

    1 where there are too few draws to tell.
    """
    chains, draws, rows = log_likelihoods.shape
    if draws < 8:
        return 1.0
    found = []
    for first in range(0, rows, ROWS_AT_ONCE):
        part = log_likelihoods[:, :, first : first + ROWS_AT_ONCE]
        likelihoods = np.exp(part - part.max(axis=(0, 1)))
        found.append(effective_sample_size(halve_chains(likelihoods)) / (chains * draws))
    known = np.concatenate(found)
    known = known[np.isfinite(known)]
    return float(known.mean()) if known.size else 1.0


def _pareto_quantiles(levels: Array, shape: float, scale: float) -> Array:
    if shape == 0:
        return -scale * np.log1p(-levels)
    return scale * np.expm1(-shape * np.log1p(-levels)) / shape


def _summarise(by_row: Array, flat: Array, shapes: Array, limit: float) -> Elpd:
    value = float(by_row.sum())
    in_training = float(_log_mean_exp(flat).sum())
    return Elpd(value, _error_of_sum(by_row), in_training - value, by_row, shapes, limit)


def _error_of_sum(terms: Array) -> float:
    return float(np.sqrt(len(terms) * np.var(terms)))


def _log_mean_exp(flat: Array) -> Array:
    return np.asarray(special.logsumexp(flat, axis=0) - math.log(len(flat)))


def _checked(log_likelihoods: ArrayLike) -> Array:
    values = np.asarray(log_likelihoods, np.float64)
    if values.ndim != 3 or values.shape[0] * values.shape[1] < MIN_DRAWS or not values.size:
        raise UserError(
            f"Leaving rows out needs log-likelihoods (chains, draws, rows) of at least {MIN_DRAWS} "
            f"draws, not of shape {values.shape}."
        )
    if not np.isfinite(values).all():
        raise UserError("The log-likelihoods are not all finite.")
    return values
