"""Mean-field variational inference, MC dropout, and the MAP estimate of the same problem.

python run_vi.py                                    embedded toy regression, a Gaussian q
python run_vi.py --vi_estimator=flipout             noise of other signs for every row
python run_vi.py --method=mc_dropout --dropout_rate=0.1
python run_vi.py --method=map
"""

import jax.numpy as jnp
import numpy as np
from absl import flags

from haiku_posteriors.core import dropout, kl_weights, sgd, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.utils import cmd_args_utils, optim_utils, script_utils
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.train_utils import RunResult

FLAGS = flags.FLAGS

# Settings of VI; those of the data sets fill in the rest.
ANCHOR: cmd_args_utils.Settings = {
    "vi_sigma_init": 1e-3,
    "vi_estimator": "reparameterization",
    "kl_warmup_epochs": 0.0,
}
# The standard deviations have a long way to go from the start: larger steps than for a point.
GENERIC: cmd_args_utils.Settings = ANCHOR | {
    "vi_sigma_init": 1e-2,
    "optimizer": "Adam",
    "init_step_size": 1e-2,
}
SETTINGS: dict[str, cmd_args_utils.Settings] = {
    # Chosen by the fit to the training data: shorter, or without warm-up, it underfits.
    "toy_regression": GENERIC
    | {
        "vi_estimator": "local",
        "num_epochs": 20_000,
        "kl_warmup_epochs": 10_000.0,
        "eval_freq": 4000,
        "save_freq": 10_000,
    },
} | dict.fromkeys(cmd_args_utils.ANCHOR_SETS, ANCHOR)

METHODS = ("vi", "mc_dropout", "map")
# Flags that one method alone reads: given to another, they would do nothing without a word.
OWN_FLAGS = {
    "vi": (
        *("vi_sigma_init", "vi_estimator", "vi_num_samples", "kl", "kl_weight"),
        *("kl_warmup_epochs", "learn_prior_scale"),
    ),
    "mc_dropout": ("dropout_rate",),
}

cmd_args_utils.define_common_flags()
cmd_args_utils.define_sgd_flags()
flags.adopt_module_key_flags(cmd_args_utils)
flags.DEFINE_enum("method", "vi", METHODS, "What to fit.")
flags.DEFINE_float("vi_sigma_init", None, "Standard deviation of q at the start.")
flags.DEFINE_integer("vi_ensemble_size", 20, "Draws to predict with.", lower_bound=1)
flags.DEFINE_string(
    "mean_init_checkpoint", None, "Run folder or .safetensors file with q's mean at the start."
)
flags.DEFINE_enum("vi_estimator", None, vi.ESTIMATORS, "How draws of q enter the gradient.")
flags.DEFINE_integer("vi_num_samples", 1, "Draws of q a minibatch.", lower_bound=1)
flags.DEFINE_enum("kl", "reverse", vi.KL_DIRECTIONS, "KL(q || prior), or KL(prior || q).")
flags.DEFINE_string(
    "kl_weight", "1", f"Factor of the KL: a number, or one of {', '.join(kl_weights.KL_WEIGHTS)}."
)
flags.DEFINE_float(
    "kl_warmup_epochs", None, "The KL's factor grows over so many epochs.", lower_bound=0.0
)
flags.DEFINE_enum(
    "learn_prior_scale",
    "None",
    ["None", *vi.PRIOR_SCALES],
    "Empirical Bayes: what shares a learned factor on the prior's scale.",
    case_sensitive=False,
)
flags.DEFINE_float("dropout_rate", 0.1, "Probability that a channel is dropped.")
flags.DEFINE_integer("num_members", 1, "Approximations from different starts.", lower_bound=1)


def make_method(log_joint: LogJoint, dataset: Dataset) -> Method:
    """The method that the flags describe; says what it covers."""
    epoch = num_minibatches(len(dataset.x_train), FLAGS.batch_size)
    optimizer = optim_utils.make_optimizer(
        FLAGS.optimizer, FLAGS.init_step_size, FLAGS.num_epochs * epoch, FLAGS.momentum_decay
    )
    if FLAGS.method == "map":
        return sgd.sgd(log_joint, optimizer, FLAGS.batch_size)
    if FLAGS.method == "mc_dropout":
        method = dropout.mc_dropout(log_joint, FLAGS.dropout_rate, optimizer, FLAGS.batch_size)
        print(f"Dropped: inputs of {', '.join(dropout.dropped_modules(log_joint))}.")
        return method
    method = vi.mean_field_vi(
        log_joint,
        optimizer,
        FLAGS.batch_size,
        sigma_init=FLAGS.vi_sigma_init,
        estimator=FLAGS.vi_estimator,
        kl=FLAGS.kl,
        kl_weight=_number_or_name(FLAGS.kl_weight),
        kl_warmup_steps=round(FLAGS.kl_warmup_epochs * epoch),
        num_samples=FLAGS.vi_num_samples,
        learn_prior_scale=None if FLAGS.learn_prior_scale == "None" else FLAGS.learn_prior_scale,
    )
    if FLAGS.vi_estimator != "reparameterization":
        covered, drawn = noisy_layers.covered_parameters(
            log_joint, jnp.asarray(dataset.x_train[:1]), FLAGS.vi_estimator
        )
        by_weight = f"; drawn as weights: {', '.join(drawn)}" if drawn else ""
        total = len(covered) + len(drawn)
        print(f"'{FLAGS.vi_estimator}' covers {len(covered)} of {total} arrays{by_weight}.")
    return method


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def start_checkpoint() -> str | None:
    """Where the means start; for VI both flags say the same."""
    if FLAGS.mean_init_checkpoint and FLAGS.init_checkpoint:
        raise UserError("Give mean_init_checkpoint or init_checkpoint, not both.")
    return FLAGS.mean_init_checkpoint or FLAGS.init_checkpoint


def report_prior_scales(result: RunResult) -> None:
    """Prints the learned factors, a number a member."""
    for group, logarithms in result.state.variational.log_prior_scale.items():
        factors = ", ".join(f"{factor:.3g}" for factor in np.exp(logarithms))
        print(f"Prior scale of {group}: {factors} times 1 / sqrt(weight_decay).")


def main() -> None:
    """Fits the members and leaves the run in its folder."""
    for method, names in OWN_FLAGS.items():
        given = [name for name in names if FLAGS[name].present]
        if given and method != FLAGS.method:
            raise UserError(f"{given[0]} is for --method={method}, not {FLAGS.method}.")
    warmup_given = FLAGS.kl_warmup_epochs is not None
    settings = SETTINGS.get(FLAGS.dataset_name, GENERIC) if FLAGS.method == "vi" else None
    log_joint, dataset = script_utils.load_problem(settings)
    if FLAGS.method == "vi" and not warmup_given:
        # So that a run shortened by --num_epochs alone ends with the whole KL.
        FLAGS["kl_warmup_epochs"].value = min(FLAGS.kl_warmup_epochs, FLAGS.num_epochs / 2)
    result, _ = script_utils.execute(
        FLAGS.method,
        make_method(log_joint, dataset),
        log_joint,
        dataset,
        initial_params=script_utils.initial_params(
            log_joint, FLAGS.num_members, start_checkpoint()
        ),
        num_chains=FLAGS.num_members,
        num_epochs=FLAGS.num_epochs,
        eval_freq=FLAGS.eval_freq,
        save_freq=FLAGS.save_freq,
        num_draws=1 if FLAGS.method == "map" else FLAGS.vi_ensemble_size,
    )
    if FLAGS.method == "vi":
        report_prior_scales(result)


if __name__ == "__main__":
    script_utils.run_script(main)
