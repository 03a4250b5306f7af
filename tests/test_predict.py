"""Folders that predict: new rows, the run's own test rows to the bit, and every refusal."""

import dataclasses
import json
import shlex

import jax
import numpy as np
import program
import pytest
from synthetic_runs import write_loadable_run

import haiku_posteriors
import predict
import run_hmc
import run_vi
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, devices, files, tasks
from haiku_posteriors.utils.problem import Problem
from haiku_posteriors.utils.report import loaded_runs, prediction_tables

NUM_ROWS, NUM_TEST = 120, 31  # neither 4 devices nor 2 divide 31
RNG = np.random.default_rng(0)
NETWORK = """
import haiku as hk
import jax

def network(inputs, num_outputs):
    return hk.nets.MLP([4, num_outputs], activation=jax.nn.tanh)(inputs)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table, its test rows as a table of their own, and a network."""
    path = tmp_path_factory.mktemp("own")
    age = RNG.uniform(20, 70, NUM_ROWS).round(2)
    colour = np.resize(["red", "green", "blue"], NUM_ROWS)
    price = age + 5 * (colour == "red") + RNG.normal(0, 2, NUM_ROWS)
    columns = {
        "age": age,
        "colour": colour,
        "rooms": np.arange(NUM_ROWS) % 4,
        "price": price.round(3),
        "size": (2 * age).round(1),
        "kind": np.where(price > 45, "dear", "cheap"),
        "part": np.where(np.arange(NUM_ROWS) < NUM_TEST, "test", "train"),
    }
    for name, keep in (("all.csv", slice(None)), ("new.csv", slice(NUM_TEST))):
        rows = zip(*(column[keep] for column in columns.values()), strict=True)
        lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
        (path / name).write_text("\n".join(lines))
    (path / "net.py").write_text(NETWORK)
    return path


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """They take longer than the runs and are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.pictures, "draw_run", lambda *_: [])
        yield


def command(folder, flags):
    table = f"--dataset_name={folder}/all.csv --split=part --model_name={folder}/net.py:network"
    return [*shlex.split(table), *shlex.split(flags)]


OWN = Problem(target=("kind",), ignore=("price", "size"), split="part")
HMC = (
    "--target=price --ignore=kind,size --num_iterations=5 --num_burn_in_iterations=2 "
    "--num_chains=2 --trajectory_len=0.02 --noise_std=0.3 --warm_start_epochs=0"
)
VI = "--target=kind --ignore=price,size --num_epochs=2 --vi_ensemble_size=3"


def run_here(script, arguments, directory):
    script.run(cmd_args_utils.parse(script.GROUPS, [*arguments, f"--dir={directory}"]))
    return directory


def predict_here(*flags):
    predict.run(cmd_args_utils.parse(predict.GROUPS, flags))


@pytest.fixture(scope="module")
def regression(folder):
    return run_here(run_hmc, command(folder, HMC), folder / "hmc")


@pytest.fixture(scope="module")
def classification(folder):
    return run_here(run_vi, command(folder, VI), folder / "vi")


def check_test_rows(run, folder, output):
    """predict.py on the test rows gives the run's own predictions, draw by draw, to the bit."""
    predict_here(f"--run={run}", f"--inputs={folder}/new.csv", f"--output={output}", "--per_draw")
    found, own = files.read_arrays(output), files.read_arrays(run / "predictions.npz")
    assert found["predictions"].dtype == own["test_predictions"].dtype == np.float32
    np.testing.assert_array_equal(found["predictions"], own["test_predictions"])
    return found, own


@pytest.mark.slow
def test_a_run_with_fixed_sums_predicts_its_bits_and_those_of_one_device(folder):
    """Four devices here, one in a process of its own; predict.py knows from the folder alone."""
    flags = command(folder, f"{HMC} --deterministic_sums")
    try:
        four = run_here(run_hmc, flags, folder / "four")
    finally:
        devices.choose_mesh(None, 1)
    check_test_rows(four, folder, folder / "four.npz")
    program.succeed("run_hmc.py", *flags, f"--dir={folder / 'one'}")
    one = files.read_arrays(folder / "one" / "predictions.npz")
    for name, values in files.read_arrays(four / "predictions.npz").items():
        np.testing.assert_array_equal(values, one[name], err_msg=name)


