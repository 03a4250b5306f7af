"""Distances against SciPy, closed forms and hand arithmetic."""

import numpy as np
import pytest
from scipy import stats

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import distances


@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 7), (5, 3), (12, 8), (1, 9)])
def test_wasserstein_is_scipys_for_any_numbers_of_draws(n, m):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(n, 4, 2)), rng.normal(0.5, 2.0, size=(m, 4, 2))
    found = distances.wasserstein(first, second)
    expected = [
        [stats.wasserstein_distance(first[:, i, j], second[:, i, j]) for j in range(2)]
        for i in range(4)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_wasserstein_by_hand_and_in_blocks(monkeypatch):
    # {0, 1} against {0.5}: half a unit from each. {0, 0, 3} against {1, 2}: quantiles differ by
    # 1 on [0, 1/2], by 2 on [1/2, 2/3], by 1 on [2/3, 1].
    assert distances.wasserstein([[0.0], [1.0]], [[0.5]]) == pytest.approx(0.5)
    found = distances.wasserstein([[0.0], [0.0], [3.0]], [[1.0], [2.0]])
    assert found == pytest.approx(1 / 2 + 2 / 6 + 1 / 3)
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(6, 50)), rng.normal(size=(4, 50))
    whole = distances.wasserstein(first, second)
    monkeypatch.setattr(distances, "BLOCK_SIZE", 16)
    np.testing.assert_allclose(distances.wasserstein(first, second), whole, rtol=1e-14)


def test_wasserstein_refuses_other_shapes():
    with pytest.raises(UserError, match="cannot be compared"):
        distances.wasserstein(np.zeros((3, 2)), np.zeros((3, 4)))
    with pytest.raises(UserError, match="none empty"):
        distances.wasserstein(np.zeros((0, 2)), np.zeros((3, 2)))


def test_logits_come_back_from_probabilities_up_to_a_constant():
    logits = np.random.default_rng(2).normal(0, 8, size=(3, 20, 5))
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = (probabilities / probabilities.sum(-1, keepdims=True)).astype(np.float32)
    centred = logits - logits.mean(-1, keepdims=True)
    found = distances.function_values("classification", probabilities)
    np.testing.assert_allclose(found, centred, atol=1e-5)  # saturated ones included
    certain = distances.function_values("classification", np.array([[[1.0, 0.0]]]))
    assert np.isfinite(certain).all()


def test_function_values_of_regression_are_the_means():
    outputs = np.arange(12.0, dtype=np.float32).reshape(1, 3, 4)
    np.testing.assert_array_equal(
        distances.function_values("regression", outputs), outputs[..., :2]
    )


def test_correlation_error_by_hand():
    # Correlations +1 and -1 between two quantities: the one difference is 2. A constant one is
    # left out.
    line = np.arange(5.0)
    first = np.stack([line, line, np.zeros(5)], axis=1)
    second = np.stack([line, -line, line], axis=1)
    assert distances.correlation_error(first, second) == pytest.approx(2.0)
    assert distances.correlation_error(first, first) == pytest.approx(0.0)
    assert np.isnan(distances.correlation_error(first[:2], second))
    assert np.isnan(distances.correlation_error(first[:, 1:], second[:, 1:]))


def test_ratio_of_spreads_tells_copies_from_unknown():
    ones = np.ones(3)
    assert distances.log_ratio(2 * ones, ones) == pytest.approx(np.log(2))
    assert (distances.log_ratio(0 * ones, ones) == -np.inf).all()
    assert np.isnan(distances.log_ratio(ones, 0 * ones)).all()
    assert distances.standard_deviation([[0.0], [2.0]]) == pytest.approx(np.sqrt(2))


def test_agreement_and_total_variation_by_hand():
    first = [[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]]
    second = [[0.5, 0.5, 0.0], [0.4, 0.3, 0.3]]
    # Classes 0, 2 against 0, 0; half of .2 + .3 + .1 and half of .1 + 0 + .1.
    assert distances.agreement(first, second) == 0.5
    assert distances.total_variation(first, second) == pytest.approx((0.3 + 0.1) / 2)
    assert distances.agreement(first, first) == 1.0
    assert distances.total_variation(np.eye(2), np.eye(2)[::-1]) == 1.0


def test_mean_predictions_with_nan_or_of_other_rows():
    mean = np.random.default_rng(0).dirichlet(np.ones(3), size=6)
    mean[2, 1] = np.nan
    assert np.isnan(distances.agreement(mean, np.roll(mean, 1, axis=0)))
    assert np.isnan(distances.total_variation(mean, np.full_like(mean, 0.25)))
    with pytest.raises(UserError, match="cannot be compared"):
        distances.agreement(mean, mean[:2])
