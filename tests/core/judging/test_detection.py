"""Detection and abstention against scikit-learn and hand arithmetic."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import detection


def test_auroc_is_scikit_learns_with_and_without_ties():
    rng = np.random.default_rng(0)
    for decimals in (8, 1):
        inside, outside = rng.normal(size=70).round(decimals), rng.normal(1, 2, 40).round(decimals)
        labels = np.repeat([0, 1], [70, 40])
        expected = roc_auc_score(labels, np.concatenate([inside, outside]))
        assert detection.auroc(inside, outside) == pytest.approx(expected)
    assert detection.auroc([0, 0], [0, 0, 0]) == 0.5
    assert detection.auroc([0, 1], [2, 3]) == 1.0


def test_false_positive_rate_by_hand():
    # 19 of 20 ordinary rows have a score of at most 19; of the foreign ones, 2 of 4 pass.
    inside = np.arange(1, 21)
    assert detection.false_positive_rate(inside, [5, 19, 19.5, 40]) == 0.5
    assert detection.false_positive_rate(inside, [100]) == 0.0
    assert detection.false_positive_rate([1, 1, 1], [1]) == 1.0


def test_risk_coverage_by_hand_whatever_the_order_of_ties():
    coverage, risk = detection.risk_coverage([3, 1, 2], [1, 0, 1])
    np.testing.assert_allclose(coverage, [1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(risk, [0, 1 / 2, 2 / 3])
    area = detection.area_under_risk_coverage([3, 1, 2], [1, 0, 1])
    assert area == pytest.approx((1 / 2 + 2 / 3) / 3)
    for losses in ([1, 0, 0], [0, 0, 1]):
        _, risk = detection.risk_coverage([5, 5, 5], losses)
        np.testing.assert_allclose(risk, 1 / 3)
    with pytest.raises(UserError, match="3 uncertainties do not belong to 2 losses"):
        detection.risk_coverage([1, 2, 3], [1, 2])
    with pytest.raises(UserError, match="Two lists"):
        detection.auroc([], [1.0])


def test_scores_and_losses():
    # Two draws that are certain of different classes: all uncertainty is epistemic.
    outputs = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    found = detection.scores("classification", outputs)
    assert found["entropy"] == pytest.approx(np.log(2))
    assert found["epistemic"] == pytest.approx(np.log(2))
    assert found["one_minus_confidence"] == pytest.approx(0.5)
    assert detection.losses_of_rows("classification", outputs, np.array([1])) == [1.0]
    # Means 0 and 2 with noise 3: total sqrt(1 + 9).
    outputs = np.array([[[0.0, 3.0]], [[2.0, 3.0]]])
    found = detection.scores("regression", outputs)
    assert found["total"] == pytest.approx(np.sqrt(10)) and found["epistemic"] == pytest.approx(1.0)
    assert detection.losses_of_rows("regression", outputs, np.array([[3.0]])) == [4.0]
