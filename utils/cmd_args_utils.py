"""Command-line flags, declared as plain records in groups and parsed by absl.

`parse` turns arguments into `Settings`; no code below the scripts sees a flag.
"""

import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from tabulate import tabulate

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import NAMES as LIKELIHOODS
from haiku_posteriors.core.priors import FAMILIES
from haiku_posteriors.utils import files
from haiku_posteriors.utils.datasets.arrays import INPUT_KINDS
from haiku_posteriors.utils.optim_utils import OPTIMIZERS
from haiku_posteriors.utils.settings import FIXED, GIVEN, Settings

# Beyond these a number or its square is not finite in float32, or is zero there.
LARGEST_FLOAT, SMALLEST_FLOAT = 1e18, float(np.finfo(np.float32).tiny)
LARGEST_INTEGER = 2**31 - 1  # counters are int32


class Flag(NamedTuple):
    """A flag.

    Attributes:
      name: without dashes.
      kind: "float", "integer", "bool", "string", "enum", "list", "strings" (may be given several
        times), "automatic" (an integer, or 'auto' for None), "path", "paths" (separated by commas,
        may be given several times), or "alias" of the flag that `default` names.
      default: None if it depends on other things.
      help: a sentence.
      by_default: what happens if it is not given, for flags whose default is None.
      choices: of an enum.
      lower_bound, upper_bound: of a number, themselves allowed.
      above, below: of a number, themselves not allowed.
    """

    name: str
    kind: str
    default: Any
    help: str
    by_default: str = ""
    choices: Sequence[str] = ()
    lower_bound: float | None = None
    upper_bound: float | None = None
    above: float | None = None
    below: float | None = None


Groups = Mapping[str, Sequence[Flag]]  # by title, in the order of --help

