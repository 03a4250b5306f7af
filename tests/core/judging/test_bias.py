"""The shift between draws and exact continuations: what it finds, and its errors."""

import numpy as np
import pytest

from haiku_posteriors.core.judging import bias
from haiku_posteriors.core.judging.bootstrap import Estimate

CHAINS, DRAWS, STARTS, TRANSITIONS, QUANTITIES = 4, 400, 8, 20, 12


def autoregressive(rng, correlation, shape):
    """Stationary, of variance 1, along the last but one axis."""
    noise = rng.normal(size=shape)
    values = np.empty(shape)
    values[..., 0, :] = noise[..., 0, :]
    for time in range(1, shape[-2]):
        values[..., time, :] = correlation * values[..., time - 1, :]
        values[..., time, :] += np.sqrt(1 - correlation**2) * noise[..., time, :]
    return values


def make(seed, mean=0.0, spread=0.0):
    """Draws of N(0, 1), and continuations of N(mean, exp(spread)^2), both correlated in time."""
    rng = np.random.default_rng(seed)
    before = autoregressive(rng, 0.5, (CHAINS, DRAWS, QUANTITIES))
    after = autoregressive(rng, 0.7, (CHAINS, STARTS, TRANSITIONS, QUANTITIES))
    return before, mean + np.exp(spread) * after


def test_shifts_are_found_with_their_standard_errors():
    """Over 20 repetitions of 12 quantities: z-scores have mean 0 and variance 1.

    Of 240 z-scores the mean is within 5 / sqrt(240), and their variance within 35 %, which is 4 of
    its standard errors and leaves room for the errors of the errors.
    """
    scores = []
    for seed in range(20):
        found = bias.shift(*make(seed, mean=0.4, spread=-0.2))
        scores.append(
            [(found.mean - 0.4) / found.mean_error, (found.spread + 0.2) / found.spread_error]
        )
    scores = np.array(scores)
    assert np.all(np.abs(scores.mean(axis=(0, 2))) < 5 / np.sqrt(240))
    assert np.all(np.abs(scores.var(axis=(0, 2)) - 1) < 0.35)


def test_what_differs_between_chains_is_no_shift_and_tails_do_not_matter():
    before, after = make(0, mean=0.3)
    heights = np.arange(CHAINS) * 10.0
    apart = bias.shift(before + heights[:, None, None], after + heights[:, None, None, None])
    assert np.all(apart.mean_error < 0.05) and np.all(np.abs(apart.mean) < 0.2)
    plain, stretched = bias.shift(before, after), bias.shift(np.exp(9 * before), np.exp(9 * after))
    np.testing.assert_allclose(plain.mean, stretched.mean)
    np.testing.assert_allclose(plain.spread, stretched.spread)


def test_typical_shift_removes_what_noise_adds():
    none = [bias.summarise({"f": bias.shift(*make(seed))}) for seed in range(10)]
    for name in ("f, mean", "f, spread"):
        assert not any(bias.exceeds(found[name]) for found in none)
        assert np.mean([found[name].value for found in none]) < 0.05
    some = [bias.summarise({"f": bias.shift(*make(seed, 0.3, 0.3))}) for seed in range(10)]
    for name in ("f, mean", "f, spread"):
        assert all(bias.exceeds(found[name]) for found in some)
        assert np.mean([found[name].value for found in some]) == pytest.approx(0.3, abs=0.05)
    assert not bias.problems(none[0], "Repent.")
    (sentence,) = bias.problems(some[0], "Repent.")
    assert "f, mean 0." in sentence and sentence.endswith("Repent.")


def test_equal_quantities_count_once():
    before, after = make(1)
    alike = bias.shift(*(np.repeat(x[..., :1], QUANTITIES, axis=-1) for x in (before, after)))
    assert alike.effective_quantities == pytest.approx(1)
    assert bias.shift(before, after).effective_quantities > 0.8 * QUANTITIES


def test_tolerance():
    assert bias.exceeds(Estimate(-0.3, 0.09)) and not bias.exceeds(Estimate(0.3, 0.11))
    signed = bias.summarise({"noise": bias.shift(*(x[..., :1] for x in make(2, mean=-0.8)))})
    assert signed["noise, mean"].value < -0.5
