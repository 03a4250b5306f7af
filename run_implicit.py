"""Implicit variational inference: a neural sampler of weights, with certified entropy bounds.

python run_implicit.py                                    embedded toy regression
python run_implicit.py --refine_iterations=10             each draw moved by HMC
python run_implicit.py --entropy=singular_value           the bound of arXiv 2310.06643
python run_implicit.py --dataset_name=digits --generator=configs/matrix_20.yaml
"""

import functools
import pathlib

import jax
import optax
from absl import flags

from haiku_posteriors.core import sgd, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import generators, implicit_vi, mixtures, samplers
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    devices,
    optim_utils,
    script_utils,
)
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.logging_utils import write_json
from haiku_posteriors.utils.stages import generator_files, mixture, refine

FLAGS = flags.FLAGS

GENERIC: cmd_args_utils.Settings = {
    "optimizer": "Adam",
    "init_step_size": 1e-3,
    "pretrain_starts": 1,
}
SETTINGS: dict[str, cmd_args_utils.Settings] = {
    "toy_regression": GENERIC
    | {
        "num_epochs": 10_000,
        "pretrain_epochs": 3000,
        "pretrain_starts": 20,
        "init_step_size": 1e-2,
        "eval_freq": 2000,
        "save_freq": 5000,
    },
}

cmd_args_utils.define_common_flags()
cmd_args_utils.define_sgd_flags()
flags.adopt_module_key_flags(cmd_args_utils)
flags.DEFINE_string("generator", "auto", "'auto', or a YAML file as in configs/.")
flags.DEFINE_integer("max_generator_parameters", None, "Size budget of --generator=auto.")
flags.DEFINE_enum(
    "entropy",
    None,
    implicit_vi.ENTROPY_ESTIMATORS,
    "Estimator; exact or, for large latents, lanczos.",
)
flags.DEFINE_integer("entropy_steps", 20, "Steps of lanczos or singular_value.", lower_bound=1)
flags.DEFINE_integer("entropy_probes", 1, "Probes of lanczos for each draw.", lower_bound=1)
flags.DEFINE_bool("entropy_warm_start", False, "singular_value: start from the last vectors.")
flags.DEFINE_integer("num_samples", 8, "Draws of the latent a minibatch.", lower_bound=1)
flags.DEFINE_float("noise_scale", 1e-2, "Noise beside the generator; at the start if learned.")
flags.DEFINE_bool("learn_noise_scale", True, "Learn the noise scale of every weight.")
flags.DEFINE_enum("start", "network", samplers.STARTS, "Where the generator's draws begin.")
flags.DEFINE_float("init_spread", 0.02, "Spread of the first draws, relative to the weights.")
flags.DEFINE_integer(
    "pretrain_epochs", None, "Epochs of MAP training before, unless a start is given."
)
flags.DEFINE_integer(
    "pretrain_starts", None, "MAP solutions, of which the best starts a member.", lower_bound=1
)
flags.DEFINE_string("vi_checkpoint", None, "Folder of a run_vi.py run to start from.")
flags.DEFINE_float("entropy_weight", 1.0, "Factor of the entropy; 1 for the ELBO.")
flags.DEFINE_float("prior_weight", 1.0, "Factor of the log-prior; 1 for the ELBO.")
flags.DEFINE_float(
    "annealing_epochs", 0.0, "The likelihood's factor grows to 1 in so many epochs.", lower_bound=0
)
flags.DEFINE_float("annealing_start", 1e-3, "The likelihood's factor at first.")
flags.DEFINE_float("clip_gradient", 0.1, "Largest norm of the gradient of ELBO / N; 0 for any.")
flags.DEFINE_integer("num_draws", 100, "Draws a member to predict with.", lower_bound=1)
flags.DEFINE_integer("num_members", 1, "Generators, from different starts.", lower_bound=1)
flags.DEFINE_enum(
    "member_weights", "even", mixtures.WEIGHTS, "How the members are mixed in the draws."
)
flags.DEFINE_integer(
    "num_elbo_draws", None, "Draws for the final ELBO on all data; 0 for none.", lower_bound=0
)
flags.DEFINE_integer(
    "refine_iterations", 0, "HMC transitions by which each draw is moved.", lower_bound=0
)
flags.DEFINE_float("refine_step_size", None, "Leapfrog step of these; adapted by default.")
flags.DEFINE_float("refine_trajectory_len", None, "Trajectory length of these; as in run_hmc.py.")


def make_generator(log_joint: LogJoint) -> Generator:
    """The generator that the flags describe; says what it is."""
    shapes = log_joint.random_shapes
    description = generator_files.describe(FLAGS.generator, shapes, FLAGS.max_generator_parameters)
    generator = generators.make_generator(description, shapes)
    print(
        f"Generator: {description}, {generators.num_parameters(generator, shapes):,} parameters "
        f"for {generator.num_weights:,} weights."
    )
    return generator


