"""Ranks, their tests at the stated rates, and what wrong posteriors look like.

Rates are compared with binomial counts at 5 standard errors.
"""

import numpy as np
import pytest

from haiku_posteriors.core.judging import calibration_ranks
from haiku_posteriors.core.judging.calibration_ranks import Envelope

NUM_DRAWS, NUM_DATA_SETS = 15, 200


@pytest.fixture(scope="module")
def envelope():
    return Envelope(NUM_DATA_SETS, NUM_DRAWS)


@pytest.fixture(scope="module")
def uniform_samples():
    rng = np.random.default_rng(1)
    return rng.integers(0, NUM_DRAWS + 1, size=(3000, NUM_DATA_SETS))


def test_ranks_count_the_draws_below_and_break_ties_evenly():
    draws = np.array([[1.0, 2.0, 2.0, 3.0]])[:, :, None].repeat(4000, axis=0)
    for value, expected in ((0.0, {0}), (2.5, {3}), (9.0, {4}), (2.0, {1, 2, 3})):
        true_values = np.full((4000, 1), value)
        found = calibration_ranks.ranks(np.random.default_rng(0), true_values, draws)[:, 0]
        values, counts = np.unique(found, return_counts=True)
        assert set(values) == expected
        assert np.all(np.abs(counts - 4000 / len(expected)) < 5 * np.sqrt(4000 * 2 / 9) + 1e-9)


def test_bins_hold_their_share_of_possible_ranks():
    counts, expected = calibration_ranks.histogram(np.array([0, 1, 2, 9, 10]), 10, 4)
    np.testing.assert_array_equal(counts, [3, 0, 0, 2])
    np.testing.assert_allclose(expected, 5 * np.array([3, 3, 3, 2]) / 11)


@pytest.mark.parametrize("rate", [0.05, 0.01])
def test_false_alarms_are_as_rare_as_stated(envelope, uniform_samples, rate):
    """At most the rate, and not much below it: counts of few data sets are discrete."""
    error = 5 * np.sqrt(rate / len(uniform_samples))
    p_values = np.array([envelope.p_value(sample) for sample in uniform_samples])
    assert 0.5 * rate - error < np.mean(p_values <= rate) < rate + error
    low, high = envelope.bounds(rate)
    distributions = np.array(
        [calibration_ranks.distribution(sample, NUM_DRAWS)[0] for sample in uniform_samples]
    )
    outside = np.any((distributions < low) | (distributions > high), axis=1)
    assert 0.5 * rate - error < np.mean(outside) < rate + error
    p_values = [calibration_ranks.chi_square_p(sample, NUM_DRAWS) for sample in uniform_samples]
    assert 0.5 * rate - error < np.mean(np.array(p_values) <= rate) < rate + error
    overall = [
        calibration_ranks.overall_p_value([calibration_ranks.deviation(sample, envelope)])
        for sample in uniform_samples[:1000]
    ]
    assert np.mean(np.array(overall) <= rate) < rate + 5 * np.sqrt(rate / 1000)


@pytest.mark.parametrize(
    ("scale", "offset"), [(1.0, 0.0), (0.6, 0.0), (1.7, 0.0), (1.0, 0.5)], ids=str
)
def test_wrong_posteriors_show_in_shift_and_spread(envelope, scale, offset):
    """True values and draws are normal; the draws of a wrong scale or place."""
    rng = np.random.default_rng(2)
    true_values = rng.normal(size=(NUM_DATA_SETS, 1))
    draws = offset + scale * rng.normal(size=(NUM_DATA_SETS, NUM_DRAWS, 1))
    values = calibration_ranks.ranks(rng, true_values, draws)[:, 0]
    found = calibration_ranks.deviation(values, envelope)
    if (scale, offset) == (1.0, 0.0):
        assert found.p_value > 1e-3 and abs(found.shift) < 5 * found.shift_error
        assert abs(found.spread - 1) < 5 * np.sqrt(0.8 / NUM_DATA_SETS)
        return
    assert found.p_value < 1e-3
    if offset:
        assert found.shift < -5 * found.shift_error  # draws above the true values
    else:
        assert (found.spread > 1) == (scale < 1)


def test_correlations_of_neighbours():
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(400, 50, 2))
    draws = noise.copy()
    for t in range(1, 50):
        draws[:, t, 1] = 0.8 * draws[:, t - 1, 1] + 0.6 * noise[:, t, 1]
    independent, correlated = calibration_ranks.lag_one_correlations(draws)
    assert abs(independent + 1 / 50) < 5 / np.sqrt(400 * 50)
    assert 0.65 < correlated < 0.8
