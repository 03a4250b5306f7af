"""Draws of any approximation, moved towards the posterior: N gradients of the log-joint for each.

    mclmc   unadjusted microcanonical steps (`core.mclmc`). In the first half a draw finds its own
            step size, at which energy is conserved to ENERGY_VARIANCE per step and dimension;
            then it is frozen
    hmc     a few transitions with a Metropolis test (`core.hmc`), with one step size for all draws,
            which a pilot from some of them adapts to its target acceptance

With `collapse_output` they move all parameters but the output layer's, on the density in which that
is integrated out, and it is drawn given the others (`core.collapse`): the law they lead to is the
same, in far fewer gradients where the noise is small.

A frozen kernel that leaves p_T(w | D) invariant brings the law of the draws nearer to it in total
variation, or at least no farther, whatever its step size was chosen by. HMC's is one; unadjusted
steps lead to a law that differs by an error of the step size, and go farther for the same
gradients. What exact transitions change in their draws is measured at the end
(`utils.stages.bias`), which also shows draws that have not arrived. The loop is one of its own, in
a folder inside the run's: it is resumed like any other.
"""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from haiku_posteriors.core import collapse, hmc, mclmc, trajectories
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.bias import BiasReport
from haiku_posteriors.core.judging.diagnostics import MIN_DRAWS
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices, files, hosts, signals
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.logging_utils import Sign, tell
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import bias
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import Run, RunResult

ENERGY_VARIANCE = 1e-3
STEPS_PER_PIECE = 25  # of mclmc, after which divergences are taken back and step sizes adapted
MAX_TRANSITIONS = 20  # of hmc
PILOT_DRAWS, PILOT_TRANSITIONS = 8, 40  # of hmc
BIAS_DRAWS, BIAS_TRANSITIONS = 32, 20
REMEDY = "Raise refine_steps; if that does not help, give a smaller refine_step_size."
FOLDER, FILE = "refinement", "refinement.json"


