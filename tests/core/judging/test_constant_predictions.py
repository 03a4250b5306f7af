"""Predictive distributions beside the best one that is the same for all rows."""

import numpy as np
import pytest
import scipy.stats

from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.judging.predictive_checks import against_constant

LABELS = np.repeat([0, 1, 2], [50, 30, 20])
FREQUENCIES = np.array([0.5, 0.3, 0.2])


def of_classes(probabilities):
    """One draw with these probabilities (rows, classes)."""
    logs = np.log(probabilities[np.arange(len(LABELS)), LABELS])
    return Predictions("classification", probabilities[None, None], logs[None, None], LABELS)


def test_class_frequencies_are_the_constant():
    found = against_constant(of_classes(np.tile(FREQUENCIES, (100, 1))))
    np.testing.assert_allclose(found.constant_nll, scipy.stats.entropy(FREQUENCIES))
    np.testing.assert_allclose([found.gain, found.variation], 0, atol=1e-12)
    assert found.is_constant


@pytest.mark.parametrize(
    ("certainty", "offset"),
    [
        pytest.param(0.5, 0, id="right"),
        pytest.param(0.999, 1, id="wrong and sure, far worse than the constant"),
    ],
)
def test_predictions_that_depend_on_inputs_are_none(certainty, offset):
    probabilities = (1 - certainty) / 3 + certainty * np.eye(3)[(LABELS + offset) % 3]
    found = against_constant(of_classes(probabilities))
    assert not found.is_constant
    assert (found.gain > 0) == (offset == 0)
    # Mean predictions vary as the labels do, by the square of the certainty.
    np.testing.assert_allclose(found.variation, certainty**2)


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.9])
def test_regression(slope):
    """Means of slope x (their variation slope^2), and a deviation that fits the rest."""
    x = np.random.default_rng(0).normal(size=(200, 1))
    targets = (x - x.mean()) / x.std() * 3 + 7
    means = 7 + slope * (targets - 7)
    stds = np.full_like(means, 3 * (1 - slope))
    outputs = np.concatenate([means, stds], axis=1)
    logs = scipy.stats.norm.logpdf(targets, means, stds)[:, 0]
    found = against_constant(
        Predictions("regression", outputs[None, None], logs[None, None], targets)
    )
    np.testing.assert_allclose(found.constant_nll, 0.5 + np.log(3 * np.sqrt(2 * np.pi)))
    np.testing.assert_allclose(found.gain, -np.log(1 - slope), atol=1e-12)
    np.testing.assert_allclose(found.variation, slope**2, atol=1e-12)
    assert found.is_constant == (slope == 0)  # a gain of .1 nats that all rows have is one
