"""Implicit VI from settings: generator, method, start; evidence and draws of the end."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_posteriors.core import progress, vi
from haiku_posteriors.core.data import Data, num_minibatches, take_rows
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import (
    generators,
    implicit_vi,
    mixtures,
    objectives,
    samplers,
    semi_implicit,
    unbiased,
)
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.judging.training import Bound
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, checkpoint_utils, devices, optim_utils
from haiku_posteriors.utils.report import evidence
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import (
    generator_files,
    local_scales,
    mean_field_start,
    mixture,
    pretrain,
    sandwich,
    variational,
)
from haiku_posteriors.utils.tasks import Task

NUM_GAP_DRAWS = 64


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


def complete(task: Task, generator: Generator) -> Settings:
    """Fills in what depends on generator and network, and refuses what contradicts itself."""
    settings = task.settings
    small = generator.num_weights <= generators.MLP_LIMIT
    settings = settings.fill(
        {"num_evidence_draws": 200 if small else 0}, "by the number of weights"
    )
    settings = settings.fill({"sandwich_draws": 1000 if small else 0}, "by the number of weights")
    entropy = objectives.default_entropy(generator)
    settings = settings.fill({"objective": entropy}, "by the latent size")
    estimator = objectives.default_estimator(generator)
    settings = settings.fill({"entropy": estimator}, "by the latent size")
    start, instead = "network", _instead_of_mean_field(task)
    if settings.until_converged and instead is None:
        start = samplers.default_start(task.log_joint, take_rows(task.dataset.x_train, slice(8)))
    settings = settings.fill({"start": start}, "by the network and whether the run ends by itself")
    is_trained = settings.start == "mean_field"
    if is_trained and instead is not None:
        raise UserError(f"start=mean_field trains mean-field VI first, and cannot with {instead}.")
    if settings.until_converged and (is_trained or settings.vi_checkpoint):
        # The first steps of a run that ends by itself are long, and would leave what is trained.
        step = progress.DECREASE * settings.init_step_size
        settings = settings.cap("init_step_size", step, "shorter after a trained start")
    if settings.num_evidence_draws == 1:
        raise UserError("One draw gives no error: num_evidence_draws must be 0 or above 1.")
    if settings.member_weights == "evidence" and not settings.num_evidence_draws:
        raise UserError("Weights by evidence need its value: give num_evidence_draws.")
    return settings


def _instead_of_mean_field(task: Task) -> str | None:
    """What the settings ask for in place of a mean-field start; None if nothing."""
    settings = task.settings
    others = {
        "init_checkpoint": settings.init_checkpoint,
        "vi_checkpoint": settings.vi_checkpoint,
        "a given noise_scale": settings.was_given("noise_scale"),
        "learn_noise_scale=false": not settings.learn_noise_scale,
        "pretrain_epochs=0": not settings.pretrain_epochs,
        "annealing_epochs, which begin without a likelihood": settings.annealing_epochs,
        "as many rows and parameters": not local_scales.is_affordable(task),
    }
    return next((name for name, asked in others.items() if asked), None)


def make_method(task: Task, generator: Generator) -> Method:
    """Implicit VI as the settings describe it. Says what `local` or `flipout` covers."""
    settings = task.settings
    num_rows = len(task.dataset.y_train)
    optimizer = optim_utils.optimizer_of(settings, num_rows)
    if settings.clip_gradient:
        optimizer = optax.chain(optax.clip_by_global_norm(settings.clip_gradient), optimizer)
    batches = num_minibatches(num_rows, settings.batch_size)
    mesh = devices.make_mesh(settings.num_members)
    variational.tell_covered(task)
    return implicit_vi.implicit_vi(
        task.log_joint,
        optimizer,
        settings.batch_size,
        generator=generator,
        estimator=make_entropy(settings),
        num_samples=settings.num_samples,
        learn_noise_scale=settings.learn_noise_scale,
        start=samplers.Start(settings.start, settings.init_spread, settings.noise_scale),
        objective=objectives.Objective(
            settings.objective,
            settings.entropy_weight,
            settings.prior_weight,
            settings.annealing_start,
            round(settings.annealing_epochs * batches),
        ),
        place=devices.draw_placement(mesh, settings.num_samples),
        noise=settings.vi_estimator,
    )


def make_entropy(settings: Settings) -> objectives.EntropyEstimator:
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


def make_estimator(settings: Settings) -> objectives.Estimator:
    """The estimator of the linearised entropy that training uses."""
    return objectives.Estimator(
        settings.entropy,
        settings.entropy_steps,
        settings.entropy_probes,
        settings.entropy_warm_start,
    )


def find_starts(task: Task, directory: pathlib.Path) -> Params | vi.VariationalParams | None:
    """Where the members start: parameters, or the mean-field posterior of a run_vi.py run."""
    settings, log_joint = task.settings, task.log_joint
    members = settings.num_members
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
    if settings.start == "prior":
        return None
    num_rows = len(task.dataset.y_train)
    optimizer = optim_utils.optimizer_of(settings, num_rows, settings.pretrain_epochs)
    trained = pretrain.map_solutions(task, directory, optimizer)
    # The noise begins as wide as the posterior is around the network: with 0.01 for all weights
    # training has first to find their scales.
    scales_given = settings.was_given("noise_scale") or not settings.learn_noise_scale
    if trained is None or scales_given or not local_scales.is_affordable(task):
        return trained

    def begin(key: jax.Array, params: Params, scales: Params) -> vi.VariationalParams:
        del key
        return vi.around(log_joint, params, scales)

    family = vi.MeanFieldFamily(log_joint)
    starts = local_scales.curvature_starts(task, trained, begin, family)
    if settings.start == "mean_field":
        return mean_field_start.train(task, directory, starts)
    return starts


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


def measure(
    task: Task, directory: pathlib.Path, generator: Generator, state: State
) -> dict[str, Any]:
    """What else the verdict needs to know: the bound of the end, and how loose the watched one was.

    Of the unbiased gradient's objective alone, whose value is not known but by bounds.
    """
    settings, estimator = task.settings, make_entropy(task.settings)
    if settings.objective != "uivi":
        return {"bound": read_bound(directory)}

    def gap(key: jax.Array, state: State, data: Data) -> jax.Array:
        terms, _ = objectives.evidence_terms(
            key,
            task.log_joint,
            generator,
            estimator,
            state.sampler,
            data,
            NUM_GAP_DRAWS,
            log_step_size=state.log_step_size,
        )
        assert terms.gap is not None
        return jnp.mean(terms.gap)

    found = local_scales.over_members(task, chains.IMPORTANCE, gap, state)
    return {"bound": read_bound(directory), "gap": np.asarray(found)}


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
    exact = generator.latent_size <= objectives.EXACT_LIMIT
    estimator = objectives.Estimator("exact") if exact else make_estimator(settings)
    return mixture.linearised_estimates(*arguments, estimator, *further)