class Refinement(NamedTuple):
    """How draws are moved.

    Attributes:
      kind: "mclmc" or "hmc".
      num_gradients: N.
      step_size: of all draws; found as above if None.
      collapse_output: whether the Gaussian output layer is integrated out.
    """

    kind: str
    num_gradients: int
    step_size: float | None = None
    collapse_output: bool = False

    @property
    def num_pieces(self) -> int:
        """Transitions that the N steps are divided into."""
        if self.kind == "hmc":
            return min(self.num_gradients, MAX_TRANSITIONS)
        return max(1, self.num_gradients // STEPS_PER_PIECE)

    @property
    def steps_per_piece(self) -> int:
        """Steps of each: N is rounded so that all have the same."""
        return max(1, round(self.num_gradients / self.num_pieces))

    def build(
        self, method: Callable[..., Method], log_joint: LogJoint, dataset: Dataset
    ) -> Callable[..., Method]:
        """`method` of its settings alone, on the target with or without its output layer."""
        if self.collapse_output:
            return functools.partial(collapse.collapsed, method, log_joint, dataset.x_train)
        return functools.partial(method, log_joint)

    def method(self, log_joint: LogJoint, dataset: Dataset) -> Method:
        """The method that moves a draw; masses are the prior's."""
        steps, size = self.steps_per_piece, self.step_size
        limits: dict[str, Any] = {"num_burn_in": max(1, self.num_pieces // 2)}
        if size is not None:
            limits = {"step_size": size, "num_burn_in": 0, "trajectory_length": size * steps}
        if self.kind == "hmc":
            # Varied, since trajectories of the length of a period lead back to where they began.
            limits |= {
                "trajectory_jitter": trajectories.DEFAULT_JITTER,
                "max_num_leapfrog_steps": math.ceil((1 + trajectories.DEFAULT_JITTER) * steps),
            }
            return self.build(hmc.hmc, log_joint, dataset)(**limits)
        method = self.build(mclmc.mclmc, log_joint, dataset)(
            energy_variance=ENERGY_VARIANCE,
            decoherence_length=trajectories.default_length(log_joint),
            noise_in_drift=False,  # draws of an approximation may start where slopes are steep
            adapt_mass_matrix=False,
            max_num_leapfrog_steps=steps,
            **limits,
        )
        # Draws of one approximation can lie in places of very different stiffness: to each its own
        # step size.
        return method._replace(pool=None)

    def pilot(self, log_joint: LogJoint, dataset: Dataset) -> Method:
        """The method that finds the step size of hmc."""
        return self.build(hmc.hmc, log_joint, dataset)(
            num_burn_in=PILOT_TRANSITIONS,
            adapt_mass_matrix=False,
            trajectory_jitter=0.0,
            max_num_leapfrog_steps=self.steps_per_piece,
        )


def chosen(settings: Settings) -> Refinement | None:
    """What the flags `cmd_args_utils.REFINEMENT` ask for; None for nothing."""
    if settings.refine is None:
        for flag in ("refine_step_size", "refine_collapse_output"):
            if settings.was_given(flag):
                raise UserError(f"{flag} is for draws that are refined: give refine, too.")
        return None
    return Refinement(
        settings.refine,
        settings.refine_steps,
        settings.refine_step_size,
        settings.refine_collapse_output,
    )


def stage(task: Task, directory: pathlib.Path) -> Callable[[State, Params], Params] | None:
    """The stage after the last step, as `tasks.execute` takes it; None if none was asked for."""
    refinement = chosen(task.settings)
    if refinement is None:
        return None
    refinement.method(task.log_joint, task.dataset)  # refused before anything is trained

    def change(state: State, draws: Params) -> Params:
        return refine(
            task.log_joint,
            task.dataset,
            draws,
            refinement,
            seed=task.settings.seed,
            directory=directory,
        )

    return change


def refine(
    log_joint: LogJoint,
    dataset: Dataset,
    draws: Params,
    refinement: Refinement,
    *,
    seed: int,
    directory: pathlib.Path | None = None,
    say: Callable[[str], None] = tell,
) -> Params:
    """Moves every draw: side by side on accelerators, in turn on CPUs.

    Args:
      log_joint: the target.
      dataset: of which the training rows are the data.
      draws: host arrays, (chains, draws, ...).
      refinement: by what.
      seed: of the run.
      directory: of the run. The loop's folder, from which it is resumed, is FOLDER there, and what
        it says of itself is in FILE; nothing is written without it.
      say: where progress goes.

    Returns:
      The moved draws, in the same shapes.
    """
    leading = jax.tree.leaves(draws)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), draws)
    total, pilot_gradients = leading[0] * leading[1], 0
    if refinement.kind == "hmc" and refinement.step_size is None:
        size, pilot_gradients = _pilot(log_joint, dataset, flat, refinement, seed, directory, say)
        refinement = refinement._replace(step_size=size)
    pieces = refinement.num_pieces
    say(
        f"Refinement: {pieces * refinement.steps_per_piece} gradients for each of {total} draws by "
        f"{refinement.kind}, in {pieces} pieces"
        f"{', the output layer integrated out' if refinement.collapse_output else ''}."
    )
    run = Run(
        log_joint,
        dataset,
        refinement.method(log_joint, dataset),
        num_steps=pieces,
        num_chains=total,
        seed=seed,
        eval_freq=pieces,
        save_freq=pieces,
        keep_history=True,
        initial_params=flat,
        purposes=chains.REFINEMENT,
        directory=directory / FOLDER if directory else None,
        unit="piece",
        expects_spread=False,
        quiet=say is not tell,
    )
    with signals.part_of(directory):
        result = run.finish()
    if hosts.is_first():  # the others have no result
        with hosts.alone():
            report = _bias(log_joint, dataset, result, refinement, seed, say)
        facts = _facts(refinement, result, pilot_gradients, report)
        for sentence in _sentences(facts, total):
            say(sentence)
        if directory:
            files.write_json(directory / FILE, facts)
    moved = jax.tree.map(lambda leaf: leaf[:, 0], result.draws) if hosts.is_first() else None
    moved = hosts.share_arrays(moved, flat)
    return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), moved)


