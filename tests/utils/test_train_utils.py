"""The loop: exact resume from any crash, non-finite numbers, collecting, warnings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_posteriors.core import sgd
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import checkpoint_utils, collection, data_utils, draws, models
from haiku_posteriors.utils.files import read_rows
from haiku_posteriors.utils.logging_utils import RunLog
from haiku_posteriors.utils.train_utils import Answer, DivergedError, Enough, Run

EPOCHS = 8


@pytest.fixture(scope="module")
def problem(module_on_first_device):
    dataset = data_utils.load("toy_regression")
    network = models.get_network("mlp_toy", 1)
    return make_log_joint(network, dataset.x_train, make_prior(1.0), gaussian(0.3)), dataset


def make_run(problem, directory=None, step_size=1e-2, **settings):
    log_joint, dataset = problem
    arguments = {
        "num_steps": EPOCHS,
        "num_chains": 3,
        "eval_freq": 3,
        "save_freq": 2,
        "collects": lambda epoch: epoch in (3, 5, EPOCHS),
        "quiet": True,
    }
    method = sgd.sgd(log_joint, optax.adam(step_size), batch_size=32)
    return Run(log_joint, dataset, method, directory=directory, **arguments | settings)


@pytest.fixture(scope="module")
def whole(problem, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return make_run(problem, directory).finish(), directory


class Crash(Exception):
    """Stands for a power cut."""


def assert_equal_runs(first, second):
    compared = (
        "draws",
        "test_predictions",
        "test_metrics",
        "train_metrics",
        "state",
        "num_updates",
    )
    for name in compared:
        a, b = getattr(first, name), getattr(second, name)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)


def test_result_is_complete(whole):
    result, directory = whole
    assert result.num_updates == EPOCHS * 3
    assert result.draws["hidden_0"]["w"].shape == (3, 3, 1, 7)
    assert result.test_predictions.outputs.shape == (3, 3, 128, 2)
    flat = result.test_predictions.flat_log_likelihoods
    assert result.test_metrics["nll"] == metrics.negative_log_likelihood(flat)
    # Convexity: the mixture's score is at least as good as the mean of its members' scores.
    assert result.test_metrics["nll"] <= result.member_metrics["nll"]
    assert [row["epoch"] for row in read_rows(directory / "metrics.jsonl")] == [3, 6, 8]


def test_many_training_rows_are_predicted_by_few_draws(problem, whole, monkeypatch):
    """Test rows by all draws; training metrics, and what is kept of them, by the middle one."""
    rows = len(problem[1].y_train)
    monkeypatch.setattr(collection, "MAX_TRAIN_PREDICTIONS", 2 * 3 * rows - 1)
    few, all_of_them = make_run(problem).finish(), whole[0]
    assert few.test_metrics == all_of_them.test_metrics
    assert few.train_draws.tolist() == [1] and all_of_them.train_draws.tolist() == [0, 1, 2]
    middle = all_of_them.train_log_likelihoods[:, 1:2]
    np.testing.assert_array_equal(few.train_log_likelihoods, middle)
    flat = middle.reshape(-1, rows).astype(np.float64)
    np.testing.assert_allclose(
        few.train_metrics["nll"], metrics.negative_log_likelihood(flat), rtol=1e-5
    )


def test_without_a_folder_nothing_is_written_and_the_result_is_the_same(problem, whole):
    assert_equal_runs(make_run(problem).finish(), whole[0])


@pytest.mark.parametrize("crash_at", ["save_draws", "save_checkpoint", "write_row"])
@pytest.mark.parametrize("nth", [1, 2])
def test_resumed_run_equals_the_whole_one(problem, whole, tmp_path, monkeypatch, crash_at, nth):
    """A crash before the nth write of each kind of file, then a second start."""
    calls = []

    def crash_on_nth(function):
        def wrapped(*arguments):
            calls.append(crash_at)
            if len(calls) == nth:
                raise Crash
            return function(*arguments)

        return wrapped

    owner, name = {
        "save_draws": (checkpoint_utils, "save_draws"),
        "save_checkpoint": (checkpoint_utils, "save_checkpoint"),
        "write_row": (RunLog, "row"),
    }[crash_at]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash_on_nth(getattr(owner, name)))
        with pytest.raises(Crash):
            make_run(problem, tmp_path).finish()
    result = make_run(problem, tmp_path).finish()
    assert_equal_runs(result, whole[0])
    for x, y in zip(
        jax.tree.leaves(checkpoint_utils.load_draws(tmp_path / "draws")),
        jax.tree.leaves(checkpoint_utils.load_draws(whole[1] / "draws")),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    volatile = {"seconds", "time"}
    rows = [
        [{k: v for k, v in row.items() if k not in volatile} for row in read_rows(path)]
        for path in (tmp_path / "metrics.jsonl", whole[1] / "metrics.jsonl")
    ]
    assert rows[0] == rows[1]


def test_a_finished_run_started_again_gives_its_result(problem, whole):
    assert_equal_runs(make_run(problem, whole[1]).finish(), whole[0])


def test_a_damaged_checkpoint_costs_time_only(problem, whole, tmp_path, capsys):
    make_run(problem, tmp_path).finish()
    newest = tmp_path / "checkpoints" / f"epoch_{EPOCHS:08d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    run = make_run(problem, tmp_path, quiet=False)
    assert run.step == 6
    assert "is damaged" in capsys.readouterr().out
    assert_equal_runs(run.finish(), whole[0])


def test_a_number_that_is_not_finite_stops_the_run_and_keeps_the_state_before(problem, tmp_path):
    log_joint, dataset = problem
    step_size = optax.piecewise_constant_schedule(1e-4, {4 * 3 + 1: 1e30})  # step 2 of epoch 5
    method = sgd.sgd(log_joint, optax.sgd(step_size), batch_size=32)
    run = Run(log_joint, dataset, method, num_steps=9, directory=tmp_path, quiet=True)
    with pytest.raises(DivergedError, match="epoch 5, step 3, chain 0; the state after epoch 4"):
        run.finish()
    epoch, state, _, _ = checkpoint_utils.load_newest_checkpoint(
        tmp_path / "checkpoints", run.state
    )
    assert epoch == 4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_draws_that_agree_are_pointed_out(problem, capsys):
    params = problem[0].init(jax.random.key(0))
    same = jax.tree.map(lambda leaf: np.stack([leaf] * 3), params)
    make_run(problem, step_size=0.0, initial_params=same, quiet=False).finish()
    printed = capsys.readouterr().out
    assert printed.count("the draws practically agree") == 1
    make_run(problem, quiet=False).finish()
    assert "practically agree" not in capsys.readouterr().out


def counting_method(log_joint):
    """Counts its steps from 0; chain k by k + 1."""

    def init(rng_key, params):
        return {"params": log_joint.init(rng_key), "count": jnp.zeros((), jnp.int32)}

    def step(rng_key, state, data):
        count = state["count"] + 1
        # A new draw every step, so that the step at which a run ends is seen in its draws.
        params = log_joint.init(rng_key)
        return {"params": params, "count": count}, {"log_joint": jnp.zeros(()), "count": count}

    def sample(rng_key, state, num_draws):
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * num_draws), state["params"])

    return Method(init, step, sample)


def run_until(problem, limit, directory=None, **settings):
    log_joint, dataset = problem
    arguments = {"num_steps": 50, "num_chains": 2, "eval_freq": 20, "save_freq": 20, "quiet": True}
    return Run(
        log_joint,
        dataset,
        counting_method(log_joint),
        is_finished=lambda state: jnp.all(state["count"] >= limit),
        directory=directory,
        **arguments | settings,
    )


@pytest.mark.parametrize("history", [False, True])
def test_a_run_ends_by_itself_at_the_first_step_that_finishes_it(problem, tmp_path, history):
    """However many steps a call makes: the end is that of a run of so many steps."""
    run = run_until(problem, 7, tmp_path, keep_history=history, show=("count",))
    result = run.finish()
    assert run.step == 7 and result.num_updates == 7 and np.all(result.state["count"] == 7)
    assert [row["epoch"] for row in read_rows(tmp_path / "metrics.jsonl")] == [7]
    log_joint, dataset = problem
    fixed = Run(
        log_joint, dataset, counting_method(log_joint), num_steps=7, num_chains=2, quiet=True
    )
    assert_equal_runs(fixed.finish(), result)
    # Started again, it is still at its end.
    again = run_until(problem, 7, tmp_path, keep_history=history)
    assert again.step == 7
    assert_equal_runs(again.finish(), result)


def test_a_run_that_ends_by_itself_is_resumed_exactly(problem, tmp_path, monkeypatch):
    """A crash at the evaluation of step 40, before its checkpoint."""
    whole = run_until(problem, 45).finish()
    row = RunLog.row

    def crash_at_40(log, position, *arguments):
        if position == 40:
            raise Crash
        row(log, position, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "row", crash_at_40)
        with pytest.raises(Crash):
            run_until(problem, 45, tmp_path).finish()
    resumed = run_until(problem, 45, tmp_path)
    assert resumed.step == 20
    assert_equal_runs(resumed.finish(), whole)
    assert resumed.step == 45


def test_draws_of_a_run_that_ends_by_itself(problem):
    """Where `collects` says; and at the end if that is nowhere before."""
    some = run_until(problem, 7, collects=lambda step: step in (2, 5, 30)).finish()
    assert some.draws["output"]["b"].shape[:2] == (2, 2)
    none = run_until(problem, 7, collects=lambda step: step == 30).finish()
    np.testing.assert_array_equal(
        none.draws["output"]["b"][:, 0], none.state["params"]["output"]["b"]
    )
    # One that never finishes makes all its steps.
    assert run_until(problem, 1000, num_steps=9).finish().num_updates == 9


def test_a_run_whose_time_ends_in_an_evaluation_still_draws(problem, monkeypatch):
    """The last steps were in time, and made no draws; what comes after them was not."""
    run = make_run(problem, num_steps=1000, eval_freq=1, time_limit=1e5)

    def slowly(info, just_collected):
        run._seconds += 1e6

    monkeypatch.setattr(run, "_evaluate", slowly)
    result = run.finish()
    assert run.step < 1000 and result.test_predictions.num_draws > 0


def test_seconds_that_the_start_took_count(problem):
    run = make_run(problem, num_steps=1000, eval_freq=1, time_limit=10.0, seconds_before=60.0)
    result = run.finish()
    assert run.step < 1000 and result.seconds > 60 and result.test_predictions.num_draws > 0


def test_a_run_that_would_collect_nothing_is_refused(problem):
    with pytest.raises(UserError, match="No draws would be collected"):
        make_run(problem, collects=lambda epoch: epoch > 100)


def test_draws_in_blocks_and_in_many_files_are_all_there(problem, tmp_path, monkeypatch):
    """With PART_BYTES below one draw: a block of one draw, a file after every block."""
    log_joint, dataset = problem
    monkeypatch.setattr(draws, "PART_BYTES", 1)
    method = Method(
        lambda rng_key, params: log_joint.init(rng_key),
        lambda rng_key, state, data: (state, {"log_joint": jnp.zeros(())}),
        lambda rng_key, state, num_draws: jax.vmap(log_joint.init)(
            jax.random.split(rng_key, num_draws)
        ),
    )
    settings = {"num_steps": 3, "num_chains": 2, "num_draws": 4, "quiet": True, "eval_freq": 2}
    runs = [Run(log_joint, dataset, method, directory=tmp_path, **settings).finish()]
    assert len(list((tmp_path / "draws").iterdir())) == 4
    runs.append(Run(log_joint, dataset, method, directory=tmp_path, **settings).finish())
    runs.append(Run(log_joint, dataset, method, **settings).finish())
    for again in runs[1:]:
        assert_equal_runs(again, runs[0])
    weights = runs[0].draws["hidden_0"]["w"]
    assert weights.shape == (2, 4, 1, 7)
    assert len(np.unique(weights.reshape(8, -1), axis=0)) == 8, "blocks must differ"
    few = [block["hidden_0"]["w"] for block in runs[0].store.chosen(np.array([1, 3]))]
    np.testing.assert_array_equal(np.concatenate(few, axis=1), weights[:, [1, 3]])


def test_changed_draws_replace_those_of_the_state(problem, tmp_path):
    """They are on disk and predicted with, and a second start makes them again."""
    arguments = {"directory": tmp_path, "collects": None}

    def change(state, draws):
        return jax.tree.map(lambda leaf: leaf + np.float32(1), draws)

    plain = make_run(problem, collects=None).finish()
    for _ in range(2):
        changed = make_run(problem, **arguments).finish(change)
        expected = plain.draws["output"]["b"] + np.float32(1)
        np.testing.assert_array_equal(changed.draws["output"]["b"], expected)
        difference = changed.test_predictions.outputs - plain.test_predictions.outputs
        assert np.abs(difference[..., 0]).min() > 0
        stored = checkpoint_utils.load_draws(tmp_path / "draws")
        np.testing.assert_array_equal(stored["output/b"], expected)


def test_a_checkpoint_of_another_version_is_pointed_out(problem, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_utils, "__version__", "0.0.1")
        make_run(problem, tmp_path).finish()
    make_run(problem, tmp_path, quiet=False).finish()
    assert "version 0.0.1 began this run" in capsys.readouterr().out


def test_predictions_are_in_original_units():
    """Standardised targets: errors and densities come back in the units of y."""
    x = np.linspace(-1, 1, 40)[:, None]
    y = 1000 + 50 * x
    dataset = data_utils.from_arrays(x, y, x, y)
    network = models.get_network("logistic_regression", 1)
    log_joint = make_log_joint(network, dataset.x_train, make_prior(1e-3), gaussian(0.1))
    method = sgd.sgd(log_joint, optax.adam(5e-2), batch_size=40)
    result = Run(log_joint, dataset, method, num_steps=500, quiet=True).finish()
    mean, std = np.moveaxis(result.test_predictions.outputs[0, 0], -1, 0)
    np.testing.assert_allclose(mean, y[:, 0], atol=0.5)
    np.testing.assert_allclose(std, 0.1 * dataset.target_scale[0], rtol=1e-5)
    expected = -0.5 * ((y[:, 0] - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(result.test_predictions.log_likelihoods[0, 0], expected, atol=1e-3)


def test_a_run_ends_when_it_has_enough_also_when_it_is_resumed(problem, tmp_path):
    """Asked at steps 4 and 6 alone, with the draws and the history up to there."""
    asked = []

    def answer(predictions, history):
        asked.append((predictions.outputs.shape[1], history["count"].shape))
        return Answer(bool(np.all(history["count"][:, -1] >= 6)), "So far, so good.")

    settings = {
        "collects": lambda step: step >= 3,
        "keep_history": True,
        "enough": Enough(lambda step: step in (4, 6), answer),
    }
    run = run_until(problem, 50, tmp_path, **settings)
    whole = run.finish()
    assert run.step == 6 and whole.history["count"].shape == (2, 6)
    assert asked == [(2, (2, 4)), (4, (2, 6))]
    # Started again, it asks again about what is on disk, and is still at its end.
    again = run_until(problem, 50, tmp_path, **settings)
    assert_equal_runs(again.finish(), whole)
    assert again.step == 6 and asked[2:] == [(4, (2, 6))]
