"""A script as a program, in this process: every end it can have, its signs of life, signals."""

import io
import os
import shlex
import signal
import sys
import time

import jax
import numpy as np
import pytest
import synthetic_runs

import compare_posteriors
import run_hmc
import run_sgd
from haiku_posteriors.utils import (
    cmd_args_utils,
    logging_utils,
    script_utils,
    signals,
    tasks,
)
from haiku_posteriors.utils.logging_utils import RunLog, Sign
from haiku_posteriors.utils.report import comparison


def end_of(run, capsys, arguments=()):
    """Exit code and what is said of it, of a script that does `run`."""
    with pytest.raises(SystemExit) as end:
        script_utils.run_script(run, run_sgd.GROUPS, "", list(arguments))
    said = capsys.readouterr()
    assert said.err.count("\n") <= 1 and "Traceback" not in said.err
    return end.value.code, said.err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
            1,
            "not enough memory: fewer chains or members, a smaller batch_size, or more pieces",
        ),
        (MemoryError(), 1, "not enough memory"),
        (ValueError("Unable to allocate 9 GiB for an array"), 1, "not enough memory"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "the last checkpoint, if there is one, stands"),
    ],
)
def test_an_end_that_is_nobodys_mistake_is_a_sentence(error, code, sentence, capsys):
    def run(settings):
        raise error

    found, said = end_of(run, capsys)
    assert found == code and sentence in said


def test_an_error_of_the_program_is_not_hidden():
    def run(settings):
        raise ValueError("a mistake of ours")

    with pytest.raises(ValueError, match="of ours"):
        script_utils.run_script(run, run_sgd.GROUPS, "", [])


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (RuntimeError("Unknown backend: 'cuda' requested"), "with JAX_PLATFORMS=cuda (Unknown"),
        (AssertionError(), "with JAX_PLATFORMS=cuda; JAX_PLATFORMS=cpu takes the CPU"),
        ([], "JAX has no devices"),
    ],
)
def test_no_device_is_a_sentence(devices, sentence, capsys, monkeypatch):
    def find(*_):
        if isinstance(devices, list):
            return devices
        raise devices

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", find)
    code, said = end_of(lambda settings: None, capsys)
    assert code == 2 and sentence in said


def test_the_command_that_goes_on_is_the_one_that_was_typed(tmp_path, monkeypatch):
    typed = [sys.executable, "-W", "ignore", "run_sgd.py", "--seed=3", "--dataset_name=my data.csv"]
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", typed[3:])
    found = script_utils._command(typed[4:], tmp_path / "a folder")
    assert shlex.split(found) == [*typed, f"--dir={tmp_path / 'a folder'}"]
    given = [*typed[4:], "--dir=here"]
    monkeypatch.setattr(sys, "orig_argv", [*typed[:4], *given])
    monkeypatch.setattr(sys, "argv", ["run_sgd.py", *given])
    assert shlex.split(script_utils._command(given, tmp_path))[-1] == "--dir=here"


