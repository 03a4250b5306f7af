"""What scripts of chains share: the advice that their settings call for, and what time is left."""

import math
import types

import pytest

from haiku_posteriors.utils import chain_runs
from haiku_posteriors.utils.settings import Settings

DEFAULTS = {
    "warm_start_epochs": 100,
    "init_checkpoint": None,
    "step_size": None,
    "trajectory_jitter": None,
    "adapt_mass_matrix": None,
}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        ({"warm_start_epochs": 0}, ["warm_start_epochs"]),
        ({"warm_start_epochs": 0, "init_checkpoint": "runs/sgd/members"}, []),
        ({"step_size": 1e-3}, ["step_size", "trajectory_jitter"]),
        ({"step_size": 1e-3, "trajectory_jitter": 0.5}, ["step_size"]),
        ({"trajectory_jitter": 0.0}, ["trajectory_jitter"]),
        ({"adapt_mass_matrix": False}, ["adapt_mass_matrix"]),
    ],
)
def test_advice_is_what_the_settings_do_without(changed, named):
    found = chain_runs.remedies(Settings(DEFAULTS | changed, {}))
    assert len(found) == len(named)
    assert all(name in sentence for name, sentence in zip(named, found, strict=True))


def test_a_method_without_jitter_is_not_told_to_jitter():
    values = {name: DEFAULTS[name] for name in ("warm_start_epochs", "init_checkpoint")}
    (sentence,) = chain_runs.remedies(Settings(values | {"step_size": 1e-3}, {}))
    assert "step_size" in sentence


def test_what_is_left_of_a_time_limit():
    def left(limit, seconds):
        task = types.SimpleNamespace(settings=types.SimpleNamespace(time_limit=limit))
        return chain_runs.seconds_left(task, types.SimpleNamespace(seconds=seconds))

    assert left(None, 1e6) == math.inf
    assert left(2, 90.0) == 30.0 and left(2, 200.0) == 0.0
