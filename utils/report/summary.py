"""What a run says of itself in numbers: summary.json and the last table."""

import pathlib
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from tabulate import tabulate

from haiku_posteriors.core.judging import metrics
from haiku_posteriors.utils import files
from haiku_posteriors.utils.report import problem_files
from haiku_posteriors.utils.train_utils import RunResult


def write(directory: pathlib.Path, result: RunResult, facts: Mapping[str, Any]) -> None:
    """Writes summary.json: `facts` of the run, its metrics, its costs and what it ran on."""
    content = {
        **facts,
        "num_chains": result.test_predictions.num_chains,
        "num_draws": result.test_predictions.num_draws,
        "steps": result.num_updates,
        "test": result.test_metrics,
        "test_mean_of_members": result.member_metrics,
        "train": result.train_metrics,
        "seconds": result.seconds,
        "peak_memory_bytes": _peak_memory(),
        "device": {"kind": jax.devices()[0].device_kind, "count": jax.device_count()},
        "versions": problem_files.versions(),
    }
    files.write_json(directory / "summary.json", content)


def add_verdict(directory: pathlib.Path) -> None:
    """Adds to summary.json what diagnostics.json says of convergence, where there is such a word.

    After summary.json has been written: judging may take long, and a run that is interrupted while
    it is judged has its numbers.
    """
    path = directory / "diagnostics.json"
    diagnostics = files.read_json(path) if path.is_file() else {}
    if "converged" not in diagnostics:
        return
    verdict = {name: diagnostics[name] for name in ("converged", "problems", "notes")}
    content = files.read_json(directory / "summary.json")
    files.write_json(directory / "summary.json", {**content, "verdict": verdict})


def metrics_by_target(result: RunResult, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Test metrics of every target, where there are several; `names` may be empty."""
    predictions = result.test_predictions
    if predictions.task != "regression" or predictions.outputs.shape[-1] == 2:
        return {}
    found = metrics.by_target(predictions)
    names = names or [f"target_{index}" for index in range(len(found))]
    return dict(zip(names, found, strict=True))


def table_by_target(by_target: Mapping[str, Mapping[str, float]]) -> str:
    """The same for the terminal."""
    metric_names = next(iter(by_target.values()))
    rows = [[metric, *(by_target[name][metric] for name in by_target)] for metric in metric_names]
    return tabulate(rows, ["test", *by_target], floatfmt=".4g")


def table(result: RunResult) -> str:
    """Metrics of training and test rows for the terminal."""
    rows = [
        [metric, result.train_metrics[metric], value, result.member_metrics[metric]]
        for metric, value in result.test_metrics.items()
    ]
    return tabulate(rows, ["", "train", "test", "test, mean of draws"], floatfmt=".4g")


def _peak_memory() -> int:
    """Of the first device if it keeps count, as accelerators do, else of this process."""
    statistics = jax.devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(statistics.get("peak_bytes_in_use", process))
