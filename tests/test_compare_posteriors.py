"""compare_posteriors.py as a user meets it: a report of tiny runs, files, and what it refuses."""

import base64
import csv
import json
import re
import shutil

import numpy as np
import program
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.report import comparison, run_folders

HMC = ["--num_chains=2", "--num_iterations=12", "--step_size=1e-3", "--trajectory_len=0.02"]
VI = ["--num_epochs=20", "--eval_freq=10", "--vi_ensemble_size=8"]


def run(*flags):
    return program.run("compare_posteriors.py", *flags)


def start_run(script, directory, *flags):
    code, _, err = program.run(script, f"--dir={directory}", *flags)
    assert code == 0, err
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A reference, a candidate, and a run on fewer rows."""
    folder = tmp_path_factory.mktemp("runs")
    start_run("run_hmc.py", folder / "hmc", *HMC)
    start_run("run_vi.py", folder / "vi", *VI, "--weight_decay=2")
    # What a run on 40 rows would leave: only its flags and checksum matter here.
    shutil.copytree(folder / "vi", folder / "fewer")
    for name, change in (
        ("flags.json", {"subset_train_to": 40, "data": "0"}),
        ("summary.json", {"data_sha256": "0"}),
    ):
        content = json.loads((folder / "fewer" / name).read_text())
        (folder / "fewer" / name).write_text(json.dumps(content | change))
    return folder


def test_a_comparison_leaves_a_page_with_its_pictures_inside(runs, tmp_path):
    code, out, err = run(
        f"--reference={runs / 'hmc'}", f"--candidates={runs / 'vi'}", f"--dir={tmp_path / 'c'}"
    )
    assert code == 0, err
    assert "W1 of functions" in out and "comparison.html" in out
    assert "Warning: The reference has not converged" in out
    assert "vi is of another posterior: weight_decay (2.0, reference 0.444" in out
    page = (tmp_path / "c/comparison.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 4
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


def test_files_of_probabilities_are_compared(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=50)
    for name in ("first", "second"):
        table = rng.dirichlet(np.ones(3), size=50)
        np.savetxt(tmp_path / f"{name}.csv", table, delimiter=",")
    np.savetxt(tmp_path / "labels.csv", labels, fmt="%d")
    code, out, err = run(
        f"--reference={tmp_path / 'first.csv'}",
        f"--candidates={tmp_path / 'second.csv'}",
        f"--targets={tmp_path / 'labels.csv'}",
        f"--dir={tmp_path / 'c'}",
    )
    assert code == 0, err
    for label in ("accuracy", "NLL", "ECE", "Brier score", "agreement", "total variation"):
        assert label in out
    assert "first has 1 draw(s)" in out


def damaged(runs, tmp_path, kind):
    """A copy of the candidate with one thing wrong."""
    copy = tmp_path / "copy"
    shutil.copytree(runs / "vi", copy)
    (draws,) = copy.glob("draws/*.safetensors")
    if kind == "unfinished":
        (copy / "summary.json").unlink()
    elif kind == "no_run":
        (copy / "flags.json").unlink()
    elif kind == "flags":
        (copy / "flags.json").write_text("{")
    elif kind == "predictions":
        content = (copy / "predictions.npz").read_bytes()
        (copy / "predictions.npz").write_bytes(content[: len(content) // 2])
    elif kind == "draws":
        content = bytearray(draws.read_bytes())
        content[-5] ^= 255
        draws.write_bytes(bytes(content))
    elif kind == "no_draws":
        draws.unlink()
    elif kind in ("not_finite", "shapes"):
        with np.load(copy / "predictions.npz") as arrays:
            arrays = dict(arrays)
        if kind == "shapes":
            arrays["test_log_likelihoods"] = arrays["test_log_likelihoods"][:, 1:]
        else:
            arrays["test_predictions"][0, 0, 0] = np.nan
        np.savez(copy / "predictions.npz", **arrays)
    return copy


SENTENCES = {
    "unfinished": "is not finished: it has no summary.json",
    "no_run": "holds no run",
    "flags": "flags.json is damaged",
    "predictions": "predictions.npz is damaged",
    "draws": "its checksum does not match",
    "no_draws": "has no draws",
    "not_finite": "not finite",
    "shapes": "predictions.npz holds predictions of shape",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_damage_is_told(runs, tmp_path, kind):
    with pytest.raises(UserError, match=SENTENCES[kind]):
        run_folders.load_draws(run_folders.open_run(damaged(runs, tmp_path, kind)))


def test_other_data_are_refused_with_the_difference(runs):
    reference, fewer = (run_folders.open_run(runs / name) for name in ("hmc", "fewer"))
    with pytest.raises(UserError, match=r"subset_train_to \(40, reference None\)"):
        run_folders.refuse_other_data(fewer, reference)
    changed = reference._replace(summary={**reference.summary, "data_sha256": "0"})
    with pytest.raises(UserError, match="files behind the same name have changed"):
        run_folders.refuse_other_data(changed, reference)
    # In float64 the rows are the same up to rounding.
    precise = changed._replace(flags={**reference.flags, "use_float64": True})
    run_folders.refuse_other_data(precise, reference)
    other = reference.targets.copy()
    other[7] += 1
    with pytest.raises(UserError, match="first in row 7"):
        run_folders.refuse_other_data(precise._replace(targets=other), reference)
    file = reference._replace(flags={}, outputs=reference.outputs[:, :5])
    with pytest.raises(UserError, match="5 rows of 2 means and deviations against 128 rows"):
        run_folders.refuse_other_data(file, reference)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--candidates={runs}/fewer"], "runs on different data: subset_train_to"),
        (["--candidates={runs}/vi", "--dataset_name=digits"], "dataset_name has no meaning here"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(runs, tmp_path, flags, sentence):
    code, _, err = run(
        f"--reference={runs / 'hmc'}",
        *(flag.format(runs=runs) for flag in flags),
        f"--dir={tmp_path / 'c'}",
    )
    assert code == 2
    assert sentence in err and err.count("\n") == 1 and err.startswith("compare_posteriors.py: ")
    assert not (tmp_path / "c").exists()


def test_a_missing_folder_and_a_run_given_twice(runs, tmp_path):
    with pytest.raises(UserError, match="There is no run folder"):
        run_folders.open_run(tmp_path / "nowhere")
    reference = run_folders.open_run(runs / "hmc")
    with pytest.raises(UserError, match="was given twice"):
        comparison.write(tmp_path / "c", reference, [reference])
