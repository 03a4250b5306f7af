"""Distance to HMC of draws before and after refinement, over seeds, as a Markdown table.

python benchmarks/refinement.py --folder=runs/refinement --seeds=0,1,2

Runs what is not in the folder yet (a run that was stopped goes on): one reference by HMC with its
own draws of the floor, and for each seed every approximation once, without refinement. Its draws
are then refined by `utils.stages.refine` in this process, for each number of gradients. Distance:
W1 between function values at a test row and the reference's, averaged over rows and functions.
Floor: that of as many draws of the reference itself, thinned evenly, from the rest. Seconds are
processor seconds: of the run, and of the refinement with its compilation and its estimate of bias.
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
from haiku_posteriors.utils import data_utils, devices, ensemble_utils
from haiku_posteriors.utils.draws import DrawStore
from haiku_posteriors.utils.report import loaded_runs
from haiku_posteriors.utils.stages import refine

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]
LAYERWISE = ("run_vi.py", "--vi_family=layerwise")
# A method is a line here; {n} is the number of draws. An ensemble's draws are its members.
METHODS = {
    "mean-field": ("run_vi.py", "--vi_ensemble_size={n}", "--num_evidence_draws=200"),
    "layerwise": (*LAYERWISE, "--vi_ensemble_size={n}"),
    "layerwise_of_8": (*LAYERWISE, "--num_members=8", "--vi_ensemble_size={eighth}"),
    "implicit": ("run_implicit.py", "--num_draws={n}"),
    "ensemble": ("run_sgd.py", "--num_members={n}"),
}
REFERENCE = ("run_hmc.py", "--num_iterations=1500", "--num_burn_in_iterations=300")


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


def refined(
    folder: pathlib.Path, dataset: data_utils.Dataset, num_gradients: int, seed: int
) -> tuple[np.ndarray, float, dict]:
    """Function values of a run's draws after refinement, its processor seconds, and its facts."""
    loaded = loaded_runs.load_run(folder)
    draws = DrawStore(folder, loaded.log_joint.shapes, 0).load()
    there = folder.with_name(f"{folder.name}_refined_{num_gradients}")
    there.mkdir(exist_ok=True)
    started = time.process_time()
    moved = refine.refine(
        loaded.log_joint,
        dataset,
        draws,
        refine.Refinement("mclmc", num_gradients),
        seed=seed,
        directory=there,
        say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    seconds = time.process_time() - started
    note = there / "seconds"
    if not note.is_file():
        note.write_text(str(seconds))
    predict = ensemble_utils.make_predictor(loaded.log_joint, dataset.form)
    test = devices.place_data(dataset.x_test, dataset.y_test, devices.make_mesh(1))
    flat = jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), moved)
    outputs = predict(flat, test).outputs[0]
    facts = json.loads((there / refine.FILE).read_text())
    return values(dataset.form.task, outputs), float(note.read_text()), facts


def main() -> None:
    """Prints the table, a line for each method, seed and number of gradients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/refinement"))
    parser.add_argument("--seeds", default="0,1,2,3,4,5")
    parser.add_argument("--gradients", default="0,300,1000")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--reference", type=pathlib.Path, help="a finished HMC run to compare with")
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
    least = floor(reference, arguments.draws)
    print(f"Floor of {arguments.draws} draws: {least:.3f}.", file=sys.stderr)
    rows = []
    for name in arguments.methods.split(","):
        script, *flags = METHODS[name]
        eighth = -(-arguments.draws // 8)
        flags = [flag.format(n=arguments.draws, eighth=eighth) for flag in flags]
        for seed in arguments.seeds.split(","):
            folder = arguments.folder / f"{name}_{seed}"
            seconds = finished(folder, script, f"--seed={seed}", *flags, *problem)
            evidence = folder / "evidence.json"
            bound = json.loads(evidence.read_text())["value"] if evidence.is_file() else None
            for gradients in map(int, arguments.gradients.split(",")):
                if gradients:
                    found, cost, facts = refined(folder, dataset, gradients, int(seed))
                    shift = facts["bias"].get("predictions, mean", {}).get("value")
                else:
                    with np.load(folder / "predictions.npz") as file:
                        found = values(dataset.form.task, file["test_predictions"])
                    cost, shift = seconds, None
                distance = float(wasserstein(found, reference).mean())
                spread = float(np.median(found.std(axis=0) / reference.std(axis=0)))
                row = [name, seed, gradients, bound, distance, distance / least, spread]
                rows.append([*row, shift, cost])
                print(rows[-1], file=sys.stderr, flush=True)
    header = ["", "seed", "gradients", "bound", "distance", "/ floor", "spread", "shift", "seconds"]
    print(tabulate(rows, header, tablefmt="github", floatfmt=".3g"))


if __name__ == "__main__":
    main()
