"""Convergence diagnostics against ArviZ, against theory, and where there is no answer."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.judging.diagnostics import Convergence, verdict


@pytest.fixture(scope="module")
def reference_draws():
    """Four quantities: independent draws, a shifted chain, a wider chain, and one with ties."""
    noise = np.random.default_rng(2021).normal(size=(4, 101, 4))
    draws = np.zeros_like(noise)
    draws[:, 0] = noise[:, 0]
    for t in range(1, 101):
        draws[:, t] = np.array([0.0, 0.6, -0.4, 0.9]) * draws[:, t - 1] + noise[:, t]
    draws[0, :, 1] += 1.5
    draws[1, :, 2] *= 3
    draws[..., 3] = np.round(draws[..., 3])
    return draws


# Computed once by ArviZ 0.21.0 on the array above: rhat(method="rank"), ess(method="bulk"),
# ess(method="tail"), ess(method="mean"), and bfmi of the second quantity.
ARVIZ = {
    "rhat": [1.00421279981, 1.169958542909, 1.13212538414, 1.159922355521],
    "bulk_ess": [369.87333244712, 20.605465331022, 1040.823996531185, 42.671149201881],
    "tail_ess": [373.048942732858, 82.79166281639, 31.662980336766, 33.246213831222],
    "ess": [371.568052895898, 19.728702344431, 1040.823996531185, 37.953700944904],
}
ARVIZ_BFMI = [1.008928742125, 0.975185951318, 0.74853787248, 0.908474011949]


@pytest.mark.parametrize("name", ARVIZ)
def test_equals_arviz(reference_draws, name):
    np.testing.assert_allclose(getattr(diagnostics, name)(reference_draws), ARVIZ[name], rtol=1e-10)


def test_energy_bfmi_equals_arviz(reference_draws):
    np.testing.assert_allclose(
        diagnostics.energy_bfmi(reference_draws[..., 1]), ARVIZ_BFMI, rtol=1e-10
    )


def autoregressive(rho, shape, seed=0):
    """A stationary AR(1) process along axis 1."""
    noise = np.random.default_rng(seed).normal(size=shape)
    draws = noise / np.sqrt(1 - rho**2)
    for t in range(1, shape[1]):
        draws[:, t] = rho * draws[:, t - 1] + noise[:, t]
    return draws


@pytest.mark.parametrize("rho", [-0.3, 0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregressive_process(rho):
    """M n (1 - rho) / (1 + rho), in the mean over 200 quantities, within 5 %."""
    draws = autoregressive(rho, (4, 1000, 200))
    expected = 4000 * (1 - rho) / (1 + rho)
    assert diagnostics.bulk_ess(draws).mean() == pytest.approx(expected, rel=0.05)
    assert diagnostics.ess(draws).mean() == pytest.approx(expected, rel=0.05)
    assert np.all(diagnostics.tail_ess(draws) > 0.6 * min(expected, 4000))
    rhat = diagnostics.rhat(draws)
    assert expected < 400 or (np.median(rhat) < 1.01 and rhat.max() < 1.05)


def test_trailing_axes_and_blocks_change_nothing(monkeypatch):
    draws = autoregressive(0.5, (3, 40, 14)).astype(np.float32)
    whole = diagnostics.convergence(draws)
    monkeypatch.setattr(diagnostics, "BLOCK_SIZE", 3 * 40 * 4)
    for a, b in zip(whole, diagnostics.convergence(draws.reshape(3, 40, 2, 7)), strict=True):
        assert b.shape == (2, 7) and b.dtype == np.float64
        np.testing.assert_allclose(a, b.reshape(-1), rtol=1e-12)
    assert diagnostics.rhat(jnp.asarray(draws[..., 0])).shape == ()


def test_chains_that_differ_in_place_or_spread_are_seen():
    draws = autoregressive(0.0, (4, 500, 3))
    draws[0, :, 1] += 2
    draws[0, :, 2] *= 4
    rhat = diagnostics.rhat(draws)
    assert rhat[0] < 1.01 and rhat[1] > 1.2 and rhat[2] > 1.1
    trend = autoregressive(0.0, (1, 500)) + np.linspace(0, 3, 500)  # one chain, not stationary
    assert diagnostics.rhat(trend) > 1.2


def test_heavy_tails_have_an_answer():
    draws = np.random.default_rng(0).standard_cauchy((4, 1000))
    assert diagnostics.rhat(draws) < 1.01 and diagnostics.bulk_ess(draws) > 3000


def test_where_there_is_no_answer():
    functions = (diagnostics.rhat, diagnostics.bulk_ess, diagnostics.tail_ess, diagnostics.ess)
    few, constant = np.random.default_rng(0).normal(size=(4, 3, 2)), np.ones((4, 50, 2))
    broken = np.random.default_rng(0).normal(size=(4, 50, 2))
    broken[1, 7, 1] = np.nan
    for function in functions:
        assert np.all(np.isnan(function(few))) and np.all(np.isnan(function(constant)))
        assert np.isnan(function(broken)[1]) and np.isfinite(function(broken)[0])
        assert np.isfinite(function(broken[:, :4, 0]))
    assert np.isnan(diagnostics.energy_bfmi(np.ones((1, 5)))).all()


def test_stuck_chains_have_an_infinite_rhat():
    stuck = np.broadcast_to(np.arange(4.0)[:, None], (4, 50))
    assert diagnostics.rhat(stuck) == np.inf and diagnostics.bulk_ess(stuck) < 10


def test_saturated_draws_are_judged_by_the_other_tail():
    draws = np.minimum(autoregressive(0.0, (4, 500)), 0.0)  # half of them are exactly 0
    assert np.isfinite(diagnostics.tail_ess(draws))


def test_low_energy_bfmi_is_a_random_walk():
    walk = np.cumsum(np.random.default_rng(0).normal(size=(2, 500)), axis=1)
    independent = np.random.default_rng(1).normal(size=(2, 500))
    assert np.all(diagnostics.energy_bfmi(walk) < 0.1)
    np.testing.assert_allclose(diagnostics.energy_bfmi(independent), 2, atol=0.3)


def test_subsample_follows_the_same_scalars():
    rng = np.random.default_rng(0)
    shapes = {"a": {"w": (3, 4)}, "b": {"b": (), "w": (2, 5)}}
    draws = {
        module: {name: rng.normal(size=(2, 6, *shape)) for name, shape in leaves.items()}
        for module, leaves in shapes.items()
    }
    every = diagnostics.subsample_parameters(draws, 1000, num_batch_axes=2)
    assert every.shape == (2, 6, 23)
    np.testing.assert_array_equal(every[..., 12], draws["b"]["b"])
    some = diagnostics.subsample_parameters(draws, 7, seed=3, num_batch_axes=2)
    assert some.shape == (2, 6, 7) and len(np.unique(some[0, 0])) == 7
    one = {m: {n: jnp.asarray(x[1, 4]) for n, x in leaves.items()} for m, leaves in draws.items()}
    alone = diagnostics.subsample_parameters(one, 7, seed=3)
    np.testing.assert_allclose(alone, some[1, 4], rtol=1e-6)
    other = diagnostics.subsample_parameters(draws, 7, seed=4, num_batch_axes=2)
    assert not np.array_equal(some, other)


GOOD = {"num_chains": 4, "num_divergent": 0, "acceptance": [0.8] * 4, "energy_bfmi": [1.0] * 4}


@pytest.fixture(scope="module")
def good_predictions():
    return diagnostics.convergence(autoregressive(0.3, (4, 1000, 300)))


def test_verdict_of_a_good_run(good_predictions):
    assert verdict(good_predictions, **GOOD) == (True, (), ())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_divergent": 3}, "3 transitions diverged.*lower step_size"),
        ({"acceptance": [0.8, 0.8, 0.8, 0.1]}, "accepts only 10%.*lower step_size"),
        ({"acceptance": [0.8, 0.8, 0.8, np.nan]}, "accepts only nan"),
        ({"energy_bfmi": [1.0, 0.2, 1.0, 1.0]}, "E-BFMI is 0.20"),
        ({"lost": [1, 3]}, "Of 4 chains these stand still: 1, 3"),
        ({"num_divergent": 1, "smaller_steps": "walk"}, "may be missing: walk"),
    ],
)
def test_verdict_names_what_is_wrong(good_predictions, change, sentence):
    result = verdict(good_predictions, **(GOOD | change))
    assert not result.converged and len(result.problems) == 1
    assert re.search(sentence, result.problems[0])


def test_unadjusted_chains_are_not_judged_by_acceptance(good_predictions):
    settings = GOOD | {"acceptance": None, "energy_bfmi": None}
    assert verdict(good_predictions, **settings) == (True, (), ())


def test_chains_that_stand_still_are_found():
    """One accepts nothing, one steps by nearly 0, one does both at times, one is well."""
    accepted, reach = np.ones((4, 10)), np.ones((4, 10))
    accepted[0], reach[1] = 0, 1e-7
    accepted[2, :5], reach[2, 5:9] = 0, 1e-7
    assert diagnostics.lost_chains(accepted, reach).tolist() == [0, 1]


def test_verdict_on_mixing():
    apart = autoregressive(0.0, (4, 1000, 20))
    apart[0] += 1
    result = verdict(diagnostics.convergence(apart), **GOOD)
    assert not result.converged and "the chains do not agree" in result.problems[0]
    short = verdict(diagnostics.convergence(autoregressive(0.0, (4, 80, 20))), **GOOD)
    assert any("effective sample size" in problem for problem in short.problems)
    nothing = verdict(diagnostics.convergence(np.ones((4, 80, 20))), **GOOD)
    assert not nothing.converged and "No prediction can be diagnosed" in nothing.problems[0]
    stuck = np.broadcast_to(np.arange(4.0)[:, None, None], (4, 80, 2))
    assert "the chains do not agree" in verdict(diagnostics.convergence(stuck), **GOOD).problems[0]


def test_chains_at_different_heights_are_seen(good_predictions):
    heights = autoregressive(0.5, (4, 1000, 1))
    assert verdict(good_predictions, log_joint=diagnostics.convergence(heights), **GOOD).converged
    heights[0] += 1
    result = verdict(good_predictions, log_joint=diagnostics.convergence(heights), **GOOD)
    assert not result.converged and "at different heights" in result.problems[0]


def test_verdict_notes_without_distrust(good_predictions):
    weights = Convergence(np.array([1.0, 1.3, np.nan]), np.ones(3), np.ones(3))
    predictions = Convergence(*(np.append(values, np.nan) for values in good_predictions))
    settings = GOOD | {"num_chains": 1, "acceptance": [0.999], "energy_bfmi": [1.0]}
    result = verdict(predictions, parameters=weights, **settings)
    assert result.converged and len(result.notes) == 4
    for part in ("1 of 301 predictions", "larger step_size", "One chain", "50% have an R-hat"):
        assert any(part in note for note in result.notes)