BY_DATA = "by data set, see --show_settings"
DATA = (
    Flag(
        "dataset_name",
        "string",
        "toy_regression",
        "Data set: embedded (toy_regression, digits, ...), an image or text set, UCI as "
        "<name>_<split>, openml:<number>, or a path to your own table (.csv, .tsv, .parquet) or "
        ".npz file (x_train, y_train, x_test, y_test, or x and y).",
    ),
    Flag("data_dir", "path", None, "Folder with raw or prepared data files."),
    Flag(
        "subset_train_to",
        "integer",
        None,
        "Number of training rows to use.",
        "all",
        lower_bound=1,
    ),
    Flag(
        "train_part",
        "string",
        None,
        "K/N: the K-th of N parts of the training rows, which are dealt out one by one; J-K/N: "
        "parts J to K.",
        "all",
    ),
    Flag(
        "task",
        "enum",
        None,
        "Overrides the data's task.",
        "by the type of the targets",
        choices=("classification", "regression"),
    ),
    Flag("target", "list", None, "Column of a table to predict, or columns, with commas."),
    Flag(
        "split",
        "string",
        None,
        "Part of a table's rows to test on, or its column that says train or test.",
        "0.1",
    ),
    Flag("split_seed", "integer", None, "Random seed of that split.", "0", lower_bound=0),
    Flag("categorical", "list", None, "Columns of numbers that are categories, with commas."),
    Flag("ignore", "list", None, "Columns of a table that are no inputs, with commas."),
    Flag(
        "input_group",
        "strings",
        [],
        "NAME=COLUMN,COLUMN of a table: an input of a network that takes several; given once for "
        "each.",
    ),
    Flag(
        "inputs",
        "string",
        None,
        f"What the inputs of an .npz file are: {', '.join(INPUT_KINDS)}; of several inputs "
        "NAME=KIND,NAME=KIND.",
        "images if they are bytes, else features",
    ),
    Flag("standardize", "bool", True, "Scale inputs and regression targets to unit variance."),
)
MODEL = (
    Flag(
        "model_name",
        "string",
        None,
        "Network: a built-in name; package.module:function or path/to/file.py:function for a Haiku "
        "function of your own.",
        "chosen from the data",
    ),
    Flag("weight_decay", "float", None, "Prior precision, 1 / prior variance.", BY_DATA, above=0),
    Flag("prior_family", "enum", "gaussian", "Family of the prior.", choices=tuple(FAMILIES)),
    Flag(
        "prior_group",
        "strings",
        [],
        "REGEX=WEIGHT_DECAY for parameters whose names match; may be given several times.",
    ),
    Flag(
        "prior_mixture_weight",
        "float",
        0.5,
        "scale_mixture: weight of the narrow part.",
        above=0,
        below=1,
    ),
    Flag("prior_mixture_ratio", "float", 10.0, "scale_mixture: wide std over narrow std.", above=0),
    Flag("prior_degrees_of_freedom", "float", 5.0, "student_t: degrees of freedom.", above=2),
    Flag(
        "prior_from",
        "path",
        None,
        "Folder of a finished run, whose posterior is the prior in place of all of the above.",
    ),
    Flag(
        "likelihood",
        "enum",
        None,
        "Observation model.",
        "by task and network",
        choices=tuple(LIKELIHOODS),
    ),
    Flag(
        "noise_std",
        "float",
        None,
        "Gaussian noise, in the units the network sees.",
        "learned",
        above=0,
    ),
    Flag(
        "learn_noise",
        "bool",
        None,
        "Make the noise a parameter.",
        "unless noise_std is given",
    ),
    Flag("stochastic_params", "string", "", "Regular expression: the random parameters; '': all."),
    Flag(
        "temperature",
        "float",
        1.0,
        "Posterior temperature; divides the whole log-joint.",
        above=0,
    ),
)
RUN = (
    # JAX's keys have 32 bits unless it computes in 64: larger seeds would be others' again.
    Flag(
        "seed",
        "integer",
        0,
        "Random seed; the whole run follows from it.",
        lower_bound=0,
        upper_bound=2**32 - 1,
    ),
    Flag("dir", "path", None, "Folder of the run.", "a new one under runs/"),
    Flag(
        "init_checkpoint",
        "path",
        None,
        "Run folder or .safetensors file with parameters to start from.",
    ),
    Flag(
        "num_microbatches",
        "integer",
        1,
        "Pieces of a full-batch pass, to save memory.",
        lower_bound=1,
    ),
    Flag("use_float64", "bool", False, "Compute in float64."),
    Flag(
        "prior_predictive",
        "bool",
        False,
        "Draw what the prior says of the data, before the run: prior_predictive.png.",
    ),
    Flag("tabulate_freq", "integer", 40, "Rows between two headers of the table.", lower_bound=1),
    Flag(
        "time_limit",
        "float",
        None,
        "Minutes after which the run ends with what it has.",
        "none",
        above=0,
    ),
)
# Of scripts that begin with a finished run, whose problem is theirs.
OF_A_RUN = (
    Flag("run", "path", None, "Folder of the finished run to begin with."),
    next(flag for flag in DATA if flag.name == "data_dir")._replace(by_default="the run's"),
    *(flag for flag in RUN if flag.name in ("seed", "dir", "tabulate_freq", "time_limit")),
)
MINIBATCHES = (
    Flag(
        "init_step_size",
        "float",
        None,
        "Initial step size, for the gradient of the summed log-joint.",
        BY_DATA,
        above=0,
    ),
    Flag(
        "num_epochs",
        "automatic",
        None,
        "Passes over the data, or 'auto': until the verdict is converged.",
        "auto; a published number for the data sets of the HMC study",
        lower_bound=1,
    ),
    Flag("batch_size", "integer", None, "Maximum rows per minibatch.", BY_DATA, lower_bound=1),
    Flag("eval_freq", "integer", None, "Epochs between evaluations.", BY_DATA, lower_bound=1),
    Flag("save_freq", "integer", None, "Epochs between checkpoints.", BY_DATA, lower_bound=1),
    Flag("momentum_decay", "float", None, "Momentum decay.", BY_DATA, lower_bound=0, below=1),
    Flag("momentum", "alias", "momentum_decay", "The same as momentum_decay."),
)
OPTIMIZER = (
    *MINIBATCHES,
    Flag(
        "until_converged",
        "bool",
        None,
        "End as soon as the verdict is converged; num_epochs is then the most.",
        "unless num_epochs is given",
    ),
    Flag("optimizer", "enum", None, "Optimizer.", BY_DATA, choices=OPTIMIZERS),
)
REFINEMENT = (
    Flag(
        "refine",
        "enum",
        None,
        "How every draw of the end is moved towards the posterior.",
        "not at all; mclmc if refine_steps is given",
        choices=("mclmc", "hmc"),
    ),
    Flag(
        "refine_steps",
        "integer",
        None,
        "Gradients by which each draw is moved, at most.",
        "1,000 if refine is given",
        lower_bound=1,
    ),
    Flag("refine_step_size", "float", None, "Step of these.", "found by a pilot", above=0),
    Flag(
        "refine_collapse_output",
        "bool",
        False,
        "Integrate out the output layer and redraw it in refinement; for one Gaussian noise.",
    ),
)
PRETRAINING = (
    Flag(
        "pretrain_epochs",
        "integer",
        None,
        "Epochs of MAP training before, unless a start is given.",
        "by data set and num_epochs, see --show_settings",
        lower_bound=0,
    ),
    Flag(
        "pretrain_starts",
        "integer",
        None,
        "MAP solutions, of which the best starts a member.",
        BY_DATA,
        lower_bound=1,
    ),
)
CHAINS = (
    Flag("step_size", "float", None, "Leapfrog step size.", "adapted in burn-in", above=0),
    Flag(
        "trajectory_len",
        "float",
        None,
        "Length of a transition.",
        "pi/2 prior standard deviations",
        above=0,
    ),
    Flag(
        "max_num_leapfrog_steps",
        "integer",
        10_000,
        "Maximum leapfrog steps per transition.",
        lower_bound=1,
    ),
    Flag("num_chains", "integer", 4, "Number of chains.", lower_bound=1),
    Flag(
        "warm_start_epochs",
        "integer",
        None,
        "Epochs of Adam, at most, that train one network for each chain to start from; 0: chains "
        "start from the prior.",
        "some 5,000 updates; none with an init_checkpoint or a step_size",
        lower_bound=0,
    ),
    Flag(
        "num_iterations",
        "integer",
        None,
        "Transitions, burn-in included; at most, with until_converged.",
        "24,000, or fewer if draws would take more than 4 GB; 1,000 with a given step_size",
        lower_bound=1,
    ),
    Flag(
        "until_converged",
        "bool",
        None,
        "End as soon as the verdict is converged.",
        "unless num_iterations or step_size is given",
    ),
    Flag(
        "num_burn_in_iterations",
        "integer",
        None,
        "Transitions that are not kept.",
        "200 or half of num_iterations; none with a given step_size",
        lower_bound=0,
    ),
    Flag("thinning", "integer", 1, "Keep every k-th draw.", lower_bound=1),
    Flag("eval_freq", "integer", 50, "Iterations between evaluations.", lower_bound=1),
    Flag("save_freq", "integer", 50, "Iterations between checkpoints.", lower_bound=1),
)
DEVICES = (
    Flag(
        "mesh",
        "string",
        None,
        "Devices on each axis, as in data:4,chain:2; the axes are chain, draw, data and model.",
        "those that divide the chains to chain, the rest to data",
    ),
    Flag(
        "deterministic_sums",
        "bool",
        False,
        "Compute in one order on any number of devices: equal bits, at a cost.",
    ),
    Flag(
        "coordinator_address",
        "string",
        None,
        "host:port of process 0 where a run has several processes; auto: from the cluster.",
        "by Slurm, Kubernetes or the TPU pod, if they tell of several",
    ),
    Flag("num_processes", "integer", None, "Number of processes.", "as above", lower_bound=1),
    Flag("process_id", "integer", None, "Which of them this is.", "as above", lower_bound=0),
)
PROBLEM: Groups = {"Data": DATA, "Model": MODEL, "Run": RUN, "Devices": DEVICES}
HELP = Flag("help", "bool", False, "Print the flags and exit.")
VERSION = Flag("version", "bool", False, "Print the version and exit.")
SHOW_SETTINGS = Flag(
    "show_settings",
    "bool",
    False,
    "Print the value of every flag and where it comes from, and exit.",
)
# Flags about this invocation and not about the run: in no flags.json.
INVOCATION = (HELP, VERSION, SHOW_SETTINGS)


