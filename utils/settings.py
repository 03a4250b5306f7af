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

GIVEN, FIXED = "given", "default"
STUDY = "the HMC study (arXiv 2104.14421)"
STUDY_SETS = ("cifar10", "cifar100", "svhn", "mnist", "fashion_mnist", "imdb")
# Observation noise of data that were made with a known one; `noise_std` where it is not given.
KNOWN_NOISE_STD = {"toy_regression": 0.3}
# SGMCMC step sizes by preconditioner, where the table has none. The two have different units; that
# of `curvature` is found by the run itself.
SGMCMC_STEP_SIZES = {"None": 1e-6, "RMSprop": 1e-4}
MAX_ITERATIONS, MAX_DRAW_BYTES = 24_000, 4 * 10**9  # of chains that end by themselves
WARM_START_UPDATES, WARM_START_BATCH_SIZE = 5000, 1000  # of Adam, in front of chains
REFINE_STEPS = 1000  # gradients for each draw
LAYERWISE_UPDATES, LAYERWISE_PRETRAINING = 3000, 1000  # of Adam
# Of one optimiser that ends by itself, at most, and between two evaluations.
MAX_UPDATES, UPDATES_PER_EVALUATION = 200_000, 2_000
# Of a chain of SGMCMC: before its first draw, and from draw to draw; at most as many draws as HMC.
BURN_IN_UPDATES, UPDATES_PER_DRAW = 10_000, 50
MAX_CHAIN_UPDATES = BURN_IN_UPDATES + MAX_ITERATIONS * UPDATES_PER_DRAW
BATCH_SIZE, BATCH_WORK = 200, 2_000_000  # rows; rows times parameters times draws per step
# Adam's step over the prior's standard deviation, the scale on which weights differ.
STEP_OVER_PRIOR_STD = 0.01
MAX_GENERATOR_STEP = 0.01  # a generator's parameters are not weights, and of another scale
# MAP solutions of which the best starts a generator, by the most parameters of the network.
PRETRAIN_STARTS = {1_000: 20, 10_000: 4}


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
        ("study",),
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
    Layer(
        f"{STUDY}, VI",
        ("vi", "gaussian_dropout"),
        ("study",),
        {"vi_sigma_init": 1e-3, "vi_estimator": "reparameterization", "vi_num_samples": 1},
    ),
    # The study's burn-in of 300 epochs is all of its 300 epochs; `resolve` caps it.
    Layer(
        f"{STUDY}, SGMCMC",
        ("sgmcmc",),
        ("study",),
        {
            "preconditioner": "None",
            "num_burnin_epochs": 300,
            "step_size_cycle_length_epochs": 50,
            "ensemble_freq": 10,
        },
    ),
    # Adam does not depend on the scale of the summed gradient, which is the data's.
    Layer(
        "data outside the study",
        (),
        ("own", "uci"),
        {"optimizer": "Adam"},
    ),
    # The network of the study, whose noise depends on the input, and its prior.
    Layer(
        "UCI regression",
        (),
        ("uci",),
        {"weight_decay": 10.0, "model_name": "mlp_regression_small"},
    ),
    # Prior standard deviation 1.5: the posterior that the documentation studies.
    Layer("toy_regression", (), ("toy_regression",), {"weight_decay": 1 / 1.5**2}),
    Layer(
        "VI outside the study",
        ("vi", "gaussian_dropout"),
        ("own", "uci"),
        {"vi_sigma_init": 1e-2, "vi_num_samples": 1},
    ),
    Layer(
        "SGMCMC outside the study",
        ("sgmcmc",),
        ("own", "uci"),
        {"preconditioner": "curvature", "step_size_cycle_length_epochs": 50},
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
            "until_converged": False,
            "warm_start_epochs": 0,
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
    Layer("implicit VI", ("implicit",), (), {"optimizer": "Adam"}),
)


