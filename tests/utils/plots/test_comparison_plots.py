"""Pictures of a comparison, and of uncertainty."""

import numpy as np
import pytest
from picture_checks import check_picture

from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils.plots import comparison, surface, uncertainty


def test_distance_bars_with_and_without_floors(tmp_path):
    results = {
        "vi": {"w1": Estimate(0.5, 0.02, 0.1, 0.01), "agreement": Estimate(0.9, 0.01)},
        "file": {"agreement": Estimate(0.8, 0.01), "w1": Estimate(float("nan"))},
    }
    path = tmp_path / "distances.png"
    comparison.distance_bars(path, results, {"w1": "W1", "agreement": "agreement"})
    check_picture(path)


def test_spread_scatter_has_a_panel_per_candidate(tmp_path):
    rng = np.random.default_rng(0)
    reference, narrow = (
        Predictions("regression", rng.normal(0, std, (2, 10, 40, 2))) for std in (1.0, 0.3)
    )
    widths = []
    for count in (1, 2):
        path = tmp_path / str(count) / "spread.png"
        candidates = {f"method {index}": narrow for index in range(count)}
        comparison.spread_scatter(path, candidates, "hmc", reference)
        widths.append(check_picture(path).shape[1])
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.05)  # margins are cut to fit


def test_more_foreign_sets_than_colours(tmp_path):
    rng = np.random.default_rng(0)
    scores = {"run": {f"set {index}": rng.random(20) for index in range(9)}}
    path = tmp_path / "entropies.png"
    uncertainty.distribution_functions(path, scores, "entropy")
    check_picture(path)


def test_a_surface_with_its_three_points(tmp_path):
    axis = np.linspace(-1, 1, 9)
    density = -(np.add.outer(axis**2, axis**2)) * 1e4
    path = tmp_path / "surface.png"
    points = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 1.0]])
    surface.draw_surfaces(path, {"log-density": density}, axis, axis, points, np.ones(2))
    check_picture(path)