def parse(groups: Groups, arguments: Sequence[str]) -> Settings:
    """The settings that arguments (without the program's name) give; the rest is None or fixed."""
    declared = [flag for group in groups.values() for flag in group] + list(INVOCATION)
    values = flags.FlagValues()
    for flag in declared:
        _define(flag, values)
    short = {"-h": "--help", "-help": "--help"}
    try:
        rest = values([sys.argv[0], *(short.get(argument, argument) for argument in arguments)])
    except flags.Error as error:
        raise UserError(str(error)) from None
    if rest[1:]:
        raise UserError(f"Not a flag: {' '.join(rest[1:])}. Flags are written --name=value.")
    own = [flag for flag in declared if flag.kind != "alias"]
    # Through an alias a flag gets a value without being marked as present.
    given = {
        flag.name
        for flag in own
        if values[flag.name].present
        or (flag.default is None and values[flag.name].value is not None)
    }
    return Settings(
        {flag.name: _checked(flag, values[flag.name].value) for flag in own},
        {flag.name: GIVEN if flag.name in given else FIXED for flag in own},
    )


def _checked(flag: Flag, value: Any) -> Any:
    """The value with ~ in paths replaced; one that no run could use is refused here, at once."""
    if value is None:
        return None
    if flag.kind == "automatic":
        if value == "auto":
            return None
        value = _integer(flag, value)
    if flag.kind in ("float", "integer", "automatic"):
        _check_number(flag, value)
    if flag.kind == "path":
        return str(files.expand(value, f"--{flag.name}"))
    if flag.kind == "paths":
        names = [name for group in value for name in group.split(",") if name]
        return [str(files.expand(name, f"--{flag.name}")) for name in names]
    return value


