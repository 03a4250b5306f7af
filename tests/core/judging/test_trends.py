"""A line through batch means: its error rates are those that are stated, on synthetic series."""

import numpy as np
import pytest

from haiku_posteriors.core.judging import trends

NUM_SERIES = 20_000


@pytest.fixture(scope="module")
def noise():
    return np.random.default_rng(0).normal(size=(NUM_SERIES, trends.NUM_BATCHES))


def line(gain):
    """Batch means of a rise by `gain` from the first batch to the one after the last."""
    return gain * trends.POSITIONS / trends.NUM_BATCHES


def share(values):
    """A share with bounds that hold but in one case in 1.7 million."""
    values = np.asarray(values)
    margin = 5 * np.sqrt(trends.LEVEL * (1 - trends.LEVEL) / len(values))
    return values.mean(), margin


def test_gain_and_error_are_those_of_least_squares(noise):
    values = noise[0] + line(3.0)
    (slope, _), covariance = np.polyfit(np.arange(trends.NUM_BATCHES), values, 1, cov="unscaled")
    found = trends.trend(values)
    fitted = np.polyval(np.polyfit(np.arange(10), values, 1), np.arange(10))
    variance = np.sum((values - fitted) ** 2) / (trends.NUM_BATCHES - 2)
    np.testing.assert_allclose(found.gain, 10 * slope, rtol=1e-5)
    np.testing.assert_allclose(found.error, 10 * np.sqrt(covariance[0, 0] * variance), rtol=1e-5)


def test_a_series_at_rest_is_called_rising_as_rarely_as_stated(noise):
    rate, margin = share(trends.trend(noise).is_rising)
    assert abs(rate - trends.LEVEL) < margin


def test_a_rise_of_the_tolerance_is_missed_as_rarely_as_stated(noise):
    tolerance = 4.0
    rate, margin = share(trends.trend(noise + line(tolerance)).highest < tolerance)
    assert abs(rate - trends.LEVEL) < margin


def test_power(noise):
    # The standard error of the gain is 10 / sqrt(82.5) = 1.1: five of them are rarely overlooked.
    assert np.mean(trends.trend(noise + line(5.5)).is_rising) > 0.95
    assert np.mean(trends.trend(noise).highest < 5.5) > 0.95
    assert not np.any(trends.trend(np.zeros((1, 10)) + line(1.0)).highest < 0.99)


def test_batches_of_different_noise_keep_the_rates(noise):
    """Given weights; a line through all of them alike has the larger error."""
    deviations = np.linspace(1.0, 0.2, trends.NUM_BATCHES)
    weights = 7 / deviations**2
    rate, margin = share(trends.trend(deviations * noise, weights).is_rising)
    assert abs(rate - trends.LEVEL) < margin
    tolerance = 2.0
    values = deviations * noise + line(tolerance)
    rate, margin = share(trends.trend(values, weights).highest < tolerance)
    assert abs(rate - trends.LEVEL) < margin
    # The variance of the weighted slope; an even line's is larger by more than half.
    center = np.sum(weights * trends.POSITIONS) / np.sum(weights)
    variance = 7 * trends.NUM_BATCHES**2 / np.sum(weights * (trends.POSITIONS - center) ** 2)
    found = np.mean(trends.trend(values, weights).error ** 2)
    np.testing.assert_allclose(found, variance, rtol=5 * 0.5 / np.sqrt(NUM_SERIES))
    assert np.mean(trends.trend(values).error ** 2) > 1.5 * variance
