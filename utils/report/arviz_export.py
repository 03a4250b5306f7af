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
from typing import Any

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.predictions import Predictions
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
    try:
        import arviz
    except ImportError as error:
        raise UserError(f"ArviZ cannot be imported ({error}): pip install arviz.") from error
    opened = run if isinstance(run, OpenedRun) else run_folders.open_run(pathlib.Path(run))
    found = groups(opened, seed)
    if int(arviz.__version__.split(".")[0]) == 0:
        return arviz.from_dict(**found)
    return arviz.from_dict(found)


def groups(run: OpenedRun, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of each group by name, (chain, draw, ...) but for the observed data."""
    draws = checkpoint_utils.load_draws(run.path / "draws")
    if draws is None:
        raise UserError(f"The run in {run.path} has no draws: its folder draws/ is empty or gone.")
    found = {"posterior": {name.replace("/", "."): leaf for name, leaf in draws.items()}}
    statistics = _sample_statistics(run)
    if statistics:
        found["sample_stats"] = statistics
    kept = run_folders.read_train_log_likelihoods(run)
    if kept is not None:
        found["log_likelihood"] = {"y": kept[0].astype(np.float64)}
    found["posterior_predictive"] = {"y_test": _drawn_targets(run.predictions, seed)}
    assert run.predictions.targets is not None
    found["observed_data"] = {"y_test": run.predictions.targets}
    return found


def _sample_statistics(run: OpenedRun) -> dict[str, np.ndarray]:
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
    found = {
        theirs: np.array([row[ours] for row in rows]).T
        for ours, theirs in STATISTICS.items()
        if all(ours in row for row in rows)
    }
    if "diverging" in found:  # ArviZ takes it for a mask
        found["diverging"] = found["diverging"].astype(bool)
    return found


def _drawn_targets(predictions: Predictions, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if predictions.task == "regression":
        means, deviations = np.split(predictions.outputs, 2, axis=-1)
        return means + deviations * rng.standard_normal(means.shape, means.dtype)
    levels = predictions.outputs.cumsum(axis=-1, dtype=np.float64)
    # Relative to the sum: rounded probabilities may end below the number drawn.
    drawn = rng.random((*levels.shape[:-1], 1)) * levels[..., -1:]
    return (levels < drawn).sum(axis=-1)
