"""What a run's flags are: given, or taken from one table of defaults by method and data set.

A value is one of three things: given on the command line, the fixed default of its flag, or None,
to be filled from the layers of LAYERS (the last layer that applies wins), by a rule about other
flags (`resolve`), or from the data. Every value keeps the sentence that says where it comes from;
--show_settings prints them.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from haiku_posteriors.utils.datasets import uci

GIVEN, FIXED = "given", "default"
STUDY = "the HMC study (arXiv 2104.14421)"
STUDY_SETS = ("cifar10", "cifar100", "svhn", "mnist", "fashion_mnist", "imdb")
SMALL_UCI_SETS = ("boston", "concrete", "energy", "wine_quality", "yacht")
# Observation noise of data that were made with a known one; `noise_std` where it is not given.
KNOWN_NOISE_STD = {"toy_regression": 0.3}
# SGMCMC step sizes by preconditioner, where the table has none. The two have different units.
SGMCMC_STEP_SIZES = {"None": 1e-6, "RMSprop": 1e-4}
MAX_ITERATIONS, MAX_DRAW_BYTES = 8000, 4 * 10**9  # of chains that end by themselves
WARM_START_UPDATES, WARM_START_BATCH_SIZE = 5000, 1000  # of Adam, in front of chains
REFINE_STEPS = 1000  # gradients for each draw
LAYERWISE_UPDATES, LAYERWISE_PRETRAINING = 3000, 1000  # of Adam


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of all flags by name, readable as attributes, and where each comes from."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        """The value of a flag."""
        if name.startswith("__") or name not in self.values:
            raise AttributeError(f"There is no setting '{name}'.")
        return self.values[name]

    def was_given(self, name: str) -> bool:
        """Whether the user gave the flag."""
        return self.sources[name] == GIVEN

    def fill(self, values: Mapping[str, Any], source: str) -> "Settings":
        """Sets the flags among `values` that have no value yet."""
        new = {
            name: value
            for name, value in values.items()
            if name in self.values and self.values[name] is None and value is not None
        }
        return Settings({**self.values, **new}, {**self.sources, **dict.fromkeys(new, source)})

    def cap(self, name: str, limit: float, source: str) -> "Settings":
        """Lowers a value that was not given to `limit`."""
        value = self.values.get(name)
        if value is None or self.was_given(name) or value <= limit:
            return self
        return Settings({**self.values, name: limit}, {**self.sources, name: source})


class Layer(NamedTuple):
    """Defaults of some methods on some data.

    Attributes:
      source: where the values come from, in a few words.
      methods: to which the layer applies; empty for all.
      data: names or kinds (see `data_kinds`) of data sets; empty for all.
      values: by flag.
    """

    source: str
    methods: Collection[str]
    data: Collection[str]
    values: Mapping[str, Any]


LAYERS = (
    Layer(
        f"{STUDY}",
        (),
        (),
        {
            "weight_decay": 15.0,
            "optimizer": "SGD",
            "init_step_size": 1e-6,
            "momentum_decay": 0.9,
            "num_epochs": 300,
            "batch_size": 80,
            "eval_freq": 10,
            "save_freq": 50,
        },
    ),
    # The study published no settings for UCI: SGD as there, our own numbers. Under a prior variance
    # of 1/10 the functions of mlp_regression_small have a standard deviation of about 2 in units of
    # the standardized targets; under 1 it is 18. It also was best on held-out splits (docs/hmc.md).
    Layer(
        "UCI regression",
        (),
        ("uci",),
        {
            "weight_decay": 10.0,
            "init_step_size": 1e-5,
            "num_epochs": 1000,
            "eval_freq": 100,
            "save_freq": 500,
        },
    ),
    # Adam does not depend on the scale of the summed gradient, which is the data's.
    Layer(
        "data without settings of their own",
        (),
        ("own",),
        {
            "weight_decay": 1.0,
            "optimizer": "Adam",
            "init_step_size": 1e-3,
            "num_epochs": 200,
            "eval_freq": 20,
            "save_freq": 100,
        },
    ),
    Layer(
        "small embedded data, full batch",
        (),
        ("toy_regression", "sine_regression", "two_moons"),
        {
            "init_step_size": 1e-2,
            "num_epochs": 6000,
            "batch_size": 1000,
            "eval_freq": 1000,
            "save_freq": 2000,
        },
    ),
    Layer("two_moons", (), ("two_moons",), {"num_epochs": 1000, "eval_freq": 200}),
    # Prior standard deviation 1.5: the posterior that the documentation studies.
    Layer("toy_regression", (), ("toy_regression",), {"weight_decay": 1 / 1.5**2}),
    Layer(
        f"{STUDY}, VI",
        ("vi",),
        (),
        {
            "vi_sigma_init": 1e-3,
            "vi_estimator": "reparameterization",
            "vi_num_samples": 1,
            "kl_warmup_epochs": 0.0,
        },
    ),
    # The standard deviations have a long way to go from the start: larger steps than for a point.
    Layer(
        "VI outside the study",
        ("vi",),
        ("own", "uci"),
        {"vi_sigma_init": 1e-2, "optimizer": "Adam", "init_step_size": 1e-2},
    ),
    # Chosen by the fit to the training data: shorter, or without warm-up, it underfits.
    Layer(
        "VI on toy_regression",
        ("vi",),
        ("toy_regression",),
        {
            "vi_estimator": "local",
            "num_epochs": 20_000,
            "kl_warmup_epochs": 10_000.0,
            "eval_freq": 4000,
            "save_freq": 10_000,
        },
    ),
    # The study's burn-in of 300 epochs is all of its 300 epochs; `resolve` caps it.
    Layer(
        f"{STUDY}, SGMCMC",
        ("sgmcmc",),
        (),
        {
            "preconditioner": "None",
            "num_burnin_epochs": 300,
            "step_size_cycle_length_epochs": 50,
            "ensemble_freq": 10,
        },
    ),
    # The preconditioner takes care of the gradient's scale, which is the data's.
    Layer(
        "SGMCMC outside the study",
        ("sgmcmc",),
        ("own", "uci"),
        {
            "preconditioner": "RMSprop",
            "init_step_size": SGMCMC_STEP_SIZES["RMSprop"],
            "momentum_decay": 0.9,
            "num_epochs": 600,
            "num_burnin_epochs": 200,
        },
    ),
    # Few rows and small networks: an epoch has few steps.
    Layer(
        "SGMCMC on small tables",
        ("sgmcmc",),
        ("small_uci", "diabetes"),
        {
            "num_epochs": 6_000,
            "num_burnin_epochs": 2_000,
            "step_size_cycle_length_epochs": 100,
            "ensemble_freq": 100,
            "eval_freq": 1_000,
            "save_freq": 2_000,
        },
    ),
    # Burn-in as in run_sgd.py, then smaller steps, since gradients are large where the targets have
    # little noise. Chosen on yacht_0, with results in view.
    Layer(
        "SGMCMC on small UCI sets (chosen on yacht_0)",
        ("sgmcmc",),
        ("small_uci",),
        {"preconditioner": "None", "init_step_size": 1e-5, "final_step_size": 1e-6},
    ),
    # Few rows and the wide network for classification: steps take longer.
    Layer(
        "SGMCMC on small tables, wide network",
        ("sgmcmc",),
        ("breast_cancer", "wine"),
        {
            "num_epochs": 1_800,
            "num_burnin_epochs": 600,
            "ensemble_freq": 30,
            "eval_freq": 300,
            "save_freq": 600,
        },
    ),
    # One step per epoch.
    Layer(
        "SGMCMC at full batch",
        ("sgmcmc",),
        ("toy_regression", "sine_regression"),
        {
            "num_epochs": 60_000,
            "num_burnin_epochs": 20_000,
            "step_size_cycle_length_epochs": 500,
            "ensemble_freq": 500,
            "eval_freq": 10_000,
            "save_freq": 20_000,
        },
    ),
    Layer(
        "SGMCMC at full batch, wide network",
        ("sgmcmc",),
        ("two_moons",),
        {
            "num_epochs": 12_000,
            "num_burnin_epochs": 4_000,
            "step_size_cycle_length_epochs": 200,
            "ensemble_freq": 200,
            "eval_freq": 2_000,
            "save_freq": 4_000,
        },
    ),
    # Chosen by R-hat and distance to HMC.
    Layer(
        "SGMCMC on toy_regression (chosen against HMC)",
        ("sgmcmc",),
        ("toy_regression",),
        {
            "preconditioner": "None",
            "init_step_size": 2e-6,
            "momentum_decay": 0.98,
            "num_epochs": 300_000,
            "num_burnin_epochs": 100_000,
            "step_size_cycle_length_epochs": 2_000,
            "ensemble_freq": 2_000,
            "eval_freq": 50_000,
            "save_freq": 100_000,
        },
    ),
    Layer(
        "implicit VI",
        ("implicit",),
        (),
        {"optimizer": "Adam", "init_step_size": 1e-3, "pretrain_starts": 1},
    ),
    Layer(
        "implicit VI on toy_regression",
        ("implicit",),
        ("toy_regression",),
        {
            "num_epochs": 10_000,
            "pretrain_epochs": 3000,
            "pretrain_starts": 20,
            "init_step_size": 1e-2,
            "eval_freq": 2000,
            "save_freq": 5000,
        },
    ),
    # Pseudo-outputs have the scale of activations, whatever the data: one step for all. Epochs
    # follow from the number of updates, see `complete`.
    Layer(
        "layerwise VI",
        ("layerwise",),
        (),
        {
            "optimizer": "Adam",
            "init_step_size": 0.03,
            "batch_size": 2000,
            "vi_sigma_init": 1e-2,
            "vi_num_samples": 8,
            "inducing": "rows",
            "layerwise_precision": "unit",
            "pretrain_starts": 10,
            "num_epochs": None,
            "eval_freq": None,
            "save_freq": None,
        },
    ),
    # As implicit VI there: this posterior has starts that are 10 nats apart at the end.
    Layer(
        "layerwise VI on toy_regression",
        ("layerwise",),
        ("toy_regression",),
        {"pretrain_epochs": 3000, "pretrain_starts": 20},
    ),
    Layer(
        "layerwise VI of large networks",
        ("layerwise",),
        ("study",),
        {
            "init_step_size": 3e-3,
            "batch_size": 200,
            "vi_num_samples": 2,
            "inducing": "minibatch",
            "pretrain_starts": 1,
        },
    ),
)


def data_kinds(dataset_name: str) -> set[str]:
    """What a data set counts as in LAYERS: its name, and `study`, `uci`, `small_uci` or `own`."""
    if dataset_name in STUDY_SETS:
        return {dataset_name, "study"}
    split = re.fullmatch(r"(\w+)_\d+", dataset_name)
    if split is None:
        return {dataset_name, "own"}
    small = uci.uci_name(split[1]) in SMALL_UCI_SETS
    return {dataset_name, "uci", "small_uci"} if small else {dataset_name, "uci"}


def table(method: str, dataset_name: str) -> dict[str, tuple[Any, str]]:
    """Value and source of every default that the table has for a method on a data set."""
    kinds = data_kinds(dataset_name)
    found: dict[str, tuple[Any, str]] = {}
    for layer in LAYERS:
        if (not layer.methods or method in layer.methods) and (
            not layer.data or kinds.intersection(layer.data)
        ):
            found |= {name: (value, layer.source) for name, value in layer.values.items()}
    return found


def resolve(method: str, settings: Settings) -> Settings:
    """Fills every flag that can be filled before the data are read.

    Args:
      method: "hmc", "mclmc", "sgd", "sgmcmc", "smc", "implicit", or the method of run_vi.py,
        "layerwise" where that is VI of this family.
      settings: of the script's flags.
    """
    defaults = table(method, settings.dataset_name)
    if method in ("hmc", "mclmc"):
        settings = _resolve_burn_in(settings)
    if method == "sgmcmc":
        settings = _resolve_sgmcmc_step_size(settings, defaults["preconditioner"][0])
    if settings.values.get("refine_steps") is not None:
        settings = settings.fill({"refine": "mclmc"}, "refine_steps was given")
    if settings.values.get("refine") is not None:
        settings = settings.fill({"refine_steps": REFINE_STEPS}, "refine was given")
    for name, (value, source) in defaults.items():
        settings = settings.fill({name: value}, source)
    if settings.values.get("num_epochs") is None:
        return settings
    # So that a run shortened by --num_epochs alone has draws, and ends with the whole KL.
    settings = settings.cap("num_burnin_epochs", settings.num_epochs // 2, "half of num_epochs")
    settings = settings.cap("kl_warmup_epochs", settings.num_epochs / 2, "half of num_epochs")
    settings = settings.fill({"pretrain_epochs": settings.num_epochs // 4}, "num_epochs / 4")
    return settings.fill({"final_step_size": settings.init_step_size}, "as init_step_size")


def complete(
    settings: Settings, chosen: Mapping[str, Any], num_rows: int, num_parameters: int
) -> Settings:
    """Fills in what data and network decide: `chosen`, and limits by rows and by parameters."""
    settings = settings.fill(chosen, "chosen from the data")
    if settings.values.get("until_converged"):
        draws = MAX_DRAW_BYTES // (4 * num_parameters * settings.num_chains)
        limit = max(1000, settings.num_burn_in_iterations + draws * settings.thinning)
        settings = settings.cap("num_iterations", limit, "at most; 4 GB of draws")
    values = {"warm_start_epochs": warm_start_epochs(num_rows)}
    settings = settings.fill(values, f"{WARM_START_UPDATES:,} updates")
    settings = settings.cap("batch_size", num_rows, "all training rows")
    return _complete_epochs(settings, num_rows)


def _complete_epochs(settings: Settings, num_rows: int) -> Settings:
    """What the table leaves to the number of updates."""
    if settings.values.get("batch_size") is None:
        return settings
    for name, updates in {
        "num_epochs": LAYERWISE_UPDATES,
        "pretrain_epochs": LAYERWISE_PRETRAINING,
    }.items():
        epochs = -(-updates // -(-num_rows // settings.batch_size))
        settings = settings.fill({name: epochs}, f"{updates:,} updates")
    settings = settings.fill({"eval_freq": -(-settings.num_epochs // 6)}, "num_epochs / 6")
    return settings.fill({"save_freq": -(-settings.num_epochs // 2)}, "num_epochs / 2")


def warm_start_epochs(num_rows: int) -> int:
    """Passes over so many rows that make WARM_START_UPDATES updates."""
    return -(-WARM_START_UPDATES // -(-num_rows // WARM_START_BATCH_SIZE))


def _resolve_burn_in(settings: Settings) -> Settings:
    if settings.init_checkpoint is not None:
        settings = settings.fill({"warm_start_epochs": 0}, "none: init_checkpoint was given")
    if settings.num_iterations is not None:
        settings = settings.fill({"until_converged": False}, "num_iterations was given")
    if settings.step_size is not None:
        values = {"warm_start_epochs": 0, "until_converged": False, "num_iterations": 1000}
        settings = settings.fill(values, "step_size was given")
        # Nothing to adapt, and the study's default.
        return settings.fill({"num_burn_in_iterations": 0}, "none: step_size was given")
    settings = settings.fill({"until_converged": True}, "default")
    settings = settings.fill({"num_iterations": MAX_ITERATIONS}, "at most")
    burn_in = min(200, settings.num_iterations // 2)
    return settings.fill({"num_burn_in_iterations": burn_in}, "200, or half of num_iterations")


def _resolve_sgmcmc_step_size(settings: Settings, preconditioner: str) -> Settings:
    """`preconditioner`: the table's."""
    if settings.init_step_size is not None:
        # A step size of the user's is in the plain sampler's units, unless they say otherwise.
        values = {"preconditioner": "None", "final_step_size": settings.init_step_size}
        return settings.fill(values, "init_step_size was given")
    if settings.preconditioner not in (None, preconditioner):
        size = SGMCMC_STEP_SIZES[settings.preconditioner]
        values = {"init_step_size": size, "final_step_size": size}
        return settings.fill(values, f"preconditioner {settings.preconditioner} was given")
    return settings