def main() -> None:
    """Fits the members and leaves the run in its folder."""
    if FLAGS.vi_checkpoint and (FLAGS.init_checkpoint or FLAGS.start == "prior"):
        raise UserError("vi_checkpoint is a start of its own: neither init_checkpoint nor prior.")
    log_joint, dataset = script_utils.load_problem(SETTINGS.get(FLAGS.dataset_name, GENERIC))
    generator = make_generator(log_joint)
    if FLAGS.pretrain_epochs is None:
        FLAGS["pretrain_epochs"].value = FLAGS.num_epochs // 4
    if FLAGS.num_elbo_draws is None:
        small = generator.num_weights <= generators.MLP_LIMIT
        FLAGS["num_elbo_draws"].value = 200 if small else 0
    if FLAGS.entropy is None:
        FLAGS["entropy"].value = implicit_vi.default_estimator(generator)
    if FLAGS.num_elbo_draws == 1:
        raise UserError("One draw gives no error of the ELBO: num_elbo_draws must be 0 or above 1.")
    if FLAGS.member_weights == "elbo" and not FLAGS.num_elbo_draws:
        raise UserError("Weights by ELBO need its value: give num_elbo_draws.")
    epoch = num_minibatches(len(dataset.x_train), FLAGS.batch_size)
    method = make_method(log_joint, generator, epoch)
    script_utils.execute(
        "implicit",
        method,
        log_joint,
        dataset,
        initial_params=initial_params(log_joint, dataset, epoch),
        num_chains=FLAGS.num_members,
        num_epochs=FLAGS.num_epochs,
        eval_freq=FLAGS.eval_freq,
        save_freq=FLAGS.save_freq,
        num_draws=FLAGS.num_draws,
        change_draws=functools.partial(final_draws, log_joint, dataset, generator, method),
    )


def make_method(log_joint: LogJoint, generator: Generator, epoch: int) -> Method:
    """Implicit VI as the flags describe it, with so many minibatches an epoch."""
    optimizer = make_optimizer(FLAGS.num_epochs * epoch)
    if FLAGS.clip_gradient:
        optimizer = optax.chain(optax.clip_by_global_norm(FLAGS.clip_gradient), optimizer)
    mesh = devices.make_mesh(FLAGS.num_members)
    return implicit_vi.implicit_vi(
        log_joint,
        optimizer,
        FLAGS.batch_size,
        generator=generator,
        estimator=make_estimator(),
        num_samples=FLAGS.num_samples,
        learn_noise_scale=FLAGS.learn_noise_scale,
        start=samplers.Start(FLAGS.start, FLAGS.init_spread, FLAGS.noise_scale),
        objective=implicit_vi.Objective(
            FLAGS.entropy_weight,
            FLAGS.prior_weight,
            FLAGS.annealing_start,
            round(FLAGS.annealing_epochs * epoch),
        ),
        place=devices.draw_placement(mesh, FLAGS.num_samples),
    )


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """The optimizer of the flags, for so many minibatches."""
    return optim_utils.make_optimizer(
        FLAGS.optimizer, FLAGS.init_step_size, max(num_steps, 1), FLAGS.momentum_decay
    )


def make_estimator() -> implicit_vi.Estimator:
    """The estimator of the entropy that training uses."""
    return implicit_vi.Estimator(
        FLAGS.entropy, FLAGS.entropy_steps, FLAGS.entropy_probes, FLAGS.entropy_warm_start
    )


def final_draws(
    log_joint: LogJoint,
    dataset: Dataset,
    generator: Generator,
    method: Method,
    state: State,
    draws: Params,
) -> Params:
    """The draws of the end: members' ELBOs told, members weighed, draws refined, by the flags."""
    if FLAGS.num_elbo_draws:
        # What training estimates by a bound may be affordable once, at the end.
        exact = generator.latent_size <= implicit_vi.EXACT_LIMIT
        estimator = implicit_vi.Estimator("exact") if exact else make_estimator()
        arguments = (log_joint, dataset, generator, estimator, state.sampler)
        elbos, errors = mixture.member_elbos(*arguments, FLAGS.seed, FLAGS.num_elbo_draws)
        weights = mixtures.weigh(FLAGS.member_weights, elbos)
        print(mixture.describe(elbos, errors, weights))
        content = {"elbos": elbos, "errors": errors, "weights": weights}
        path = pathlib.Path(FLAGS.dir) / "evidence.json"
        write_json(path, {name: array.tolist() for name, array in content.items()})
        if FLAGS.member_weights != "even":
            draws = mixture.mixture_draws(method, state, weights, FLAGS.num_draws, FLAGS.seed)
    if not FLAGS.refine_iterations:
        return draws
    return refine.refine(
        log_joint,
        dataset,
        draws,
        seed=FLAGS.seed,
        num_iterations=FLAGS.refine_iterations,
        step_size=FLAGS.refine_step_size,
        trajectory_len=FLAGS.refine_trajectory_len,
    )


def initial_params(
    log_joint: LogJoint, dataset: Dataset, epoch: int
) -> Params | vi.VariationalParams | None:
    """Where the members start: parameters, or the mean-field posterior of a run_vi.py run."""
    members = FLAGS.num_members
    if FLAGS.init_checkpoint:
        return script_utils.initial_params(log_joint, members, FLAGS.init_checkpoint)
    if FLAGS.vi_checkpoint:
        template = jax.eval_shape(
            jax.vmap(lambda key: vi.initial_variational(log_joint, log_joint.init(key))),
            jax.random.split(jax.random.key(0), members),
        )
        path = pathlib.Path(FLAGS.vi_checkpoint)
        return checkpoint_utils.load_part(path, "variational", template)
    resumed = FLAGS.dir and any(pathlib.Path(FLAGS.dir).glob("checkpoints/*"))
    if FLAGS.start == "prior" or not FLAGS.pretrain_epochs or resumed:
        return None
    starts = FLAGS.pretrain_starts
    print(
        f"Pretraining: {members * starts} MAP solution(s), {FLAGS.pretrain_epochs} epochs.",
        flush=True,
    )
    return script_utils.pretrain(
        sgd.sgd(log_joint, make_optimizer(FLAGS.pretrain_epochs * epoch), FLAGS.batch_size),
        log_joint,
        dataset,
        num_chains=members,
        num_starts=starts,
        num_epochs=FLAGS.pretrain_epochs,
    )


if __name__ == "__main__":
    script_utils.run_script(main)
