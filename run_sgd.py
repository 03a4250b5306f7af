"""SGD, MAP estimates and deep ensembles.

python run_sgd.py                                      embedded toy regression
python run_sgd.py --num_members=10                     a deep ensemble, in one program
python run_sgd.py --dataset_name=digits --model_name=mlp_classification
"""

from absl import flags

from haiku_posteriors.core import sgd
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.utils import cmd_args_utils, optim_utils, script_utils

FLAGS = flags.FLAGS

cmd_args_utils.define_common_flags()
cmd_args_utils.define_sgd_flags()
flags.adopt_module_key_flags(cmd_args_utils)
flags.DEFINE_integer("num_members", 1, "Members of the deep ensemble.", lower_bound=1)


def main() -> None:
    """Trains the members and leaves the run in its folder."""
    log_joint, dataset = script_utils.load_problem()
    steps = FLAGS.num_epochs * num_minibatches(len(dataset.x_train), FLAGS.batch_size)
    optimizer = optim_utils.make_optimizer(
        FLAGS.optimizer, FLAGS.init_step_size, steps, FLAGS.momentum_decay
    )
    script_utils.execute(
        "sgd",
        sgd.sgd(log_joint, optimizer, FLAGS.batch_size),
        log_joint,
        dataset,
        initial_params=script_utils.initial_params(
            log_joint, FLAGS.num_members, FLAGS.init_checkpoint
        ),
        num_chains=FLAGS.num_members,
        num_epochs=FLAGS.num_epochs,
        eval_freq=FLAGS.eval_freq,
        save_freq=FLAGS.save_freq,
    )


if __name__ == "__main__":
    script_utils.run_script(main)