def _pilot(
    log_joint: LogJoint,
    dataset: Dataset,
    flat: Params,
    refinement: Refinement,
    seed: int,
    directory: pathlib.Path | None,
    say: Callable[[str], None],
) -> tuple[float, int]:
    """The step size that a pilot finds, or has found in an earlier session, and its gradients."""
    path = directory / FOLDER / "pilot.json" if directory else None
    form = {"step_size": float, "gradients": int}
    found = hosts.on_first(lambda: files.read_json(path, form) if path and path.is_file() else None)
    if found is not None:
        return found["step_size"], found["gradients"]
    some = np.unique(np.linspace(0, len(jax.tree.leaves(flat)[0]) - 1, PILOT_DRAWS).astype(int))
    method = refinement.pilot(log_joint, dataset)
    program, data = chains.compile_stage(log_joint, dataset, method, seed, len(some), chains.PILOT)
    state = program.init(jax.tree.map(lambda leaf: leaf[some], flat))
    say(f"Refinement: a pilot of {PILOT_TRANSITIONS} transitions of {len(some)} draws ...")
    sign, gradients = Sign(say), 0
    for iteration in range(PILOT_TRANSITIONS):
        state, info, *_ = program.run(state, data, iteration, iteration + 1)
        gradients += int(np.sum(info["num_leapfrog_steps"]))
        sign(f"Refinement: transition {iteration + 1} of the pilot ...")
    size = float(np.median(devices.to_host(state.step_size)))
    if path:
        path.parent.mkdir(exist_ok=True)
        files.write_json(path, {"step_size": size, "gradients": gradients})
    return size, gradients


def _bias(
    log_joint: LogJoint,
    dataset: Dataset,
    result: RunResult,
    refinement: Refinement,
    seed: int,
    say: Callable[[str], None],
) -> BiasReport | None:
    """What exact transitions change in the moved draws, which are independent: one chain."""
    if refinement.kind == "hmc":
        return None
    total = result.test_predictions.num_chains
    flat = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), result.draws)
    before = bias.quantities(
        result.test_predictions.outputs.swapaxes(0, 1),
        result.history["log_joint"][:, -1][None],
        bias.log_noise(flat),
    )
    if not before or total < MIN_DRAWS:
        return BiasReport({}, [], [bias.UNKNOWN + "there are too few draws."])
    some = np.unique(np.linspace(0, total - 1, BIAS_DRAWS).astype(int))
    steps = -(-refinement.num_gradients // BIAS_TRANSITIONS)
    size = float(np.median(result.state.step_size))
    return bias.go_on_exactly(
        log_joint,
        dataset,
        before,
        jax.tree.map(lambda leaf: leaf[:, some], flat),
        build=refinement.build(mclmc.mclmc, log_joint, dataset),
        seed=seed,
        step_size=size,
        num_iterations=BIAS_TRANSITIONS,
        # As many gradients as each of the draws had.
        trajectory_length=size * steps,
        max_num_leapfrog_steps=4 * steps,
        remedy=REMEDY,
        say=say,
    )


def _facts(
    refinement: Refinement,
    result: RunResult,
    pilot_gradients: int,
    report: BiasReport | None,
) -> dict[str, Any]:
    """What summary.json says of the refinement."""
    history = result.history
    made = history["num_leapfrog_steps"].sum(axis=1)
    facts: dict[str, Any] = {
        "kind": refinement.kind,
        "collapse_output": refinement.collapse_output,
        "gradients_per_draw": round(float(made.mean())),
        "gradients": int(made.sum()) + pilot_gradients,
        "step_size": float(np.median(result.state.step_size)),
        "acceptance": float(np.nanmean(history["acceptance_probability"])),
        "divergent": int(np.nansum(history["divergent"])),
        "divergent_at_the_end": int(np.nansum(history["divergent"][:, -1])),
        "log_joint": [float(np.nanmean(history["log_joint"][:, i])) for i in (0, -1)],
        "problems": [],
        "notes": [],
    }
    if report is not None:
        facts["bias"] = {name: found._asdict() for name, found in report.shifts.items()}
        facts["gradients"] += report.num_gradients
        facts["problems"], facts["notes"] = report.problems, report.notes
    return facts


def _sentences(facts: dict[str, Any], total: int) -> list[str]:
    first, last = facts["log_joint"]
    said = (
        f"Refinement: {facts['gradients_per_draw']} gradients a draw, {facts['gradients']:,} in "
        f"all; median step size {facts['step_size']:.3g}; log-joint {first:.6g} after the first "
        f"piece, {last:.6g} after the last; divergences {facts['divergent']}, "
        f"{facts['divergent_at_the_end']} of {total} in the last piece."
    )
    shifts = "; ".join(
        f"{name} {found['value']:.3f} +- {found['error']:.3f}"
        for name, found in facts.get("bias", {}).items()
    )
    told = f"What exact transitions change in the refined draws, in their deviations: {shifts}."
    return [said, *([told] if shifts else []), *facts["problems"], *facts["notes"]]
