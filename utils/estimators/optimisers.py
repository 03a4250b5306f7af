"""Plans of optimisers: to the end by themselves, or a number of epochs."""

import math
from typing import Any

import jax
import optax

from haiku_posteriors.core import dropout, progress, sgd, trees, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import generators, implicit_vi, objectives
from haiku_posteriors.core.judging.training import Objective
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.utils import optim_utils, settings
from haiku_posteriors.utils.estimators import forms
from haiku_posteriors.utils.estimators.forms import Plan, Wishes
from haiku_posteriors.utils.report import training as training_report
from haiku_posteriors.utils.report import verdicts
from haiku_posteriors.utils.train_utils import RunResult


def ensemble(log_joint: LogJoint, num_rows: int, wishes: Wishes, num_members: int = 10) -> Plan:
    """Networks trained from independent starts."""
    if wishes.num_draws not in (None, 1):
        raise UserError("A member of an ensemble is one draw: give num_chains, not num_draws.")
    training = _Training(log_joint, num_rows, wishes, training_report.LOG_JOINT)
    method = sgd.sgd(log_joint, training.optimizer(), training.batch_size, **training.options)
    return training.plan(method, num_members, num_draws=1)


def map(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    """One of them."""
    return ensemble(log_joint, num_rows, wishes, num_members=1)


def mean_field(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    """Mean-field VI."""
    training = _Training(log_joint, num_rows, wishes, training_report.ELBO)
    estimator = noisy_layers.default_estimator(log_joint)
    options = {"sigma_init": 1e-2, "estimator": estimator, **training.options}
    optimizer, batch_size = training.optimizer(), training.batch_size
    return training.plan(vi.mean_field_vi(log_joint, optimizer, batch_size, **options))


def mc_dropout(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    """MC dropout."""
    training = _Training(log_joint, num_rows, wishes, training_report.DROPOUT)
    defaults = {"optimizer": training.optimizer(), "batch_size": training.batch_size}
    return training.plan(dropout.mc_dropout(log_joint, **{**defaults, **training.options}))


def implicit(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    """Implicit VI."""
    noise = noisy_layers.default_estimator(log_joint)
    options = {"num_samples": 8, "noise": noise, **(wishes.options or {})}
    if "generator" not in options:
        shapes = log_joint.random_shapes
        options["generator"] = generators.make_generator(generators.automatic(shapes), shapes)
    if "objective" not in options and "estimator" not in options:
        entropy = objectives.default_entropy(options["generator"])
        options["objective"] = objectives.Objective(entropy)
    training = _Training(
        log_joint,
        num_rows,
        wishes,
        training_report.ELBO,
        step_size=1e-3,
        draws_per_step=options["num_samples"],
        largest_step=settings.MAX_GENERATOR_STEP,
        starts_trained=True,
    )
    # Clipped as in run_implicit.py.
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), training.optimizer())
    method = implicit_vi.implicit_vi(log_joint, optimizer, training.batch_size, **options)
    return training.plan(method)._replace(warm_start_epochs=training.warm_start_epochs)


class _Training:
    """How an optimiser is run: to the end by itself, or, if asked for, a number of epochs."""

    def __init__(
        self,
        log_joint: LogJoint,
        num_rows: int,
        wishes: Wishes,
        objective: Objective,
        step_size: float = 1e-2,
        draws_per_step: int = 1,
        largest_step: float = math.inf,
        starts_trained: bool = False,
    ):
        """`step_size` is that of a schedule; without one it is the scripts', to `largest_step`.

        With `starts_trained` members that end by themselves start at networks trained by Adam, as
        those of the scripts do: around a network's random start a generator is all but lost.
        """
        forms.refuse(wishes, "num_burn_in", *(() if starts_trained else ("warm_start_epochs",)))
        self.options = wishes.options or {}
        self._log_joint, self._wishes, self._objective = log_joint, wishes, objective
        self._num_rows, self._by_itself = num_rows, wishes.num_steps is None
        rows = forms.BATCH_SIZE
        self.warm_start_epochs = wishes.warm_start_epochs or 0
        if starts_trained and self._by_itself and wishes.warm_start_epochs is None:
            self.warm_start_epochs = settings.warm_start_epochs(num_rows)
        if self._by_itself:
            rows = settings.affordable_rows(trees.size(log_joint.shapes), draws_per_step)
            step = settings.STEP_OVER_PRIOR_STD * min(jax.tree.leaves(log_joint.prior_scales))
            step_size = min(step, largest_step)
        self._step_size = step_size if wishes.step_size is None else wishes.step_size
        self.batch_size = min(wishes.batch_size or rows, num_rows)
        self._batches = num_minibatches(num_rows, self.batch_size)
        self._num_steps = wishes.num_steps or -(-settings.MAX_UPDATES // self._batches)

    def optimizer(self) -> optax.GradientTransformation:
        """Adam, whose step `core.progress` decreases or a schedule."""
        length = None if self._by_itself else self._num_steps * self._batches
        return optim_utils.make_optimizer("Adam", self._step_size, length)

    def plan(self, method: Method, num_members: int = 1, num_draws: int = 100) -> Plan:
        """The plan; one that ends by itself ends with a verdict as well."""
        members = self._wishes.num_chains or num_members
        draws = self._wishes.num_draws or num_draws
        if not self._by_itself:
            return Plan(method, members, self._num_steps, draws)
        objective, num_random = self._objective, trees.size(self._log_joint.random_shapes)
        rules = optim_utils.rules_of_auto(self._batches, num_random)
        rules = rules._replace(num_evaluations=objective.evaluation_epochs(self._batches))

        def diagnose(result: RunResult) -> dict[str, Any]:
            noise = None
            if objective is training_report.LOG_JOINT:
                noise = training_report.learned_noise(self._log_joint, result.state, self._num_rows)
            verdict, content = training_report.judge_training(
                result.state.progress, rules, objective, noise=noise
            )
            return {**content, **verdicts.as_content(verdict)}

        return Plan(
            progress.watch(method, rules),
            members,
            self._num_steps,
            draws,
            is_finished=progress.all_reached,
            diagnose=diagnose,
        )