@pytest.mark.slow
def test_a_run_on_a_given_mesh_is_predicted_with_by_that_of_the_rule(folder):
    try:
        run = run_here(run_hmc, command(folder, f"{HMC} --mesh=data:4"), folder / "mesh")
    finally:
        devices.choose_mesh(None, 1)
    predict_here(f"--run={run}", f"--inputs={folder}/new.csv", f"--output={folder}/mesh.npz")
    own = files.read_arrays(run / "predictions.npz")["test_predictions"]
    found = files.read_arrays(folder / "mesh.npz")
    np.testing.assert_allclose(found["mean"], own[..., 0].mean(0, float), rtol=1e-5, atol=1e-4)


def test_test_rows_on_four_devices(regression, folder, tmp_path, capsys):
    assert jax.device_count() == 4
    found, own = check_test_rows(regression, folder, tmp_path / "out.npz")
    np.testing.assert_array_equal(found["mean"], own["test_predictions"][..., 0].mean(0, float))
    # The data, of which the run's own metrics are, came with their target.
    summary = files.read_json(regression / "summary.json")
    out = capsys.readouterr().out
    assert f"rmse {summary['test']['rmse']:.4g}" in out and "nll " in out
    assert "not used: price, size, kind, part." in out


def test_test_rows_on_one_device(folder, tmp_path, first_device_only):
    run = run_here(run_hmc, command(folder, HMC), tmp_path / "run")
    check_test_rows(run, folder, tmp_path / "out.npz")


@pytest.mark.slow  # another run; draws of chains are above
def test_test_rows_of_draws_that_were_taken_at_once(classification, folder, tmp_path):
    found, own = check_test_rows(classification, folder, tmp_path / "out.npz")
    mean = own["test_predictions"].mean(axis=0, dtype=float)
    np.testing.assert_array_equal(found["probability_dear"], mean[:, 1])
    assert found["class"].tolist() == np.array(["cheap", "dear"])[mean.argmax(axis=1)].tolist()
    assert np.all(found["mutual_information"] <= found["entropy"])


def test_a_table_of_predictions(regression, folder, tmp_path):
    outputs = {}
    for suffix in ("csv", "npz", "parquet"):
        path = tmp_path / f"out.{suffix}"
        if suffix == "parquet":
            pytest.importorskip("pyarrow")
        predict_here(
            f"--run={regression}",
            f"--inputs={folder}/new.csv",
            f"--output={path}",
            "--quantiles=0.05,0.5,0.95",
        )
        read = prediction_tables.read_inputs(path)
        outputs[suffix] = read.columns
    names = ["mean", "std", "aleatoric_std", "epistemic_std"]
    names += ["quantile_0.05", "quantile_0.5", "quantile_0.95"]
    for columns in outputs.values():
        assert list(columns) == names
        for name in names:
            np.testing.assert_array_equal(columns[name], outputs["npz"][name])
    assert np.all(columns["quantile_0.05"] < columns["quantile_0.95"])
    np.testing.assert_allclose(
        columns["std"], np.hypot(columns["aleatoric_std"], columns["epistemic_std"])
    )


def test_from_python(regression, classification, folder, monkeypatch):
    monkeypatch.chdir("/")  # neither the table nor the working directory is needed
    run = haiku_posteriors.load_run(regression)
    assert run.num_draws == 6 and run.is_finished
    rows = {"age": [30.0, 60.0], "colour": ["red", "blue"], "rooms": [1, 2]}
    prediction = run.predict(rows)
    assert prediction.mean.shape == (2, 1) and prediction.outputs.shape == (6, 2, 2)
    functions = run.sample_functions(rows, 6)
    np.testing.assert_array_equal(functions, prediction.outputs[..., :1])
    assert run.sample_functions(rows, 3).shape == (3, 2, 1)
    with pytest.raises(UserError, match="has 6 draws: between 1 and that many"):
        run.sample_functions(rows, 7)
    with pytest.raises(UserError, match="give columns by name"):
        run.predict(np.zeros((2, 5)))
    kinds = haiku_posteriors.load_run(classification)
    assert kinds.predict(rows).labels[0] in ("cheap", "dear")
    assert kinds.evaluate(rows, ["dear", "cheap"])["nll"] > 0
    with pytest.raises(UserError, match="'costly' is none of the run's classes: cheap, dear"):
        kinds.evaluate(rows, ["dear", "costly"])
    with pytest.raises(UserError, match="2 rows of inputs but 1 of targets"):
        run.evaluate(rows, [3.0])
    with pytest.raises(UserError, match=r"has 1 target\(s\) a row, and 2"):
        run.evaluate(rows, [[3.0, 4.0], [1.0, 2.0]])


