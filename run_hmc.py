"""Full-batch Hamiltonian Monte Carlo: the reference posterior.

python run_hmc.py                                        embedded toy regression, four chains
python run_hmc.py --dataset_name=yacht_0 --data_dir=path/to/data
python run_hmc.py --init_checkpoint=runs/sgd/my_ensemble  one chain from each member
"""

from absl import flags

from haiku_posteriors.core import hmc
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, script_utils
from haiku_posteriors.utils.logging_utils import Ticker
from haiku_posteriors.utils.report import chain_diagnostics

FLAGS = flags.FLAGS

cmd_args_utils.define_common_flags()
flags.adopt_module_key_flags(cmd_args_utils)
flags.DEFINE_float("step_size", None, "Leapfrog step size; adapted in burn-in by default.")
flags.DEFINE_float(
    "trajectory_len", None, "Trajectory length; pi/2 prior standard deviations by default."
)
flags.DEFINE_integer("num_iterations", 500, "Transitions in all, burn-in included.", lower_bound=1)
flags.DEFINE_integer(
    "num_burn_in_iterations", None, "Transitions that are not kept.", lower_bound=0
)
flags.DEFINE_integer("max_num_leapfrog_steps", 10_000, "Longest trajectory, in leapfrog steps.")
flags.DEFINE_bool("no_mh", False, "Accept every proposal that does not diverge.")
flags.DEFINE_integer("num_chains", 4, "Chains, side by side.", lower_bound=1)
flags.DEFINE_float("target_accept", 0.8, "Acceptance that the adapted step size aims at.")
flags.DEFINE_bool("adapt_mass_matrix", False, "Adapt a diagonal mass matrix in burn-in.")
flags.DEFINE_float("trajectory_jitter", 0.0, "Lengths vary by up to this fraction.")
flags.DEFINE_integer("thinning", 1, "Keep every so many-th draw.", lower_bound=1)
flags.DEFINE_integer("eval_freq", 50, "Iterations between evaluations.", lower_bound=1)
flags.DEFINE_integer("save_freq", 50, "Iterations between checkpoints.", lower_bound=1)


def main() -> None:
    """Runs the chains, judges them, and leaves the run in its folder."""
    # With a step size of the user's there is nothing to adapt: the anchor's default, none.
    burn_in = 0 if FLAGS.step_size is not None else min(100, FLAGS.num_iterations // 2)
    log_joint, dataset = script_utils.load_problem({"num_burn_in_iterations": burn_in})
    if FLAGS.stochastic_params and FLAGS.init_checkpoint is None:
        raise UserError(
            "HMC keeps the parameters that stochastic_params does not name where they start: give "
            "an init_checkpoint with trained ones."
        )
    burn_in = FLAGS.num_burn_in_iterations
    ticker = Ticker()
    method = hmc.hmc(
        log_joint,
        step_size=FLAGS.step_size,
        trajectory_length=FLAGS.trajectory_len,
        num_burn_in=burn_in,
        target_accept=FLAGS.target_accept,
        adapt_mass_matrix=FLAGS.adapt_mass_matrix,
        trajectory_jitter=FLAGS.trajectory_jitter,
        max_num_leapfrog_steps=FLAGS.max_num_leapfrog_steps,
        metropolis=not FLAGS.no_mh,
        progress=ticker,
    )
    result, directory = script_utils.execute(
        "hmc",
        method,
        log_joint,
        dataset,
        num_chains=FLAGS.num_chains,
        initial_params=script_utils.initial_params(
            log_joint, FLAGS.num_chains, FLAGS.init_checkpoint
        ),
        num_epochs=FLAGS.num_iterations,
        eval_freq=FLAGS.eval_freq,
        save_freq=FLAGS.save_freq,
        collects=lambda done: done > burn_in and (done - burn_in) % FLAGS.thinning == 0,
        keep_history=True,
        ticker=ticker,
        unit="iteration",
    )
    chain_diagnostics.report_hmc(directory, result, burn_in)


if __name__ == "__main__":
    script_utils.run_script(main)
