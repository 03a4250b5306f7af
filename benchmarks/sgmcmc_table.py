"""How far runs' predictions are from those of a reference run, as a table.

Classification: total variation and agreement of the mean predictions. Regression: at each test row
the draws of the network's mean are two samples of numbers; W1 is their Wasserstein distance in
units of the reference's standard deviation, averaged over rows, and "std" the geometric mean of
the ratio of their standard deviations. The floor is the same distance between the first half of the
reference's chains and the second.

  python benchmarks/sgmcmc_table.py FOLDER_OF_REFERENCE FOLDER_OF_RUN...
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np
from scipy import stats
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core.judging.distances import agreement, total_variation


def distances(first: np.ndarray, second: np.ndarray, task: str) -> dict[str, float]:
    """From the reference `second` to `first`, both (draws, rows, outputs)."""
    if task == "classification":
        means = [predictions.mean(axis=0, dtype=np.float64) for predictions in (first, second)]
        return {
            "total variation": total_variation(*means),
            "agreement": agreement(*means),
        }
    targets = first.shape[2] // 2
    ours, reference = (p[:, :, :targets].reshape(len(p), -1) for p in (first, second))
    spread = reference.std(axis=0)
    apart = [stats.wasserstein_distance(a, b) for a, b in zip(ours.T, reference.T, strict=True)]
    return {
        "W1": float(np.mean(apart / spread)),
        "std": float(np.exp(np.mean(np.log(ours.std(axis=0) / spread)))),
    }


def load(folder: pathlib.Path) -> tuple[np.ndarray, int, dict[str, Any], dict[str, Any]]:
    """Predictions (draw, row, output), chains, summary.json and diagnostics.json."""
    with np.load(folder / "predictions.npz") as arrays:
        predictions, chains = arrays["test_predictions"], int(arrays["num_chains"])
    summary, diagnostics = (
        json.loads((folder / name).read_text()) for name in ("summary.json", "diagnostics.json")
    )
    return predictions, chains, summary, diagnostics


def row(folder: pathlib.Path, reference: np.ndarray | None = None) -> dict[str, Any]:
    """One run's line; without a reference, its own halves are compared."""
    predictions, chains, summary, diagnostics = load(folder)
    task = "classification" if "accuracy" in summary["test"] else "regression"
    if reference is None:
        half = len(predictions) // chains * (chains // 2)
        apart = distances(predictions[:half], predictions[half:], task)
    else:
        apart = distances(predictions, reference, task)
    quality = "accuracy" if task == "classification" else "rmse"
    # A pass over the data is an epoch, or a gradient of HMC.
    gradients = np.mean(diagnostics.get("num_leapfrog_steps", 1))
    return {
        "run": f"{folder.name} (floor)" if reference is None else folder.name,
        "draws": len(predictions),
        "passes a chain": round(summary["epochs"] * gradients),
        "seconds": summary["seconds"],
        "NLL": summary["test"]["nll"],
        quality: summary["test"][quality],
        **apart,
        "largest R-hat": diagnostics["predictions"]["largest_rhat"],
        "median R-hat": diagnostics["predictions"]["median_rhat"],
        "least ESS": diagnostics["predictions"]["smallest_bulk_ess"],
    }


if __name__ == "__main__":
    first, *others = (pathlib.Path(name) for name in sys.argv[1:])
    reference = load(first)[0]
    rows = [row(first), *(row(folder, reference) for folder in others)]
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"))
