"""Runs as ArviZ has them, in whichever version is installed."""

import json
import warnings

import numpy as np
import pytest
import synthetic_runs

from haiku_posteriors.core.judging import loo
from haiku_posteriors.utils.report import arviz_export, run_folders

HISTORY = ("log_joint", "acceptance_probability", "divergent", "energy", "step_size")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four chains of 50 draws, every second of 100 transitions after 3 of burn-in."""
    folder = synthetic_runs.write_toy_run(
        tmp_path_factory.mktemp("runs") / "hmc", chains=4, draws=50, draws_per_file=20
    )
    rows = [
        {"epoch": epoch, **{name: [epoch, 0, 0, 0] for name in HISTORY}} for epoch in range(1, 104)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = json.loads((folder / "flags.json").read_text())
    flags |= {"num_burn_in_iterations": 3, "thinning": 2}
    (folder / "flags.json").write_text(json.dumps(flags))
    return folder


def test_groups(folder):
    run = run_folders.open_run(folder)
    groups = arviz_export.groups(run)
    assert groups["posterior"]["hidden_0.w"].shape == (4, 50, 1, 7)
    np.testing.assert_array_equal(groups["sample_stats"]["lp"][0], np.arange(5, 104, 2))
    assert groups["sample_stats"]["diverging"].shape == (4, 50)
    assert groups["log_likelihood"]["y"].shape == (4, 50, 70)
    drawn, observed = (groups[g]["y_test"] for g in ("posterior_predictive", "observed_data"))
    assert drawn.shape == (4, 50, 128, 1) and observed.shape == (128, 1)
    # Targets scatter about the draws' means by their noise: mean and spread over 25,600 of them.
    residual = (drawn - run.predictions.outputs[..., :1]) / run.predictions.outputs[..., 1:]
    assert abs(residual.mean()) < 5 / 160 and abs(residual.std() - 1) < 5 / 226


def test_classes_are_drawn_by_their_probabilities():
    probabilities = np.broadcast_to([0.1, 0.6, 0.3], (2, 3000, 2, 3))
    drawn = arviz_export._drawn_targets(run_folders.Predictions("classification", probabilities), 0)
    shares = np.bincount(drawn.ravel(), minlength=3) / drawn.size
    np.testing.assert_allclose(shares, [0.1, 0.6, 0.3], atol=5 * np.sqrt(0.25 / drawn.size))


def test_arviz_reads_it_in_one_line(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces its next version when it is imported
        arviz = pytest.importorskip("arviz", exc_type=ImportError)
        data = arviz_export.to_arviz(folder)
        found = arviz.loo(data)
        assert "hidden_0.w[0, 0]" in arviz.summary(data, var_names=["hidden_0.w"]).index
        arviz.plot_trace(data, var_names=["output.b"])
    theirs = found.elpd_loo if hasattr(found, "elpd_loo") else found.elpd
    values, _ = run_folders.read_train_log_likelihoods(run_folders.open_run(folder))
    # The relative efficiencies differ (theirs is of the parameters), and so do tails, a little.
    assert float(theirs) == pytest.approx(loo.loo(values).value, rel=1e-2)