def data_kinds(dataset_name: str) -> set[str]:
    """What a data set counts as in LAYERS: its name, and `study`, `uci` or `own`."""
    if dataset_name in STUDY_SETS:
        return {dataset_name, "study"}
    is_split = re.fullmatch(r"\w+_\d+", dataset_name) is not None
    return {dataset_name, "uci" if is_split else "own"}


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
        if settings.init_checkpoint is not None:
            settings = settings.fill({"warm_start_epochs": 0}, "none: init_checkpoint was given")
        settings = _resolve_sgmcmc_step_size(settings, defaults["preconditioner"][0])
    if settings.values.get("refine_steps") is not None:
        settings = settings.fill({"refine": "mclmc"}, "refine_steps was given")
    if settings.values.get("refine") is not None:
        settings = settings.fill({"refine_steps": REFINE_STEPS}, "refine was given")
    for name, (value, source) in defaults.items():
        settings = settings.fill({name: value}, source)
    if "num_epochs" not in settings.values:
        return settings
    values: dict[str, Any] = {
        "kl_warmup_epochs": 0.0,
        "warm_start_epochs": 0,
        "until_converged": False,
    }
    if settings.num_epochs is None:
        return settings.fill({**values, "warm_start_epochs": None, "until_converged": True}, FIXED)
    if settings.values.get("preconditioner") == "curvature":  # which is that of trained starts
        values["warm_start_epochs"] = None
    settings = settings.fill(values, f"num_epochs: {settings.sources['num_epochs']}")
    # So that a run shortened by --num_epochs alone has draws.
    settings = settings.cap("num_burnin_epochs", settings.num_epochs // 2, "half of num_epochs")
    return settings.fill({"pretrain_epochs": settings.num_epochs // 4}, "num_epochs / 4")


def complete(
    settings: Settings,
    chosen: Mapping[str, Any],
    num_rows: int,
    num_parameters: int,
    prior_std: float,
) -> Settings:
    """Fills in what data and network decide: `chosen`, and limits by rows and by parameters."""
    settings = settings.fill(chosen, "chosen from the data")
    is_curvature = settings.values.get("preconditioner") == "curvature"
    if is_curvature or _optimises_without_length(settings):
        named = (settings.values.get(name) for name in ("num_samples", "vi_num_samples"))
        rows = affordable_rows(num_parameters, next((draws for draws in named if draws), 1))
        settings = settings.fill({"batch_size": rows}, "by the network's size")
    settings = settings.fill({"batch_size": BATCH_SIZE}, FIXED)
    if not is_curvature:
        settings = settings.fill({"momentum_decay": 0.9}, FIXED)
    settings = settings.cap("batch_size", num_rows, "all training rows")
    if settings.values.get("until_converged") and "num_iterations" in settings.values:
        draws = MAX_DRAW_BYTES // (4 * num_parameters * settings.num_chains)
        limit = max(1000, settings.num_burn_in_iterations + draws * settings.thinning)
        settings = settings.cap("num_iterations", limit, "at most; 4 GB of draws")
    values = {"warm_start_epochs": warm_start_epochs(num_rows)}
    settings = settings.fill(values, f"{WARM_START_UPDATES:,} updates")
    if "num_epochs" not in settings.values:
        return settings
    starts = next((n for most, n in PRETRAIN_STARTS.items() if num_parameters <= most), 1)
    settings = settings.fill({"pretrain_starts": starts}, "by the network's size")
    if settings.values.get("preconditioner") != "curvature":
        step = STEP_OVER_PRIOR_STD * prior_std
        if "generator" in settings.values:
            step = min(step, MAX_GENERATOR_STEP)
        settings = settings.fill({"init_step_size": step}, "by the prior's scale")
        settings = settings.fill({"final_step_size": settings.init_step_size}, "as init_step_size")
    return _fill_lengths(settings, num_rows, num_parameters)


def affordable_rows(num_parameters: int, num_draws: int = 1) -> int:
    """Rows of a minibatch: as many as cost little, since noise is paid for by smaller steps."""
    return max(BATCH_SIZE, BATCH_WORK // (num_parameters * num_draws))


def _optimises_without_length(settings: Settings) -> bool:
    """Whether training is to end by itself; lengths are numbers of updates then, not of epochs."""
    values = settings.values
    is_optimiser = "num_epochs" in values and "preconditioner" not in values
    return is_optimiser and values["num_epochs"] is None and values["until_converged"]


def _fill_lengths(settings: Settings, num_rows: int, num_parameters: int) -> Settings:
    """Numbers of epochs that are numbers of updates by their nature."""
    batches = -(-num_rows // settings.batch_size)

    def epochs(num_updates: int) -> int:
        return -(-num_updates // batches)

    if settings.num_epochs is None and not settings.until_converged:  # layerwise VI
        values = {"num_epochs": LAYERWISE_UPDATES, "pretrain_epochs": LAYERWISE_PRETRAINING}
        for name, updates in values.items():
            settings = settings.fill({name: epochs(updates)}, f"{updates:,} updates")
    updates = MAX_CHAIN_UPDATES if "ensemble_freq" in settings.values else MAX_UPDATES
    settings = settings.fill({"num_epochs": epochs(updates)}, f"at most; {updates:,} updates")
    every = epochs(UPDATES_PER_EVALUATION)
    if not settings.until_converged:
        every = min(every, max(1, settings.num_epochs // 10))
    often = {"eval_freq": every, "save_freq": 5 * every}
    settings = settings.fill(often, "by the number of updates")
    settings = settings.fill(
        {"pretrain_epochs": epochs(WARM_START_UPDATES)}, f"{WARM_START_UPDATES:,} updates"
    )
    if "ensemble_freq" not in settings.values:
        return settings
    burn_in = {"num_burnin_epochs": epochs(BURN_IN_UPDATES)}
    settings = settings.fill(burn_in, f"{BURN_IN_UPDATES:,} updates")
    settings = settings.cap("num_burnin_epochs", settings.num_epochs // 2, "half of num_epochs")
    num_draws = MAX_DRAW_BYTES // (4 * num_parameters * settings.num_chains)
    after = max(settings.num_epochs - settings.num_burnin_epochs, 1)
    period = max(epochs(UPDATES_PER_DRAW), after // max(num_draws, 1))
    return settings.fill(
        {"ensemble_freq": min(period, after)}, f"{UPDATES_PER_DRAW} updates; 4 GB of draws"
    )


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
    if settings.final_step_size is not None and settings.preconditioner is None:
        values = {"preconditioner": "None", "init_step_size": SGMCMC_STEP_SIZES["None"]}
        return settings.fill(values, "final_step_size was given")
    if settings.preconditioner not in (None, preconditioner, "curvature"):
        size = SGMCMC_STEP_SIZES[settings.preconditioner]
        values = {"init_step_size": size, "final_step_size": size}
        return settings.fill(values, f"preconditioner {settings.preconditioner} was given")
    return settings
