"""The tool calibrate_method.py, and the ranks of every method that claims to be exact."""

import json

import numpy as np
import pytest

import calibrate_method
from haiku_posteriors.core import METHODS, hmc
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import calibration_ranks
from haiku_posteriors.utils import calibration, cmd_args_utils

NUM_DATA_SETS, NUM_DRAWS, NUM_ROWS = 500, 31, 15
# A correct method is refused one time in 1,000 choices of the seed, which is fixed.
LIMIT = 1e-3


def calibrate(*flags):
    calibrate_method.run(cmd_args_utils.parse(calibrate_method.GROUPS, flags))


@pytest.mark.slow
def test_the_tool_leaves_a_table_and_a_picture(tmp_path, capsys):
    """A point estimate has no spread: every true value is beyond all draws."""
    short = ("--num_data_sets=40", "--num_draws=7", "--num_steps=300", "--num_rows=6")
    calibrate("--method=sgd", *short, f"--dir={tmp_path}")
    out = capsys.readouterr().out
    assert "Verdict: NOT uniform" in out and "log noise" in out
    found = json.loads((tmp_path / "calibration_sgd.json").read_text())
    assert found["p_value"] < LIMIT and found["num_not_finite"] == 0
    assert not found["claims_to_be_exact"]
    for ranks in found["ranks"].values():
        assert len(ranks) == 40 and set(ranks) <= {0, 7}
    assert all(d["spread"] > 2 for d in found["quantities"].values())
    assert (tmp_path / "ranks_sgd.png").stat().st_size > 20_000


def test_methods_without_a_recipe_are_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="Did you mean 'hmc'"):
        calibrate("--method=hmcc", f"--dir={tmp_path}")
    monkeypatch.setitem(METHODS, "newest", None)
    with pytest.raises(UserError, match="There is no recipe for newest yet"):
        calibrate("--method=newest", f"--dir={tmp_path}")


def overall_p_value(method, recipe, temperature=1.0):
    log_joint = calibration.make_problem(NUM_ROWS, 3, temperature)
    portions = calibration.simulate(
        log_joint,
        method(log_joint, NUM_ROWS),
        num_rows=NUM_ROWS,
        num_data_sets=NUM_DATA_SETS,
        num_draws=NUM_DRAWS,
        num_steps=recipe.num_steps,
        thinning=recipe.thinning,
        seed=1,
    )
    true_values, draws = (np.concatenate(parts) for parts in zip(*portions, strict=True))
    ranks = calibration_ranks.ranks(np.random.default_rng(0), true_values, draws)
    envelope = calibration_ranks.Envelope(NUM_DATA_SETS, NUM_DRAWS)
    return calibration_ranks.overall_p_value(
        [calibration_ranks.deviation(column, envelope) for column in ranks.T]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", calibration.EXACT_METHODS)
def test_methods_that_claim_to_be_exact_have_uniform_ranks(name):
    recipe = calibration.RECIPES[name]
    assert overall_p_value(recipe.make, recipe) > LIMIT


@pytest.mark.slow
def test_a_wrong_temperature_is_detected():
    recipe = calibration.RECIPES["hmc"]
    assert overall_p_value(recipe.make, recipe, temperature=1.3) < LIMIT


@pytest.mark.slow
def test_steps_without_a_metropolis_test_are_detected():
    """The step is so large that the integrator's error is a good part of the posterior."""
    recipe = calibration.RECIPES["hmc"]

    def unadjusted(log_joint, num_rows):
        return hmc.hmc(log_joint, step_size=0.1, num_burn_in=0, metropolis=False)

    assert overall_p_value(unadjusted, recipe) < LIMIT