def test_a_data_frame_is_columns_by_name(regression):
    class Frame(dict):
        columns = ("age", "colour", "rooms")

    run = haiku_posteriors.load_run(regression)
    rows = {"age": [30.0], "colour": ["red"], "rooms": [1]}
    expected = run.predict(rows).outputs
    np.testing.assert_array_equal(run.predict(Frame(rows)).outputs, expected)


def test_rows_in_blocks_and_draws_in_pieces_change_nothing(regression, folder, monkeypatch):
    whole = haiku_posteriors.load_run(regression)
    table = prediction_tables.read_inputs(folder / "all.csv")
    expected = whole.predict(table)
    monkeypatch.setattr(loaded_runs, "BLOCK_BYTES", 1)
    monkeypatch.setattr(loaded_runs, "DRAW_BYTES_KEPT", 1)
    run = haiku_posteriors.load_run(regression)
    ticks = []
    blocks = {rows.start: block for rows, block in run.predict_blocks(table, ticks.append)}
    assert list(blocks) == [0, 31, 62, 93] and len(blocks[93].mean) == 27
    assert sum(ticks) == run.num_passes(NUM_ROWS) == 4 * 6
    joined = np.concatenate([block.mean for block in blocks.values()])
    np.testing.assert_allclose(joined, expected.mean, rtol=1e-5)


def test_arrays_of_a_run_without_names(tmp_path, capsys):
    described = Problem("two_moons", model_name="mlp_toy")
    run = write_loadable_run(tmp_path / "run", described)
    (tmp_path / "new.csv").write_text("first,second\n0.5,1\n1,2\n")
    np.savez(tmp_path / "new.npz", x=np.array([[0.5, 1], [1, 2]]))
    for suffix in ("csv", "npz"):
        output = tmp_path / f"out_{suffix}.npz"
        predict_here(f"--run={run}", f"--inputs={tmp_path}/new.{suffix}", f"--output={output}")
    assert "The run is not finished" in capsys.readouterr().out
    csv, npz = (files.read_arrays(tmp_path / f"out_{suffix}.npz") for suffix in ("csv", "npz"))
    assert csv["class"].tolist() == npz["class"].tolist()
    np.testing.assert_array_equal(csv["probability_1"], npz["probability_1"])
    loaded = haiku_posteriors.load_run(run)
    for wrong, sentence in (
        (np.zeros((2, 3)), r"shape \(2, 3\), but the run was trained on rows of shape \(2,\)"),
        (np.zeros((0, 2)), "have no rows"),
        (np.array([[1, np.nan]]), "missing or not finite, in row 1"),
        (np.array([["a", "b"]]), "must hold real numbers"),
        ({"a": [1.0]}, r"has 1 columns, but the run was trained on rows of shape \(2,\) without"),
    ):
        with pytest.raises(UserError, match=sentence):
            loaded.predict(wrong)


INPUTS = {
    "age,colour\n1,red\n": "lacks the column rooms; it has age, colour.",
    "age,rooms,colour\n1,,red\n2,3,red\n,1,red\n": "column 'age' in row 3; column 'rooms' in row 1",
    "age,rooms,colour\n1,1,pink\n": "'pink' in row 1, which is none of the categories known: blue",
    "age,rooms,colour\nold,1,red\n": "column 'age' must hold numbers, but row 1 has 'old'",
}


