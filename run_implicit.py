"""Implicit variational inference: a neural sampler of weights, and a lower bound of the evidence.

python run_implicit.py                                    embedded toy regression
python run_implicit.py --refine=mclmc                     each draw moved by 1,000 gradients
python run_implicit.py --objective=linearised             the published objective, no bound
python run_implicit.py --objective=sivi --num_mixture_draws=100   on a bound, without one
python run_implicit.py --objective=uivi                   by an unbiased gradient of the entropy
python run_implicit.py --entropy=singular_value           the estimator of arXiv 2310.06643
python run_implicit.py --dataset_name=digits --generator=configs/mnist_mlp.yaml
"""

import functools
from collections.abc import Sequence

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import mixtures, objectives, samplers
from haiku_posteriors.utils import cmd_args_utils, script_utils, tasks, training_runs
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import training
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import family_flags, implicit, refine

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
        choices=objectives.ENTROPY_ESTIMATORS,
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
        "sivi: K, conditionals in the mixture; uivi: draws of the bounds that it is watched by.",
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
        None,
        "Entropy in what is maximised: of the linearised generator (no bound), a lower bound by an "
        "encoder or by a mixture of K conditionals, or an unbiased gradient.",
        "hierarchical or, for large latents, linearised",
        choices=objectives.ENTROPIES,
    ),
    *LINEARISED,
    *SEMI_IMPLICIT,
    *UNBIASED,
    Flag("num_samples", "integer", 8, "Draws of the latent per minibatch.", lower_bound=1),
    family_flags.ESTIMATOR,
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
        None,
        "Where draws begin: mean-field VI of the same run, a trained network, or the prior.",
        "mean_field where a run of a network ends by itself, else network",
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
    settings = choose_objective(settings)
    task = tasks.load_task("implicit", settings)
    generator = implicit.make_generator(task)
    task = task._replace(settings=implicit.complete(task, generator))
    settings = task.settings
    method = implicit.make_method(task, generator)
    directory = tasks.open_folder(task)
    refinement = refine.stage(task, directory)  # its mistakes are told before anything is trained
    training_runs.train(
        task,
        directory,
        method,
        training.ELBO._replace(name=f"{settings.objective} objective"),
        num_members=settings.num_members,
        measure=lambda result: implicit.measure(task, directory, generator, result.state.state),
        initial_params=implicit.find_starts(task, directory),
        num_draws=settings.num_draws,
        change_draws=functools.partial(
            implicit.final_draws, task, directory, generator, method, refinement
        ),
    )


def choose_objective(settings: Settings) -> Settings:
    """Takes the objective that given flags are for, and refuses what the chosen one would not read.

    Without any such flag the generator decides, once it is known.
    """
    given = [flag.name for flag in LINEARISED if settings.was_given(flag.name)]
    if given and settings.evidence != "linearised":
        settings = settings.fill({"objective": "linearised"}, f"{given[0]} was given")
        if settings.objective != "linearised":
            raise UserError(f"{given[0]} is for the linearised entropy, which nothing here uses.")
    for flags, readers in ((SEMI_IMPLICIT, ("sivi", "uivi")), (UNBIASED, ("uivi",))):
        given = [flag.name for flag in flags if settings.was_given(flag.name)]
        if given and settings.objective not in readers:
            raise UserError(
                f"{given[0]} is for --objective={' or '.join(readers)}, not "
                f"{settings.objective or 'for the default'}."
            )
    return settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
