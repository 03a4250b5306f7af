"""Implicit variational inference: a neural sampler of weights, and a lower bound of the evidence.

python run_implicit.py                                    embedded toy regression
python run_implicit.py --refine=mclmc                     each draw moved by 1,000 gradients
python run_implicit.py --objective=hierarchical           trained on a bound, with an encoder
python run_implicit.py --objective=sivi --num_mixture_draws=100   on a bound, without one
python run_implicit.py --objective=uivi                   by an unbiased gradient of the entropy
python run_implicit.py --entropy=singular_value           the estimator of arXiv 2310.06643
python run_implicit.py --dataset_name=digits --generator=configs/mnist_mlp.yaml
"""

import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax

from haiku_posteriors.core import sgd, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import (
    generators,
    implicit_vi,
    mixtures,
    samplers,
    semi_implicit,
    unbiased,
)
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.judging.training import Bound
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    devices,
    hosts,
    optim_utils,
    script_utils,
    tasks,
    training_runs,
)
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import evidence, training
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import generator_files, mixture, pretrain, refine, sandwich
from haiku_posteriors.utils.tasks import Task

GENERATOR = (
    Flag("generator", "path", "auto", "'auto', or a YAML file as in configs/."),
    Flag(
        "max_generator_parameters",
        "integer",
        None,
        "Maximum parameters of --generator=auto.",
        "by the network",
        lower_bound=1,
    ),
    Flag(
        "noise_scale",
        "float",
        1e-2,
        "Noise beside the generator; at the start if learned.",
        above=0,
    ),
    Flag("learn_noise_scale", "bool", True, "Learn the noise scale of every weight."),
)
LINEARISED = (
    Flag(
        "entropy",
        "enum",
        None,
        "Estimator of the linearised entropy's log-determinant.",
        "exact or, for large latents, lanczos",
        choices=implicit_vi.ENTROPY_ESTIMATORS,
    ),
    Flag("entropy_steps", "integer", 20, "Steps of lanczos or singular_value.", lower_bound=1),
    Flag("entropy_probes", "integer", 1, "Probes of lanczos for each draw.", lower_bound=1),
    Flag("entropy_warm_start", "bool", False, "singular_value: start from the last vectors."),
)
SEMI_IMPLICIT = (
    Flag(
        "num_mixture_draws",
        "integer",
        50,
        "sivi, and what uivi reports: K, conditionals in the mixture.",
        lower_bound=1,
    ),
)
UNBIASED = (
    Flag(
        "reverse_transitions",
        "integer",
        6,
        "uivi: HMC transitions to draws of the latent given the weights; half of them count.",
        lower_bound=2,
    ),
    Flag("reverse_leapfrog_steps", "integer", 5, "uivi: steps of each.", lower_bound=1),
)
OBJECTIVE = (
    Flag(
        "objective",
        "enum",
        "linearised",
        "Entropy in what is maximised: of the linearised generator (no bound), a lower bound by an "
        "encoder or by a mixture of K conditionals, or an unbiased gradient.",
        choices=implicit_vi.ENTROPIES,
    ),
    *LINEARISED,
    *SEMI_IMPLICIT,
    *UNBIASED,
    Flag("num_samples", "integer", 8, "Draws of the latent per minibatch.", lower_bound=1),
    Flag("entropy_weight", "float", 1.0, "Factor of the entropy.", lower_bound=0),
    Flag("prior_weight", "float", 1.0, "Factor of the log-prior.", lower_bound=0),
    Flag(
        "annealing_epochs",
        "float",
        0.0,
        "Epochs over which the likelihood's factor grows to 1.",
        lower_bound=0,
    ),
    Flag(
        "annealing_start",
        "float",
        1e-3,
        "The likelihood's factor at first.",
        above=0,
        upper_bound=1,
    ),
    # A negative norm would turn the gradient around.
    Flag(
        "clip_gradient",
        "float",
        0.1,
        "Maximum norm of the gradient of objective / N; 0 for any.",
        lower_bound=0,
    ),
)
START = (
    Flag(
        "start",
        "enum",
        "network",
        "Where the generator's draws begin.",
        choices=samplers.STARTS,
    ),
    Flag(
        "init_spread",
        "float",
        0.02,
        "Spread of the first draws, relative to the weights.",
        above=0,
    ),
    *cmd_args_utils.PRETRAINING,
    Flag("vi_checkpoint", "path", None, "Folder of a run_vi.py run to start from."),
)
DRAWS = (
    Flag("num_draws", "integer", 100, "Draws per member to predict with.", lower_bound=1),
    Flag("num_members", "integer", 1, "Generators, from different starts.", lower_bound=1),
    Flag(
        "member_weights",
        "enum",
        "even",
        "How the members are mixed in the draws.",
        choices=mixtures.WEIGHTS,
    ),
    Flag(
        "evidence",
        "enum",
        "hierarchical",
        "What is said of log p(D) at the end: a lower bound, or the linearised estimate, which is "
        "none.",
        choices=("hierarchical", "linearised"),
    ),
    Flag(
        "num_evidence_draws",
        "integer",
        None,
        "Draws for it, on all data; 0 for none.",
        "200 for small networks, else 0",
        lower_bound=0,
    ),
    Flag(
        "num_inner_draws",
        "integer",
        100,
        "hierarchical: K, draws of the reverse model for each of these; more tighten the bound.",
        lower_bound=0,
    ),
    Flag(
        "sandwich_draws",
        "integer",
        None,
        "Largest K of the semi-implicit bounds from both sides, for each of these; 0 for none.",
        "1000 for small networks, else 0",
        lower_bound=0,
    ),
)
GROUPS = {
    **cmd_args_utils.PROBLEM,
    "Training": cmd_args_utils.OPTIMIZER,
    "Generator": GENERATOR,
    "Objective": OBJECTIVE,
    "Start": START,
    "Draws": DRAWS,
    "Refinement": cmd_args_utils.REFINEMENT,
}


