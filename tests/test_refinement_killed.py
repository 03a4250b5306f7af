"""A kill in the middle of a refinement."""

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