def _integer(flag: Flag, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{flag.name} must be an integer or 'auto', not '{text}'.") from None


def _check_number(flag: Flag, value: float) -> None:
    low, high = flag.lower_bound, flag.upper_bound
    if not (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (flag.above is None or value > flag.above)
        and (flag.below is None or value < flag.below)
    ):
        raise UserError(f"{flag.name} must be {_describe_range(flag)}, not {value}.")
    largest = LARGEST_FLOAT if flag.kind == "float" else high or LARGEST_INTEGER
    if abs(value) > largest or 0 < abs(value) < SMALLEST_FLOAT:
        size = "small" if abs(value) < 1 else "large"
        raise UserError(f"{flag.name} = {value} is too {size} to compute with.")


def _describe_range(flag: Flag) -> str:
    if flag.above == 0 and flag.below is None:
        return "positive and finite"
    bounds = {
        "at least": flag.lower_bound,
        "above": flag.above,
        "at most": flag.upper_bound,
        "below": flag.below,
    }
    words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
    return " and ".join(words) or "a finite number"


def _define(flag: Flag, values: flags.FlagValues) -> None:
    name, kind, default, text = flag[:4]
    define: dict[str, Callable] = {
        "alias": lambda: flags.DEFINE_alias(name, default, flag_values=values),
        "bool": lambda: flags.DEFINE_bool(name, default, text, flag_values=values),
        "string": lambda: flags.DEFINE_string(name, default, text, flag_values=values),
        "path": lambda: flags.DEFINE_string(name, default, text, flag_values=values),
        "automatic": lambda: flags.DEFINE_string(name, default, text, flag_values=values),
        "paths": lambda: flags.DEFINE_multi_string(name, default, text, flag_values=values),
        "list": lambda: flags.DEFINE_list(name, default, text, flag_values=values),
        "strings": lambda: flags.DEFINE_multi_string(name, default, text, flag_values=values),
        "float": lambda: flags.DEFINE_float(name, default, text, flag_values=values),
        "integer": lambda: flags.DEFINE_integer(name, default, text, flag_values=values),
        "enum": lambda: flags.DEFINE_enum(
            name, default, list(flag.choices), text, case_sensitive=False, flag_values=values
        ),
    }
    define[kind]()


def describe_flags(description: str, groups: Groups) -> str:
    """The text of --help."""
    lines = [description.strip()]
    for title, group in {**groups, "Help": INVOCATION}.items():
        lines.append(f"\n{title}:")
        for flag in group:
            default = flag.by_default or (
                "none" if flag.default in (None, "", []) else flag.default
            )
            choices = f" <{'|'.join(flag.choices)}>" if flag.choices else ""
            sentence = f"{flag.help} (by default: {default})"
            if flag.kind == "alias" or flag in INVOCATION:
                sentence = flag.help
            wrapped = textwrap.wrap(sentence, 88)
            lines += [f"  --{flag.name}{choices}", *(f"        {line}" for line in wrapped)]
    return "\n".join(lines)


def about_the_run(settings: Settings) -> dict[str, Any]:
    """The values of all flags but those of this invocation: what flags.json holds."""
    return {
        name: value
        for name, value in settings.values.items()
        if name not in [flag.name for flag in INVOCATION]
    }


def describe_settings(settings: Settings) -> str:
    """The text of --show_settings: value and source of every flag that has a value."""
    rows = [
        [name, value, settings.sources[name]]
        for name, value in about_the_run(settings).items()
        if value not in (None, "", [])
    ]
    return tabulate(rows, ["flag", "value", "source"], disable_numparse=True)
