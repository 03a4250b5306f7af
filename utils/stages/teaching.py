"""What a student learns from: inputs, and what the draws of a finished run predict of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from haiku_posteriors.core.data import Inputs, count_rows, take_rows
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.datasets import shifts
from haiku_posteriors.utils.datasets.forms import DataForm
from haiku_posteriors.utils.problem import Problem
from haiku_posteriors.utils.report import run_networks
from haiku_posteriors.utils.report.run_folders import OpenedRun

ROWS_AT_ONCE = 2000
MAX_EXTRA_ROWS = 10_000  # of each further data set


def teach(
    run: OpenedRun,
    problem: Problem,
    dataset: Dataset,
    *,
    num_draws: int,
    num_copies: int,
    input_noise: float,
    extra_inputs: Sequence[str],
    seed: int,
) -> Dataset:
    """The data set with a run's predictions as targets, on training inputs and more.

    Args:
      run: the teacher.
      problem: of its data.
      dataset: its data.
      num_draws: draws to predict with, at most, evenly chosen.
      num_copies: of every training input, with noise.
      input_noise: standard deviation of that noise, in the units the network sees.
      extra_inputs: names of data sets whose test inputs are added.
      seed: of the noise.
    """
    log_joint, _ = run_networks.load_run_problem(run, problem.data_dir)
    draws = run_networks.choose_draws(log_joint, run, num_draws)
    predict = run_networks.predictor_of_run(log_joint, dataset, draws)
    parts = [dataset.x_train, *_noisy(dataset.x_train, num_copies, input_noise, seed)]
    if extra_inputs:
        if dataset.form.inputs.shape is None or dataset.form.inputs.is_tokens:
            raise UserError("extra_inputs are for inputs that are numbers, and one array.")
        space, _ = shifts.input_space(
            dataset, problem.data_dir, problem.task, problem.table_options
        )
        parts += [
            shifts.foreign_rows(name, problem.data_dir, space, dataset.x_test, MAX_EXTRA_ROWS)
            for name in extra_inputs
        ]
    inputs = jax.tree.map(
        lambda *leaves: np.concatenate([leaf.astype(leaves[0].dtype) for leaf in leaves]), *parts
    )
    return dataset._replace(
        x_train=inputs, y_train=predictive_targets(predict, inputs, dataset.form)
    )


def _noisy(inputs: Inputs, num_copies: int, input_noise: float, seed: int) -> list[Inputs]:
    if num_copies and any(leaf.dtype.kind != "f" for leaf in jax.tree.leaves(inputs)):
        raise UserError("num_copies adds noise to inputs, and tokens take none: give num_copies=0.")
    rng = np.random.default_rng(seed)

    def noisy(leaf: Any) -> np.ndarray:
        noise = rng.normal(size=leaf.shape).astype(leaf.dtype)
        return np.asarray(leaf) + np.asarray(input_noise, leaf.dtype) * noise

    return [jax.tree.map(noisy, inputs) for _ in range(num_copies)]


def predictive_targets(
    predict: Callable[[Inputs, np.ndarray | None], Predictions], inputs: Inputs, form: DataForm
) -> np.ndarray:
    """Of the mixture of all draws: class probabilities, or means and then standard deviations.

    As the likelihoods take them, in the units that the network sees; blocks of one size, so that
    one program is compiled.
    """
    total = count_rows(inputs)
    size = min(ROWS_AT_ONCE, total)
    found = []
    for first in range(0, total, size):
        rows = np.minimum(first + np.arange(size), total - 1)
        outputs = predict(take_rows(inputs, rows), None).flat_outputs[:, : total - first]
        if form.task == "classification":
            found.append(outputs.mean(axis=0))
            continue
        means, stds = np.split(outputs.astype(np.float64), 2, axis=-1)
        center = means.mean(axis=0)
        spread = np.sqrt((stds**2).mean(axis=0) + means.var(axis=0))
        scaled = [(center - form.target_mean) / form.target_scale, spread / form.target_scale]
        found.append(np.concatenate(scaled, axis=1))
    dtype = form.target_scale.dtype if form.task == "regression" else np.float32
    return np.concatenate(found).astype(dtype)
