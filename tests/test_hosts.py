"""Several processes over loopback: the same results, and what happens when one goes away."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import program
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import heartbeats, hosts

RUNS = {
    "run_sgd.py": "--num_members=2 --num_epochs=20 --batch_size=32 --eval_freq=10 --save_freq=4",
    "run_hmc.py": "--num_chains=1 --num_iterations=6 --step_size=1e-3 --trajectory_len=3e-3",
    # A default run makes thousands of updates first, which no rounding survives.
    "run_sgmcmc.py": "--num_chains=2 --num_epochs=20 --num_burnin_epochs=10 --ensemble_freq=5 "
    "--warm_start_epochs=20 --preconditioner=None --init_step_size=1e-5",
    "run_vi.py": "--num_epochs=20 --vi_ensemble_size=4 --eval_freq=10",
    "run_implicit.py": "--num_epochs=4 --num_draws=4 --num_samples=2 --num_evidence_draws=4 "
    "--pretrain_epochs=2 --pretrain_starts=2 --generator=generator.yaml",
}
LONG = "--num_members=2 --num_epochs=8000 --batch_size=32 --eval_freq=2000 --save_freq=20"
GENERATOR = "kind: mlp\nlatent_size: 2\nhidden_sizes: [4]\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("127.0.0.1:1", 2, None), "coordinator_address, num_processes and process_id, all three"),
        ((None, None, 1), "coordinator_address=auto takes them from the cluster"),
        (("127.0.0.1:1", 2, 2), "process_id must lie between 0 and 1, not 2"),
        (("nowhere", 2, 0), "'nowhere' is not of the form host:port"),
    ],
)
def test_what_does_not_describe_several_processes_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        hosts.start(*arguments)


def test_one_process_agrees_with_itself():
    assert hosts.is_first() and not hosts.are_several()
    assert hosts.share({"a": 1}) == {"a": 1}
    assert hosts.largest(3) == 3
    assert hosts.on_first(lambda: 4) == 4


@pytest.fixture
def connections(monkeypatch):
    """Of process 0 to 1 and of process 1 to 0."""
    monkeypatch.setattr(heartbeats, "GRACE_SECONDS", 0.0)
    listener = heartbeats.Listener("127.0.0.1")
    found = []
    waiting = threading.Thread(target=lambda: found.append(listener.accept(1)))
    waiting.start()
    stranger = heartbeats.connect("127.0.0.1", listener.port, "00" * heartbeats.TOKEN_BYTES, 1)
    own = heartbeats.connect("127.0.0.1", listener.port, listener.token, 1)
    waiting.join()
    assert found[0].keys() == {1}
    assert stranger[0].recv(1) == b""  # who does not know the token is sent away
    yield found[0], own
    for connection in (*found[0].values(), *own.values(), *stranger.values()):
        connection.close()


def test_silence_is_noticed(connections, monkeypatch):
    monkeypatch.setattr(heartbeats, "SILENCE_SECONDS", 0.1)
    said = queue.Queue()
    heartbeats.Heartbeats(connections[0], said.put)  # process 1 has not said a word
    assert said.get(timeout=5) == "Process 1 gave no sign of life for 0 s"


def test_a_goodbye_is_no_loss(connections):
    said = queue.Queue()
    watching, own = connections
    heartbeats.Heartbeats(own, said.put)
    heartbeats.Heartbeats(watching, said.put).say_goodbye()
    watching[1].shutdown(socket.SHUT_WR)
    time.sleep(0.3)
    assert said.empty()


def test_a_broken_connection_is_noticed(connections):
    said = queue.Queue()
    watching, own = connections
    heartbeats.Heartbeats(watching, said.put)
    own[0].close()
    assert said.get(timeout=5) == "Process 1 is gone"


def start(num_processes, script, *flags, num_devices=1):
    """The processes of a run, process 0 first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = program.ENVIRONMENT | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "NPROC": "16",
        "PYTHONPATH": str(program.ROOT),
    }
    several = [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={num_processes}"]
    return [
        subprocess.Popen(
            [sys.executable, script, *flags, *several, f"--process_id={index}"],
            cwd=program.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(num_processes)
    ]


def end(processes, timeout=900):
    """Exit codes, standard outputs and standard errors."""
    try:
        told = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], *zip(*told, strict=True)


def succeed(num_processes, script, *flags, **options):
    codes, out, err = end(start(num_processes, script, *flags, **options))
    assert codes == [0] * num_processes, err
    return out


def wait_for_checkpoint(directory, processes):
    """One that these processes write."""
    before = {*directory.glob("checkpoints/*.safetensors")}
    while not {*directory.glob("checkpoints/*.safetensors")} - before:
        assert all(process.poll() is None for process in processes), end(processes)
        time.sleep(0.05)


def assert_close_outcomes(first, second, tolerance=1e-9):
    """Draws and predictions to rounding in float64."""
    for ours, theirs in zip(program.outcome(first)[1:], program.outcome(second)[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(
                ours[name], theirs[name], rtol=tolerance, atol=tolerance, err_msg=name
            )


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_two_processes_give_what_one_gives(script, tmp_path):
    (tmp_path / "generator.yaml").write_text(GENERATOR)
    flags = [*RUNS[script].replace("generator.yaml", f"{tmp_path}/generator.yaml").split()]
    flags += ["--use_float64"]
    program.succeed(script, *flags, f"--dir={tmp_path / 'one'}")
    out = succeed(2, script, *flags, f"--dir={tmp_path / 'two'}")
    assert "2 cpu device(s) of 2 processes" in out[0]
    assert all(line.startswith("[Gloo]") for line in out[1].splitlines()), out[1]  # the library's
    assert_close_outcomes(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_four_processes_of_two_devices_give_what_one_gives(tmp_path):
    flags = [*RUNS["run_sgd.py"].split(), "--use_float64"]
    program.succeed("run_sgd.py", *flags, f"--dir={tmp_path / 'one'}")
    mesh = "--mesh=chain:2,data:4"
    succeed(4, "run_sgd.py", *flags, mesh, f"--dir={tmp_path / 'four'}", num_devices=2)
    assert_close_outcomes(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
def test_one_killed_ends_the_other_and_the_same_command_goes_on(tmp_path):
    """Again with two processes: it ends as if nothing had happened."""
    flags = [*LONG.split(), "--use_float64"]
    succeed(2, "run_sgd.py", *flags, f"--dir={tmp_path / 'whole'}")
    directory = tmp_path / "two"
    for victim in (1, 0):
        processes = start(2, "run_sgd.py", *flags, f"--dir={directory}")
        wait_for_checkpoint(directory, processes)
        processes[victim].kill()
        killed = time.monotonic()
        codes, _, err = end(processes)
        assert time.monotonic() - killed < heartbeats.SILENCE_SECONDS
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] != 0
        if victim == 1:
            assert codes[0] == hosts.EXIT_LOST
            assert "Start the same command again on all" in err[0]
            assert "Traceback" not in err[0]
    succeed(2, "run_sgd.py", *flags, f"--dir={directory}")
    assert_close_outcomes(tmp_path / "whole", directory)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_hangs_ends_the_other_with_a_sentence(victim, tmp_path):
    directory = tmp_path / "two"
    processes = start(2, "run_sgd.py", *LONG.split(), f"--dir={directory}")
    wait_for_checkpoint(directory, processes)
    os.kill(processes[victim].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        _, err = processes[1 - victim].communicate(timeout=300)
        seconds = time.monotonic() - stopped
    finally:
        for process in processes:
            process.kill()
        processes[victim].communicate()
    assert processes[1 - victim].returncode == hosts.EXIT_LOST
    assert f"Process {victim} gave no sign of life for 30 s, as process {1 - victim} finds" in err
    assert "Start the same command again on all" in err
    assert seconds < 2 * heartbeats.SILENCE_SECONDS


@pytest.mark.slow
def test_a_signal_to_one_ends_both_after_a_checkpoint_and_one_process_goes_on(tmp_path):
    flags = [*LONG.split(), "--use_float64"]
    program.succeed("run_sgd.py", *flags, f"--dir={tmp_path / 'one'}")
    directory = tmp_path / "two"
    processes = start(2, "run_sgd.py", *flags, f"--dir={directory}")
    wait_for_checkpoint(directory, processes)
    os.kill(processes[1].pid, signal.SIGTERM)
    codes, out, _ = end(processes)
    assert codes == [128 + signal.SIGTERM] * 2
    assert "Stopped by SIGTERM; to go on:" in out[0]
    out = program.succeed("run_sgd.py", *flags, f"--dir={directory}")
    assert "Going on from the checkpoint" in out
    # Thousands of updates let the rounding of one and of two processes grow.
    assert_close_outcomes(tmp_path / "one", directory, tolerance=1e-5)


@pytest.mark.slow
def test_what_process_0_refuses_ends_all(tmp_path):
    (tmp_path / "something").write_text("of somebody else's")
    codes, _, err = end(start(2, "run_sgd.py", f"--dir={tmp_path}"))
    assert codes == [2, 2]
    assert "holds no run; use another --dir" in err[0]
