"""A kill or a request to stop in a refinement, or between the main loop and it."""

import shlex
import signal
import sys
import time

import program
import pytest

pytestmark = pytest.mark.slow  # whole runs as programs

REFINED = (
    *("--num_epochs=300", "--warm_start_epochs=0", "--vi_ensemble_size=20"),
    *("--refine=mclmc", "--refine_steps=3000"),
)


def test_a_run_that_is_killed_in_its_refinement_ends_the_same(tmp_path):
    program.succeed("run_vi.py", f"--dir={tmp_path / 'whole'}", *REFINED)
    directory = tmp_path / "killed"
    flags = [f"--dir={directory}", *REFINED]
    process = program.start("run_vi.py", *flags)
    while not (directory / "refinement").is_dir():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    assert not (directory / "refinement.json").exists()
    program.succeed("run_vi.py", *flags)
    program.assert_same_outcome(directory, tmp_path / "whole")


@pytest.mark.parametrize(("kind", "moment"), [("hmc", "a pilot of"), ("mclmc", "Compiling ...")])
def test_a_request_to_stop_after_the_main_loop_tells_the_command_that_goes_on(
    tmp_path, kind, moment
):
    """During the pilot, which no loop surrounds, and in the refinement's own loop."""
    refined = [*REFINED[:-2], f"--refine={kind}", "--refine_steps=1000"]
    program.succeed("run_vi.py", f"--dir={tmp_path / 'whole'}", *refined)
    directory = tmp_path / "stopped"
    flags = [f"--dir={directory}", *refined]
    process = program.start("run_vi.py", *flags)
    said, is_refining = "", False
    while not (is_refining and moment in said):
        said = process.stdout.readline()
        assert said, process.communicate()
        is_refining |= said.startswith("Refinement: ")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    python, *command = shlex.split(out.split("to go on: ")[1])
    assert python == sys.executable and command == ["run_vi.py", *flags]
    program.succeed("run_vi.py", *flags)
    program.assert_same_outcome(directory, tmp_path / "whole")
