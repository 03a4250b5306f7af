"""Variational families over all weights from settings: method, start, importance weights."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import low_rank, multiplicative_flows, trees, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.densities import BoundedFamily, Posterior
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.gaussian_priors import precision_diagonal
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices, optim_utils, run_priors
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import local_scales, warm_start
from haiku_posteriors.utils.tasks import Task

DEFAULT_RANK, LATENT_SAMPLES = 10, 8


def begin(settings: Settings) -> Settings:
    """Fills in what the family decides before the table of defaults does.

    A draw of z moves all weights along R columns at once: with one a step the noise of the columns'
    gradients costs more than they gain (docs/semi_implicit.md). So it is with latents of flows.
    """
    if settings.vi_family in ("low_rank", "mnf"):
        settings = settings.fill({"vi_num_samples": LATENT_SAMPLES}, "families with latents")
    if settings.method == "vi" and settings.prior_from:
        settings = settings.fill({"warm_start_epochs": 0}, "q starts at the earlier posterior")
    return settings


def complete(settings: Settings, log_joint: LogJoint) -> Settings:
    """Fills in a rank, and refuses one that is too large."""
    num_random = trees.size(log_joint.random_shapes)
    settings = settings.fill({"vi_rank": min(DEFAULT_RANK, num_random)}, "10, or all weights")
    if settings.vi_rank > num_random:
        raise UserError(
            f"vi_rank must be at most the number of random weights ({num_random}), not "
            f"{settings.vi_rank}."
        )
    return settings


def make_method(task: Task) -> tuple[Method, BoundedFamily]:
    """VI of one of these families as the settings describe it, and the family.

    Says what `local` or `flipout` covers.
    """
    settings, log_joint = task.settings, task.log_joint
    num_rows = len(task.dataset.y_train)
    arguments = (log_joint, optim_utils.optimizer_of(settings, num_rows), settings.batch_size)
    shared: dict[str, Any] = {
        "sigma_init": settings.vi_sigma_init,
        "estimator": settings.vi_estimator,
        "num_samples": settings.vi_num_samples,
    }
    tell_covered(task)
    if settings.vi_family == "low_rank":
        method = low_rank.low_rank_vi(*arguments, rank=settings.vi_rank, **shared)
        return method, family_of(task)
    if settings.vi_family == "mnf":
        method = multiplicative_flows.multiplicative_flow_vi(
            *arguments, **(_flow_sizes(settings) | shared)
        )
        return method, family_of(task)
    batches = num_minibatches(num_rows, settings.batch_size)
    method = vi.mean_field_vi(
        *arguments,
        **shared,
        kl=settings.kl,
        kl_weight=_number_or_name(settings.kl_weight),
        kl_warmup_steps=round(settings.kl_warmup_epochs * batches),
        learn_prior_scale=_learned_scale(settings),
    )
    return method, family_of(task)


def find_starts(task: Task, directory: pathlib.Path, given: Params | None) -> Params | Posterior:
    """Where the members start.

    Around trained networks q is as wide as curvature and ELBO say; where the prior is an earlier
    posterior, q starts as that.
    """
    settings = task.settings
    if not settings.warm_start_epochs:
        elsewhere = given is not None or settings.was_given("vi_sigma_init")
        is_earlier = task.method == "vi" and settings.prior_from and not elsewhere
        return _at_prior(task, directory) if is_earlier else given
    trained = warm_start.train_starts(task, directory, given, settings.num_members)
    # Under the prior of Gaussian dropout a weight that starts as wide as its curvature is lost.
    is_dropout = task.method == "gaussian_dropout"
    given_width = is_dropout or settings.was_given("vi_sigma_init")
    if given_width or not local_scales.is_affordable(task):
        return trained
    begin = functools.partial(_around, task)
    return local_scales.curvature_starts(task, trained, begin, family_of(task))


def _around(task: Task, key: jax.Array, params: Params, scales: Params) -> Posterior:
    """q of the family around one member's parameters."""
    settings, log_joint = task.settings, task.log_joint
    if settings.vi_family == "low_rank":
        return low_rank.initial_low_rank(key, log_joint, params, settings.vi_rank, scale=scales)
    if settings.vi_family == "mnf":
        return multiplicative_flows.initial_multiplicative(
            key, log_joint, params, scale=scales, **_flow_sizes(settings)
        )
    return vi.around(log_joint, params, scales, _learned_scale(settings))


def _at_prior(task: Task, directory: pathlib.Path) -> Posterior:
    """q as the Gaussian that is the prior, as far as the family has it; members, ...

    A family without its correlations takes the variances of each weight given all others, of which
    the nearest mean-field q is made.
    """
    settings, log_joint = task.settings, task.log_joint
    gaussian, _ = run_priors.load(run_priors.path_of(directory, settings.prior_from), log_joint)
    random, point = log_joint.partition(log_joint.shapes)

    def placed(named: Mapping[str, np.ndarray], like: Params) -> Params:
        return trees.map_with_name(lambda name, leaf: jnp.asarray(named[name], leaf.dtype), like)

    params = trees.merge(placed(gaussian.mean, random), placed(gaussian.point, point))
    has_columns = settings.vi_family == "low_rank" and settings.vi_rank == gaussian.rank
    conditional = {name: p**-0.5 for name, p in precision_diagonal(gaussian).items()}
    scales = placed(gaussian.scale if has_columns else conditional, random)

    def start(member: jax.Array) -> Posterior:
        key = chains.chain_key(settings.seed, chains.CURVATURE, 0, member)
        q = _around(task, key, params, scales)
        if not has_columns:
            return q
        columns = jax.tree.map(jnp.divide, placed(gaussian.factor, random), scales)
        return q._replace(factor=columns)

    print("q starts at the earlier posterior, its prior.", flush=True)
    return devices.to_host(jax.vmap(start)(jnp.arange(settings.num_members)))


def family_of(task: Task) -> BoundedFamily:
    """The family of the settings, with draws of weights as such."""
    if task.settings.vi_family == "low_rank":
        return low_rank.LowRankFamily(task.log_joint)
    if task.settings.vi_family == "mnf":
        return multiplicative_flows.MultiplicativeFamily(task.log_joint)
    return vi.MeanFieldFamily(task.log_joint)


def tell_covered(task: Task) -> None:
    """Says of which weights `local` or `flipout` draws the noise layer by layer."""
    estimator = task.settings.vi_estimator
    if estimator == "reparameterization":
        return
    covered, drawn = noisy_layers.covered_parameters(
        task.log_joint, task.dataset.form.inputs.example(), estimator
    )
    by_weight = f"; drawn as weights: {', '.join(drawn)}" if drawn else ""
    total = len(covered) + len(drawn)
    print(f"'{estimator}' covers {len(covered)} of {total} arrays{by_weight}.")


def _flow_sizes(settings: Settings) -> dict[str, Any]:
    return {"num_couplings": settings.flow_couplings, "hidden_size": settings.flow_hidden_size}


def _learned_scale(settings: Settings) -> str | None:
    return None if settings.learn_prior_scale == "None" else settings.learn_prior_scale


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
