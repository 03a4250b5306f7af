"""Pictures of calibration."""

import numpy as np
import pytest
from picture_checks import check_picture

from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils.plots import calibration, style


def _is_colour(pixels, name) -> np.ndarray:
    colour = np.array([int(name[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.abs(pixels - colour).max(axis=-1) < 0.01


def test_reliability_diagram_tells_over_from_underconfidence(tmp_path):
    over, under = tmp_path / "over" / "a.png", tmp_path / "under" / "b.png"
    half_right = np.arange(40) % 2
    calibration.reliability_diagram(over, np.tile([0.9, 0.1], (40, 1)), half_right, "over")
    calibration.reliability_diagram(under, np.tile([0.6, 0.4], (40, 1)), np.zeros(40, int), "under")
    # The legend has a small patch of every colour; a bar has many times its pixels.
    vermillion, sky_blue = (
        [np.sum(_is_colour(check_picture(path), colour)) for path in (over, under)]
        for colour in (style.VERMILLION, style.SKY_BLUE)
    )
    assert vermillion[0] > 3 * vermillion[1]
    assert sky_blue[1] > 3 * sky_blue[0]


def test_reliability_diagram_of_saturated_predictions(tmp_path):
    path = tmp_path / "saturated.png"
    calibration.reliability_diagram(
        path, np.eye(3)[[0, 1, 2, 0]], np.array([0, 1, 1, 1]), "certain"
    )
    check_picture(path)


@pytest.mark.parametrize(("rows", "targets"), [(7, 1), (400, 2)])
def test_regression_calibration(tmp_path, rows, targets):
    path, rng = tmp_path / "calibration.png", np.random.default_rng(3)
    means = rng.normal(0, 5, (1, rows, targets)) + rng.normal(size=(6, rows, targets))
    predictions = np.concatenate([means, np.ones_like(means)], axis=-1)
    observed = means[0] + rng.normal(size=(rows, targets))
    calibration.regression_calibration(path, predictions, observed, "synthetic")
    check_picture(path)


def test_calibration_curves_have_a_colour_per_run_with_targets(tmp_path):
    path = tmp_path / "calibration.png"
    rng = np.random.default_rng(0)
    outputs = rng.dirichlet(np.ones(3), size=(1, 2, 60))
    known = Predictions("classification", outputs, targets=rng.integers(3, size=60))
    runs = {"first": known, "unknown": Predictions("classification", outputs), "third": known}
    calibration.calibration_curves(path, runs)
    pixels = check_picture(path)
    shown = [_is_colour(pixels, colour).any() for colour in style.RUN_COLOURS[1:3]]
    assert shown == [False, True]
