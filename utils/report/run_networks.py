"""Networks of finished runs: rebuilt from their flags, given draws, and made to predict again."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Inputs, count_rows, make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.predictions import Predictions, evenly
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import data_utils, ensemble_utils, problem
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.problem import Problem
from haiku_posteriors.utils.report.run_folders import OpenedRun, map_draw_files

# Inputs and, where they are known, targets as the network sees them.
Predictor = Callable[[Inputs, np.ndarray | None], Predictions]


def problem_of_run(run: OpenedRun, data_dir: str | None) -> Problem:
    """The problem that a run solved; its data are looked for in `data_dir` if that is given."""
    described = Problem.from_mapping(run.flags).in_folder(run.path)
    return described if data_dir is None else dataclasses.replace(described, data_dir=data_dir)


def load_run_problem(run: OpenedRun, data_dir: str | None) -> tuple[LogJoint, Dataset]:
    """The log-joint and the data of a run.

    Raises:
      UserError: the data cannot be found, or are not those that the run was trained on.
    """
    _, dataset, log_joint = problem.load_problem(problem_of_run(run, data_dir))
    if data_utils.fingerprint(dataset) != run.summary["data_sha256"]:
        raise UserError(
            f"The data set '{dataset.name}' found now is not the one that {run.path} was trained "
            "on; give the folder of the original files as --data_dir."
        )
    return log_joint, dataset


def choose_draws(log_joint: LogJoint, run: OpenedRun, max_draws: int) -> Params:
    """At most `max_draws` evenly chosen draws in the network's structure, (1, draws, ...)."""
    chosen = evenly(run.predictions.num_draws, max_draws)
    chain, position = np.divmod(chosen, run.predictions.outputs.shape[1])

    def pick(named: dict[str, np.ndarray], start: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        stop = start + next(iter(named.values())).shape[1]
        here = np.flatnonzero((position >= start) & (position < stop))
        return here, {k: leaf[chain[here], position[here] - start] for k, leaf in named.items()}

    parts = map_draw_files(run, pick)
    # Files follow one another in time, and the chosen draws chain by chain.
    order = np.argsort(np.concatenate([here for here, _ in parts]))
    joined = {
        name: np.concatenate([picked[name] for _, picked in parts])[order][None]
        for name in parts[0][1]
    }
    template = log_joint.shapes
    if trees.named_leaves(template).keys() != joined.keys():
        network = run.flags["model_name"]
        raise UserError(f"The draws in {run.path} are not of the network {network}.")
    return trees.from_named_leaves(template, joined)


def predictor_of_run(log_joint: LogJoint, dataset: Dataset, draws: Params) -> Predictor:
    """A function from inputs and targets (None where unknown) to what the draws predict.

    It is compiled once for each number of rows.
    """
    predict = ensemble_utils.make_predictor(log_joint, dataset.form)

    def predictor(inputs: Inputs, targets: np.ndarray | None) -> Predictions:
        known = targets is not None
        if targets is None:  # the program needs some
            targets = dataset.form.empty_targets(count_rows(inputs))
        typed = jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), inputs, dataset.x_train)
        data = make_data(typed, targets)
        found = predict(draws, jax.device_put(data))
        return Predictions(
            dataset.task,
            found.outputs,
            found.log_likelihoods if known else None,
            ensemble_utils.targets_in_original_units(targets, dataset.form) if known else None,
        )

    return predictor
