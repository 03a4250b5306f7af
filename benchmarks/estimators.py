"""The scikit-learn estimators on small tables: scores on test rows, and what a fit costs.

python benchmarks/estimators.py --data_dir=path/to/data [--methods=ensemble,hmc] [--sets=diabetes]
"""

import argparse
import csv
import pathlib
import sys
import tempfile
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from tabulate import tabulate

import haiku_posteriors as hp
from haiku_posteriors.sklearn import PosteriorClassifier, PosteriorRegressor
from haiku_posteriors.utils.data_utils import Dataset


def write_houses(path: pathlib.Path) -> None:
    """A table with text in it: 400 rows, price = 3 age + 20 [red] + 5 rooms + N(0, 5^2)."""
    rng = np.random.default_rng(0)
    age, rooms = rng.uniform(20, 70, 400).round(1), rng.integers(1, 5, 400)
    colour = rng.choice(["red", "green", "blue"], 400)
    price = (3 * age + 20 * (colour == "red") + 5 * rooms + rng.normal(0, 5, 400)).round(2)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "rooms", "colour", "price"])
        writer.writerows(zip(age, rooms, colour, price, strict=True))


def load(name: str, data_dir: str | None) -> Dataset:
    """A data set in its own units."""
    table = hp.TableOptions(target="price") if name.endswith(".csv") else hp.TableOptions()
    return hp.load_dataset(name, data_dir, standardize=False, table=table)


def main() -> None:
    """Prints a line for every data set and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir")
    parser.add_argument("--methods", default="ensemble,mean_field,sghmc,hmc")
    parser.add_argument("--sets", default="houses.csv,diabetes,breast_cancer,wine,boston_0")
    arguments = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp())
    write_houses(folder / "houses.csv")
    rows = []
    for method in arguments.methods.split(","):
        for name in arguments.sets.split(","):
            data = load(str(folder / name) if name.endswith(".csv") else name, arguments.data_dir)
            kind = PosteriorRegressor if data.task == "regression" else PosteriorClassifier
            y_train, y_test = (np.squeeze(y) for y in (data.y_train, data.y_test))
            started, clock = time.process_time(), time.monotonic()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the table says it
                model = kind(method).fit(data.x_train, y_train)
            seconds = (time.process_time() - started, time.monotonic() - clock)
            predicted = model.predict(data.x_test)
            if data.task == "regression":
                quality = f"RMSE {np.sqrt(np.mean((predicted - y_test) ** 2)):.3g}"
            else:
                quality = f"accuracy {np.mean(predicted == y_test):.3f}"
            found = model.diagnostics_
            rhat = found["predictions"]["largest_rhat"] if found else float("nan")
            verdict = {True: "converged", False: "NOT converged"}.get(found.get("converged"), "-")
            score = model.score(data.x_test, y_test)
            rows.append([name, method, quality, f"{score:.3f}", f"{rhat:.3f}", verdict])
            rows[-1] += [f"{value:.0f}" for value in seconds]
            print(rows[-1], flush=True)
    heads = ["data", "method", "test", "score (nats)", "R-hat", "verdict", "CPU s", "s"]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
