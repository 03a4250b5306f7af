"""All methods without tuning flags, on posteriors of different kind, against long chains.

python benchmarks/defaults.py --data_dir=FOLDER with uci/ and waveform/ [--dir=FOLDER of the runs]
  [--only=POSTERIOR,...] [--methods=METHOD,...] [--time_limit=MINUTES of a run] [--longer]
  [--evidence] [--table: of the runs that are there]

Flags say what the posterior is and nothing else. The reference is run_hmc.py without flags; of the
two linear-Gaussian ones the exact posterior is told beside it. A run that is there is not made
again, and one that was stopped goes on: parts of the table are made by --only and --methods, the
whole of it without them. W1 of functions stands beside its floor, what as many draws of the
reference itself score (docs/comparison.md). With --longer, VI and implicit VI are trained ten times
as long once more: the difference of their objectives, with common random numbers, says how far the
run was from its own optimum. With --evidence, run_smc.py finds log p(D), below which the bound of
implicit VI is by all that longer training could gain; of linear-Gaussian posteriors it is known.
"""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import untuned_data
from scipy import optimize, stats
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core.implicit import generators
from haiku_posteriors.core.judging import floors
from haiku_posteriors.utils.report import run_folders

METHODS = {
    "hmc": "run_hmc.py",
    "sgmcmc": "run_sgmcmc.py",
    "vi": "run_vi.py --vi_ensemble_size=400",
    "implicit": "run_implicit.py --num_draws=400",
    "ensemble": "run_sgd.py --num_members=10",
}
EVIDENCE = "run_smc.py --num_final_moves=0"
# By name: the flags that say where training starts and with which steps.
OPTIMISERS = {
    "vi": ("warm_start_epochs",),
    "implicit": ("pretrain_epochs", "start", "init_step_size"),
}
ARGUMENTS = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
ROOT = pathlib.Path(ARGUMENTS.get("dir", "runs/defaults"))
DATA = pathlib.Path(ARGUMENTS.get("data_dir", "data"))
LINEAR = (
    "--model_name=logistic_regression --likelihood=gaussian --noise_std=0.5 --standardize=false"
)
LOGISTIC = "--model_name=logistic_regression"
UCI = f"--data_dir={DATA} --likelihood=gaussian"
# By name: flags that describe the posterior. Rows, weights and prior variances differ widely.
POSTERIORS = {
    "linear_3": f"--dataset_name={ROOT}/linear_3.npz {LINEAR} --weight_decay=1",
    "linear_100": f"--dataset_name={ROOT}/linear_100.npz {LINEAR} --weight_decay=1",
    "logistic_10000": f"--dataset_name={ROOT}/logistic_10000.npz {LOGISTIC} --weight_decay=1",
    "waveform": (
        f"--dataset_name={DATA}/waveform/waveform.npz --standardize=false {LOGISTIC} "
        "--likelihood=bernoulli --weight_decay=0.01"
    ),
    "breast_cancer": f"--dataset_name=breast_cancer {LOGISTIC} --weight_decay=1",
    "wine": f"--dataset_name=wine {LOGISTIC} --weight_decay=0.1",
    "digits": f"--dataset_name=digits {LOGISTIC} --weight_decay=100",
    "diabetes": (
        "--dataset_name=diabetes --model_name=mlp_regression_small --likelihood=gaussian "
        "--weight_decay=10"
    ),
    "boston_0": f"--dataset_name=boston_0 {UCI} --weight_decay=30",
    "yacht_0": f"--dataset_name=yacht_0 {UCI} --weight_decay=10",
    "concrete_0": f"--dataset_name=concrete_0 {UCI} --weight_decay=10",
    "toy_regression": "--dataset_name=toy_regression",
    "sine_regression": (
        "--dataset_name=sine_regression --model_name=mlp_20_20 --likelihood=gaussian"
    ),
    "two_moons": "--dataset_name=two_moons --model_name=mlp_20_20 --weight_decay=1",
    **{
        name: f"--dataset_name={ROOT}/{name}.csv --target={untuned_data.TARGET}"
        for name in untuned_data.TABLES
    },
}


class Exact(NamedTuple):
    """A linear-Gaussian posterior: mean (D,) and precision (D, D), and log p(D)."""

    mean: np.ndarray
    precision: np.ndarray
    log_evidence: float


