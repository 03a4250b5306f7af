"""Stochastic gradient MCMC: SGLD, SGHMC, cyclical and preconditioned.

python run_sgmcmc.py                            embedded toy regression, SGHMC
python run_sgmcmc.py --momentum=0               SGLD
python run_sgmcmc.py --step_size_schedule=cyclical --preconditioner=RMSprop
"""

import math
import re

import optax
from absl import flags

from haiku_posteriors.core import sgmcmc
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, script_utils
from haiku_posteriors.utils.datasets import uci
from haiku_posteriors.utils.report import chain_diagnostics

FLAGS = flags.FLAGS

# Where a table has none for the preconditioner in force. The two are in different units.
STEP_SIZES = {"None": 1e-6, "RMSprop": 1e-4}
# The anchor's defaults. Its burn-in of 300 epochs is all of its 300 epochs; see `main`.
ANCHOR: cmd_args_utils.Settings = {
    "preconditioner": "None",
    "num_burnin_epochs": 300,
    "step_size_cycle_length_epochs": 50,
    "ensemble_freq": 10,
}
# Other data: the preconditioner takes care of the gradient's scale, which is the data's.
GENERIC: cmd_args_utils.Settings = ANCHOR | {
    "preconditioner": "RMSprop",
    "init_step_size": STEP_SIZES["RMSprop"],
    "momentum_decay": 0.9,
    "num_epochs": 600,
    "num_burnin_epochs": 200,
}
# Of few rows, by small networks: an epoch has few steps.
SMALL: cmd_args_utils.Settings = GENERIC | {
    "num_epochs": 6_000,
    "num_burnin_epochs": 2_000,
    "step_size_cycle_length_epochs": 100,
    "ensemble_freq": 100,
    "eval_freq": 1_000,
    "save_freq": 2_000,
}
# Small UCI sets: burn-in as in run_sgd.py, then smaller steps, since gradients are large where the
# targets have little noise. Chosen on yacht_0, with results in view.
UCI_SETS = ("boston", "concrete", "energy", "wine_quality", "yacht")
UCI: cmd_args_utils.Settings = SMALL | {
    "preconditioner": "None",
    "init_step_size": 1e-5,
    "final_step_size": 1e-6,
}
# Of few rows, by the wide network for classification: steps that take longer.
SMALL_WIDE: cmd_args_utils.Settings = GENERIC | {
    "num_epochs": 1_800,
    "num_burnin_epochs": 600,
    "ensemble_freq": 30,
    "eval_freq": 300,
    "save_freq": 600,
}
# One step an epoch.
FULL_BATCH: cmd_args_utils.Settings = GENERIC | {
    "num_epochs": 60_000,
    "num_burnin_epochs": 20_000,
    "step_size_cycle_length_epochs": 500,
    "ensemble_freq": 500,
    "eval_freq": 10_000,
    "save_freq": 20_000,
}
FULL_BATCH_WIDE: cmd_args_utils.Settings = FULL_BATCH | {
    "num_epochs": 12_000,
    "num_burnin_epochs": 4_000,
    "step_size_cycle_length_epochs": 200,
    "ensemble_freq": 200,
    "eval_freq": 2_000,
    "save_freq": 4_000,
}
SETTINGS: dict[str, cmd_args_utils.Settings] = {
    # Chosen by R-hat and distance to HMC.
    "toy_regression": FULL_BATCH
    | {
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
    "sine_regression": FULL_BATCH,
    "two_moons": FULL_BATCH_WIDE,
    **dict.fromkeys(("breast_cancer", "wine"), SMALL_WIDE),
    "diabetes": SMALL,
    **dict.fromkeys(cmd_args_utils.ANCHOR_SETS, ANCHOR),
}

cmd_args_utils.define_common_flags()
cmd_args_utils.define_sgd_flags(with_optimizer=False)
flags.adopt_module_key_flags(cmd_args_utils)
flags.DEFINE_enum(
    "preconditioner", None, ["None", "RMSprop"], "Preconditioner; it stands still after burn-in."
)
flags.DEFINE_enum(
    "step_size_schedule",
    "constant",
    ["constant", "cyclical"],
    "constant: cosine burn-in to final_step_size; cyclical: constant burn-in, then cosine cycles.",
)
flags.DEFINE_integer("num_burnin_epochs", None, "Epochs before draws are taken.", lower_bound=0)
flags.DEFINE_float(
    "final_step_size", None, "After burn-in (constant schedule); init_step_size by default."
)
flags.DEFINE_integer(
    "step_size_cycle_length_epochs",
    None,
    "Epochs in a cycle of the step size; a draw is taken at its end (cyclical schedule).",
    lower_bound=1,
)
flags.DEFINE_integer(
    "ensemble_freq", None, "Epochs between draws (constant schedule).", lower_bound=1
)
flags.DEFINE_bool("save_all_ensembled", True, "Accepted for old commands: draws are always saved.")
flags.DEFINE_integer("num_chains", 4, "Chains, side by side.", lower_bound=1)


def default_settings() -> cmd_args_utils.Settings:
    """What flags that were not given default to, seen what was."""
    settings = SETTINGS.get(FLAGS.dataset_name, GENERIC)
    split = re.fullmatch(r"(\w+)_\d+", FLAGS.dataset_name)
    if split and uci.uci_name(split[1]) in UCI_SETS:
        settings = UCI
    if FLAGS.init_step_size is not None:
        # A step size of the user's is in the plain sampler's units, unless they say otherwise.
        return settings | {"preconditioner": "None", "final_step_size": FLAGS.init_step_size}
    if FLAGS.preconditioner not in (None, settings["preconditioner"]):
        size = STEP_SIZES[FLAGS.preconditioner]
        return settings | {"init_step_size": size, "final_step_size": size}
    return settings


def make_sampler(num_rows: int) -> optax.GradientTransformationExtraArgs:
    """The sampler that the flags describe."""
    epoch = num_minibatches(num_rows, FLAGS.batch_size)
    burn_in = FLAGS.num_burnin_epochs * epoch
    cmd_args_utils.fill_in(FLAGS, {"final_step_size": FLAGS.init_step_size})
    sizes = {"init_step_size": FLAGS.init_step_size, "final_step_size": FLAGS.final_step_size}
    for name, size in sizes.items():
        if not (size > 0 and math.isfinite(size)):
            raise UserError(f"{name} must be positive and finite, not {size}.")
    if FLAGS.step_size_schedule == "cyclical":
        schedule = sgmcmc.cyclical(
            FLAGS.init_step_size, burn_in, FLAGS.step_size_cycle_length_epochs * epoch
        )
    else:
        schedule = sgmcmc.constant_with_burn_in(
            FLAGS.init_step_size, FLAGS.final_step_size, burn_in
        )
    preconditioner = None
    if FLAGS.preconditioner == "RMSprop":
        # Standing still after burn-in, it leaves the target as it is.
        preconditioner = sgmcmc.rmsprop(adaptation_steps=max(burn_in, 1))
    if FLAGS.momentum_decay == 0:
        return sgmcmc.sgld(schedule, preconditioner)
    return sgmcmc.sghmc(schedule, FLAGS.momentum_decay, preconditioner)


def draw_period() -> int:
    """Epochs between two draws; refuses flags by which there would be none."""
    name, period = "ensemble_freq", FLAGS.ensemble_freq
    if FLAGS.step_size_schedule == "cyclical":
        name, period = "step_size_cycle_length_epochs", FLAGS.step_size_cycle_length_epochs
    if FLAGS.num_burnin_epochs + period > FLAGS.num_epochs:
        raise UserError(
            f"There would be no draws: the first comes num_burnin_epochs + {name} = "
            f"{FLAGS.num_burnin_epochs} + {period} epochs from the start, and num_epochs is "
            f"{FLAGS.num_epochs}."
        )
    return period


def main() -> None:
    """Runs the chains and leaves the run in its folder."""
    burn_in_given = FLAGS.num_burnin_epochs is not None
    log_joint, dataset = script_utils.load_problem(default_settings())
    if not burn_in_given:
        # So that a run shortened by --num_epochs alone has draws.
        FLAGS["num_burnin_epochs"].value = min(FLAGS.num_burnin_epochs, FLAGS.num_epochs // 2)
    burn_in, period = FLAGS.num_burnin_epochs, draw_period()
    result, directory = script_utils.execute(
        "sgmcmc",
        sgmcmc.sgmcmc(log_joint, make_sampler(len(dataset.x_train)), FLAGS.batch_size),
        log_joint,
        dataset,
        num_chains=FLAGS.num_chains,
        initial_params=script_utils.initial_params(
            log_joint, FLAGS.num_chains, FLAGS.init_checkpoint
        ),
        num_epochs=FLAGS.num_epochs,
        eval_freq=FLAGS.eval_freq,
        save_freq=FLAGS.save_freq,
        collects=lambda done: sgmcmc.collects(done, burn_in, period),
    )
    chain_diagnostics.report_sampler(directory, result)


if __name__ == "__main__":
    script_utils.run_script(main)
