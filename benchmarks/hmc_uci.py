"""Test RMSE and log-likelihood of HMC over the splits of UCI sets, as a table.

Means over runs of the same data set and, after the sign, their standard errors over splits; R-hat
of the test predictions as the median over runs of the median one, and the largest of all.

  python benchmarks/hmc_uci.py FOLDER_OF_RUN...
"""

import json
import pathlib
import statistics
import sys
from collections import defaultdict
from typing import Any

from tabulate import tabulate

# RMSE and log-likelihood of HMC, read off a plot of arXiv 2104.14421.
PUBLISHED = {"concrete": (4.48, -2.67), "yacht": (0.67, 0.56), "boston": (3.69, -2.39)}


def with_error(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


def row(name: str, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """One data set's line from (summary.json, diagnostics.json) of its runs."""
    summaries, judged = zip(*runs, strict=True)
    rmse, log_likelihood = PUBLISHED.get(name, (float("nan"), float("nan")))
    predictions = [diagnostics["predictions"] for diagnostics in judged]
    return {
        "": name,
        "splits": len(runs),
        "RMSE": with_error([summary["test"]["rmse"] for summary in summaries]),
        "published": rmse,
        "log-likelihood": with_error([-summary["test"]["nll"] for summary in summaries]),
        "published ": log_likelihood,
        "R-hat, median / largest": (
            f"{statistics.median(p['median_rhat'] for p in predictions):.2f} / "
            f"{max(p['largest_rhat'] for p in predictions):.2f}"
        ),
        "least ESS": round(min(p["smallest_bulk_ess"] for p in predictions)),
        "converged": f"{sum(d['converged'] for d in judged)} of {len(runs)}",
        "seconds a run": round(statistics.mean(summary["seconds"] for summary in summaries)),
    }


if __name__ == "__main__":
    by_set = defaultdict(list)
    for folder in map(pathlib.Path, sys.argv[1:]):
        summary, judged = (
            json.loads((folder / name).read_text()) for name in ("summary.json", "diagnostics.json")
        )
        by_set[summary["dataset"].rpartition("_")[0]].append((summary, judged))
    rows = [row(name, runs) for name, runs in by_set.items()]
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
