"""Predictions of large networks on MNIST, all rows, by methods that are no Markov chains.

python benchmarks/mnist_table.py --data_dir=FOLDER with mnist, fashion_mnist and notmnist
  [--dir=FOLDER of the runs] [--only=NETWORK,...] [--methods=METHOD,...] [--table]

Runs what is not there yet, and goes on where a run was stopped; evaluates it on test rows, on
Fashion-MNIST and on notMNIST (evaluate_uncertainty.py), and prints a Markdown table; with --table
of what is there alone. ELBO: its estimate in the last epoch, of methods that have one. Settings are
by reasons that need no test row: the prior is one under which logits differ by about 5 between
draws, and steps are the best of a few by the ELBO of two epochs (docs/layerwise.md). VI and the
layerwise posterior start at the MAP solution, implicit VI at the end of mean-field VI: seconds are
a method's own, without those of its start.
"""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

from tabulate import tabulate

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]


class Network(NamedTuple):
    """What differs between the networks.

    Attributes:
      weight_decay: the prior's precision.
      epochs: of training, fewer where one is long.
      estimator: of mean-field VI. For convolutions `local` is no bound, and `flipout` takes four
        times as long as plain draws.
      generator: of implicit VI.
      inducing: rows of the layerwise posterior.
      layerwise_epochs: of its training.
    """

    weight_decay: int
    epochs: int
    estimator: str
    generator: str
    inducing: int
    layerwise_epochs: int


NETWORKS = {
    "mlp_400_400": Network(100, 10, "local", "configs/mnist_mlp.yaml", 250, 10),
    "lenet5": Network(40, 6, "reparameterization", "configs/mnist_lenet.yaml", 100, 4),
}
DRAWS = 20
TRAINING = "--optimizer=Adam --batch_size=250 --num_epochs={epochs}"
# By name: the script and its flags; {folder} holds the other runs, and the order is that of starts.
METHODS = {
    "MAP": f"run_sgd.py {TRAINING} --init_step_size=1e-3",
    "ensemble of 5": f"run_sgd.py {TRAINING} --init_step_size=1e-3 --num_members=5 --seed=1",
    "mean-field VI": (
        f"run_vi.py {TRAINING} --init_step_size=1e-2 --init_checkpoint={{folder}}/map "
        f"--vi_estimator={{estimator}} --vi_sigma_init=0.02 --vi_ensemble_size={DRAWS}"
    ),
    "implicit VI": (
        "run_implicit.py --batch_size=250 --num_epochs={epochs} --init_step_size=1e-3 "
        "--vi_checkpoint={folder}/mean-field_vi --generator={scripts}/{generator} "
        f"--entropy_steps=10 --num_samples=1 --num_draws={DRAWS}"
    ),
    "layerwise VI": (
        "run_vi.py --vi_family=layerwise --inducing=minibatch --layerwise_precision=shared "
        "--num_inducing={inducing} --batch_size=500 --num_epochs={layerwise_epochs} "
        f"--init_step_size=1e-2 --init_checkpoint={{folder}}/map --vi_ensemble_size={DRAWS}"
    ),
}
FOREIGN = {"fashion_mnist": "Fashion-MNIST", "notmnist": "notMNIST"}


def run(folder: pathlib.Path, script: str, *flags: str) -> None:
    """Runs a script; adds its processor seconds to those of earlier sessions of the folder."""
    log = folder.with_suffix(".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{script} {' '.join(flags)} ...", file=sys.stderr, flush=True)
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / script), *flags], stdout=output, stderr=output
        )
        _, status, used = os.wait4(process.pid, 0)
    note = folder.with_suffix(".seconds")
    before = float(note.read_text()) if note.is_file() else 0.0
    note.write_text(str(before + used.ru_utime + used.ru_stime))
    if status:
        sys.exit(f"{script} ended with {os.waitstatus_to_exitcode(status)}, see {log}.")


def folder_of(root: pathlib.Path, network: str, method: str) -> pathlib.Path:
    """Where a run is."""
    return root / network / method.lower().replace(" ", "_")


def make(root: pathlib.Path, network: str, method: str, data_dir: str) -> None:
    """Makes a run and its evaluation, unless they are there."""
    settings = NETWORKS[network]
    folder = folder_of(root, network, method)
    if not (folder / "report.html").is_file():
        words = METHODS[method].format(folder=folder.parent, scripts=SCRIPTS, **settings._asdict())
        problem = f"--dataset_name=mnist --data_dir={data_dir} --model_name={network} "
        problem += f"--weight_decay={settings.weight_decay}"
        script, *flags = f"{words} {problem} --eval_freq=5 --save_freq=1 --dir={folder}".split()
        run(folder, script, *flags)
    judged = folder / "uncertainty"
    if not (judged / "uncertainty.csv").is_file():
        flags = [f"--runs={folder}", f"--data_dir={data_dir}", "--shifts=false", "--num_rows=2000"]
        run(judged, "evaluate_uncertainty.py", *flags, f"--num_draws={DRAWS}")


def line(root: pathlib.Path, network: str, method: str) -> list[str] | None:
    """A row of the table; None where the run is not there."""
    folder = folder_of(root, network, method)
    path = folder / "uncertainty" / "uncertainty.csv"
    if not path.is_file():
        return None
    with path.open() as file:
        numbers = {row["metric"]: row for row in csv.DictReader(file)}

    def number(metric: str, form: str) -> str:
        value, error = (numbers[metric][name] for name in ("value", "error"))
        return f"{float(value):{form}}" + (f" ± {float(error):{form}}" if error else "")

    summary = json.loads((folder / "summary.json").read_text())
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return [
        network,
        method,
        *(number(metric, form) for metric, form in (("nll", ".4f"), ("accuracy", ".4f"))),
        number("ece", ".4f"),
        *(number(f"auroc/{name}", ".3f") for name in FOREIGN),
        *(number(f"auroc_epistemic/{name}", ".3f") for name in FOREIGN),
        f"{last['elbo']:,.0f}" if "elbo" in last else "",
        f"{float(folder.with_suffix('.seconds').read_text()):.0f}",
        f"{summary['peak_memory_bytes'] / 2**20:,.0f}" if "peak_memory_bytes" in summary else "",
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path("runs/mnist_table"))
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--table", action="store_true", help="of the runs that are there")
    arguments = parser.parse_args()
    chosen = [
        (network, method)
        for network in arguments.only.split(",")
        for method in arguments.methods.split(",")
    ]
    for network, method in [] if arguments.table else chosen:
        make(arguments.dir, network, method, arguments.data_dir)
    rows = [line(arguments.dir, network, method) for network, method in chosen]
    header = [
        "",
        "",
        "test NLL",
        "accuracy",
        "ECE",
        *(f"AUROC, {name}" for name in FOREIGN.values()),
    ]
    header += [f"epistemic, {name}" for name in FOREIGN.values()]
    header += ["ELBO", "processor seconds", "peak MB"]
    print(tabulate([row for row in rows if row], header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
