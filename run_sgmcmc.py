"""Stochastic gradient MCMC: SGLD, SGHMC, cyclical and preconditioned.

python run_sgmcmc.py                            embedded toy regression, SGHMC
python run_sgmcmc.py --momentum=0               SGLD
python run_sgmcmc.py --step_size_schedule=cyclical --preconditioner=RMSprop
"""

import optax
from absl import flags

from core import sgmcmc
from core.data import num_minibatches
from utils import cmd_args_utils, diagnostics_utils, script_utils

FLAGS = flags.FLAGS

# The sampler's own settings for the embedded data; chosen by R-hat and distance to HMC.
SETTINGS: dict[str, cmd_args_utils.Settings] = {
    "toy_regression": {
        "init_step_size": 2e-6,
        "num_epochs": 300_000,
        "num_burnin_epochs": 100_000,
        "ensemble_freq": 2_000,
        "eval_freq": 50_000,
        "save_freq": 100_000,
        "momentum_decay": 0.98,
    },
}

cmd_args_utils.define_common_flags()
cmd_args_utils.define_sgd_flags()
flags.adopt_module_key_flags(cmd_args_utils)
flags.DEFINE_enum("preconditioner", "None", ["None", "RMSprop"], "Preconditioner.")
flags.DEFINE_enum(
    "step_size_schedule",
    "constant",
    ["constant", "cyclical"],
    "constant: cosine burn-in to final_step_size; cyclical: constant burn-in, then cosine cycles.",
)
flags.DEFINE_integer("num_burnin_epochs", None, "Epochs before draws are taken.", lower_bound=0)
flags.DEFINE_float("final_step_size", None, "After burn-in; init_step_size by default.")
flags.DEFINE_integer(
    "step_size_cycle_length_epochs", 50, "Epochs in a cycle of the step size.", lower_bound=1
)
flags.DEFINE_integer(
    "ensemble_freq", None, "Epochs between draws (constant schedule).", lower_bound=1
)
flags.DEFINE_bool("save_all_ensembled", True, "Accepted for old commands: draws are always saved.")
flags.DEFINE_integer("num_chains", 4, "Chains, side by side.", lower_bound=1)


def make_sampler(num_rows: int) -> optax.GradientTransformationExtraArgs:
    """The sampler that the flags describe."""
    epoch = num_minibatches(num_rows, FLAGS.batch_size)
    burn_in = FLAGS.num_burnin_epochs * epoch
    if FLAGS.step_size_schedule == "cyclical":
        schedule = sgmcmc.cyclical(
            FLAGS.init_step_size, burn_in, FLAGS.step_size_cycle_length_epochs * epoch
        )
    else:
        final = FLAGS.final_step_size or FLAGS.init_step_size
        schedule = sgmcmc.constant_with_burn_in(FLAGS.init_step_size, final, burn_in)
    preconditioner = None
    if FLAGS.preconditioner == "RMSprop":
        # Standing still after burn-in, it leaves the target as it is.
        preconditioner = sgmcmc.rmsprop(adaptation_steps=max(burn_in, 1))
    if FLAGS.momentum_decay == 0:
        return sgmcmc.sgld(schedule, preconditioner)
    return sgmcmc.sghmc(schedule, FLAGS.momentum_decay, preconditioner)


def main() -> None:
    """Runs the chains and leaves the run in its folder."""
    settings = {"num_burnin_epochs": 300, "ensemble_freq": 10}
    log_joint, dataset = script_utils.load_problem(settings | SETTINGS.get(FLAGS.dataset_name, {}))
    cyclical = FLAGS.step_size_schedule == "cyclical"
    period = FLAGS.step_size_cycle_length_epochs if cyclical else FLAGS.ensemble_freq
    result, directory = script_utils.execute(
        "sgmcmc",
        sgmcmc.sgmcmc(log_joint, make_sampler(len(dataset.x_train)), FLAGS.batch_size),
        log_joint,
        dataset,
        num_chains=FLAGS.num_chains,
        initial_params=script_utils.initial_params(log_joint, FLAGS.num_chains),
        num_epochs=FLAGS.num_epochs,
        eval_freq=FLAGS.eval_freq,
        save_freq=FLAGS.save_freq,
        collects=lambda done: sgmcmc.collects(done, FLAGS.num_burnin_epochs, period),
    )
    diagnostics_utils.report_sampler(directory, result)


if __name__ == "__main__":
    script_utils.run_script(main)
