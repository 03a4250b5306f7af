"""The pictures that every finished run leaves in its folder."""

import pathlib

import jax
import numpy as np

from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.utils import ensemble_utils
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.files import read_rows
from haiku_posteriors.utils.plots import calibration, curves, predictive
from haiku_posteriors.utils.train_utils import RunResult

GRID_POINTS = 300
GRID_SIDE = 80
GRID_MARGIN = 0.3  # how far beyond the data the grid reaches, in units of their range
DRAWS_SHOWN = 200  # more change nothing that the eye can see


def draw_run(
    directory: pathlib.Path,
    title: str,
    log_joint: LogJoint,
    dataset: Dataset,
    result: RunResult,
    unit: str = "epoch",
) -> list[pathlib.Path]:
    """Draws what suits the data, and returns the files; `unit` is what a step is called."""
    pictures = {}
    outputs = result.test_predictions.flat_outputs
    targets = ensemble_utils.targets_in_original_units(dataset.y_test, dataset.form)
    one_input = dataset.form.inputs.shape == (1,)
    two_inputs = dataset.form.inputs.shape == (2,)
    if dataset.task == "regression":
        pictures["calibration.png"] = lambda path: calibration.regression_calibration(
            path, outputs, targets, title
        )
        if one_input and dataset.y_train.shape[1] == 1:
            pictures["predictive.png"] = lambda path: _predictive(
                path, title, log_joint, dataset, result
            )
    else:
        pictures["reliability.png"] = lambda path: calibration.reliability_diagram(
            path, outputs.mean(axis=0), targets, title
        )
        if two_inputs and dataset.num_classes == 2:
            pictures["surface.png"] = lambda path: _surface(path, title, log_joint, dataset, result)
    rows = read_rows(directory / "metrics.jsonl")
    if len(rows) > 1:
        score = "rmse" if dataset.task == "regression" else "accuracy"
        keys = ["log_joint", "train_nll", "test_nll", f"test_{score}"]
        pictures["curves.png"] = lambda path: curves.training_curves(path, rows, keys, title, unit)
    for file_name, draw in pictures.items():
        draw(directory / file_name)
    return [directory / file_name for file_name in pictures]


def predict_grid(
    log_joint: LogJoint, dataset: Dataset, result: RunResult, grid: np.ndarray
) -> np.ndarray:
    """Predictions of evenly chosen draws at given inputs, (draws, points, outputs)."""
    total = result.test_predictions.outputs.shape[1]
    per_chain = max(1, DRAWS_SHOWN // result.test_predictions.outputs.shape[0])
    few = np.unique(np.linspace(0, total - 1, min(total, per_chain)).astype(int))
    dummy = dataset.form.empty_targets(len(grid))
    predict = ensemble_utils.make_predictor(log_joint, dataset.form)
    data = jax.device_put(make_data(grid.astype(dataset.x_train.dtype), dummy))
    blocks = [predict(draws, data).outputs for draws in result.store.chosen(few)]
    outputs = np.concatenate(blocks, axis=1)
    return outputs.reshape(-1, *outputs.shape[2:])


def grid_axis(values: np.ndarray, points: int) -> np.ndarray:
    """Evenly spaced inputs, somewhat beyond the data on both sides."""
    low, high = float(values.min()), float(values.max())
    margin = GRID_MARGIN * (high - low)
    return np.linspace(low - margin, high + margin, points)


def _predictive(
    path: pathlib.Path, title: str, log_joint: LogJoint, dataset: Dataset, result: RunResult
) -> None:
    grid = grid_axis(dataset.x_train, GRID_POINTS)
    predictions = predict_grid(log_joint, dataset, result, grid[:, None])
    targets = ensemble_utils.targets_in_original_units(dataset.y_train, dataset.form)
    predictive.predictive_panel(
        path, {title: predictions}, grid, dataset.x_train[:, 0], targets[:, 0]
    )


def _surface(
    path: pathlib.Path, title: str, log_joint: LogJoint, dataset: Dataset, result: RunResult
) -> None:
    first, second = (grid_axis(dataset.x_train[:, column], GRID_SIDE) for column in (0, 1))
    grid = np.stack([mesh.ravel() for mesh in np.meshgrid(first, second)], axis=1)
    probabilities = predict_grid(log_joint, dataset, result, grid)
    predictive.decision_surface(
        path, first, second, probabilities, dataset.x_train, dataset.y_train, title
    )
