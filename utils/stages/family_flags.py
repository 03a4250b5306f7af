"""Flags of run_vi.py that one method or family alone reads: given to another, they are refused."""

from collections.abc import Sequence

from haiku_posteriors.core import gaussian_dropout, kl_weights, vi
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.layerwise import posteriors
from haiku_posteriors.utils import cmd_args_utils
from haiku_posteriors.utils.cmd_args_utils import BY_DATA, Flag
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import bound

METHODS = ("vi", "mc_dropout", "gaussian_dropout", "map")
VI_FAMILIES = ("mean_field", "low_rank", "mnf", "layerwise")
VI_FLAGS = (
    Flag(
        "vi_family",
        "enum",
        "mean_field",
        "Independent weights, a Gaussian of low rank plus a diagonal, weights times latents of a "
        "normalising flow, or layers that are drawn given the layers before.",
        choices=VI_FAMILIES,
    ),
    Flag("vi_sigma_init", "float", None, "Standard deviation of q at the start.", BY_DATA, above=0),
    Flag("vi_num_samples", "integer", None, "Draws of q per minibatch.", BY_DATA, lower_bound=1),
    Flag(
        "num_evidence_draws",
        "integer",
        None,
        "Draws for the final ELBO on all data; 0 for none.",
        "200 for small networks, 0 for mean-field VI and large ones",
        lower_bound=0,
    ),
    Flag(
        "anneal_steps",
        "integer",
        0,
        "Annealed Hamiltonian steps of every draw, with learned sizes; they tighten the bound.",
        lower_bound=0,
    ),
    Flag(
        "member_weights",
        "enum",
        "even",
        "How the members are mixed in the draws.",
        choices=bound.WEIGHTS,
    ),
)
ESTIMATOR = Flag(
    "vi_estimator",
    "enum",
    None,
    "How draws of q enter the gradient.",
    BY_DATA,
    choices=vi.ESTIMATORS,
)
GAUSSIAN_FLAGS = (
    ESTIMATOR,
    Flag(
        "warm_start_epochs",
        "integer",
        None,
        "Epochs of Adam, at most, that train a network to begin at; its curvature gives the first "
        "standard deviations. 0 for none.",
        "some 5,000 updates; none where num_epochs is given",
        lower_bound=0,
    ),
)
MEAN_FIELD_FLAGS = (
    Flag("kl", "enum", "reverse", "KL(q || prior), or KL(prior || q).", choices=vi.KL_DIRECTIONS),
    Flag(
        "kl_weight",
        "string",
        "1",
        f"Factor of the KL: a number, or one of {', '.join(kl_weights.KL_WEIGHTS)}.",
    ),
    Flag(
        "kl_warmup_epochs",
        "float",
        None,
        "Epochs over which the KL's factor grows to its full value.",
        "0",
        lower_bound=0,
    ),
    Flag(
        "learn_prior_scale",
        "enum",
        "None",
        "Empirical Bayes: what shares a learned factor on the prior's scale.",
        choices=("None", *vi.PRIOR_SCALES),
    ),
)
LOW_RANK_FLAGS = (
    Flag(
        "vi_rank",
        "integer",
        None,
        "Rank of the covariance beside its diagonal.",
        "10, or all weights if there are fewer",
        lower_bound=1,
    ),
)
FLOW_FLAGS = (
    Flag("flow_couplings", "integer", 2, "Coupling layers of every layer's flow.", lower_bound=1),
    Flag("flow_hidden_size", "integer", 32, "Hidden units of a coupling layer.", lower_bound=1),
)
LAYERWISE_FLAGS = (
    Flag(
        "num_inducing",
        "integer",
        None,
        "Inducing inputs, which start as rows of the data.",
        "100, or all rows if there are fewer",
        lower_bound=1,
    ),
    Flag(
        "inducing",
        "enum",
        None,
        "Learned inducing inputs, or rows of each minibatch.",
        BY_DATA,
        choices=posteriors.INDUCING,
    ),
    Flag(
        "layerwise_precision",
        "enum",
        None,
        "Precisions of pseudo-outputs: by row and unit, a_row b_unit, or by row alone.",
        BY_DATA,
        choices=posteriors.PRECISIONS,
    ),
    Flag(
        "inducing_positions",
        "integer",
        8,
        "Positions of an inducing image, at most, at which a convolution is regressed.",
        lower_bound=1,
    ),
    *cmd_args_utils.PRETRAINING,
)
DROPOUT_FLAGS = (
    Flag(
        "dropout_rate",
        "float",
        0.1,
        "Probability that a channel is dropped.",
        lower_bound=0,
        below=1,
    ),
)
GAUSSIAN_DROPOUT_FLAGS = (
    Flag(
        "dropout_prior",
        "enum",
        "log_uniform",
        "Prior of the weights, or one normal for each, learned.",
        choices=gaussian_dropout.PRIORS,
    ),
    Flag(
        "prune_above",
        "float",
        gaussian_dropout.PRUNE_ABOVE,
        "Logarithm of noise over signal, alpha, beyond which a weight is removed from draws.",
    ),
)
SHARED_WITH_DROPOUT = ("vi_sigma_init", "vi_num_samples", "vi_estimator", "warm_start_epochs")
READERS: dict[str, tuple[str, Sequence[str], Sequence[Flag]]] = {
    "VI": ("vi", VI_FAMILIES, VI_FLAGS),
    "Gaussian VI": ("vi", ("mean_field", "low_rank", "mnf"), GAUSSIAN_FLAGS),
    "Mean-field VI": ("vi", ("mean_field",), MEAN_FIELD_FLAGS),
    "Low-rank VI": ("vi", ("low_rank",), LOW_RANK_FLAGS),
    "Multiplicative flows": ("vi", ("mnf",), FLOW_FLAGS),
    "Layerwise VI": ("vi", ("layerwise",), LAYERWISE_FLAGS),
    "MC dropout": ("mc_dropout", VI_FAMILIES, DROPOUT_FLAGS),
    "Gaussian dropout": ("gaussian_dropout", VI_FAMILIES, GAUSSIAN_DROPOUT_FLAGS),
}
GROUPS = {title: flags for title, (_, _, flags) in READERS.items()}


def refuse(settings: Settings) -> None:
    """Refuses what the chosen method or family would not read, and what contradicts itself."""
    for method, families, flags in READERS.values():
        given = [flag.name for flag in flags if settings.was_given(flag.name)]
        if settings.method == "gaussian_dropout":
            given = [name for name in given if name not in SHARED_WITH_DROPOUT]
        if given and method != settings.method:
            raise UserError(f"{given[0]} is for --method={method}, not {settings.method}.")
        if given and settings.vi_family not in families:
            raise UserError(
                f"{given[0]} is for --vi_family={' or '.join(families)}, not {settings.vi_family}."
            )
    if settings.prior_from and settings.method == "gaussian_dropout":
        raise UserError("Gaussian dropout brings a prior of its own: it takes no prior_from.")
    if settings.prior_from and (settings.kl == "forward" or settings.learn_prior_scale != "None"):
        raise UserError(
            "prior_from leaves the prior as it is: with kl=reverse, and nothing learned."
        )
    if settings.mean_init_checkpoint and settings.init_checkpoint:
        raise UserError("Give mean_init_checkpoint or init_checkpoint, not both.")
