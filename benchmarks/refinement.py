"""Distance to HMC of draws before and after refinement, repeated, as a Markdown table.

python benchmarks/refinement.py --folder=runs/refinement --repeats=6

Runs what is not in the folder yet (a run that was stopped goes on): one reference by HMC with its
own draws of the floor, and every approximation once, unrefined, with as many independent members as
there are repeats, which share a compilation. Their draws are then refined by `utils.stages.refine`
in this process, for each number of gradients; with --collapse_output also with the output layer
integrated out. Distance: W1 between function values at a test row and the reference's, averaged
over rows and functions; with --relative over the reference's standard deviation there. Floor: that
of as many draws of the reference itself, thinned evenly, from the rest. The first line has the
distances of sets of its draws that are chosen at random: so far exact draws are from one another.
Bound: the mean of the members' lower bounds of the log-evidence, which for several members is one
of their mixture's. Seconds are processor seconds of a repeat: of the run, and of the refinement
with its compilation and its estimate of bias.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time

import jax
import numpy as np
from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from haiku_posteriors.core.judging.distances import function_values, wasserstein
from haiku_posteriors.core.judging.predictions import evenly
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import data_utils, devices, ensemble_utils
from haiku_posteriors.utils.draws import DrawStore
from haiku_posteriors.utils.report import loaded_runs
from haiku_posteriors.utils.stages import refine

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]
LAYERWISE = ("run_vi.py", "--vi_family=layerwise", "--num_evidence_draws=100")
LINEARISED = ("run_implicit.py", "--objective=linearised", "--num_epochs=10000")
# A line is a method: the members of one repeat (0 for as many as draws), the script, its flags.
# Mixtures of layerwise members differ in their number alone: eight take long on larger posteriors.
METHODS = {
    "mean-field": (1, ("run_vi.py", "--num_evidence_draws=200"), "--vi_ensemble_size={draws}"),
    "layerwise": (1, LAYERWISE, "--vi_ensemble_size={draws}"),
    **{
        f"layerwise of {members}": (members, LAYERWISE, "--vi_ensemble_size={draws}")
        for members in (2, 4, 8)
    },
    "implicit": (1, ("run_implicit.py",), "--num_draws={draws}"),
    "implicit linearised": (1, LINEARISED, "--num_draws={draws}"),
    "ensemble": (0, ("run_sgd.py", "--num_epochs=6000"), ""),
}
DEFAULT = ("mean-field", "layerwise", "layerwise of 8", "implicit", "ensemble")
REFERENCE = ("run_hmc.py",)  # which goes on until it has converged


def run(script: str, *flags: str) -> float:
    """Runs a script; returns its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, str(SCRIPTS / script), *flags], check=True, stdout=sys.stderr)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def finished(folder: pathlib.Path, script: str, *flags: str) -> float:
    """Runs a script unless its folder is finished; returns the processor seconds it took."""
    note = folder.with_suffix(".seconds")
    if not note.is_file():
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(str(run(script, f"--dir={folder}", *flags)))
    return float(note.read_text())


def in_floors(distances: list[float], least: float) -> tuple[str, float, float]:
    """Distances in order, and their mean and largest over the floor."""
    listed = " ".join(f"{distance:.3f}" for distance in sorted(distances))
    return listed, float(np.mean(distances)) / least, max(distances) / least


def values(task: str, outputs: np.ndarray) -> np.ndarray:
    """Function values (draws, quantities)."""
    found = function_values(task, outputs)
    return found.reshape(len(found), -1)


def floor(reference: np.ndarray, num_draws: int) -> float:
    """The mean distance of evenly chosen draws of the reference from the rest of it."""
    found = []
    for offset in range(4):
        chosen = np.unique((evenly(len(reference), num_draws) + offset) % len(reference))
        rest = np.delete(reference, chosen, axis=0)
        found.append(wasserstein(reference[chosen], rest).mean())
    return float(np.mean(found))


def of_itself(reference: np.ndarray, num_repeats: int, num_draws: int) -> list[float]:
    """Distances of random sets of draws, without a draw in common, from the rest."""
    order = np.random.default_rng(0).permutation(len(reference))
    sets = order[: num_repeats * num_draws].reshape(num_repeats, -1)
    return [
        float(wasserstein(reference[chosen], np.delete(reference, chosen, axis=0)).mean())
        for chosen in sets
    ]


def repeated(
    folder: pathlib.Path, num_repeats: int, num_draws: int
) -> tuple[loaded_runs.LoadedRun, Params]:
    """A finished run, and its draws, (repeats, draws, ...): those of as many members each."""
    loaded = loaded_runs.load_run(folder)
    draws = DrawStore(folder, loaded.log_joint.shapes, 0).load()

    def divide(leaf: np.ndarray) -> np.ndarray:
        return leaf.reshape(num_repeats, -1, *leaf.shape[2:])[:, :num_draws]

    return loaded, jax.tree.map(divide, draws)