def make_data() -> dict[str, Exact]:
    """Writes the simulated data; the linear-Gaussian posteriors.

    Inputs of linear_100 have scales from 0.1 to 10, and neighbours are correlated; coefficients are
    in the order of the network's parameters, the bias first.
    """
    ROOT.mkdir(parents=True, exist_ok=True)
    untuned_data.write(ROOT)
    exact = {}
    for name, rows, columns in (("linear_3", 30, 2), ("linear_100", 300, 99)):
        random = np.random.default_rng(columns)
        inputs = random.normal(size=(rows + 50, columns))
        inputs[:, 1:] += 0.7 * inputs[:, :-1]
        inputs *= np.geomspace(0.1, 10, columns)
        weights = random.normal(size=columns)
        targets = inputs @ weights + 0.5 * random.normal(size=len(inputs))
        _save(name, inputs, targets[:, None], rows)
        design = np.concatenate([np.ones((rows, 1)), inputs[:rows]], axis=1)
        precision = design.T @ design / 0.5**2 + np.eye(columns + 1)
        mean = np.linalg.solve(precision, design.T @ targets[:rows] / 0.5**2)
        covariance = 0.5**2 * np.eye(rows) + design @ design.T
        log_evidence = stats.multivariate_normal(cov=covariance).logpdf(targets[:rows])
        exact[name] = Exact(mean, precision, float(log_evidence))
    random = np.random.default_rng(0)
    inputs = random.normal(size=(10_500, 10)) @ (np.eye(10) + 0.3 * random.normal(size=(10, 10)))
    chances = 1 / (1 + np.exp(-(inputs @ random.normal(size=10) * 0.5 - 1)))
    _save("logistic_10000", inputs, (random.uniform(size=10_500) < chances).astype(int), 10_000)
    return exact


def _save(name: str, inputs: np.ndarray, targets: np.ndarray, num_train: int) -> None:
    if not (ROOT / f"{name}.npz").is_file():
        x = inputs.astype(np.float32)
        y = targets.astype(np.float32 if targets.ndim == 2 else np.int32)
        arrays = {"x_train": x[:num_train], "y_train": y[:num_train]}
        np.savez(ROOT / f"{name}.npz", **arrays, x_test=x[num_train:], y_test=y[num_train:])


def make_run(name: str, posterior: str, script: str, further: str = "") -> pathlib.Path:
    """The folder of a finished run of `script`, made where it is not there yet."""
    directory = ROOT / posterior / name
    if not (directory / "report.html").is_file():
        limit = f"--time_limit={ARGUMENTS['time_limit']}" if "time_limit" in ARGUMENTS else ""
        words = f"{script} {POSTERIORS[posterior]} {further} {limit} --dir={directory}"
        print(f"{posterior}, {name} ...", flush=True)
        log = ROOT / f"{posterior}_{name}.txt"
        with log.open("w") as output:
            ended = subprocess.run([sys.executable, *words.split()], stdout=output, stderr=output)
        if ended.returncode:
            print(f"  ended with {ended.returncode}, see {log}.", flush=True)
    return directory


def longer(directory: pathlib.Path, method: str) -> str:
    """Flags for a run ten times as long, from the same start with the same minibatches."""
    summary, flags = (
        json.loads((directory / name).read_text()) for name in ("summary.json", "flags.json")
    )
    same = " ".join(f"--{name}={flags[name]}" for name in ("batch_size", *OPTIMISERS[method]))
    return f"--num_epochs={10 * summary['epochs']} {same}"


def line(posterior: str, method: str, exact: dict) -> list[str] | None:
    """A row of the table; None where the runs are not there."""
    reference, directory = (ROOT / posterior / name for name in ("hmc", method))
    if not all((path / "report.html").is_file() for path in (reference, directory)):
        return None
    theirs, ours = run_folders.open_run(reference), run_folders.open_run(directory)
    found = floors.compare(ours.predictions, theirs.predictions) if method != "hmc" else {}
    w1, ratio = found.get("w1"), found.get("std_ratio")
    is_converged = ours.diagnostics.get("converged")
    cells = [
        posterior,
        method,
        "-" if w1 is None else f"{w1.value:.3f} [{w1.floor:.3f}]",
        "-" if w1 is None else f"{w1.value / w1.floor:.2f}",
        "-" if ratio is None else f"{ratio.value:.2f}",
        {True: "converged", False: "NOT converged", None: "-"}[is_converged],
        f"{ours.summary['seconds']:.0f}",
    ]
    known = _against_exact(ours, exact.get(posterior), method)
    if method == "implicit":
        known = "; ".join(filter(None, (known, _against_evidence(posterior, exact.get(posterior)))))
    return [*cells, known, _against_longer(posterior, method)]


