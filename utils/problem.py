"""The problem a run solves (data, network, prior, likelihood, temperature) as one frozen record.

Flags make a `Problem`, so does the flags.json of a run's folder, and so does Python:

    problem, dataset, log_joint = load_problem(Problem(dataset_name="diabetes", weight_decay=10.0))
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from haiku_posteriors.core import likelihoods, priors, trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.gaussian_priors import make_gaussian_prior
from haiku_posteriors.core.likelihoods import Likelihood
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.utils import data_utils, models, run_priors
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.datasets import own_tables
from haiku_posteriors.utils.datasets.forms import DataForm
from haiku_posteriors.utils.datasets.own_tables import TableOptions

# The HMC study's regression networks (arXiv 2104.14421) give a mean and a raw scale.
HETEROSCEDASTIC_NETWORKS = ("mlp_regression", "mlp_regression_small")
# Under a prior variance of 1/10 the functions of one hidden layer of 50 have a standard deviation
# of about 2, in units of standardized targets or of logits; under 1 it is 18. It also was best on
# held-out UCI splits (docs/hmc.md).
WEIGHT_DECAYS, OTHER_WEIGHT_DECAY = {"mlp_50": 10.0, "mlp_regression_small": 10.0}, 1.0
UNKNOWN_NOISE_STD = 0.3  # where learning starts, in units of the standardized targets


@dataclasses.dataclass(frozen=True)
class Problem:
    """A posterior, described by plain values; names and meaning are those of the flags.

    None means "chosen from the data" and is replaced by `complete`.
    """

    dataset_name: str = "toy_regression"
    data_dir: str | None = None
    subset_train_to: int | None = None
    train_part: str | None = None
    task: str | None = None
    target: tuple[str, ...] | None = None
    split: str | None = None
    split_seed: int | None = None
    inputs: str | None = None
    categorical: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    input_group: tuple[str, ...] = ()
    standardize: bool = True
    use_float64: bool = False
    model_name: str | None = None
    weight_decay: float | None = None
    prior_family: str = "gaussian"
    prior_group: tuple[str, ...] = ()
    prior_mixture_weight: float = 0.5
    prior_mixture_ratio: float = 10.0
    prior_degrees_of_freedom: float = 5.0
    prior_from: str | None = None
    likelihood: str | None = None
    noise_std: float | None = None
    learn_noise: bool | None = None
    stochastic_params: str = ""
    temperature: float = 1.0
    num_microbatches: int = 1

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Problem":
        """Takes from `values` (of flags, of flags.json) what describes the problem."""
        own: dict[str, Any] = {name: values[name] for name in FIELDS if name in values}
        for name, value in own.items():
            own[name] = tuple(value) if isinstance(value, list) else value
        return cls(**own)

    def in_folder(self, folder: pathlib.Path) -> "Problem":
        """The same, with the copy of its prior that a run's folder keeps, if it does."""
        path = folder / run_priors.NAME
        if self.prior_from is None or not path.is_file():
            return self
        return dataclasses.replace(self, prior_from=str(path))

    @property
    def table_options(self) -> TableOptions:
        """How its data are to be read, if they are a table or arrays of the user's own."""
        return TableOptions(
            self.target or (),
            self.split,
            self.split_seed,
            self.inputs,
            self.categorical or (),
            self.ignore or (),
            own_tables.parse_groups(self.input_group),
        )


FIELDS = tuple(field.name for field in dataclasses.fields(Problem))


def load_problem(
    problem: Problem, known_noise_std: float | None = None
) -> tuple[Problem, Dataset, LogJoint]:
    """The problem with all choices made (see `complete`), its data and its log-joint."""
    dataset = load_data(problem)
    problem = complete(problem, dataset.form, known_noise_std)
    assert problem.model_name is not None
    models.check_tokens(problem.model_name, dataset.x_train)
    return problem, dataset, build_log_joint(problem, dataset.form)


def check_precision(problem: Problem) -> None:
    """Refuses a problem in float64 where JAX would silently compute in float32."""
    if problem.use_float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UserError("use_float64 needs JAX in that mode: set jax_enable_x64 before.")


def load_data(problem: Problem) -> Dataset:
    """The data set of a problem, in the precision it asks for."""
    check_precision(problem)
    dataset = data_utils.load(
        problem.dataset_name,
        problem.data_dir,
        problem.subset_train_to,
        problem.task,
        problem.standardize,
        np.float64 if problem.use_float64 else np.float32,
        problem.table_options,
    )
    return data_utils.take_part(dataset, problem.train_part) if problem.train_part else dataset