def refined(
    folder: pathlib.Path, dataset: data_utils.Dataset, draws: Params, refinement: refine.Refinement
) -> tuple[Params, float]:
    """Draws after refinement, and its processor seconds."""
    ending = "_collapsed" if refinement.collapse_output else ""
    there = folder.with_name(f"{folder.name}_refined_{refinement.num_gradients}{ending}")
    there.mkdir(exist_ok=True)
    note = there / "seconds"
    is_new = not (there / refine.FILE).is_file()
    before = float(note.read_text()) if note.is_file() else 0.0
    started = time.process_time()
    try:
        moved = refine.refine(
            loaded_runs.load_run(folder).log_joint,
            dataset,
            draws,
            refinement,
            seed=0,
            directory=there,
            say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
        )
    finally:  # a session that is stopped counts, too
        if is_new:
            note.write_text(str(before + time.process_time() - started))
    return moved, float(note.read_text())


def main() -> None:
    """Prints the table, a line for each method and number of gradients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/refinement"))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--gradients", default="0,300,1000")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--methods", default=",".join(DEFAULT))
    parser.add_argument("--reference", type=pathlib.Path, help="a finished HMC run to compare with")
    parser.add_argument("--relative", action="store_true", help="distances in deviations")
    parser.add_argument("--collapse_output", action="store_true", help="refine in both ways")
    parser.add_argument("--dataset_name", default="toy_regression")
    parser.add_argument("--data_dir")
    parser.add_argument("flags", nargs="*", help="of all scripts, after --")
    arguments = parser.parse_args()
    problem = [f"--dataset_name={arguments.dataset_name}", *arguments.flags]
    problem += [f"--data_dir={arguments.data_dir}"] if arguments.data_dir else []
    dataset = data_utils.load(arguments.dataset_name, arguments.data_dir)
    reference_folder = arguments.reference or arguments.folder / "hmc"
    if arguments.reference is None:
        finished(reference_folder, *REFERENCE, *problem)
    with np.load(reference_folder / "predictions.npz") as file:
        reference = values(dataset.form.task, file["test_predictions"])
    deviation = reference.std(axis=0)
    if arguments.relative:
        reference = reference / deviation
    least = floor(reference, arguments.draws)
    print(f"Floor of {arguments.draws} draws: {least:.3f}.", file=sys.stderr)
    test = devices.place_data(dataset.x_test, dataset.y_test, devices.make_mesh(1))
    repeats = arguments.repeats
    exact = of_itself(reference, repeats, arguments.draws)
    rows = [["HMC itself", "", "", *in_floors(exact, least), 1.0, ""]]
    ways = [
        refine.Refinement("mclmc", gradients, collapse_output=collapses)
        for collapses in (False, *([True] if arguments.collapse_output else []))
        for gradients in map(int, arguments.gradients.split(","))
        if gradients or not collapses
    ]
    for name in arguments.methods.split(","):
        group, (script, *flags), drawn = METHODS[name]
        members = repeats * (group or arguments.draws)
        per_member = -(-arguments.draws // (group or arguments.draws))
        flags += [f"--num_members={members}", *([drawn.format(draws=per_member)] if drawn else [])]
        folder = arguments.folder / name.replace(" ", "_")
        seconds = finished(folder, script, *flags, *problem)
        evidence = folder / "evidence.json"
        bounds = None
        if evidence.is_file():
            each = json.loads(evidence.read_text())["values"]
            bounds = np.reshape(each, (repeats, -1)).mean(axis=1)
        loaded, draws = repeated(folder, repeats, per_member * (group or arguments.draws))
        predict = ensemble_utils.make_predictor(loaded.log_joint, dataset.form)
        for way in ways:
            moved, cost = (
                refined(folder, dataset, draws, way) if way.num_gradients else (draws, seconds)
            )
            outputs = predict(moved, test).outputs
            found = [values(dataset.form.task, repeat) for repeat in outputs]
            if arguments.relative:
                found = [repeat / deviation for repeat in found]
            distances = [float(wasserstein(repeat, reference).mean()) for repeat in found]
            spread = np.median([r.std(axis=0) / reference.std(axis=0) for r in found])
            rows.append(
                [
                    name,
                    f"{way.num_gradients}{', collapsed' if way.collapse_output else ''}",
                    "" if bounds is None else " ".join(f"{b:.1f}" for b in bounds),
                    *in_floors(distances, least),
                    spread,
                    cost / repeats,
                ]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    header = ["", "gradients", "bound", "distance", "mean / floor", "worst / floor"]
    print(tabulate(rows, [*header, "spread", "seconds"], tablefmt="github", floatfmt=".3g"))


if __name__ == "__main__":
    main()