@pytest.mark.parametrize(("encoding", "said"), [("ascii", "grün ±"), ("latin-1", "grün ±")])
def test_letters_that_the_locale_does_not_know(encoding, said):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    script_utils._accept_any_letter(stream)
    print("grün ± 比", file=stream, flush=True)
    found = stream.buffer.getvalue().decode(stream.encoding)
    assert found == (f"{said} 比\n" if encoding == "ascii" else f"{said} \\u6bd4\n")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for script, flag in ((run_sgd, "dir"), (run_sgd, "data_dir"), (compare_posteriors, "dir")):
        settings = cmd_args_utils.parse(script.GROUPS, [f"--{flag}=~/x"])
        assert settings.values[flag] == str(tmp_path / "x")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request_to_stop(number):
    before = signal.getsignal(number)
    with signals.Interruption() as interruption:
        interruption.check()
        signal.raise_signal(number)
        with pytest.raises(signals.Interrupted, match=signal.Signals(number).name):
            interruption.check()
        with pytest.raises(KeyboardInterrupt):  # asked twice
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_signal_ends_a_stage_beside_the_loop_and_the_run_is_named(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(signals.Interrupted) as stopped:
        signals.run_stage(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.value.directory == tmp_path
    assert signal.getsignal(signal.SIGTERM) is before
    assert signals.run_stage(tmp_path, lambda: 3) == 3


def test_a_loop_inside_a_stage_hears_the_signal_and_is_waited_for(tmp_path):
    """In a thread of its own Python would deliver it no signal."""
    saved = []

    def loop():
        with signals.Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 10
            while not interruption.received and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)  # beyond the stage's own grace
            saved.append("checkpoint")
            interruption.check()

    with signals.part_of(tmp_path), signals.Interruption(grace_seconds=0.1) as interruption:
        with pytest.raises(signals.Interrupted, match="SIGTERM"):
            interruption.wait_for(loop)
        assert saved == ["checkpoint"]


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.Interruption() as interruption:
            signal.raise_signal(signal.SIGHUP)
            interruption.check()
    finally:
        signal.signal(signal.SIGHUP, before)


# Signs of life, where there is no terminal.


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(logging_utils, "time", clock)
    return clock


def test_a_sign_after_five_seconds_and_ever_more_rarely(clock):
    said = []
    sign = Sign(said.append)
    for clock.now in range(400):
        sign(clock.now)
    assert said[:4] == [5, 15, 35, 75] and max(np.diff(said)) == 60


def test_a_run_shows_how_far_it_is(clock, capsys):
    log = RunLog(total=1000, unit="iteration")
    for clock.now in range(20):
        log.advance(clock.now, log_joint=-3.0)
        log.within(7)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "iteration 5 of 1000, log_joint -3 ..."
    assert len(out.splitlines()) == 2


def test_tags_of_tensorboard_are_in_groups(tmp_path, monkeypatch):
    log, found = RunLog(tmp_path, total=1), []
    monkeypatch.setattr(log._events, "add_scalar", lambda tag, *_: found.append(tag))
    log.row(1, dict.fromkeys(["test_rmse", "train_nll", "ensemble_ece", "log_joint"], 0.0), [])
    assert found == ["test/rmse", "train/nll", "ensemble/ece", "run/log_joint"]
    log.close()


def test_comparisons_say_what_they_are_at_and_take_a_new_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hmc", "vi"):
        synthetic_runs.write_toy_run(tmp_path / name, seed=len(name))
    monkeypatch.setattr(comparison, "_draw", lambda *_: ({}, []))
    flags = ["--reference=hmc", "--candidates=vi"]
    compare_posteriors.run(cmd_args_utils.parse(compare_posteriors.GROUPS, flags))
    (folder,) = (tmp_path / "runs/comparison").iterdir()
    said = capsys.readouterr().out
    for sentence in ("Reading hmc ...", "Reading vi ...", "Comparing vi with hmc ..."):
        assert sentence in said
    # Into an old folder of one's own: what it held of the last comparison goes.
    (folder / "spread.png").touch()
    again = [*flags, f"--dir={folder}"]
    compare_posteriors.run(cmd_args_utils.parse(compare_posteriors.GROUPS, again))
    assert not (folder / "spread.png").exists()


def test_whole_numbers_are_features_unless_they_are_said_to_be_tokens(tmp_path):
    x = np.random.default_rng(0).integers(0, 30, (40, 9))
    np.savez(tmp_path / "whole.npz", x=x, y=x[:, 0] % 2)
    for inputs, network in (((), "mlp_50"), (("--inputs=tokens",), "cnn_lstm")):
        flags = [f"--dataset_name={tmp_path}/whole.npz", *inputs]
        task = tasks.load_task("hmc", cmd_args_utils.parse(run_hmc.GROUPS, flags))
        assert task.settings.model_name == network
