"""Pictures of predictive distributions."""

import numpy as np
import pytest
from picture_checks import check_picture

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.plots import predictive


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _regression_draws(rng, draws, grid):
    means = np.sin(grid) + rng.normal(0, 0.1, (draws, 1)) * grid
    return np.stack([means, np.full_like(means, 0.2)], axis=-1)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_predictive_panel(tmp_path, rng, count):
    path, grid = tmp_path / "made" / "panel.png", np.linspace(-3, 3, 40)
    panels = {f"method {i}": _regression_draws(rng, 1 + 10 * i, grid) for i in range(count)}
    x_train = rng.uniform(-2, 2, (30, 1))
    predictive.predictive_panel(path, panels, grid, x_train, np.sin(x_train), np.sin)
    check_picture(path)


def test_predictive_panel_draws_what_is_finite(tmp_path, rng):
    path, grid = tmp_path / "panel.png", np.linspace(-3, 3, 40)
    predictions = _regression_draws(rng, 3, grid)
    predictions[1, 5] = np.nan
    predictive.predictive_panel(path, {"diverged": predictions}, grid, [0.0], [0.0])
    check_picture(path)


def _surface(rng):
    grid_x, grid_y = np.linspace(-2, 2, 30), np.linspace(-1, 1, 20)
    first_input = np.meshgrid(grid_x, grid_y)[0].ravel()
    one = 1 / (1 + np.exp(-rng.uniform(1, 9, (5, 1)) * first_input))
    return grid_x, grid_y, np.stack([1 - one, one], axis=-1)


def test_decision_surface_has_the_first_input_across(tmp_path, rng):
    path = tmp_path / "surface.png"
    x_train = rng.uniform(-0.1, 0.1, (10, 2))
    predictive.decision_surface(path, *_surface(rng), x_train, np.arange(10) % 2, "steps")
    pixels = check_picture(path)
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
    predictive.decision_surface(path, grid_x, grid_y, same, np.zeros((1, 2)), [0], "one network")
    pixels = check_picture(path)
    height, width = pixels.shape[:2]
    panel = pixels[height // 4 : 3 * height // 4, 11 * width // 20 : 12 * width // 20]
    assert (panel == panel[0, 0]).all()


def test_decision_surface_needs_two_classes_on_its_grid(tmp_path, rng):
    grid_x, grid_y, probabilities = _surface(rng)
    with pytest.raises(UserError, match="30 by 20"):
        predictive.decision_surface(
            tmp_path / "a.png", grid_x, grid_y, probabilities[:, :-1], np.zeros((1, 2)), [0], ""
        )
    assert not list(tmp_path.iterdir())
