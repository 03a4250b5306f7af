"""evaluate_uncertainty.py on a tiny ensemble: one whole report, and what it refuses."""

import csv

import numpy as np
import program
import pytest
import synthetic_runs

import evaluate_uncertainty
from haiku_posteriors.core.errors import UserError


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    """Three members on digits, and images of noise as foreign data."""
    folder = tmp_path_factory.mktemp("runs")
    synthetic_runs.write_digits_ensemble(folder / "digits")
    x = np.random.default_rng(0).random((60, 64))
    y = np.zeros(60, int)
    y[0] = 1
    np.savez(folder / "noise.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return folder


def test_a_report_of_shifts_and_foreign_rows(ensemble, tmp_path):
    out = program.succeed(
        "evaluate_uncertainty.py",
        f"--runs={ensemble / 'digits'}",
        f"--ood_sets={ensemble / 'noise.npz'},svhn",
        f"--data_dir={ensemble}",
        f"--dir={tmp_path / 'u'}",
        "--num_rows=40",
    )
    assert "Left out: Data set 'svhn' was not found: it needs train_32x32.mat" in out
    with (tmp_path / "u/uncertainty.csv").open() as file:
        numbers = {row["metric"]: float(row["value"]) for row in csv.DictReader(file)}
    assert numbers["accuracy"] > 0.85
    assert numbers["auroc/noise"] > 0.6
    assert numbers["accuracy/gaussian_noise/5"] < numbers["accuracy/gaussian_noise/1"]
    assert numbers["accuracy/rotation/90"] < 0.6 < numbers["accuracy/rotation/0"]
    assert (tmp_path / "u/uncertainty.html").read_text().count("data:image/png;base64") == 5


def test_without_shifts_foreign_rows_are_told_alone(ensemble, tmp_path):
    sets = [str(ensemble / "noise.npz")]
    for name, with_shifts in (("all", True), ("foreign", False)):
        evaluate_uncertainty.evaluate(
            [str(ensemble / "digits")], sets, 2, 10, None, tmp_path / name, with_shifts
        )
    found = {}
    for name in ("all", "foreign"):
        with (tmp_path / name / "uncertainty.csv").open() as file:
            found[name] = {row["metric"]: row["value"] for row in csv.DictReader(file)}
    left_out = found["all"].keys() - found["foreign"].keys()
    assert "accuracy/rotation/90" in left_out
    assert found["foreign"] == {k: v for k, v in found["all"].items() if k not in left_out}
    assert not (tmp_path / "foreign" / "rotations.png").exists()


def test_a_regression_under_noise_on_its_features(tmp_path, capsys):
    run = synthetic_runs.write_toy_run(tmp_path / "toy", draws=2)
    evaluate_uncertainty.evaluate([str(run)], None, 3, 20, None, None)
    with (run / "uncertainty/uncertainty.csv").open() as file:
        metrics = {row["metric"] for row in csv.DictReader(file)}
    assert {"rmse", "aurc", "nll/feature_noise/5", "coverage_90/corrupted/1"} <= metrics
    assert "rmse/rotation/0" not in metrics
    assert "RMSE, corrupted, severity 5" in capsys.readouterr().out


def test_runs_that_cannot_be_evaluated_together_are_refused(ensemble, tmp_path):
    digits, toy = ensemble / "digits", synthetic_runs.write_toy_run(tmp_path / "toy", draws=2)
    with pytest.raises(UserError, match=r"different data: dataset_name \(toy_regression, ref"):
        evaluate_uncertainty.evaluate([str(digits), str(toy)], None, 50, 100, None, None)
    assert not (digits / "uncertainty").exists()


@pytest.mark.slow
def test_a_mistake_is_one_sentence_and_exit_code_2():
    code, _, err = program.run("evaluate_uncertainty.py")
    assert code == 2
    assert "as --runs" in err and err.count("\n") == 1
    assert err.startswith("evaluate_uncertainty.py: ")
