"""Spread and correlations of weights, of several runs of one network: a table and a picture.

python benchmarks/correlations.py runs/hmc/a runs/implicit/b --picture=correlations.png

Chains (members) are centred each before they are pooled: hidden units may be permuted between them,
and correlations within a mode are what is compared. Across layers: correlations of weights of
different modules, by their root mean square; and the error against the first run's, likewise.
"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from utils import checkpoint_utils


def centred_draws(directory: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Draws (all, weights), each chain around its mean; and the number of each weight's module."""
    draws = checkpoint_utils.load_draws(directory / "draws")
    if draws is None:
        raise SystemExit(f"{directory} holds no draws.")
    modules = sorted({name.rpartition("/")[0] for name in draws})
    columns, owners = [], []
    for name in sorted(draws):
        flat = draws[name].reshape(*draws[name].shape[:2], -1).astype(float)
        columns.append((flat - flat.mean(axis=1, keepdims=True)).reshape(-1, flat.shape[2]))
        owners += [modules.index(name.rpartition("/")[0])] * flat.shape[2]
    return np.concatenate(columns, axis=1), np.array(owners)


def main() -> None:
    """Prints the table of the runs on the command line, the reference first; draws the picture."""
    pictures = [a.removeprefix("--picture=") for a in sys.argv[1:] if a.startswith("--picture=")]
    directories = [pathlib.Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    rows, matrices, reference = [], [], None
    for directory in directories:
        draws, owners = centred_draws(directory)
        matrix = np.corrcoef(draws, rowvar=False)
        across = owners[:, None] != owners
        if reference is None:
            reference = matrix
        off_diagonal = matrix - np.eye(len(matrix))
        cells = [directory.name, draws.std(axis=0).mean(), np.abs(off_diagonal).max()]
        if across.any():
            error = matrix - reference
            cells += [np.sqrt(np.mean(values[across] ** 2)) for values in (matrix, error)]
        rows.append(cells)
        matrices.append(matrix)
    header = ["run", "average std", "largest |correlation|", "across layers, rms", "error, rms"]
    print(tabulate(rows, header[: len(rows[0])], tablefmt="github", floatfmt=".3g"))
    if pictures:
        figure, axes = plt.subplots(1, len(matrices), figsize=(4 * len(matrices), 4.2))
        for axis, matrix, directory in zip(np.atleast_1d(axes), matrices, directories, strict=True):
            image = axis.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
            axis.set_title(directory.name)
            for edge in np.flatnonzero(np.diff(owners)) + 0.5:  # between modules
                axis.axhline(edge, color="0.3", linewidth=0.6)
                axis.axvline(edge, color="0.3", linewidth=0.6)
        figure.colorbar(image, ax=axes, label="correlation of two weights", shrink=0.8)
        figure.savefig(pictures[0], dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
