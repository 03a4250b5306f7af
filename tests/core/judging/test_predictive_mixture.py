"""The predictive mixture: its quantiles, moments and information against independent numbers."""

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.judging.predictive import Predictive, mixture_quantiles

LEVELS = (0.001, 0.06, 0.51, 0.83, 0.999)  # no multiples of 1 / 40, where quantiles are not unique


def mixtures(seed=0):
    """Components that overlap, lie far apart, differ by decades of width, or are all the same."""
    rng = np.random.default_rng(seed)
    means = rng.normal(0, 1, (40, 6)) * np.array([1, 100, 1e-3, 1e4, 1, 0])
    stds = np.exp(rng.normal(0, 1, (40, 6))) * np.array([1, 0.01, 1, 1, 1e-3, 0]) + 1e-3
    means[:, 4] = np.where(np.arange(40) < 10, -50.0, 3.0)  # a gap without mass between two levels
    return means, stds


def test_quantiles_of_mixtures_are_those_of_a_root_finder():
    means, stds = mixtures()
    found = mixture_quantiles(means, stds, LEVELS)
    assert found.shape == (5, 6)
    for row in range(6):
        m, s = means[:, row], stds[:, row]
        for index, level in enumerate(LEVELS):

            def excess(y, m=m, s=s, level=level):
                return stats.norm.cdf((y - m) / s).mean() - level

            expected = optimize.brentq(excess, (m - 9 * s).min(), (m + 9 * s).max(), xtol=1e-13)
            assert found[index, row] == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_quantiles_between_modes_with_nothing_between_them_end():
    """At the level where the distribution function is flat, any point of the gap will do."""
    found = mixture_quantiles([[-1e3], [1e3]], [[1e-3], [1e-3]], [0.5])
    assert -1e3 < found[0, 0] < 1e3


def test_moments_are_those_of_the_mixtures_density():
    means, stds = (array[:, :1] for array in mixtures(1))
    outputs = np.stack([means, stds], axis=-1)  # (draws, rows, 2)
    predictive = Predictive("regression", outputs)

    def moment(power):
        def integrand(y):
            return (y - centre) ** power * stats.norm.pdf(y, means[:, 0], stds[:, 0]).mean()

        return integrate.quad(integrand, -60, 60, points=[-3, 0, 3], limit=500)[0]

    centre = 0.0
    assert predictive.mean[0, 0] == pytest.approx(moment(1), abs=1e-8)
    centre = predictive.mean[0, 0]
    assert predictive.std[0, 0] == pytest.approx(np.sqrt(moment(2)), rel=1e-7)
    total = predictive.aleatoric_std**2 + predictive.epistemic_std**2
    np.testing.assert_allclose(predictive.std**2, total)
    assert predictive.quantile(0.3).shape == (1, 1)
    assert predictive.quantile([0.3, 0.4]).shape == (2, 1, 1)


def test_classes():
    outputs = np.array([[[0.8, 0.2], [0.5, 0.5]], [[0.8, 0.2], [0.1, 0.9]]])
    predictive = Predictive("classification", outputs, ("no", "yes"))
    np.testing.assert_allclose(predictive.probabilities, [[0.8, 0.2], [0.3, 0.7]])
    assert predictive.labels.tolist() == ["no", "yes"]
    np.testing.assert_allclose(predictive.entropy, stats.entropy([[0.8, 0.2], [0.3, 0.7]], axis=1))
    own = (np.log(2) + stats.entropy([0.1, 0.9])) / 2
    expected = [0, stats.entropy([0.3, 0.7]) - own]
    np.testing.assert_allclose(predictive.mutual_information, expected, atol=1e-15)
    for name in ("std", "aleatoric_std", "epistemic_std"):
        with pytest.raises(UserError, match="of classification has no standard deviations"):
            getattr(predictive, name)
    with pytest.raises(UserError, match="quantiles; these are of regression"):
        predictive.quantile(0.5)
    with pytest.raises(UserError, match="has no class probabilities"):
        _ = Predictive("regression", outputs).probabilities


@pytest.mark.parametrize("levels", [[], [0.0], [0.5, 1.0], [-1], [np.nan]])
def test_levels_that_are_none(levels):
    with pytest.raises(UserError, match="levels between 0 and 1"):
        mixture_quantiles([[0.0]], [[1.0]], levels)


def test_several_targets_are_judged_each_alone():
    rng = np.random.default_rng(2)
    outputs = np.concatenate([rng.normal(size=(2, 5, 7, 2)), np.ones((2, 5, 7, 2))], axis=-1)
    targets = rng.normal(size=(7, 2))
    targets[:, 1] += 5
    found = metrics.by_target(Predictions("regression", outputs, None, targets))
    for index, one in enumerate(found):
        mean = outputs[..., index].reshape(10, 7)
        error = targets[:, index] - mean.mean(axis=0)
        assert one["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)))
        density = stats.norm.pdf(targets[:, index], mean).mean(axis=0)
        assert one["nll"] == pytest.approx(-np.log(density).mean())
