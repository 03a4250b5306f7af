"""The peer of the UCI table: scikit-learn-contrib's bde, in an environment of its own.

pip install sklearn-contrib-bde==1.0.2           not into this project's environment
python benchmarks/bde_uci.py FOLDER_WITH_uci NAME_SPLIT...

One hidden layer of 50 units, members trained with early stopping, then 5,000 steps of warm-up and
2,000 of sampling each, prior N(0, 1); ten members take about the processor time of our runs. RMSE
and the log-likelihood of the mixture of all draws are in the units of y; seconds are processor
seconds. One line of JSON for each data set.
"""

import json
import pathlib
import sys
import time

import numpy as np
from bde import BdeRegressor
from scipy.special import logsumexp


def load(folder: pathlib.Path, name: str, split: str) -> list[np.ndarray]:
    """x_train, y_train, x_test, y_test of a published split."""
    folder = folder / "uci" / name
    values = np.loadtxt(folder / "data.txt")
    features = np.loadtxt(folder / "index_features.txt").astype(int)
    target = int(np.loadtxt(folder / "index_target.txt"))
    rows = [
        np.loadtxt(folder / f"index_{part}_{split}.txt").astype(int) for part in ("train", "test")
    ]
    return [values[index][:, column] for index in rows for column in (features, target)]


def main() -> None:
    """Fits and scores, one data set after another."""
    for dataset in sys.argv[2:]:
        x_train, y_train, x_test, y_test = load(pathlib.Path(sys.argv[1]), *dataset.rsplit("_", 1))
        center, scale = x_train.mean(axis=0), x_train.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        mean, deviation = y_train.mean(), y_train.std()
        started = time.process_time()
        model = BdeRegressor(
            n_members=10,
            hidden_layers=[50],
            epochs=1000,
            patience=20,
            n_samples=2000,
            warmup_steps=5000,
            n_thinning=10,
        )
        model.fit((x_train - center) / scale, (y_train - mean) / deviation)
        raw = np.asarray(model.predict((x_test - center) / scale, raw=True), float)
        seconds = time.process_time() - started
        location = raw[..., 0].reshape(-1, len(y_test)) * deviation + mean
        noise = (np.logaddexp(0, raw[..., 1]) + 1e-6).reshape(-1, len(y_test)) * deviation
        densities = -0.5 * ((y_test - location) / noise) ** 2 - np.log(noise * np.sqrt(2 * np.pi))
        row = {
            "dataset": dataset,
            "rmse": float(np.sqrt(np.mean((location.mean(axis=0) - y_test) ** 2))),
            "log_likelihood": float(np.mean(logsumexp(densities, axis=0) - np.log(len(densities)))),
            "processor_seconds": seconds,
            "draws": len(densities),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