@pytest.mark.parametrize("content", INPUTS)
def test_wrong_inputs_are_refused_in_one_sentence(regression, tmp_path, content):
    (tmp_path / "new.csv").write_text(content)
    with pytest.raises(UserError) as error:
        predict_here(
            f"--run={regression}", f"--inputs={tmp_path}/new.csv", f"--output={tmp_path}/o.csv"
        )
    assert INPUTS[content] in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"run": ""}, "--run is empty"),
        ({"output": ""}, "--output is empty"),
        ({"run": "nowhere"}, "There is no run folder nowhere"),
        ({"run": "."}, "holds no problem.json"),
        ({"inputs": "nowhere.csv"}, "There is no file nowhere.csv"),
        ({"inputs": "new.xlsx"}, "none of the files that can be read"),
        ({"output": "out.xlsx"}, "none of the files that can be written"),
        ({"output": "no_folder/out.csv"}, "its folder does not exist"),
        ({"quantiles": "0.5,1"}, "must be numbers between 0 and 1"),
        ({"quantiles": "half"}, "must be numbers between 0 and 1"),
        ({"per_draw": "true"}, "--per_draw needs an --output that ends in .npz"),
    ],
)
def test_wrong_flags_are_refused_in_one_sentence(regression, folder, tmp_path, flags, sentence):
    given = {"run": regression, "inputs": folder / "new.csv", "output": tmp_path / "out.csv"}
    with pytest.raises(UserError) as error:
        predict_here(*(f"--{name}={value}" for name, value in (given | flags).items()))
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_quantiles_are_not_of_classes(classification, folder, tmp_path):
    flags = (f"--run={classification}", f"--inputs={folder}/new.csv", "--quantiles=0.5")
    with pytest.raises(UserError, match="Quantiles are of numbers"):
        predict_here(*flags, f"--output={tmp_path}/o.csv")


def test_a_network_that_has_changed_is_refused(folder, tmp_path, monkeypatch):
    network = tmp_path / "net.py"
    network.write_text(NETWORK)
    described = dataclasses.replace(OWN, dataset_name=f"{folder}/all.csv")
    described = dataclasses.replace(described, model_name=f"{network}:network")
    run = write_loadable_run(tmp_path / "run", described)
    before = haiku_posteriors.load_run(run)
    network.write_text(NETWORK.replace("tanh", "relu"))
    with pytest.raises(UserError, match=r"net.py:network' has changed since the run in .* Restore"):
        haiku_posteriors.load_run(run)
    after = haiku_posteriors.load_run(run, allow_changed_network=True)
    rows = {"age": [30.0, 60.0], "colour": ["red", "blue"], "rooms": [1, 2]}
    assert not np.array_equal(before.predict(rows).outputs, after.predict(rows).outputs)
    network.write_text(NETWORK.replace("[4,", "[5,"))
    with pytest.raises(UserError, match=r"draws in .* are not of the network"):
        haiku_posteriors.load_run(run, allow_changed_network=True)
    network.unlink()
    with pytest.raises(UserError, match="cannot be imported"):
        haiku_posteriors.load_run(run)


def test_damaged_folders_are_refused(folder, regression, tmp_path):
    content = json.loads((regression / "problem.json").read_text())
    for change, sentence in (
        ({"format": 7}, "another version"),
        ({"form": {}}, "damaged: KeyError"),
        ({"num_chains": "two"}, "damaged: ValueError"),
    ):
        files.write_json(tmp_path / "problem.json", content | change)
        with pytest.raises(UserError, match=sentence):
            haiku_posteriors.load_run(tmp_path)
    files.write_json(tmp_path / "problem.json", content)
    with pytest.raises(UserError, match="has no draws yet"):
        haiku_posteriors.load_run(tmp_path)


def test_several_targets(folder, tmp_path):
    described = dataclasses.replace(
        OWN,
        dataset_name=f"{folder}/all.csv",
        model_name="mlp_toy",
        target=("price", "size"),
        ignore=("kind",),
        noise_std=0.3,
    )
    run = write_loadable_run(tmp_path / "run", described)
    flags = (f"--run={run}", f"--inputs={folder}/new.csv", f"--output={tmp_path}/o.npz")
    predict_here(*flags, "--per_draw")
    found = files.read_arrays(tmp_path / "o.npz")
    mean = found["predictions"].mean(axis=0, dtype=float)
    np.testing.assert_array_equal(found["size_mean"], mean[:, 1])
    np.testing.assert_allclose(found["price_aleatoric_std"], mean[:, 2], rtol=1e-6)