def run(settings: Settings) -> None:
    """Fits the members and leaves the run in its folder."""
    if settings.vi_checkpoint and (settings.init_checkpoint or settings.start == "prior"):
        raise UserError("vi_checkpoint is a start of its own: neither init_checkpoint nor prior.")
    task = tasks.load_task("implicit", settings)
    generator = make_generator(task)
    task = task._replace(settings=complete(task.settings, generator))
    settings = task.settings
    method = make_method(task, generator)
    directory = tasks.open_folder(task)
    refinement = refine.stage(task, directory)  # its mistakes are told before anything is trained
    training_runs.train(
        task,
        directory,
        method,
        training.ELBO._replace(name=f"{settings.objective} objective"),
        num_members=settings.num_members,
        measure=lambda result: {"bound": read_bound(directory)},
        initial_params=find_starts(task, directory),
        num_draws=settings.num_draws,
        change_draws=functools.partial(final_draws, task, directory, generator, method, refinement),
    )


def make_generator(task: Task) -> Generator:
    """The generator that the settings describe; says what it is."""
    shapes = task.log_joint.random_shapes
    description = generator_files.describe_generator(
        task.settings.generator, shapes, task.settings.max_generator_parameters
    )
    generator = generators.make_generator(description, shapes)
    print(
        f"Generator: {description}, {generators.num_parameters(generator, shapes):,} parameters "
        f"for {generator.num_weights:,} weights."
    )
    return generator


def complete(settings: Settings, generator: Generator) -> Settings:
    """Fills in what depends on the generator, and refuses what contradicts itself."""
    small = generator.num_weights <= generators.MLP_LIMIT
    settings = settings.fill(
        {"num_evidence_draws": 200 if small else 0}, "by the number of weights"
    )
    settings = settings.fill({"sandwich_draws": 1000 if small else 0}, "by the number of weights")
    estimator = implicit_vi.default_estimator(generator)
    settings = settings.fill({"entropy": estimator}, "by the latent size")
    if settings.num_evidence_draws == 1:
        raise UserError("One draw gives no error: num_evidence_draws must be 0 or above 1.")
    if settings.member_weights == "evidence" and not settings.num_evidence_draws:
        raise UserError("Weights by evidence need its value: give num_evidence_draws.")
    given = [flag.name for flag in LINEARISED if settings.was_given(flag.name)]
    if given and "linearised" not in (settings.objective, settings.evidence):
        raise UserError(f"{given[0]} is for the linearised entropy, which nothing here uses.")
    for flags, objectives in ((SEMI_IMPLICIT, ("sivi", "uivi")), (UNBIASED, ("uivi",))):
        given = [flag.name for flag in flags if settings.was_given(flag.name)]
        if given and settings.objective not in objectives:
            raise UserError(
                f"{given[0]} is for --objective={' or '.join(objectives)}, not "
                f"{settings.objective}."
            )
    return settings


def make_method(task: Task, generator: Generator) -> Method:
    """Implicit VI as the settings describe it."""
    settings = task.settings
    num_rows = len(task.dataset.y_train)
    optimizer = optim_utils.optimizer_of(settings, num_rows)
    if settings.clip_gradient:
        optimizer = optax.chain(optax.clip_by_global_norm(settings.clip_gradient), optimizer)
    batches = num_minibatches(num_rows, settings.batch_size)
    mesh = devices.make_mesh(settings.num_members)
    return implicit_vi.implicit_vi(
        task.log_joint,
        optimizer,
        settings.batch_size,
        generator=generator,
        estimator=make_entropy(settings),
        num_samples=settings.num_samples,
        learn_noise_scale=settings.learn_noise_scale,
        start=samplers.Start(settings.start, settings.init_spread, settings.noise_scale),
        objective=implicit_vi.Objective(
            settings.objective,
            settings.entropy_weight,
            settings.prior_weight,
            settings.annealing_start,
            round(settings.annealing_epochs * batches),
        ),
        place=devices.draw_placement(mesh, settings.num_samples),
    )


