"""The layerwise posterior from settings: inducing inputs from the data, a start from training."""

import pathlib

import jax
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import num_minibatches, take_rows
from haiku_posteriors.core.densities import Family
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.layerwise import layerwise_vi
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, optim_utils
from haiku_posteriors.utils.stages import pretrain
from haiku_posteriors.utils.tasks import Task

PRETRAINING_STEP = 1e-2  # of Adam, on weights: pseudo-outputs take longer ones
MAX_NAMES = 8  # in a list of the terminal


def make_method(task: Task) -> tuple[Method, Family]:
    """Layerwise VI as the settings describe it, and its family; says what that covers."""
    settings, log_joint = task.settings, task.log_joint
    num_rows = len(task.dataset.y_train)
    if settings.num_inducing > num_rows:
        raise UserError(
            f"num_inducing must be at most the number of training rows ({num_rows}), not "
            f"{settings.num_inducing}."
        )
    key = jax.random.fold_in(jax.random.key(settings.seed), chains.INDUCING)
    rows = np.sort(jax.random.permutation(key, num_rows)[: settings.num_inducing])
    inducing_inputs = take_rows(task.dataset.x_train, rows)
    if settings.optimizer == "Adam":
        num_steps = settings.num_epochs * num_minibatches(num_rows, settings.batch_size)
        optimizer = optim_utils.warmed_adam(settings.init_step_size, num_steps)
    else:
        optimizer = optim_utils.optimizer_of(settings, num_rows, settings.num_epochs)
    family = layerwise_vi.find_family(log_joint, inducing_inputs, settings.inducing_positions)
    method = layerwise_vi.layerwise_vi(
        log_joint,
        optimizer,
        settings.batch_size,
        inducing_inputs=inducing_inputs,
        inducing=settings.inducing,
        precision=settings.layerwise_precision,
        max_positions=settings.inducing_positions,
        rows_per_input=num_rows / settings.num_inducing,
        num_samples=settings.vi_num_samples,
        sigma_init=settings.vi_sigma_init,
    )
    others = [
        name
        for name in trees.named_leaves(log_joint.random_shapes)
        if trees.module_name(name) not in family.shapes
    ]
    rest = f"; independent weights: {_listed(others)}" if others else ""
    print(
        f"Drawn given the layers before, with {settings.num_inducing} inducing inputs: "
        f"{_listed(list(family.shapes))}{rest}."
    )
    return method, family


def _listed(names: list[str]) -> str:
    """Names in a sentence; of many the first and the last."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: MAX_NAMES - 1])}, ... {names[-1]} ({len(names)} in all)"


def find_starts(task: Task, directory: pathlib.Path) -> Params | None:
    """MAP solutions by Adam, see `pretrain.map_solutions`."""
    batches = num_minibatches(len(task.dataset.y_train), task.settings.batch_size)
    num_updates = max(task.settings.pretrain_epochs * batches, 1)
    optimizer = optim_utils.make_optimizer("Adam", PRETRAINING_STEP, num_updates)
    return pretrain.map_solutions(task, directory, optimizer)
