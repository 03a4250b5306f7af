"""Run folders: damage is told, other data are refused, and draws are read one file at a time."""

import json
import shutil
import tracemalloc

import numpy as np
import pytest
import synthetic_runs

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import checkpoint_utils, data_utils
from haiku_posteriors.utils.problem import Problem
from haiku_posteriors.utils.report import run_folders
from haiku_posteriors.utils.report.run_folders import open_run


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Two chains of six draws, in one file of four and one of two."""
    return synthetic_runs.write_toy_run(tmp_path_factory.mktemp("runs") / "toy")


def damaged(toy, tmp_path, kind):
    """A copy with one thing wrong."""
    copy = tmp_path / "copy"
    shutil.copytree(toy, copy)
    draws = sorted(copy.glob("draws/*.safetensors"))[-1]
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
        shutil.rmtree(copy / "draws")
    elif kind == "fewer_draws":
        draws.unlink()
    elif kind == "fewer_chains":
        named = checkpoint_utils.load_tensors(draws)[0]
        checkpoint_utils.save_tree(draws, {name: leaf[:1] for name, leaf in named.items()})
    else:
        with np.load(copy / "predictions.npz") as arrays:
            arrays = dict(arrays)
        if kind == "shapes":
            arrays["test_log_likelihoods"] = arrays["test_log_likelihoods"][:, 1:]
        elif kind == "chains":
            arrays["num_chains"] = np.array(5)
        elif kind == "arrays":
            del arrays["test_targets"]
        else:
            arrays["test_predictions"][0, 0, 0] = np.nan
        np.savez(copy / "predictions.npz", **arrays)
    return copy


SENTENCES = {
    "unfinished": "is not finished: it has no summary.json",
    "no_run": "holds no run",
    "flags": "flags.json is damaged",
    "predictions": "predictions.npz is damaged",
    "arrays": "predictions.npz lacks test_targets",
    "draws": "its checksum does not match",
    "no_draws": "has no draws",
    "fewer_draws": "has 4 draws of each chain, and predictions.npz .* 6 draws of each of 2 chains",
    "fewer_chains": "has draws of 1 chains",
    "not_finite": "not finite",
    "shapes": "predictions.npz holds predictions of shape",
    "chains": r"12 draws, .* of shape \(12, 128, 2\) from 5 chain",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_damage_is_told(toy, tmp_path, kind):
    with pytest.raises(UserError, match=SENTENCES[kind]):
        run_folders.read_parameters(open_run(damaged(toy, tmp_path, kind)), 10)


def test_an_opened_run_is_what_was_written(toy):
    run = open_run(toy)
    assert run.name == "toy" and run.diagnostics == {}
    assert run.predictions.task == "regression"
    assert run.predictions.outputs.shape == (2, 6, 128, 2)
    with np.load(toy / "predictions.npz") as arrays:
        np.testing.assert_array_equal(run.predictions.flat_outputs, arrays["test_predictions"])
        np.testing.assert_array_equal(run.predictions.targets, arrays["test_targets"])
    described = Problem.from_mapping(run.flags)
    assert (described.dataset_name, described.model_name) == ("toy_regression", "mlp_toy")


def test_float64_is_needed_by_one_run_of_several(toy):
    run = open_run(toy)
    precise = run._replace(flags={**run.flags, "use_float64": True})
    file = run._replace(flags={})
    assert not run_folders.needs_float64([run, file])
    assert run_folders.needs_float64([file, run, precise])


def test_other_data_are_refused_with_the_difference(toy):
    reference = open_run(toy)
    fewer = reference._replace(
        flags={**reference.flags, "subset_train_to": 40},
        summary={**reference.summary, "data_sha256": "0"},
    )
    with pytest.raises(UserError, match=r"subset_train_to \(40, reference None\)"):
        run_folders.refuse_other_data(fewer, reference)
    changed = reference._replace(summary={**reference.summary, "data_sha256": "0"})
    with pytest.raises(UserError, match="files behind the same name have changed"):
        run_folders.refuse_other_data(changed, reference)
    # In float64 the rows are the same up to rounding.
    precise = changed._replace(flags={**reference.flags, "use_float64": True})
    run_folders.refuse_other_data(precise, reference)
    other = reference.predictions.targets.copy()
    other[7] += 1
    other = precise._replace(predictions=reference.predictions._replace(targets=other))
    with pytest.raises(UserError, match="first in row 7"):
        run_folders.refuse_other_data(other, reference)
    few = reference.predictions._replace(outputs=reference.predictions.outputs[:, :, :5])
    with pytest.raises(UserError, match="5 rows of 2 means and deviations against 128 rows"):
        run_folders.refuse_other_data(reference._replace(flags={}, predictions=few), reference)


def test_names_are_as_short_as_they_can_be(toy, tmp_path):
    run = open_run(toy)
    other = run._replace(path=tmp_path / "second" / "toy")
    third = run._replace(path=tmp_path / "vi", name="vi")
    names = [named.name for named in run_folders.distinct_names([run, other, third])]
    assert names == [f"{toy.parent.name}/toy", "second/toy", "vi"]
    with pytest.raises(UserError, match="was given twice"):
        run_folders.distinct_names([run, run])


def test_a_sample_of_parameters_is_the_same_for_every_division_into_files(toy, tmp_path):
    whole = synthetic_runs.write_toy_run(tmp_path / "whole", draws_per_file=6)
    assert len(list(whole.glob("draws/*"))) == 1 and len(list(toy.glob("draws/*"))) == 2
    samples = [run_folders.read_parameters(open_run(path), 20) for path in (toy, whole)]
    assert samples[0].shapes == samples[1].shapes
    np.testing.assert_array_equal(samples[0].values, samples[1].values)
    assert samples[0].values.shape == (12, 20)
    everything = run_folders.read_parameters(open_run(toy), 10**6)
    leaves = checkpoint_utils.load_draws(toy / "draws")
    # Draws chain by chain, parameters in the order of their names.
    first_name = min(leaves)
    size = leaves[first_name][0, 0].size
    np.testing.assert_array_equal(everything.values[:, :size], leaves[first_name].reshape(12, size))


def test_no_more_than_one_file_of_draws_is_in_memory(tmp_path):
    num_files, scalars = 8, 2**18
    for index in range(num_files):
        draws = {"w": np.full((1, 1, scalars), index, np.float32)}
        checkpoint_utils.save_draws(tmp_path / "draws", index + 1, draws)
    outputs = np.full((1, num_files, 1, 2), 0.5, np.float32)
    run = run_folders.OpenedRun(
        "large", tmp_path, run_folders.Predictions("classification", outputs), {}, {}, {}
    )
    one_file = 4 * scalars
    tracemalloc.start()
    sample = run_folders.read_parameters(run, 300)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert one_file <= peak < 1.5 * one_file
    np.testing.assert_array_equal(sample.values, np.tile(np.arange(8.0)[:, None], 300))


def test_the_fingerprint_follows_the_rows(toy):
    dataset = data_utils.load("toy_regression")
    summary = json.loads((toy / "summary.json").read_text())
    assert data_utils.fingerprint(dataset) == summary["data_sha256"]
    fewer = dataset._replace(x_train=dataset.x_train[1:], y_train=dataset.y_train[1:])
    precise = dataset._replace(x_test=dataset.x_test.astype(np.float64))
    assert len({data_utils.fingerprint(d) for d in (dataset, fewer, precise)}) == 3
