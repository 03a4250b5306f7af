"""The configurational temperature of draws whose law is known, and when it is a problem."""

import numpy as np
import pytest

from haiku_posteriors.core.judging import temperatures
from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.core.judging.temperatures import Temperatures, configurational, problems


def virials(rng, num_chains, num_draws, dimension, excess, autocorrelation=0.0):
    """a w^2 / D of autoregressive Gaussian draws whose variance is (1 + excess) / a."""
    noise = rng.normal(size=(num_chains, num_draws, dimension))
    values = np.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for number in range(1, num_draws):
        values[:, number] = (
            autocorrelation * values[:, number - 1]
            + np.sqrt(1 - autocorrelation**2) * noise[:, number]
        )
    return (1 + excess) * np.mean(values**2, axis=2)


@pytest.mark.parametrize("autocorrelation", [0.0, 0.8])
def test_value_and_error(autocorrelation):
    rng = np.random.default_rng(0)
    found = [configurational(virials(rng, 4, 200, 5, 0.2, autocorrelation)) for _ in range(200)]
    values = np.array([estimate.value for estimate in found])
    errors = np.array([estimate.error for estimate in found])
    assert abs(values.mean() - 1.2) < 5 * values.std() / np.sqrt(200)
    # The larger of two estimates of the error is a little above it.
    assert 0.85 < errors.mean() / values.std() < 1.6


def test_chains_that_differ_make_the_error():
    levels = np.array([0.8, 1.0, 1.2, 1.0])
    noise = 0.01 * np.random.default_rng(0).normal(size=(4, 200))
    found = temperatures.configurational(levels[:, None] + noise)
    assert found.error >= 0.95 * levels.std(ddof=1) / 2


def test_error_rates_of_the_sentence():
    """Right draws are called hot in fewer than 2.5 %, a quarter too wide is found in most runs."""
    rng = np.random.default_rng(1)
    said = {
        excess: np.mean(
            [
                bool(problems(Temperatures(configurational(virials(rng, 4, 100, 20, excess))), ""))
                for _ in range(300)
            ]
        )
        for excess in (0.0, temperatures.TOLERANCE, 0.25, -0.25)
    }
    assert said[0.0] == 0
    assert said[temperatures.TOLERANCE] < 0.06  # at the limit itself
    assert said[0.25] > 0.95 and said[-0.25] > 0.95


def test_sentences():
    hot = Temperatures(Estimate(1.3, 0.01), 1.2, 0.3)
    sentences = problems(hot, "Lower it.")
    assert "too wide, by 30%" in sentences[0] and "Lower it." in sentences[0]
    assert "raise batch_size" in sentences[1]
    assert "too narrow" in problems(Temperatures(Estimate(0.5, 0.1)), "")[0]
    assert problems(Temperatures(Estimate(np.nan, np.nan)), "")
    # The formula alone, which ignores that the minibatches of an epoch share the rows, is no proof.
    assert not problems(Temperatures(Estimate(1.0, 0.01), None, 0.5), "")
