"""scikit-learn estimators of Bayesian neural networks, by any method of the package.

    from haiku_posteriors.sklearn import PosteriorRegressor

    model = PosteriorRegressor(method="hmc").fit(x_train, y_train)
    mean, std = model.predict(x_test, return_std=True)

They run the loop that the scripts run, on the same log-joint, and predict with the same program.
A fitted one is saved into a folder without pickle (`save`, `load`), from which predict.py and
`load_run` predict as well.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import files
from haiku_posteriors.utils.draws import DrawStore
from haiku_posteriors.utils.estimators.base import (
    FILE_NAME,
    RECORD_NAME,
    Network,
    PosteriorEstimator,
)
from haiku_posteriors.utils.report import loaded_runs


@dataclasses.dataclass(eq=False, repr=False)
class PosteriorRegressor(RegressorMixin, PosteriorEstimator):
    """Regression with a Bayesian neural network.

    Parameters
    ----------
    method : one of `haiku_posteriors.utils.estimators.plans.PLANS`: "hmc", "mclmc", "sghmc",
        "sgld", "mean_field", "mc_dropout", "implicit", "ensemble", "map".
    network : a Haiku function of inputs, and perhaps `num_outputs`; a built-in network's name,
        `package.module:function` or `path/to/file.py:function`; None for one hidden layer of 50.
    input_groups : for a network of several inputs, the columns of X that each takes, by its name:
        positions, or names where X has them.
    weight_decay : prior precision of the weights; None for 10 with the default network, else 1.
    temperature : divides the log-joint.
    num_steps : transitions of HMC, epochs of other methods; None for the method's default, as with
        the other numbers: chains and optimisers then end by themselves.
    num_burn_in : steps before draws are kept.
    num_chains : chains, or members.
    num_draws : draws of each chain or member.
    warm_start_epochs : of Adam, before chains and generators ("implicit") start; 0 starts them from
        the prior, or from a network's random start.
    step_size : of the sampler or optimizer; HMC adapts it by default.
    batch_size : maximum rows per minibatch.
    options : further arguments of the method's function in `haiku_posteriors.core`, a dict.
    standardize : scale inputs and targets to unit variance; predictions are in the units of y.
    random_state : from which all random numbers derive.
    verbose : show progress.
    likelihood : "gaussian", one noise for all rows, or "heteroscedastic_gaussian", the network's.
    noise_std : of "gaussian", in units of the standardized targets; None to learn it.

    Attributes
    ----------
    draws_ : parameters, a dict of dicts of arrays (chain, draw, ...).
    diagnostics_ : what chains say of themselves: R-hat, effective sample sizes, HMC's verdict.
    train_metrics_ : metrics on the training rows.
    """

    _task: ClassVar[str] = "regression"
    _checks_of_y: ClassVar[Mapping[str, bool]] = {"multi_output": True, "y_numeric": True}

    likelihood: str = "gaussian"
    noise_std: float | None = None

    def predict(
        self,
        X: ArrayLike,
        return_std: bool = False,
        quantiles: Sequence[float] | None = None,
    ) -> Any:
        """The predictive mean, (rows,) or (rows, targets), in the units of y.

        With `return_std`, also the standard deviation of a new observation; with `quantiles`, also
        the mixture's quantiles, (levels, rows, ...); in this order, as a tuple.
        """
        predictive = self.predictive(X)
        found = [predictive.mean]
        if return_std:
            found.append(predictive.std)
        if quantiles is not None:
            found.append(predictive.quantile(list(quantiles)))
        found = [values[..., 0] if self._is_flat else values for values in found]
        return found[0] if len(found) == 1 else tuple(found)

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """The mean log predictive density of a row, in the units of y; not R-squared."""
        return self._mean_log_density(X, y)

    def sample_y(
        self,
        X: ArrayLike,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = 0,
    ) -> np.ndarray:
        """New observations from the predictive mixture, (rows, samples) or with targets between."""
        generator = check_random_state(random_state)
        outputs = self.predictive(X).outputs.astype(np.float64)
        chosen = outputs[generator.randint(len(outputs), size=n_samples)]
        means, stds = np.split(chosen, 2, axis=-1)
        samples = np.moveaxis(means + stds * generator.standard_normal(means.shape), 0, -1)
        return samples[:, 0] if self._is_flat else samples

    def _read_targets(self, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        self._is_flat = y.ndim == 1
        return y, ()

    def _likelihood(self) -> dict[str, Any]:
        return {
            "likelihood": self.likelihood,
            "noise_std": self.noise_std,
            "learn_noise": self.noise_std is None,
        }

    def _fitted_values(self) -> dict[str, Any]:
        return super()._fitted_values() | {"_is_flat": self._is_flat}

    def __sklearn_tags__(self) -> Any:
        """Several targets will do; the score is no R-squared, which scikit-learn's tests expect."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = True
        return tags


@dataclasses.dataclass(eq=False, repr=False)
class PosteriorClassifier(ClassifierMixin, PosteriorEstimator):
    """Classification with a Bayesian neural network.

    Parameters and attributes are those of `PosteriorRegressor`, without `likelihood` and
    `noise_std`, and with `classes_`.
    """

    _task: ClassVar[str] = "classification"

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row."""
        most_probable = self.predict_proba(X).argmax(axis=1)
        return self.classes_[most_probable]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Class probabilities of the mixture over draws, (rows, classes)."""
        return self.predictive(X).probabilities

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """The mean log-likelihood of a label, in nats; not the accuracy."""
        return self._mean_log_density(X, self._names(y))

    def sample_y(
        self,
        X: ArrayLike,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = 0,
    ) -> np.ndarray:
        """New labels from the predictive mixture, (rows, samples)."""
        generator = check_random_state(random_state)
        edges = np.cumsum(self.predict_proba(X), axis=1)
        uniform = generator.uniform(size=(len(edges), n_samples)) * edges[:, -1:]
        return self.classes_[(uniform[:, :, np.newaxis] >= edges[:, np.newaxis, :]).sum(axis=2)]

    def _read_targets(self, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise UserError("Two classes or more are needed, and y has one class only.")
        return labels.astype(np.int32), tuple(map(str, self.classes_))

    def _names(self, y: ArrayLike) -> np.ndarray:
        """Labels as names, which the run knows."""
        return np.array([str(label) for label in column_or_1d(y)])

    def _fitted_values(self) -> dict[str, Any]:
        return super()._fitted_values() | {"classes_": self.classes_.tolist()}


def load(
    directory: str | pathlib.Path,
    *,
    network: Network | None = None,
    allow_changed_network: bool = False,
) -> PosteriorRegressor | PosteriorClassifier:
    """A fitted estimator from the folder that `save` wrote.

    Args:
      directory: the folder.
      network: the Haiku function, where the estimator was given one and not a name.
      allow_changed_network: take the network as it is now, even if its source has changed.
    """
    folder = pathlib.Path(directory).expanduser()
    run = loaded_runs.load_run(folder, network=network, allow_changed_network=allow_changed_network)
    content = files.read_json(folder / FILE_NAME)
    kinds = {kind.__name__: kind for kind in (PosteriorRegressor, PosteriorClassifier)}
    estimator = kinds[content["estimator"]](**content["params"])
    if network is not None:
        estimator.set_params(network=network)
    (draws,) = DrawStore(folder, run.log_joint.shapes, 0).parts()
    record = files.read_arrays(folder / RECORD_NAME)
    return estimator.restore(content["fitted"], record, run, draws)
