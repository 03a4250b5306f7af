"""Test RMSE and log-likelihood of chains over the splits of UCI sets, as a table, beside a peer's.

Means over runs of the same data set and, after the sign, their standard errors over splits; R-hat
of the test predictions as the median over runs of the median one, and the largest of all. "Ahead"
is the mean difference of log-likelihoods on the same splits, with its standard error.

  python benchmarks/bde_uci.py FOLDER_WITH_uci yacht_0 yacht_1 ... > bde.jsonl
  python benchmarks/uci_table.py bde.jsonl FOLDER_OF_RUN...
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


def row(
    name: str, runs: list[tuple[dict[str, Any], dict[str, Any]]], peers: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """One data set's line from (summary.json, diagnostics.json) of its runs, and the peer's."""
    summaries, judged = zip(*runs, strict=True)
    rmse, log_likelihood = PUBLISHED.get(name, (float("nan"), float("nan")))
    predictions = [diagnostics["predictions"] for diagnostics in judged]
    peer = [peers[summary["dataset"]] for summary in summaries]
    ours = [-summary["test"]["nll"] for summary in summaries]
    theirs = [line["log_likelihood"] for line in peer]
    return {
        "": name,
        "splits": len(runs),
        "RMSE": with_error([summary["test"]["rmse"] for summary in summaries]),
        "bde": with_error([line["rmse"] for line in peer]),
        "published": rmse,
        "log-likelihood": with_error(ours),
        "bde ": with_error(theirs),
        "published ": log_likelihood,
        "ahead of bde by": with_error([a - b for a, b in zip(ours, theirs, strict=True)]),
        "R-hat, median / largest": (
            f"{statistics.median(p['median_rhat'] for p in predictions):.2f} / "
            f"{max(p['largest_rhat'] for p in predictions):.2f}"
        ),
        "converged": f"{sum(d['converged'] for d in judged)} of {len(runs)}",
        "bde's processor seconds": round(statistics.mean(p["processor_seconds"] for p in peer)),
    }


if __name__ == "__main__":
    lines = map(json.loads, pathlib.Path(sys.argv[1]).read_text().splitlines())
    peers = {line["dataset"]: line for line in lines}
    by_set = defaultdict(list)
    for folder in map(pathlib.Path, sys.argv[2:]):
        summary, judged = (
            json.loads((folder / name).read_text()) for name in ("summary.json", "diagnostics.json")
        )
        by_set[summary["dataset"].rpartition("_")[0]].append((summary, judged))
    rows = [row(name, runs, peers) for name, runs in by_set.items()]
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
