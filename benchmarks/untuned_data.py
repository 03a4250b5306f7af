"""Tables that nobody has tuned anything on, for benchmarks/defaults.py.

    rare             5,000 rows, 8 inputs, 2 % positives
    heteroscedastic  300 rows, a curve whose noise grows with the first of 3 inputs
    wide             30 rows of 40 inputs, 3 of which matter
    collinear        200 rows, 8 inputs of which 3 are nearly sums of others, 5 % gross outliers
    five_classes     500 rows, 6 inputs, 5 overlapping classes of unequal size

Written as CSV files with their targets in column `y`, as a user would have them.
"""

import csv
import pathlib

import numpy as np

TARGET = "y"


def rare() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    inputs = random.normal(size=(5000, 8))
    scores = inputs @ random.normal(size=8) * 0.7 - 5
    return inputs, np.where(random.uniform(size=5000) < 1 / (1 + np.exp(-scores)), "yes", "no")


def heteroscedastic() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    inputs = random.uniform(-2, 2, size=(300, 3))
    noise = 0.1 + 0.3 * (inputs[:, 0] + 2)
    means = np.sin(2 * inputs[:, 0]) + 0.5 * inputs[:, 1]
    return inputs, means + noise * random.normal(size=300)


def wide() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    inputs = random.normal(size=(30, 40))
    return inputs, inputs[:, :3] @ [2.0, -1.0, 0.5] + 0.3 * random.normal(size=30)


def collinear() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(4)
    free = random.normal(size=(200, 5)) * [1, 10, 100, 1, 0.01]
    sums = free @ random.normal(size=(5, 3)) * (1 + 1e-3 * random.normal(size=(200, 3)))
    targets = 50 + free @ [3, 0.2, 0.01, -1, 100] + random.normal(size=200)
    targets[random.uniform(size=200) < 0.05] += 100
    return np.concatenate([free, sums], axis=1), targets


def five_classes() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    classes = random.choice(5, size=500, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    centers = 1.2 * random.normal(size=(5, 6))
    return centers[classes] + random.normal(size=(500, 6)), np.array(list("abcde"))[classes]


TABLES = {made.__name__: made for made in (rare, heteroscedastic, wide, collinear, five_classes)}


def write(folder: pathlib.Path) -> None:
    """Writes the tables that are not there yet."""
    for name, make in TABLES.items():
        path = folder / f"{name}.csv"
        if path.is_file():
            continue
        inputs, targets = make()
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([f"x{number}" for number in range(inputs.shape[1])] + [TARGET])
            rows = zip(inputs.tolist(), targets.tolist(), strict=True)
            writer.writerows([*row, target] for row, target in rows)
