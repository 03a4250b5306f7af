"""A finished run as ArviZ has it: InferenceData in versions 0.x, a DataTree in 1.x.

| group | content |
|---|---|
| posterior | parameters by name (`hidden_0.w`), with chain and draw |
| sample_stats | of HMC: `lp`, `acceptance_rate`, `diverging`, `energy`, `step_size`, `n_steps` |
| log_likelihood | `y`: of the training rows, for the draws whose log-likelihoods were kept |
| posterior_predictive | `y_test`: a target drawn at each test row by each draw |
| observed_data | `y_test`: the targets of the test rows |

So `arviz.loo(to_arviz(folder))`, `arviz.plot_trace`, `arviz.summary` and `arviz.plot_ppc` work.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import checkpoint_utils
from haiku_posteriors.utils.files import read_rows
from haiku_posteriors.utils.report import run_folders
from haiku_posteriors.utils.report.run_folders import OpenedRun

# Names that ArviZ knows, by ours in history.jsonl.
STATISTICS = {
    "log_joint": "lp",
    "acceptance_probability": "acceptance_rate",
    "divergent": "diverging",
    "energy": "energy",
    "step_size": "step_size",
    "num_leapfrog_steps": "n_steps",
}


def to_arviz(run: str | pathlib.Path | OpenedRun, seed: int = 0) -> Any:
    """The run in the object that the installed version of ArviZ works with.

    Args:
      run: its folder.
      seed: of the targets that the posterior predictive group draws.

    Raises:
      UserError: ArviZ is not installed, or the folder holds no finished run.
    """
    opened = run if isinstance(run, OpenedRun) else run_folders.open_run(pathlib.Path(run))
    return _as_arviz(groups(opened, seed))


def from_fit(
    draws: Params,
    history: Mapping[str, np.ndarray],
    log_likelihoods: np.ndarray,
    predictions: Predictions,
    seed: int = 0,
) -> Any:
    """The same of a fit without a folder.

    Args:
      draws: (chains, draws, ...).
      history: of the transitions whose states these are, (chains, draws); may be empty.
      log_likelihoods: of the training rows, (chains, some draws, rows).
      predictions: of the rows whose targets are to be drawn.
      seed: of these.
    """
    named = {name: np.asarray(leaf) for name, leaf in trees.named_leaves(draws).items()}
    return _as_arviz(_groups(named, history, log_likelihoods, predictions, "y", seed))


def _as_arviz(found: dict[str, dict[str, np.ndarray]]) -> Any:
    try:
        import arviz
    except ImportError as error:
        raise UserError(f"ArviZ cannot be imported ({error}): pip install arviz.") from error
    if int(arviz.__version__.split(".")[0]) == 0:
        return arviz.from_dict(**found)
    return arviz.from_dict(found)


def groups(run: OpenedRun, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of each group by name, (chain, draw, ...) but for the observed data."""
    draws = checkpoint_utils.load_draws(run.path / "draws")
    if draws is None:
        raise UserError(f"The run in {run.path} has no draws: its folder draws/ is empty or gone.")
    kept = run_folders.read_train_log_likelihoods(run)
    log_likelihoods = None if kept is None else kept[0]
    return _groups(draws, _history(run), log_likelihoods, run.predictions, "y_test", seed)


def _groups(
    draws: Mapping[str, np.ndarray],
    history: Mapping[str, np.ndarray],
    log_likelihoods: np.ndarray | None,
    predictions: Predictions,
    name_of_targets: str,
    seed: int,
) -> dict[str, dict[str, np.ndarray]]:
    found = {"posterior": {name.replace("/", "."): leaf for name, leaf in draws.items()}}
    statistics = {theirs: history[ours] for ours, theirs in STATISTICS.items() if ours in history}
    if "diverging" in statistics:  # ArviZ takes it for a mask
        statistics["diverging"] = statistics["diverging"].astype(bool)
    if statistics:
        found["sample_stats"] = statistics
    if log_likelihoods is not None:
        found["log_likelihood"] = {"y": log_likelihoods.astype(np.float64)}
    found["posterior_predictive"] = {name_of_targets: _drawn_targets(predictions, seed)}
    assert predictions.targets is not None
    found["observed_data"] = {name_of_targets: predictions.targets}
    return found


def _history(run: OpenedRun) -> dict[str, np.ndarray]:
    """Of the transitions whose states are draws; empty for methods that keep no history."""
    burn_in = run.flags.get("num_burn_in_iterations", 0)
    thinning = run.flags.get("thinning", 1)
    rows = [
        row
        for row in read_rows(run.path / "history.jsonl")
        if row["epoch"] > burn_in and (row["epoch"] - burn_in) % thinning == 0
    ]
    if len(rows) != run.predictions.outputs.shape[1]:
        return {}
    return {
        name: np.array([row[name] for row in rows]).T
        for name in STATISTICS
        if all(name in row for row in rows)
    }


def _drawn_targets(predictions: Predictions, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if predictions.task == "regression":
        means, deviations = np.split(predictions.outputs, 2, axis=-1)
        return means + deviations * rng.standard_normal(means.shape, means.dtype)
    levels = predictions.outputs.cumsum(axis=-1, dtype=np.float64)
    # Relative to the sum: rounded probabilities may end below the number drawn.
    drawn = rng.random((*levels.shape[:-1], 1)) * levels[..., -1:]
    return (levels < drawn).sum(axis=-1)