def complete(problem: Problem, form: DataForm, known_noise_std: float | None = None) -> Problem:
    """The same problem with every choice made that was left to the data.

    Args:
      problem: perhaps with None in it.
      form: of its data.
      known_noise_std: of data whose noise is known; taken where noise_std is None.
    """
    model_name = problem.model_name
    if model_name is None:
        if form.inputs.shape is None:
            raise UserError(
                "Several inputs need a network of your own: --model_name=path/to/file.py:function."
            )
        model_name = models.default_network_name(
            form.task, form.inputs.shape, form.inputs.is_tokens
        )
    one_noise_is_meant = problem.noise_std is not None or problem.learn_noise is not None
    likelihood = problem.likelihood
    if likelihood is None and form.task == "classification":
        likelihood = "categorical"
    elif likelihood is None and model_name in HETEROSCEDASTIC_NETWORKS and not one_noise_is_meant:
        likelihood = "heteroscedastic_gaussian"
    noise_std = known_noise_std if problem.noise_std is None else problem.noise_std
    learn_noise = noise_std is None if problem.learn_noise is None else problem.learn_noise
    weight_decay = problem.weight_decay
    if weight_decay is None:
        weight_decay = WEIGHT_DECAYS.get(model_name, OTHER_WEIGHT_DECAY)
    return dataclasses.replace(
        problem,
        model_name=model_name,
        weight_decay=weight_decay,
        likelihood=likelihood or "gaussian",
        noise_std=UNKNOWN_NOISE_STD if noise_std is None else noise_std,
        learn_noise=learn_noise,
    )


def build_log_joint(
    problem: Problem, form: DataForm, network: str | Callable[..., jax.Array] | None = None
) -> LogJoint:
    """The log-joint of a complete problem; of `network` in place of the one it names, if given."""
    likelihood, groups = _make_likelihood(problem, form), _prior_groups(problem)
    network = network or problem.model_name
    assert network is not None
    inputs = form.inputs
    log_joint = make_log_joint(
        models.get_network(network, likelihood.num_outputs, getattr(inputs, "names", ())),
        inputs.example(),
        _make_prior(problem, groups),
        likelihood,
        temperature=problem.temperature,
        num_microbatches=problem.num_microbatches,
        stochastic_params=problem.stochastic_params,
    )
    _refuse_groups_of_nothing(groups, log_joint)
    return log_joint if problem.prior_from is None else _with_prior_from(problem, log_joint)


def _with_prior_from(problem: Problem, log_joint: LogJoint) -> LogJoint:
    """The same with an earlier run's posterior as its prior, which it also starts from."""
    assert problem.prior_from is not None
    if problem.temperature != 1:
        raise UserError(
            "prior_from is for temperature 1: a tempered posterior is no prior of further data."
        )
    gaussian, _ = run_priors.load(pathlib.Path(problem.prior_from), log_joint)
    replaced = dataclasses.replace(log_joint, prior=make_gaussian_prior(gaussian))
    return dataclasses.replace(
        replaced, init=lambda rng_key: run_priors.start_from(gaussian, replaced, rng_key)
    )


def _make_likelihood(problem: Problem, form: DataForm) -> Likelihood:
    name = problem.likelihood
    assert name is not None and problem.noise_std is not None
    if (form.task == "regression") != ("gaussian" in name):
        raise UserError(f"The likelihood '{name}' does not fit a task of {form.task}.")
    if name == "categorical":
        return likelihoods.categorical(form.num_classes)
    if name == "bernoulli":
        if form.num_classes != 2:
            raise UserError(f"A Bernoulli likelihood needs 2 classes, not {form.num_classes}.")
        return likelihoods.bernoulli()
    num_targets = len(form.target_mean)
    if name == "gaussian":
        return likelihoods.gaussian(problem.noise_std, num_targets, bool(problem.learn_noise))
    return likelihoods.heteroscedastic_gaussian(num_targets)


def _prior_groups(problem: Problem) -> list[tuple[str, float]]:
    groups = []
    for group in problem.prior_group:
        pattern, _, precision = group.rpartition("=")
        try:
            groups.append((pattern, float(precision)))
        except ValueError:
            raise UserError(f"prior_group '{group}' is not of the form REGEX=NUMBER.") from None
    return groups


def _refuse_groups_of_nothing(groups: list[tuple[str, float]], log_joint: LogJoint) -> None:
    """Refuses a group whose weight decay no parameter takes."""
    names = [
        name
        for name in trees.named_leaves(log_joint.random_shapes)
        if trees.module_name(name) != likelihoods.PARAMETER_GROUP
    ]
    for pattern, _ in groups:
        left = [name for name in names if not re.search(pattern, name)]
        if len(left) == len(names):
            raise UserError(
                f"prior_group '{pattern}' matches no parameter with a prior that no group before "
                f"it matches; the names are {', '.join(trees.named_leaves(log_joint.shapes))}."
            )
        names = left


def _make_prior(problem: Problem, groups: list[tuple[str, float]]) -> priors.Prior:
    arguments = {
        "scale_mixture": {
            "weight": problem.prior_mixture_weight,
            "ratio": problem.prior_mixture_ratio,
        },
        "student_t": {"degrees_of_freedom": problem.prior_degrees_of_freedom},
    }.get(problem.prior_family, {})
    assert problem.weight_decay is not None
    return priors.make_prior(problem.weight_decay, problem.prior_family, groups, **arguments)
