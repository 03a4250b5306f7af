"""make_posterior_surface_plot.py on a tiny ensemble."""

import numpy as np
import program
import pytest
import synthetic_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return synthetic_runs.write_digits_ensemble(tmp_path_factory.mktemp("runs") / "digits")


def test_a_surface_through_the_members(run, tmp_path):
    out = program.succeed(
        "make_posterior_surface_plot.py",
        *(f"--checkpoint{n + 1}={run}@{n}" for n in range(3)),
        f"--dir={tmp_path}",
        *("--grid_size=7", "--limit_left=0", "--limit_right=1", "--limit_bottom=0"),
        *("--limit_top=1", "--pdf"),
    )
    assert "Points at [[0.0, 0.0], [1.0, 0.0]," in out
    with np.load(tmp_path / "surface.npz") as arrays:
        density = arrays["log_density"]
        np.testing.assert_allclose(density, arrays["log_prior"] + arrays["log_likelihood"])
    # The corners at the bottom are trained members; what lies between them is not.
    assert min(density[0, 0], density[0, -1]) > density[0, 3]
    assert (tmp_path / "surface.png").is_file() and (tmp_path / "surface.pdf").is_file()


@pytest.mark.slow
def test_a_mistake_is_one_sentence_and_exit_code_2(run):
    code, _, err = program.run(
        "make_posterior_surface_plot.py",
        *(f"--checkpoint1={run}", f"--checkpoint2={run}@1", f"--checkpoint3={run}@2"),
    )
    assert code == 2
    assert "holds 3 sets of parameters: choose one of" in err and err.count("\n") == 1
    assert err.startswith("make_posterior_surface_plot.py: ")
