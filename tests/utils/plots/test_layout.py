"""What holds for pictures of every kind: titles, legends beside the data, colours that agree."""

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_rgba
from matplotlib.text import Text

from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils.plots import (
    calibration,
    curves,
    predictive,
    style,
    uncertainty,
)
from haiku_posteriors.utils.plots import surface as surfaces

RNG = np.random.default_rng(0)
GRID = np.linspace(-3, 3, 40)
MEANS = np.sin(GRID) + RNG.normal(0, 0.5, (12, 1)) * GRID
FUNCTIONS = np.stack([MEANS, np.full_like(MEANS, 0.2)], axis=-1)
PROBABILITIES = RNG.dirichlet(np.ones(2), (6, 100))
LABELS = RNG.integers(0, 2, 100)
ROWS = [{"epoch": e, "log_joint": -1.0 / e, "test_nll": 1.0 / e} for e in range(1, 9)]
SHIFTS = {
    f"run {i}": [(k, s, {"nll": s + i}) for k in "ab" for s in (1.0, 2.0, 3.0)] for i in (1, 2)
}
SIDE = np.linspace(-1, 2, 10)
PLANE = -((SIDE[:, None] - 0.3) ** 2) - SIDE**2
THREE = np.array([[0.0, 0.0], [1.0, 0.0], [0.4, 1.0]])

# Module, picture, its arguments after the path, and what must be written on it.
PICTURES = {
    "predictive": (
        predictive,
        "predictive_panel",
        ({"hmc": FUNCTIONS}, GRID, GRID, np.sin(GRID)),
        ("hmc", "epistemic, ±2 std", "total, ±2 std"),
    ),
    "plane": (
        predictive,
        "decision_surface",
        (SIDE, SIDE, PROBABILITIES, RNG.normal(size=(100, 2)), LABELS, "sgd on moons"),
        ("sgd on moons", "class 0", "class 1"),
    ),
    "prior": (
        predictive,
        "prior_histograms",
        ("classification", PROBABILITIES, LABELS),
        ("favoured class",),
    ),
    "reliability": (
        calibration,
        "reliability_diagram",
        (PROBABILITIES[0], LABELS, "vi on moons"),
        ("vi on moons", "100 test rows"),
    ),
    "calibration": (
        calibration,
        "regression_calibration",
        (FUNCTIONS, np.sin(GRID)[:, None], "vi on a table"),
        ("vi on a table", "40 test rows"),
    ),
    "calibrations": (
        calibration,
        "calibration_curves",
        ({"hmc": Predictions("regression", FUNCTIONS[None], targets=np.sin(GRID)[:, None])},),
        ("test rows", "hmc"),
    ),
    "curves": (
        curves,
        "training_curves",
        (ROWS, ["log_joint", "test_nll"], "hmc on a table", "iteration"),
        ("hmc on a table", "log-joint", "NLL, test rows", "iteration"),
    ),
    "chains": (
        curves,
        "chain_diagnostics",
        (RNG.normal(size=(4, 50)), np.linspace(1, 1.1, 9), np.linspace(1, 2, 9)),
        ("log-joint", "R-hat", "chain 3", "predictions"),
    ),
    "coverage": (
        uncertainty,
        "risk_coverage",
        ({"hmc": (RNG.random(50), RNG.random(50))}, "error"),
        ("hmc",),
    ),
    "shifts": (
        uncertainty,
        "shift_curves",
        (SHIFTS, ["nll"], {"nll": "NLL"}, "severity"),
        ("run 1", "run 2", "NLL", "severity"),
    ),
    "functions": (
        uncertainty,
        "distribution_functions",
        ({"hmc": {"test": RNG.random(50), "svhn": RNG.random(50)}}, "entropy"),
        ("test", "svhn", "entropy"),
    ),
    "surface": (
        surfaces,
        "draw_surfaces",
        ({"log-density": PLANE, "log-prior": PLANE}, SIDE, SIDE, THREE, np.ones(2), "abc"),
        ("log-density", "point 1: a", "2"),
    ),
}


def texts(figure):
    """All that is written on a figure."""
    found = [text.get_text() for text in figure.findobj(Text)]
    return "\n".join(found)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_named_and_their_legends_cover_nothing(name, tmp_path, monkeypatch):
    module, function, arguments, written = PICTURES[name]
    figures = []
    monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure))
    getattr(module, function)(tmp_path / "picture.png", *arguments)
    (figure,) = figures
    figure.canvas.draw()
    for words in written:
        assert words in texts(figure), words
    boxes = [axis.get_window_extent() for axis in figure.axes]
    own = [axis.get_legend() for axis in figure.axes if axis.get_legend() is not None]
    for legend in (*figure.legends, *own):
        assert not any(legend.get_window_extent().overlaps(box) for box in boxes)


def test_a_swatch_has_the_colour_of_its_band(tmp_path, monkeypatch):
    """Where the bands lie on one another, too: none shines through."""
    figures = []
    monkeypatch.setattr(predictive, "save", lambda figure, path: figures.append(figure))
    predictive.predictive_panel(
        tmp_path / "p.png", {"hmc": FUNCTIONS}, GRID, GRID, np.sin(GRID), show_bands=True
    )
    axis = figures[0].axes[0]
    bands = axis.findobj(FillBetweenPolyCollection)
    swatches = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    assert len(bands) == 2
    for band in bands:
        assert band is swatches[band.get_label()] and band.get_facecolor()[0, 3] == 1
    assert to_rgba(style.BLUE) not in [tuple(band.get_facecolor()[0]) for band in bands]
    reach = np.abs(MEANS - MEANS.mean(axis=0)).max()
    assert np.ptp(axis.get_ylim()) > reach
