"""Spread and correlations of weights, of several runs of one network: a table and a picture.

python benchmarks/correlations.py runs/hmc/a runs/implicit/b --align=runs/implicit/b --picture=c.png

The first run is the reference. Across layers: correlations of weights of different modules, by
their root mean square; the error against the reference's, likewise; and how similar the two sets of
correlations are, by their cosine. The reference's own row compares one half of its chains with the
other, which is what the same posterior would score.

Hidden units can be relabelled without changing the function, and HMC does so on its way, which
leaves its weights all but uncorrelated. With --align, the units of every draw of every run are
relabelled so that its weights come nearest to that run's mean (for networks of dense layers in the
order of their names; one layer at a time by linear assignment, until nothing changes). Without it,
chains are centred each before they are pooled, since each may have a labelling of its own.
"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import linear_sum_assignment
from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from haiku_posteriors.utils import checkpoint_utils

Layers = list[np.ndarray]  # of each layer (inputs + 1, outputs), the biases last


def load_layers(directory: pathlib.Path) -> tuple[list[Layers], int]:
    """The draws of a run, chain after chain, as dense layers in the order of their names."""
    draws = checkpoint_utils.load_draws(directory / "draws")
    if draws is None:
        raise SystemExit(f"{directory} holds no draws.")
    modules = sorted({name.rpartition("/")[0] for name in draws if name.endswith("/w")})
    stacked = []
    for module in modules:
        weights = draws[f"{module}/w"].astype(float)
        bias = draws.get(f"{module}/b", np.zeros((*weights.shape[:2], 0, weights.shape[-1])))
        bias = bias.reshape(*weights.shape[:2], -1, weights.shape[-1])
        joined = np.concatenate([weights, bias], axis=2)
        stacked.append(joined.reshape(-1, *joined.shape[2:]))
    chains = draws[f"{modules[0]}/w"].shape[0]
    return [[layer[index] for layer in stacked] for index in range(len(stacked[0]))], chains


def relabelled(draw: Layers, target: Layers) -> Layers:
    """The draw with its hidden units in the order that brings its weights nearest to `target`."""
    draw, changed = list(draw), True
    while changed:
        changed = False
        for index in range(len(draw) - 1):
            below, above = draw[index], draw[index + 1]
            units = below.shape[1]
            gain = target[index].T @ below + target[index + 1][:units] @ above[:units].T
            order = linear_sum_assignment(gain, maximize=True)[1]
            if gain[np.arange(units), order].sum() > np.trace(gain) + 1e-9:
                draw[index] = below[:, order]
                draw[index + 1] = np.concatenate([above[:units][order], above[units:]])
                changed = True
    return draw


def flatten(draws: list[Layers]) -> np.ndarray:
    """(draws, weights)."""
    return np.stack([np.concatenate([layer.ravel() for layer in draw]) for draw in draws])


def option(name: str) -> str | None:
    """The value of --name=value on the command line."""
    found = [a.removeprefix(f"--{name}=") for a in sys.argv[1:] if a.startswith(f"--{name}=")]
    return found[0] if found else None


def main() -> None:
    """Prints the table of the runs on the command line, the reference first; draws the picture."""
    directories = [pathlib.Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    target = None
    if option("align") is not None:
        aligned, _ = load_layers(pathlib.Path(option("align") or ""))
        target = [np.mean(layers, axis=0) for layers in zip(*aligned, strict=True)]
    found, owners, halves = [], np.zeros(0), np.zeros(0)
    for directory in directories:
        draws, chains = load_layers(directory)
        owners = np.concatenate([np.full(w.size, index) for index, w in enumerate(draws[0])])
        if target is not None:
            draws = [relabelled(draw, target) for draw in draws]
        flat = flatten(draws)
        by_chain = flat.reshape(chains, -1, flat.shape[1])
        if target is None:
            by_chain = by_chain - by_chain.mean(axis=1, keepdims=True)
        if directory == directories[0]:
            halves = np.stack(
                [
                    np.corrcoef(np.concatenate(half), rowvar=False)
                    for half in np.array_split(list(by_chain), 2)
                ]
            )
        pooled = by_chain.reshape(-1, flat.shape[1])
        found.append((pooled.std(axis=0).mean(), np.corrcoef(pooled, rowvar=False)))

    across = owners[:, None] != owners
    matrices = [matrix for _, matrix in found]
    rows = []
    for index, (spread, matrix) in enumerate(found):
        cells = [directories[index].name, spread, np.abs(matrix - np.eye(len(matrix))).max()]
        if across.any():
            ours, theirs = (matrix, matrices[0]) if index else halves
            error, own = (np.sqrt(np.mean(m[across] ** 2)) for m in (ours - theirs, matrix))
            product = np.sum(ours[across] * theirs[across])
            cosine = product / np.linalg.norm(ours[across]) / np.linalg.norm(theirs[across])
            cells += [own, error, cosine]
        rows.append(cells)
    header = ["run", "average std", "largest |correlation|", "across layers, rms"]
    header += ["error, rms", "cosine"]
    print(tabulate(rows, header[: len(rows[0])], tablefmt="github", floatfmt=".3g"))
    if option("picture") is not None:
        draw_picture(matrices, [directory.name for directory in directories], owners)


def draw_picture(matrices: list[np.ndarray], names: list[str], owners: np.ndarray) -> None:
    """One panel a run, on one scale; lines between layers."""
    figure, axes = plt.subplots(1, len(matrices), figsize=(4 * len(matrices), 4.2))
    for axis, matrix, name in zip(np.atleast_1d(axes), matrices, names, strict=True):
        image = axis.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        axis.set_title(name)
        for edge in np.flatnonzero(np.diff(owners)) + 0.5:
            axis.axhline(edge, color="0.3", linewidth=0.6)
            axis.axvline(edge, color="0.3", linewidth=0.6)
    figure.colorbar(image, ax=axes, label="correlation of two weights", shrink=0.8)
    figure.savefig(option("picture"), dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
