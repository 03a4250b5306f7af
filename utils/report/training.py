"""What optimisers say about themselves at the end of a run: diagnostics.json and a verdict."""

import pathlib
from typing import Any

import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.judging import training, trends
from haiku_posteriors.core.judging.diagnostics import Verdict
from haiku_posteriors.core.judging.training import Bound, FallingNoise, Objective, Training
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP, UNLIKELY_NOISE
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.progress import Progress, Rules, WatchedState
from haiku_posteriors.utils.report import verdicts

LOG_JOINT = Objective("log-joint", "Raise batch_size")
DROPOUT = Objective("log-joint", "Raise batch_size", num_evaluations=32)
ELBO = Objective("ELBO", "Raise the draws per step or batch_size", num_evaluations=32)


def training_of(progress: Progress, rules: Rules) -> Training:
    """How far members have come, from their states at the end, (members, ...) each."""
    if rules.ends is not None:
        # Batches of equal ways: their iterates scatter by a variance that is proportional to the
        # step, which is one over the epochs of a batch, and so do values of a noisy objective.
        weights = np.maximum(np.diff((rules.start, *rules.ends)), 1)
        last = trends.trend(progress.values, weights)
        is_known = np.asarray(progress.num_values) == trends.NUM_BATCHES
        epochs = np.where(is_known, rules.ends[-1] - rules.start, 0)
        return Training(last, epochs, None, _where(is_known, progress.values[:, -1]))
    # A round that is not settled makes the next one twice as long.
    is_settled = np.asarray(progress.last.highest) < rules.tolerance
    length = np.asarray(progress.round_length) // np.where(is_settled, 1, 2)
    epochs = np.where(np.asarray(progress.num_rounds) > 0, length, 0)
    objectives = _where(epochs > 0, progress.objective)
    return Training(progress.last, epochs, np.asarray(progress.is_reached), objectives)


def _where(is_known: np.ndarray, objectives: Any) -> np.ndarray:
    """NaN, null in JSON, of members that were cut short: their zeros are no values."""
    return np.where(is_known, np.asarray(objectives), np.nan)


def judge_training(
    progress: Progress,
    rules: Rules,
    objective: Objective,
    *,
    remaining: np.ndarray | None = None,
    pareto_k: np.ndarray | None = None,
    bound: Bound | None = None,
    gap: np.ndarray | None = None,
    noise: FallingNoise | None = None,
) -> tuple[Verdict, dict[str, Any]]:
    """The verdict on a run of an optimiser, and the numbers that it is from.

    Args:
      progress: of all members, at the end.
      rules: by which they were watched.
      objective: that they maximise.
      remaining, pareto_k, bound, gap, noise: see `training.verdict`.
    """
    found = training_of(progress, rules)
    verdict = training.verdict(
        found,
        objective,
        rules.tolerance,
        remaining=remaining,
        pareto_k=pareto_k,
        bound=bound,
        gap=gap,
        noise=noise,
    )
    content = {
        "objective": objective.name,
        "gain": np.asarray(found.last.gain).tolist(),
        "gain_error": np.asarray(found.last.error).tolist(),
        "gain_epochs": found.num_epochs.tolist(),
        "tolerance": rules.tolerance,
        "ended_by_itself": None if found.is_reached is None else found.is_reached.tolist(),
        "objectives": found.objectives.tolist(),
        "num_phases": np.asarray(progress.num_phases).tolist(),
        "remaining_gain": None if remaining is None else np.asarray(remaining).tolist(),
        "pareto_k": None if pareto_k is None else np.asarray(pareto_k).tolist(),
        "bound": None if bound is None else bound.values.tolist(),
        "bound_error": None if bound is None else bound.errors.tolist(),
        "bound_gap": None if gap is None else gap.tolist(),
        "noise_share_of_gain": None if noise is None else noise.share.tolist(),
    }
    return verdict, content


def learned_noise(log_joint: LogJoint, watched: WatchedState, num_rows: int) -> FallingNoise | None:
    """Of point estimates whose training ends by itself; None where no noise is learned.

    Args:
      log_joint: the model.
      watched: of members at the end, whose state has `params`.
      num_rows: of the data.
    """
    likelihood, progress = log_joint.likelihood, watched.progress
    own = watched.state.params.get(PARAMETER_GROUP)
    if not own or likelihood.noise_std is None or progress.average is None:
        return None
    at_end, in_batch, before = (
        np.asarray(likelihood.noise_std(state.params[PARAMETER_GROUP]))
        for state in (watched.state, progress.batch_average, progress.average)
    )
    length = np.asarray(progress.round_length) // trends.NUM_BATCHES
    now = np.where(np.asarray(progress.epoch) % length, in_batch, at_end)
    return training.falling_noise(
        progress,
        before,
        now,
        trees.size(log_joint.random_shapes),
        num_rows * likelihood.num_outputs,
        UNLIKELY_NOISE * float(likelihood.noise_std(likelihood.init())),
        log_joint.temperature,
    )


def report_training(
    directory: pathlib.Path, progress: Progress, rules: Rules, objective: Objective, **measured: Any
) -> None:
    """Judges a run of an optimiser, by `judge_training` with its arguments, and says so."""
    verdicts.tell(directory, *judge_training(progress, rules, objective, **measured))