def make_entropy(settings: Settings) -> implicit_vi.EntropyEstimator:
    """How training estimates the entropy of its objective."""
    if settings.objective == "sivi":
        return semi_implicit.Mixture(settings.num_mixture_draws)
    if settings.objective == "uivi":
        kept = settings.reverse_transitions // 2
        return unbiased.Unbiased(
            settings.reverse_transitions - kept,
            kept,
            settings.reverse_leapfrog_steps,
            settings.num_mixture_draws,
        )
    return make_estimator(settings)


def make_estimator(settings: Settings) -> implicit_vi.Estimator:
    """The estimator of the linearised entropy that training uses."""
    return implicit_vi.Estimator(
        settings.entropy,
        settings.entropy_steps,
        settings.entropy_probes,
        settings.entropy_warm_start,
    )


def find_starts(task: Task, directory: pathlib.Path) -> Params | vi.VariationalParams | None:
    """Where the members start: parameters, or the mean-field posterior of a run_vi.py run."""
    settings, log_joint = task.settings, task.log_joint
    members, starts = settings.num_members, settings.pretrain_starts
    if settings.init_checkpoint:
        return checkpoint_utils.load_starts(
            settings.init_checkpoint, log_joint.shapes, members, "num_members"
        )
    if settings.vi_checkpoint:
        template = jax.eval_shape(
            jax.vmap(lambda key: vi.initial_variational(log_joint, log_joint.init(key))),
            jax.random.split(jax.random.key(0), members),
        )
        path = pathlib.Path(settings.vi_checkpoint)
        return checkpoint_utils.load_part(path, "variational", template)
    resumed = hosts.share(checkpoint_utils.has_checkpoint(directory))
    if settings.start == "prior" or not settings.pretrain_epochs or resumed:
        return None
    print(
        f"Pretraining: {members * starts} MAP solution(s), {settings.pretrain_epochs} epochs.",
        flush=True,
    )
    num_rows = len(task.dataset.y_train)
    optimizer = optim_utils.optimizer_of(settings, num_rows, settings.pretrain_epochs)
    return pretrain.pretrain(
        sgd.sgd(log_joint, optimizer, settings.batch_size),
        log_joint,
        task.dataset,
        seed=settings.seed,
        num_chains=members,
        num_starts=starts,
        num_epochs=settings.pretrain_epochs,
    )


def final_draws(
    task: Task,
    directory: pathlib.Path,
    generator: Generator,
    method: Method,
    refined: Callable[[State, Params], Params] | None,
    state: State,
    draws: Params,
) -> Params:
    """The draws of the end: members' evidence told, members weighed, draws refined."""
    settings = task.settings
    if settings.num_evidence_draws:
        found = member_evidence(task, generator, state)
        weights = mixtures.weigh(settings.member_weights, found.values)
        print(mixture.describe(found, weights))
        value, error = mixtures.of_mixture(found.values, found.errors, weights)
        both = None
        if settings.sandwich_draws:
            both = sandwich.find(task, generator, state.sampler)
            print(sandwich.tell(directory, f"implicit, {settings.objective}", both))
        evidence.write(
            directory,
            found.kind,
            value,
            error,
            values=found.values,
            errors=found.errors,
            weights=weights,
            sandwich=both,
        )
        if settings.member_weights != "even":
            draws = mixture.mixture_draws(method, state, weights, settings.num_draws, settings.seed)
    return refined(state, draws) if refined else draws


def read_bound(directory: pathlib.Path) -> Bound | None:
    """The hierarchical bounds that `final_draws` has left; None where there are none."""
    found = evidence.read(directory)
    if found is None or not found["estimator"].startswith(mixture.HIERARCHICAL):
        return None
    if None in found["values"]:
        return None
    return Bound(*(np.array(found[name], float) for name in ("values", "errors")))


def member_evidence(task: Task, generator: Generator, state: State) -> mixture.Evidence:
    """What each member says of the evidence, as the flags ask for it."""
    settings = task.settings
    arguments = (task.log_joint, task.dataset, generator)
    further = (state.sampler, settings.seed, settings.num_evidence_draws)
    if settings.evidence == "hierarchical":
        return mixture.hierarchical_bounds(*arguments, *further, settings.num_inner_draws)
    # What training estimates may be affordable once, at the end.
    exact = generator.latent_size <= implicit_vi.EXACT_LIMIT
    estimator = implicit_vi.Estimator("exact") if exact else make_estimator(settings)
    return mixture.linearised_estimates(*arguments, estimator, *further)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
