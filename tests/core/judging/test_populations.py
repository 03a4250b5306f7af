"""Nested R-hat against its definition and plain R-hat, evidence of populations, the verdict."""

import itertools

import numpy as np
import pytest

from haiku_posteriors.core.judging import chain_statistics, populations
from haiku_posteriors.core.judging.populations import LogEvidence

GOOD = {
    "fractions": np.ones(4),
    "num_ancestors": np.full(4, 9),
    "num_particles": 100,
    "acceptance": np.full(4, 0.8),
}


def by_definition(draws):
    """Margossian et al. (arXiv 2110.13017), with loops; (superchains, chains, draws)."""
    superchains, chains, num_draws = draws.shape
    chain_means = draws.mean(axis=2)
    means = chain_means.mean(axis=1)
    between = sum((mean - means.mean()) ** 2 for mean in means) / (superchains - 1)
    within = 0.0
    for k in range(superchains):
        if chains > 1:
            within += sum((m - means[k]) ** 2 for m in chain_means[k]) / (chains - 1) / superchains
        if num_draws > 1:
            for m, n in itertools.product(range(chains), range(num_draws)):
                deviation = (draws[k, m, n] - chain_means[k, m]) ** 2
                within += deviation / (num_draws - 1) / chains / superchains
    return np.sqrt((between + within) / within)


@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 1, 7), (5, 6, 1)])
def test_equals_its_definition(shape):
    draws = (
        np.random.default_rng(0).normal(size=(*shape, 3)) + np.arange(shape[0])[:, None, None, None]
    )
    expected = [by_definition(draws[..., i]) for i in range(3)]
    np.testing.assert_allclose(chain_statistics.plain_nested_rhat(draws), expected, rtol=1e-12)


def test_with_one_chain_a_superchain_it_is_plain_rhat_but_for_one_over_the_draws():
    draws = np.random.default_rng(1).normal(size=(4, 50, 6)) + np.arange(4)[:, None, None] / 3
    nested = chain_statistics.plain_nested_rhat(draws[:, None])
    np.testing.assert_allclose(
        nested**2, chain_statistics.plain_rhat(draws) ** 2 + 1 / 50, rtol=1e-12
    )


@pytest.mark.parametrize(("num_draws", "expected"), [(4, 1 / 25 / 5), (1, 1 / 25)])
def test_independent_draws_have_the_excess_of_their_number(num_draws, expected):
    """B is 1 / (chains draws), W is 1 + 1 / draws, or 1 for single draws.

    The mean over 2,000 quantities has an error of 1.3 %, and W varies, which adds 1 %.
    """
    draws = np.random.default_rng(2).normal(size=(8, 25, num_draws, 2000))
    excess = populations.nested_rhat(draws) ** 2 - 1
    # The larger of two excesses, of the draws and of their folded values, is above each one's mean.
    plain = chain_statistics.plain_nested_rhat(draws) ** 2 - 1
    assert np.mean(plain) == pytest.approx(expected, rel=0.08)
    assert np.mean(plain) < np.mean(excess) < 2 * np.mean(plain)


def test_populations_that_differ_are_told_in_location_and_in_spread():
    draws = np.random.default_rng(3).normal(size=(4, 200, 1, 3))
    draws[0, ..., 1] += 1
    draws[0, ..., 2] *= 3
    rhat = populations.nested_rhat(draws)
    assert rhat[0] < 1.02 < rhat[1:].min()


def test_what_cannot_be_judged_is_nan_and_what_is_stuck_infinite():
    draws = np.random.default_rng(4).normal(size=(3, 5, 1, 4))
    draws[..., 1] = 7.0
    draws[0, 0, 0, 2] = np.nan
    draws[..., 3] = np.arange(3)[:, None, None]
    rhat = populations.nested_rhat(draws)
    assert np.isfinite(rhat[0]) and np.isnan(rhat[1]) and np.isnan(rhat[2]) and np.isinf(rhat[3])
    assert np.all(np.isnan(populations.nested_rhat(draws[:1])))
    assert np.all(np.isnan(populations.nested_rhat(draws[:, :1])))
    assert populations.nested_rhat(draws.reshape(3, 5, 1, 2, 2)).shape == (2, 2)


def test_log_evidences_are_combined_by_the_mean_of_their_exponentials():
    logs = np.log([1.0, 2.0, 3.0, 6.0]) - 2000
    combined = populations.combine_log_evidences(logs)
    assert combined.value == pytest.approx(np.log(3) - 2000)
    assert combined.error == pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 3 / 2)
    assert combined.spread == pytest.approx(np.std(logs, ddof=1))
    np.testing.assert_allclose(combined.weights, np.array([1, 2, 3, 6]) / 12)
    single = populations.combine_log_evidences([-5.0])
    assert single.value == -5 and np.isnan(single.error) and np.isnan(single.spread)


def judged(rhat=1.001, spread=0.2, **changes):
    evidence = LogEvidence(-63.0, 0.1, spread, np.full(4, 0.25))
    return populations.verdict(np.full(5, rhat), evidence, **GOOD | changes)


def test_verdict_names_every_problem():
    good = judged()
    assert good.converged and "descend from 9 of the start at least" in good.notes[0]
    for changes, sentence in (
        ({"fractions": np.array([1, 1, 0.3, 1])}, "b = 0.3 only"),
        ({"rhat": 1.2}, "populations do not agree"),
        ({"rhat": np.nan}, "No prediction can be diagnosed"),
        ({"spread": 1.5}, "standard deviation of 1.50"),
        ({"acceptance": np.array([0.8, 0.1, 0.8, 0.8])}, "accepts only 10%"),
    ):
        verdict = judged(**changes)
        assert not verdict.converged and len(verdict.problems) == 1
        assert sentence in verdict.problems[0]
    alone = judged(
        rhat=np.nan,
        spread=np.nan,
        fractions=np.ones(1),
        num_ancestors=np.ones(1),
        acceptance=np.ones(1),
    )
    assert alone.converged and "One population cannot show" in alone.notes[0]
    assert "moves have made" in alone.notes[1]
