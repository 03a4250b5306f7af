"""Command-line flags, and what they are when they are not given.

A flag that is not given takes a value that suits the data set: the settings of the HMC anchor
(arXiv 2104.14421) for the data sets it used, our own for the embedded ones.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags

from haiku_posteriors.core.likelihoods import NAMES as LIKELIHOODS
from haiku_posteriors.core.priors import FAMILIES
from haiku_posteriors.utils.optim_utils import OPTIMIZERS

Settings = dict[str, Any]

# The anchor's defaults, for every data set without settings of its own below.
ANCHOR: Settings = {
    "weight_decay": 15.0,
    "optimizer": "SGD",
    "init_step_size": 1e-6,
    "momentum_decay": 0.9,
    "num_epochs": 300,
    "batch_size": 80,
    "eval_freq": 10,
    "save_freq": 50,
}
ANCHOR_SETS = ("cifar10", "cifar100", "svhn", "mnist", "fashion_mnist", "imdb")
# UCI regression, for which the anchor published no settings: SGD as there, our own numbers.
UCI: Settings = ANCHOR | {
    "weight_decay": 1.0,
    "init_step_size": 1e-5,
    "num_epochs": 1000,
    "eval_freq": 100,
    "save_freq": 500,
}
# A user's own data: Adam does not mind the scale of the summed gradient.
GENERIC: Settings = ANCHOR | {
    "weight_decay": 1.0,
    "optimizer": "Adam",
    "init_step_size": 1e-3,
    "num_epochs": 200,
    "eval_freq": 20,
    "save_freq": 100,
}
FULL_BATCH: Settings = GENERIC | {
    "init_step_size": 1e-2,
    "num_epochs": 6000,
    "batch_size": 1000,
    "eval_freq": 1000,
    "save_freq": 2000,
}
EMBEDDED: Mapping[str, Settings] = {
    # Prior standard deviation 1.5 and noise 0.3: the posterior that the documentation studies.
    "toy_regression": FULL_BATCH | {"weight_decay": 1 / 1.5**2, "noise_std": 0.3},
    "sine_regression": FULL_BATCH,
    "two_moons": FULL_BATCH | {"num_epochs": 1000, "eval_freq": 200},
}


def data_settings(dataset_name: str) -> Settings:
    """What flags default to on a data set."""
    if dataset_name in ANCHOR_SETS:
        return ANCHOR
    if re.fullmatch(r"\w+_\d+", dataset_name):
        return UCI
    return EMBEDDED.get(dataset_name, GENERIC)


def define_common_flags() -> None:
    """Flags of every script: the problem, where it runs and where its results go."""
    flags.DEFINE_integer("seed", 0, "Random seed; the whole run follows from it.")
    flags.DEFINE_string("dir", None, "Folder of the run; a fresh one under runs/ by default.")
    flags.DEFINE_string(
        "dataset_name",
        "toy_regression",
        "Data set: embedded (toy_regression, digits, ...), an image or text set, UCI as "
        "<name>_<seed>, or a path to an .npz file with x_train, y_train, x_test, y_test.",
    )
    flags.DEFINE_string("data_dir", None, "Folder with raw or prepared data files.")
    flags.DEFINE_integer("subset_train_to", None, "Train on the first so many rows only.")
    flags.DEFINE_enum("task", None, ["classification", "regression"], "Overrides the data's task.")
    flags.DEFINE_bool("standardize", True, "Scale inputs and regression targets to unit variance.")
    flags.DEFINE_string(
        "model_name",
        None,
        "Network: a built-in name, or package.module:function for a Haiku function of your own. "
        "Chosen from the data by default.",
    )
    flags.DEFINE_float("weight_decay", None, "Prior precision: prior variance = 1 / weight_decay.")
    flags.DEFINE_enum("prior_family", "gaussian", list(FAMILIES), "Family of the prior.")
    flags.DEFINE_multi_string(
        "prior_group",
        [],
        "REGEX=WEIGHT_DECAY for parameters whose names match; may be given several times.",
    )
    flags.DEFINE_float("prior_mixture_weight", 0.5, "scale_mixture: weight of the narrow part.")
    flags.DEFINE_float("prior_mixture_ratio", 10.0, "scale_mixture: wide std over narrow std.")
    flags.DEFINE_float("prior_degrees_of_freedom", 5.0, "student_t: degrees of freedom.")
    flags.DEFINE_enum("likelihood", None, list(LIKELIHOODS), "Chosen from the task by default.")
    flags.DEFINE_float("noise_std", None, "Gaussian noise, in the units the network sees.")
    flags.DEFINE_bool(
        "learn_noise", None, "Make the noise a parameter; by default unless noise_std is given."
    )
    flags.DEFINE_string(
        "stochastic_params", "", "Regular expression: the random parameters; all by default."
    )
    flags.DEFINE_float("temperature", 1.0, "Posterior temperature; divides the whole log-joint.")
    flags.DEFINE_integer("num_microbatches", 1, "Pieces of a full-batch pass, to save memory.")
    flags.DEFINE_string(
        "init_checkpoint", None, "Run folder or .safetensors file with parameters to start from."
    )
    flags.DEFINE_integer("tabulate_freq", 40, "Rows between two headers of the table.")
    flags.DEFINE_bool("use_float64", False, "Compute in float64.")


def define_sgd_flags(with_optimizer: bool = True) -> None:
    """Flags of the methods that pass over minibatches, by an optimizer or without one."""
    flags.DEFINE_float(
        "init_step_size", None, "Initial step size, for the gradient of the summed log-joint."
    )
    flags.DEFINE_integer("num_epochs", None, "Passes over the data.", lower_bound=1)
    flags.DEFINE_integer("batch_size", None, "Rows in a minibatch.")
    flags.DEFINE_integer("eval_freq", None, "Epochs between evaluations.", lower_bound=1)
    flags.DEFINE_integer("save_freq", None, "Epochs between checkpoints.", lower_bound=1)
    flags.DEFINE_float("momentum_decay", None, "Momentum decay.")
    flags.DEFINE_alias("momentum", "momentum_decay")
    if with_optimizer:
        flags.DEFINE_enum("optimizer", None, OPTIMIZERS, "Optimizer.")


def fill_in(values: flags.FlagValues, settings: Settings) -> None:
    """Gives every flag that was not given its value from `settings`, where that has one."""
    for name, value in settings.items():
        if name in values and values[name].value is None:
            values[name].value = value


def own_flags(values: flags.FlagValues) -> dict[str, Any]:
    """The flags that this project defines (absl defines others), by name."""
    modules = values.flags_by_module_dict()
    own = [*modules.get(__name__, []), *modules.get(sys.argv[0], []), *modules.get("__main__", [])]
    return {flag.name: flag.value for flag in own if flag.name != "momentum"}
