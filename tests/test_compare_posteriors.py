"""compare_posteriors.py as a user meets it: one whole comparison, files, and what it refuses."""

import base64
import csv
import json
import re

import numpy as np
import program
import pytest
import synthetic_runs

import compare_posteriors
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import files


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A reference that has not converged, a candidate of another posterior, one on fewer rows."""
    folder = tmp_path_factory.mktemp("runs")
    synthetic_runs.write_toy_run(folder / "hmc", draws=8)
    files.write_json(folder / "hmc/diagnostics.json", {"problems": ["R-hat is 3."]})
    synthetic_runs.write_toy_run(folder / "vi", seed=1, chains=1, draws=8, weight_decay=2.0)
    synthetic_runs.write_toy_run(folder / "fewer", seed=2, subset_train_to=40)
    return folder


def test_a_comparison_leaves_a_page_with_its_pictures_inside(runs, tmp_path):
    out = program.succeed(
        "compare_posteriors.py",
        f"--reference={runs / 'hmc'}",
        f"--candidates={runs / 'vi'}",
        f"--dir={tmp_path / 'c'}",
    )
    assert "W1 of functions" in out and "comparison.html" in out
    assert "Warning: The reference has not converged by its own verdict. R-hat is 3." in out
    assert "vi is of another posterior: weight_decay (2.0, reference 0.444" in out
    page = (tmp_path / "c/comparison.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 5
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert "http" not in page  # nothing is fetched
    with (tmp_path / "c/comparison.csv").open() as file:
        numbers = {(row["run"], row["metric"]): row for row in csv.DictReader(file)}
    summary = json.loads((runs / "vi/summary.json").read_text())
    assert float(numbers["vi", "rmse"]["value"]) == pytest.approx(summary["test"]["rmse"])
    assert float(numbers["vi", "seconds"]["value"]) == pytest.approx(summary["seconds"])
    for metric in ("w1", "std_ratio", "parameter_std_ratio", "correlation_error"):
        assert float(numbers["vi", metric]["floor"]) > 0
    assert (tmp_path / "c/comparison.md").read_text().startswith("|")
    assert not list((tmp_path / "c").glob(".*.tmp"))


@pytest.mark.slow
def test_a_mistake_is_one_sentence_and_exit_code_2():
    # The flags of the runs are not flags of this script, and are refused before it starts.
    code, _, err = program.run("compare_posteriors.py", "--dataset_name=digits")
    assert code == 2
    assert "dataset_name" in err and err.count("\n") == 1
    assert err.startswith("compare_posteriors.py: ")


def test_files_of_probabilities_are_compared(tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=50)
    for name in ("first", "second"):
        table = rng.dirichlet(np.ones(3), size=50)
        np.savetxt(tmp_path / f"{name}.csv", table, delimiter=",")
    np.savetxt(tmp_path / "labels.csv", labels, fmt="%d")
    compare_posteriors.compare(
        str(tmp_path / "first.csv"),
        [str(tmp_path / "second.csv")],
        str(tmp_path / "labels.csv"),
        None,
        tmp_path / "c",
    )
    out = capsys.readouterr().out
    for label in ("accuracy", "NLL", "ECE", "Brier score", "agreement", "total variation"):
        assert label in out
    assert "first has 1 draw(s)" in out


def test_labels_of_one_file_serve_the_others(tmp_path, capsys):
    probabilities = np.random.default_rng(0).dirichlet(np.ones(3), size=20)
    np.savez(tmp_path / "with.npz", probabilities=probabilities, labels=np.arange(20) % 3)
    np.savetxt(tmp_path / "without.csv", probabilities)
    pair = [str(tmp_path / "with.npz"), str(tmp_path / "without.csv")]
    compare_posteriors.compare(pair[1], pair[:1], None, None, tmp_path / "c")
    with (tmp_path / "c/comparison.csv").open() as file:
        accuracies = [row["value"] for row in csv.DictReader(file) if row["metric"] == "accuracy"]
    assert len(accuracies) == 2 and len(set(accuracies)) == 1


@pytest.mark.parametrize(
    ("reference", "candidates", "sentence"),
    [
        (None, ["vi"], "as --reference"),
        ("hmc", ["fewer"], "runs on different data: subset_train_to"),
        ("hmc", ["vi", "vi"], "was given twice"),
        ("hmc", ["nowhere"], "There is no run folder"),
        ("nowhere.csv", [], "There is no file"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    runs, tmp_path, reference, candidates, sentence
):
    paths = [str(runs / name) for name in candidates]
    with pytest.raises(UserError, match=sentence):
        compare_posteriors.compare(
            reference and str(runs / reference), paths, None, None, tmp_path / "c"
        )
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_folders_that_the_scripts_leave_are_read(tmp_path):
    """The other tests write folders by hand, because starting HMC and VI takes 40 seconds."""
    hmc = ("--num_chains=2", "--num_iterations=12", "--step_size=1e-3", "--trajectory_len=0.02")
    vi = ("--num_epochs=20", "--eval_freq=10", "--vi_ensemble_size=8")
    program.succeed("run_hmc.py", f"--dir={tmp_path / 'hmc'}", *hmc)
    program.succeed("run_vi.py", f"--dir={tmp_path / 'vi'}", *vi)
    out = program.succeed(
        "compare_posteriors.py",
        f"--reference={tmp_path / 'hmc'}",
        f"--candidates={tmp_path / 'vi'}",
        f"--dir={tmp_path / 'c'}",
    )
    assert "Warning: The reference has not converged" in out
    with (tmp_path / "c/comparison.csv").open() as file:
        numbers = {(row["run"], row["metric"]): row for row in csv.DictReader(file)}
    summary = json.loads((tmp_path / "vi/summary.json").read_text())
    assert float(numbers["vi", "rmse"]["value"]) == pytest.approx(summary["test"]["rmse"])
    for metric in ("w1", "std_ratio", "parameter_std_ratio", "correlation_error"):
        assert float(numbers["vi", metric]["floor"]) > 0
    assert (tmp_path / "c/predictive.png").is_file()
