"""Distance of toy regression runs to an HMC run, as a Markdown table.

python benchmarks/implicit_toy.py runs/hmc/reference runs/implicit/a runs/vi/b ...

The test inputs are an even grid over the data and the gap between them, |x| < 0.61. Distance: W1
between the draws' function values at a grid point and the reference's, averaged over the grid.
Spread: the standard deviation of these values over the reference's, averaged over the gap or the
rest. The reference's own rows compare each of its chains with all others.
"""

import json
import pathlib
import sys

import numpy as np
from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from haiku_posteriors.core.judging.distances import function_values, wasserstein
from haiku_posteriors.utils.data_utils import load

GAP = 0.61


def values(directory: pathlib.Path) -> np.ndarray:
    """Function values (chains, draws, grid)."""
    with np.load(directory / "predictions.npz") as file:
        outputs = function_values("regression", file["test_predictions"])[..., 0]
        return outputs.reshape(int(file["num_chains"]), -1, outputs.shape[-1])


def row(draws: np.ndarray, reference: np.ndarray, in_gap: np.ndarray) -> list[float]:
    """Distance, and spreads in the gap and outside; both are (draws, grid)."""
    ratio = draws.std(axis=0) / reference.std(axis=0)
    distance = wasserstein(draws, reference).mean()
    return [float(distance), float(ratio[in_gap].mean()), float(ratio[~in_gap].mean())]


def main() -> None:
    """Prints the table of the runs named on the command line, the reference first."""
    first, *others = map(pathlib.Path, sys.argv[1:])
    dataset = load("toy_regression")
    in_gap = np.abs(dataset.x_test[:, 0]) < GAP
    chains = values(first)
    reference = np.concatenate(list(chains))
    rows = []
    for index, chain in enumerate(chains):
        rest = np.concatenate(list(np.delete(chains, index, axis=0)))
        rows.append([f"{first.name}, chain {index}", "", *row(chain, rest, in_gap), ""])
    for directory in others:
        summary = json.loads((directory / "summary.json").read_text())
        evidence = directory / "evidence.json"
        best = max(json.loads(evidence.read_text())["values"]) if evidence.is_file() else ""
        found = row(np.concatenate(list(values(directory))), reference, in_gap)
        rows.append([directory.name, best, *found, summary["seconds"]])
    header = [
        "run",
        "best bound or estimate",
        "distance",
        "spread in gap",
        "spread outside",
        "seconds",
    ]
    print(tabulate(rows, header, tablefmt="github", floatfmt=".3g"))


if __name__ == "__main__":
    main()