def _against_evidence(posterior: str, exact: Exact | None) -> str:
    """By how many nats the hierarchical bound of implicit VI is below log p(D)."""
    path, smc = (ROOT / posterior / name / "evidence.json" for name in ("implicit", "smc"))
    if not path.is_file() or not (exact or smc.is_file()):
        return ""
    bound = json.loads(path.read_text())
    known = json.loads(smc.read_text()) if exact is None else {"value": exact.log_evidence}
    error = np.hypot(bound["error"], known.get("error", 0.0))
    said = f"{known['value'] - bound['value']:.2f} +- {error:.2f} nats below log p(D)"
    if exact is None:
        return said
    least = _least_divergence(exact.precision, min(len(exact.mean), generators.MAX_LATENT))
    return f"{said}, {least:.2f} of them by its rank"


def _least_divergence(precision: np.ndarray, rank: int) -> float:
    """Least KL(q | p) of Gaussians with covariance L L^T + diag(s)^2, L of this rank, by L-BFGS."""
    scale = 1 / np.sqrt(np.diag(precision))
    scaled, size = precision * np.outer(scale, scale), len(precision)
    log_det = np.linalg.slogdet(scaled)[1]

    def divergence(values: np.ndarray) -> tuple[float, np.ndarray]:
        factor, squares = values[:-size].reshape(size, rank), np.exp(2 * values[-size:])
        covariance = factor @ factor.T + np.diag(squares)
        value = np.sum(scaled * covariance) - np.linalg.slogdet(covariance)[1] - log_det - size
        gradient = scaled - np.linalg.inv(covariance)
        by_scale = np.diag(gradient) * squares
        return value / 2, np.concatenate([(gradient @ factor).ravel(), by_scale])

    covariances, directions = np.linalg.eigh(np.linalg.inv(scaled) - np.eye(size))
    start = directions[:, -rank:] * np.sqrt(np.maximum(covariances[-rank:], 1e-3))
    values = np.concatenate([start.ravel(), np.zeros(size)])
    limits = {"maxiter": 5000, "maxfun": 10_000}
    return optimize.minimize(divergence, values, jac=True, method="L-BFGS-B", options=limits).fun


def _against_exact(run: run_folders.OpenedRun, exact: Exact | None, method: str) -> str:
    """Largest error of a mean, and ratios of standard deviations, where the posterior is known.

    Of mean-field VI also by how many nats its ELBO is below the best: 1/2 e' P e for an error e of
    the mean, and 1/2 sum (r - 1 - log r) for r = sigma_i^2 P_ii; less what as many draws of the
    best q would show.
    """
    if exact is None:
        return ""
    values = run_folders.read_parameters(run, 10**6).values.astype(np.float64)
    mean, precision, _ = exact
    std = np.sqrt(np.diag(np.linalg.inv(precision)))
    errors, ratios = values.mean(axis=0) - mean, values.std(axis=0, ddof=1) / std
    said = f"means {np.max(np.abs(errors) / std):.2f} sd, sds {ratios.min():.2f}-{ratios.max():.2f}"
    if method != "vi":
        return said
    squares = values.var(axis=0, ddof=1) * np.diag(precision)
    nats = 0.5 * (errors @ precision @ errors + np.sum(squares - 1 - np.log(squares)))
    return f"{said}; {nats - len(mean) / len(values):.2f} nats below its best"


def _against_longer(posterior: str, method: str) -> str:
    """Nats that ten times longer training gains."""
    folders = (
        ROOT / posterior / name / "diagnostics.json" for name in (method, f"{method}_longer")
    )
    found = [json.loads(path.read_text()) for path in folders if path.is_file()]
    if method not in OPTIMISERS or len(found) < 2:
        return ""
    return f"{found[1]['objectives'][0] - found[0]['objectives'][0]:+.2f}"


def main() -> None:
    exact = make_data()
    posteriors = ARGUMENTS.get("only", ",".join(POSTERIORS)).split(",")
    methods = ARGUMENTS.get("methods", ",".join(METHODS)).split(",")
    for posterior in posteriors:
        for method in [] if "table" in ARGUMENTS else methods:
            directory = make_run(method, posterior, METHODS[method])
            if "longer" in ARGUMENTS and method in OPTIMISERS:
                further = longer(directory, method)
                make_run(f"{method}_longer", posterior, METHODS[method], further)
        if "evidence" in ARGUMENTS and posterior not in exact:
            make_run("smc", posterior, EVIDENCE)
    rows = [line(posterior, method, exact) for posterior in posteriors for method in methods]
    headers = ["posterior", "method", "W1 [floor]", "over floor", "std ratio", "verdict", "seconds"]
    headers += ["exact answer", "ten times longer"]
    print(tabulate([row for row in rows if row], headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
