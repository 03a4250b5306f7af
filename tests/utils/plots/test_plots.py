"""Pictures are whole PNG files with something in them, and leave nothing else behind."""

import os

import numpy as np
import pytest
from matplotlib import image

from haiku_posteriors.core import errors
from haiku_posteriors.utils.plots import plot_utils

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _check_picture(path) -> np.ndarray:
    """The picture is the only file of its folder, and is not blank; returns its pixels."""
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes().startswith(SIGNATURE)
    pixels = image.imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels @ np.array([1.0, 256.0, 65536.0]))) > 20  # One number per colour.
    # Nothing runs out of the frame: its outermost pixels are background.
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (border == 1).all()
    return pixels


def _is_colour(pixels, name) -> np.ndarray:
    colour = np.array([int(name[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.abs(pixels - colour).max(axis=-1) < 0.01


def _regression_draws(rng, draws, grid):
    means = np.sin(grid) + rng.normal(0, 0.1, (draws, 1)) * grid
    return np.stack([means, np.full_like(means, 0.2)], axis=-1)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_predictive_panel(tmp_path, rng, count):
    path, grid = tmp_path / "made" / "panel.png", np.linspace(-3, 3, 40)
    panels = {f"method {i}": _regression_draws(rng, 1 + 10 * i, grid) for i in range(count)}
    x_train = rng.uniform(-2, 2, (30, 1))
    plot_utils.predictive_panel(path, panels, grid, x_train, np.sin(x_train), np.sin)
    _check_picture(path)


def test_predictive_panel_draws_what_is_finite(tmp_path, rng):
    path, grid = tmp_path / "panel.png", np.linspace(-3, 3, 40)
    predictions = _regression_draws(rng, 3, grid)
    predictions[1, 5] = np.nan
    plot_utils.predictive_panel(path, {"diverged": predictions}, grid, [0.0], [0.0])
    _check_picture(path)


def test_reliability_diagram_tells_over_from_underconfidence(tmp_path):
    over, under = tmp_path / "over" / "a.png", tmp_path / "under" / "b.png"
    half_right = np.arange(40) % 2
    plot_utils.reliability_diagram(over, np.tile([0.9, 0.1], (40, 1)), half_right, "over")
    plot_utils.reliability_diagram(under, np.tile([0.6, 0.4], (40, 1)), np.zeros(40, int), "under")
    # The legend has a small patch of every colour; a bar has many times its pixels.
    vermillion, sky_blue = (
        [np.sum(_is_colour(_check_picture(path), colour)) for path in (over, under)]
        for colour in (plot_utils.VERMILLION, plot_utils.SKY_BLUE)
    )
    assert vermillion[0] > 3 * vermillion[1]
    assert sky_blue[1] > 3 * sky_blue[0]


def test_reliability_diagram_of_saturated_predictions(tmp_path):
    path = tmp_path / "saturated.png"
    plot_utils.reliability_diagram(path, np.eye(3)[[0, 1, 2, 0]], np.array([0, 1, 1, 1]), "certain")
    _check_picture(path)


@pytest.mark.parametrize(("rows", "targets"), [(7, 1), (400, 2)])
def test_regression_calibration(tmp_path, rng, rows, targets):
    path = tmp_path / "calibration.png"
    means = rng.normal(0, 5, (1, rows, targets)) + rng.normal(size=(6, rows, targets))
    predictions = np.concatenate([means, np.ones_like(means)], axis=-1)
    observed = means[0] + rng.normal(size=(rows, targets))
    plot_utils.regression_calibration(path, predictions, observed, "synthetic")
    _check_picture(path)


def _surface(rng):
    grid_x, grid_y = np.linspace(-2, 2, 30), np.linspace(-1, 1, 20)
    first_input = np.meshgrid(grid_x, grid_y)[0].ravel()
    one = 1 / (1 + np.exp(-rng.uniform(1, 9, (5, 1)) * first_input))
    return grid_x, grid_y, np.stack([1 - one, one], axis=-1)


def test_decision_surface_has_the_first_input_across(tmp_path, rng):
    path = tmp_path / "surface.png"
    x_train = rng.uniform(-0.1, 0.1, (10, 2))
    plot_utils.decision_surface(path, *_surface(rng), x_train, np.arange(10) % 2, "steps")
    pixels = _check_picture(path)
    # Within the left panel: class 0 (blue over red) at its left, class 1 at its right, all the way
    # down. Transposed, the two would lie above one another.
    height, width = pixels.shape[:2]
    for line in (height // 4, 3 * height // 4):
        left, right = pixels[line, width // 9], pixels[line, 3 * width // 8]
        assert left[2] > left[0] and right[0] > right[2]


def test_decision_surface_of_agreeing_draws_looks_certain(tmp_path, rng):
    path = tmp_path / "surface.png"
    grid_x, grid_y, probabilities = _surface(rng)
    # All but equal: scaled to its own largest value, even this difference would fill the colours.
    same = np.stack([probabilities[0], 0.999 * probabilities[0] + 0.0005])
    plot_utils.decision_surface(path, grid_x, grid_y, same, np.zeros((1, 2)), [0], "one network")
    pixels = _check_picture(path)
    height, width = pixels.shape[:2]
    panel = pixels[height // 4 : 3 * height // 4, 11 * width // 20 : 12 * width // 20]
    assert (panel == panel[0, 0]).all()


def test_decision_surface_needs_two_classes_on_its_grid(tmp_path, rng):
    grid_x, grid_y, probabilities = _surface(rng)
    with pytest.raises(errors.UserError, match="30 by 20"):
        plot_utils.decision_surface(
            tmp_path / "a.png", grid_x, grid_y, probabilities[:, :-1], np.zeros((1, 2)), [0], ""
        )
    assert not list(tmp_path.iterdir())


def test_training_curves(tmp_path):
    path = tmp_path / "curves.png"
    rows = [{"epoch": epoch, "log_joint": -1e6 / (1 + epoch)} for epoch in range(40)]
    for row in rows[::10]:
        row["test_nll"] = float("nan") if row["epoch"] == 10 else 1 / (1 + row["epoch"])
    rows[30]["test_nll"] = None
    plot_utils.training_curves(path, rows, ["log_joint", "test_nll", "r_hat", "log_joint"])
    _check_picture(path)


def test_training_curves_of_nothing(tmp_path):
    path = tmp_path / "curves.png"
    plot_utils.training_curves(path, [], ["test_nll"])
    assert path.read_bytes().startswith(SIGNATURE)
    with pytest.raises(errors.UserError, match="nothing to draw"):
        plot_utils.training_curves(path, [], [])


def test_a_failed_picture_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    plot_utils.training_curves(path, [{"epoch": 1, "nll": 2.0}], ["nll"])
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        plot_utils.training_curves(path, [{"epoch": 1, "nll": 3.0}], ["nll"])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
