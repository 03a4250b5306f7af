"""Data sets that need no files: made from formulas, or bundled with scikit-learn."""

from collections.abc import Callable

import numpy as np

from haiku_posteriors.utils.datasets.forms import Column
from haiku_posteriors.utils.datasets.raw import RawData


def _toy_regression() -> RawData:
    """The first figure of "Implicit Variational Inference for High-Dimensional Posteriors".

    y = x + 0.8 sin(2 pi x) + 0.8 sin(4 pi x) + 0.3 e (arXiv 2310.06643), with 38 training inputs
    on [-1.28, -0.61] and 32 on [0.61, 1.28]; the test inputs cover the gap between them as well.
    """
    rng = np.random.default_rng(0)
    left, right = rng.uniform(-1.28, -0.61, 38), rng.uniform(0.61, 1.28, 32)
    x_train = np.concatenate([left, right])[:, np.newaxis]
    x_test = np.linspace(-1.28, 1.28, 128)[:, np.newaxis]

    def targets(x: np.ndarray) -> np.ndarray:
        waves = 0.8 * np.sin(2 * np.pi * x) + 0.8 * np.sin(4 * np.pi * x)
        return x + waves + 0.3 * rng.standard_normal(x.shape)

    y_train, y_test = targets(x_train), targets(x_test)
    return RawData("regression", x_train, y_train, x_test, y_test, 0, "none")


def _sine_regression() -> RawData:
    """y = 10 sin(2 pi x) + 2 e on [-0.5, 0.5]: 92 evenly spaced inputs, 92 other ones for tests."""
    rng = np.random.default_rng(1)
    x_train = np.linspace(-0.5, 0.5, 92)[:, np.newaxis]
    x_test = np.sort(rng.uniform(-0.5, 0.5, 92))[:, np.newaxis]

    def targets(x: np.ndarray) -> np.ndarray:
        return 10 * np.sin(2 * np.pi * x) + 2 * rng.standard_normal(x.shape)

    y_train, y_test = targets(x_train), targets(x_test)
    return RawData("regression", x_train, y_train, x_test, y_test, 0, "none", True)


def _two_moons() -> RawData:
    """Two half circles with noise 0.2, as drawn by scikit-learn's `make_moons`."""
    from sklearn.datasets import make_moons

    x_train, y_train = make_moons(200, noise=0.2, random_state=0)
    x_test, y_test = make_moons(1000, noise=0.2, random_state=1)
    return RawData("classification", x_train, y_train, x_test, y_test, 2, "feature")


def _from_scikit_learn(name: str) -> RawData:
    """A set bundled with scikit-learn, split 80/20, by equal proportions of each class."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    bunch = getattr(datasets, f"load_{name}")()
    x, y = bunch.data, bunch.target
    columns = tuple(Column(str(column)) for column in bunch.feature_names)
    is_regression = name == "diabetes"
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.2, random_state=0, stratify=None if is_regression else y
    )
    if is_regression:
        y_train, y_test = y_train[:, np.newaxis], y_test[:, np.newaxis]
        raw = RawData("regression", x_train, y_train, x_test, y_test, 0, "feature", True)
        return raw._replace(columns=columns, target_names=("progression",))
    classes = int(y.max()) + 1
    if name == "digits":  # 8 x 8 pixels of 0 to 16; many are constant, so one scale for all.
        x_train, x_test = x_train / 16, x_test / 16
        return RawData("classification", x_train, y_train, x_test, y_test, classes, "global")
    raw = RawData("classification", x_train, y_train, x_test, y_test, classes, "feature")
    return raw._replace(columns=columns, classes=tuple(map(str, bunch.target_names)))


EMBEDDED_SETS: dict[str, Callable[[], RawData]] = {
    "toy_regression": _toy_regression,
    "sine_regression": _sine_regression,
    "two_moons": _two_moons,
    "digits": lambda: _from_scikit_learn("digits"),
    "diabetes": lambda: _from_scikit_learn("diabetes"),
    "breast_cancer": lambda: _from_scikit_learn("breast_cancer"),
    "wine": lambda: _from_scikit_learn("wine"),
}
