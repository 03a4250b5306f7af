"""PSIS-LOO and WAIC against ArviZ on the same log-likelihoods, and against exact leaving out."""

import math
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import scipy.stats

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import loo


def log_likelihoods():
    """An ordinary model, few heavy-tailed draws, and draws of which no tail can be trusted."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(4, 250, 1)) * np.array([0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 3])
    targets = np.array([0.1, -0.4, 0.9, 2, -1, 0.5, 1.5, 4])
    return (
        -0.5 * (targets - means) ** 2 - 0.5 * np.log(2 * np.pi),
        rng.standard_t(3, size=(2, 60, 5)),
        rng.standard_cauchy(size=(1, 400, 4)).clip(-200, 5),
    )


class Reference(NamedTuple):
    elpd: float
    error: float
    num_effective: float
    pareto_k: list[float]


# By arviz.loo(data, reff=..., pointwise=True, scale="log") of ArviZ 0.23.4, by case and reff.
# ArviZ 1.0 rounds the length of the tail down where 0.23.4 and R's loo round it up.
ARVIZ_LOO = {
    (0, 1.0): Reference(
        -134.3454222591303,
        74.99568339770047,
        120.63650253142005,
        [
            0.291198759,
            0.224771141,
            0.69263862,
            1.538134002,
            1.167663134,
            2.436853784,
            4.708967242,
            10.822802463,
        ],
    ),
    (0, 0.5): Reference(
        -131.38366837879767,
        72.95408044008089,
        117.67474865108743,
        [
            0.249631324,
            0.143453005,
            0.622699911,
            1.414188749,
            1.088828215,
            2.478853212,
            4.580942896,
            10.479433639,
        ],
    ),
    (1, 1.0): Reference(
        -6.285528477616106,
        0.5483366149960698,
        16.221513005935023,
        [1.151211249, 1.623112165, 1.027548796, 1.186530379, 0.773166111],
    ),
    (1, 0.5): Reference(
        -6.285528477616106,
        0.5483366149960698,
        16.221513005935023,
        [1.151211249, 1.623112165, 1.027548796, 1.186530379, 0.773166111],
    ),
    (2, 1.0): Reference(
        -143.67792830319848,
        18.870309797404712,
        153.32225111879245,
        [6.397640558, 11.79132241, 9.927495041, 6.976814412],
    ),
    (2, 0.5): Reference(
        -127.14347443497358,
        16.49909749906979,
        136.78779725056756,
        [5.772638576, 10.212205694, 8.54770467, 5.965267782],
    ),
}
# By arviz.waic: elpd, its error, effective parameters.
ARVIZ_WAIC = {
    0: (-237.81782431229882, 183.09076253238672, 224.10890458458863),
    1: (-2.5853185743291665, 2.106832230533752, 12.521303102648083),
    2: (-382.8939979007189, 133.84451903907174, 392.5383207163129),
}


@pytest.mark.parametrize(("case", "efficiency"), ARVIZ_LOO)
def test_loo_equals_arviz(case, efficiency):
    found = loo.loo(log_likelihoods()[case], efficiency)
    expected = ARVIZ_LOO[case, efficiency]
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-6)
    np.testing.assert_allclose(found.pareto_k, expected.pareto_k, atol=1e-6)


@pytest.mark.parametrize("case", ARVIZ_WAIC)
def test_waic_equals_arviz(case):
    np.testing.assert_allclose(loo.waic(log_likelihoods()[case])[:3], ARVIZ_WAIC[case], rtol=1e-6)


def test_loo_equals_the_arviz_that_is_installed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces its next version when it is imported
        arviz = pytest.importorskip("arviz", exc_type=ImportError)
    values = log_likelihoods()[2]  # 3 sqrt(400) is whole: versions differ in how they round
    groups = {"posterior": {"a": values[..., 0]}, "log_likelihood": {"y": values}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if arviz.__version__.startswith("0."):
            theirs = arviz.loo(arviz.from_dict(**groups), pointwise=True, reff=1.0, scale="log")
            elpd = float(theirs.elpd_loo)
        else:
            theirs = arviz.loo(arviz.from_dict(groups), pointwise=True, reff=1.0)
            elpd = float(theirs.elpd)
    ours = loo.loo(values, 1.0)
    assert ours.value == pytest.approx(elpd, rel=1e-6)
    assert ours.error == pytest.approx(float(theirs.se), rel=1e-6)
    np.testing.assert_allclose(ours.pareto_k, np.asarray(theirs.pareto_k), atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 3.0])
def test_loo_is_what_leaving_out_gives(temperature):
    """A Gaussian mean in closed form, left-out posteriors tempered as the whole one is.

    Weights vary little here: the relative error of a term is about that of a mean of 40,000 draws,
    below 0.005; six terms at ten times that, so that no seed fails.
    """
    rng = np.random.default_rng(1)
    targets, prior_precision = rng.normal(0.5, 1, 12), 0.25
    count = len(targets)

    def posterior(total, rows):
        precision = prior_precision + rows
        return total / precision, math.sqrt(temperature / precision)

    mean, std = posterior(targets.sum(), count)
    draws = rng.normal(mean, std, (4, 10_000, 1))
    found = loo.loo(scipy.stats.norm.logpdf(targets, draws, 1), temperature=temperature)
    left = [posterior(targets.sum() - target, count - 1) for target in targets]
    exact = [
        scipy.stats.norm.logpdf(target, m, math.hypot(1, s))
        for target, (m, s) in zip(targets, left, strict=True)
    ]
    np.testing.assert_allclose(found.by_row, exact, atol=0.05 if temperature > 1 else 0.02)
    assert found.value == pytest.approx(sum(exact), abs=0.05)
    assert found.num_doubtful == 0


def test_differences_are_paired():
    """Rows differ by 10, the two runs by 0.5 in each: the difference is far better known."""
    base = 10 * np.random.default_rng(2).normal(size=50)
    draws = 1e-3 * np.random.default_rng(3).normal(size=(2, 100, 50))
    first, second = loo.loo(base + 0.5 + draws), loo.loo(base + draws)
    value, error = loo.difference(first, second)
    assert value == pytest.approx(25, abs=1e-3) and error < 0.01 < first.error
    with pytest.raises(UserError, match="no paired differences"):
        loo.difference(first, loo.loo(base[:3] + draws[..., :3]))


def test_correlated_draws_have_a_longer_tail():
    rng = np.random.default_rng(4)
    slow = np.repeat(rng.normal(size=(4, 50, 3)), 10, axis=1)
    assert 0.05 < loo.likelihood_efficiency(slow) < 0.25
    assert 0.8 < loo.likelihood_efficiency(rng.normal(size=(4, 500, 3))) < 1.3


def test_a_row_that_no_draw_varies_in_is_as_it_is():
    found = loo.loo(np.full((2, 50, 3), -1.5))
    np.testing.assert_allclose(found.by_row, -1.5)
    assert found.num_effective == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_left_out():
    with pytest.raises(UserError, match="at least 25 draws"):
        loo.loo(np.zeros((2, 5, 3)))
    with pytest.raises(UserError, match="not all finite"):
        loo.waic(np.full((1, 30, 3), np.nan))
