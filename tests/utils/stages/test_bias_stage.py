"""The estimate of bias at the end of a run: a large step is seen, a small one passes."""

import functools
import itertools
import math
import types

import haiku as hk
import numpy as np
import pytest

from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.mclmc import mclmc
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.core.trajectories import default_length
from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.stages import bias
from haiku_posteriors.utils.train_utils import Run

pytestmark = [pytest.mark.usefixtures("first_device_only"), pytest.mark.slow]

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(20, 20))
TARGETS = INPUTS @ RANDOM.normal(size=(20, 1)) + RANDOM.normal(size=(20, 1))
DATASET = data_utils.from_arrays(INPUTS, TARGETS, INPUTS, TARGETS, standardize=False)
LOG_JOINT = make_log_joint(
    lambda inputs: hk.Linear(1)(inputs),
    DATASET.x_train,
    make_prior(1.0),
    gaussian(5.0, learn_noise=True),
)


@functools.cache
def finished_run(**settings):
    run = Run(
        LOG_JOINT,
        DATASET,
        mclmc(LOG_JOINT, num_burn_in=100, **settings),
        num_steps=500,
        num_chains=4,
        collects=lambda step: step > 100,
        keep_history=True,
        eval_freq=1000,
        quiet=True,
    )
    return run.finish()


def estimate(num_iterations=40, max_seconds=math.inf, **settings):
    said = []
    report = bias.estimate(
        LOG_JOINT,
        DATASET,
        finished_run(**settings),
        seed=0,
        num_burn_in=100,
        num_iterations=num_iterations,
        trajectory_length=default_length(LOG_JOINT),
        max_seconds=max_seconds,
        say=said.append,
    )
    return report, said


@pytest.mark.parametrize(("energy_variance", "biased"), [(1e-4, False), (0.2, True)])
def test_a_large_step_is_seen_and_a_small_one_passes(energy_variance, biased):
    # Noise between steps, where no transition is made again: by those that are, 0.2 has no bias.
    report, said = estimate(energy_variance=energy_variance, noise_in_drift=not biased)
    assert len(said) == 4 and report.acceptance > 0.5 and report.num_gradients > 32 * 40
    expected = {"predictions", "log-joint", "noise"}
    assert {name.split(",")[0] for name in report.shifts} == expected
    assert bool(report.problems) == biased, report.shifts
    if biased:
        assert "biased" in report.problems[0] and "--adjusted" in report.problems[0]


def test_chains_that_stand_still_are_a_problem():
    """From the prior, steps that are much too long are all taken back."""
    report, said = estimate(step_size=1.0)
    assert not said and "stands still" in report.problems[0]


def test_no_estimate_is_a_note():
    report, said = estimate(num_iterations=0, energy_variance=0.2)
    assert not said and not report.problems and "not known" in report.notes[0]


def clock():
    """In place of the module `time`."""
    return types.SimpleNamespace(monotonic=itertools.count(step=1.0).__next__)


def test_a_limit_of_time_ends_it_with_what_it_has(monkeypatch):
    """By a clock that goes on by a second at each look: ten relax, and ten are compared."""
    finished_run(energy_variance=1e-4)
    monkeypatch.setattr(bias, "time", clock())
    report, said = estimate(max_seconds=20.0, energy_variance=1e-4)
    assert len(said) == 1 and not report.problems and report.shifts
    assert any("after 19 of 40 adjusted transitions" in note for note in report.notes)
    monkeypatch.setattr(bias, "time", clock())
    report, _ = estimate(max_seconds=6.0, energy_variance=1e-4)
    assert not report.shifts and "time_limit left too little time" in report.problems[0]


def test_without_time_it_does_not_begin():
    report, said = estimate(max_seconds=0.0, energy_variance=1e-4)
    assert not said and report.num_gradients == 0 and "time_limit" in report.problems[0]


def test_a_run_that_ended_in_burn_in_has_too_few_draws():
    result = finished_run(energy_variance=1e-4)
    report = bias.estimate(
        LOG_JOINT,
        DATASET,
        result,
        seed=0,
        num_burn_in=500,
        num_iterations=40,
        trajectory_length=default_length(LOG_JOINT),
    )
    assert "too few draws" in report.problems[0] and not report.shifts
