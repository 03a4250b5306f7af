"""What unadjusted steps do to the posterior, measured: adjusted ones go on from some of the draws.

They start at kept draws, spread over chains and time, and run side by side. In the first half of
their transitions they relax, and share a step size that is adapted to their acceptance; what they
do in the second half, with all frozen, is compared with all draws of the run. Where time is
limited, either half ends with its half of the time.
"""

import functools
import math
import time
from collections.abc import Callable

import jax
import numpy as np

from haiku_posteriors.core import likelihoods, mclmc
from haiku_posteriors.core.collapse import CollapsedState
from haiku_posteriors.core.judging import bias, diagnostics
from haiku_posteriors.core.judging.bias import BiasReport, Shift
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices, ensemble_utils
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.train_utils import RunResult

NUM_STARTS = 32  # of all chains together, but at least two of each
PREDICTIONS_COMPARED = 300
TARGET_ACCEPT = 0.8
MIN_COMPARED = 4  # transitions; after fewer of them a limit of time has left nothing to say
REMEDY = "Lower energy_variance, or use adjusted transitions (--adjusted)."
UNKNOWN = "The bias of the unadjusted steps is not known: "
NO_TIME = "time_limit left too little time for its estimate. Raise it, and go on."


def estimate(
    log_joint: LogJoint,
    dataset: Dataset,
    result: RunResult,
    *,
    seed: int,
    num_burn_in: int,
    num_iterations: int,
    trajectory_length: float,
    max_num_leapfrog_steps: int = 10_000,
    max_seconds: float = math.inf,
    say: Callable[[str], None] = print,
) -> BiasReport:
    """Estimates the bias of a finished run of unadjusted MCLMC.

    Args:
      log_joint: the target.
      dataset: training rows are the data; predictions are those at test rows.
      result: of the run, with its history.
      seed: of the run.
      num_burn_in: transitions of it that do not count.
      num_iterations: adjusted transitions of each start, of which half relax; 0 for no estimate.
      trajectory_length, max_num_leapfrog_steps: as in the run.
      max_seconds: see `go_on_exactly`.
      say: where progress goes.
    """
    num_chains, num_draws = result.test_predictions.outputs.shape[:2]
    if num_iterations < 4:
        return BiasReport({}, [], [UNKNOWN + "give bias_iterations."])
    # A run that a limit of time ends in burn-in has a draw, and no transition that counts.
    num_counted = result.history["log_joint"].shape[1] - num_burn_in
    has_draws = min(num_draws, num_counted) >= diagnostics.MIN_DRAWS
    before = _quantities(result, num_burn_in) if has_draws else {}
    if not before:
        return BiasReport({}, [UNKNOWN + "a chain has too few draws, or stands still."], [])
    per_chain = min(num_draws, max(2, -(-NUM_STARTS // num_chains)))
    chosen = np.linspace(0, num_draws - 1, per_chain).astype(int)
    blocks = list(result.store.chosen(chosen))
    starts = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *blocks)
    size = float(result.state.step_size[0])
    return go_on_exactly(
        log_joint,
        dataset,
        before,
        starts,
        seed=seed,
        step_size=size,
        inverse_mass=jax.tree.map(lambda leaf: leaf[0], result.state.inverse_mass),
        num_iterations=num_iterations,
        # At most as many steps as the run could make.
        trajectory_length=min(trajectory_length, size * max_num_leapfrog_steps / 2),
        max_num_leapfrog_steps=max_num_leapfrog_steps,
        remedy=REMEDY,
        max_seconds=max_seconds,
        say=say,
    )


def go_on_exactly(
    log_joint: LogJoint,
    dataset: Dataset,
    before: dict[str, np.ndarray],
    starts: Params,
    *,
    build: Callable[..., Method] | None = None,
    seed: int,
    step_size: float,
    inverse_mass: Params | None = None,
    num_iterations: int,
    trajectory_length: float,
    max_num_leapfrog_steps: int,
    remedy: str,
    max_seconds: float = math.inf,
    say: Callable[[str], None] = print,
) -> BiasReport:
    """What adjusted transitions change in quantities of draws, from some of these.

    Args:
      log_joint: the target.
      dataset: training rows are the data; predictions are those at test rows.
      before: of all draws, (chains, draws, quantities), by `predictions`, `log-joint` or `noise`;
        independent draws are one chain.
      starts: some of the draws, host arrays (chains, starts, ...).
      build: makes the method from these settings in place of MCLMC on the target.
      seed: of the run.
      step_size: to begin with.
      inverse_mass: of one chain; the prior's by default.
      num_iterations: adjusted transitions of each start, of which half relax.
      trajectory_length, max_num_leapfrog_steps: of a transition.
      remedy: a sentence on what to change if there is a bias.
      max_seconds: after which it ends, with what it has; looked at between transitions, the
        seconds it takes to compile included.
      say: where progress goes.
    """
    if max_seconds <= 0:
        return BiasReport({}, [UNKNOWN + NO_TIME], [])
    started = time.monotonic()
    num_chains, per_chain = jax.tree.leaves(starts)[0].shape[:2]
    starts = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), starts)
    method = (build or functools.partial(mclmc.mclmc, log_joint))(
        adjusted=True,
        step_size=step_size,
        num_burn_in=0,
        trajectory_length=trajectory_length,
        max_num_leapfrog_steps=max_num_leapfrog_steps,
    )
    total = num_chains * per_chain
    program, data = chains.compile_stage(log_joint, dataset, method, seed, total, chains.BIAS)
    mesh = devices.make_mesh(total)
    state = program.init(starts)
    if inverse_mass is not None:
        masses = jax.tree.map(lambda m: np.broadcast_to(m, (total, *np.shape(m))), inverse_mass)
        state = state._replace(inverse_mass=masses)
    state = jax.device_put(state, devices.chain_sharding(mesh))
    predict = ensemble_utils.make_predictor(log_joint, dataset.form)
    test = devices.place_data(dataset.x_test, dataset.y_test, mesh)

    # Chains stand at their draws: no key is used.
    sample = jax.vmap(lambda chain: method.sample(jax.random.key(0), chain, 1))
    after: dict[str, list[np.ndarray]] = {name: [] for name in before}
    infos = []
    num_relaxing = num_iterations // 2
    for iteration in range(num_iterations):
        seconds = time.monotonic() - started
        if seconds >= max_seconds:
            break
        if iteration < num_relaxing and seconds >= max_seconds / 2:
            num_relaxing = iteration
        state, info, *_ = program.run(state, data, iteration, iteration + 1)
        infos.append(devices.to_host(info))
        acceptance = float(np.mean(infos[-1]["acceptance_probability"]))
        if iteration < num_relaxing:
            # The mean over many chains is sure enough to be followed as it is.
            factor = math.exp(acceptance - TARGET_ACCEPT)
            state = _with_longer_steps(state, factor)
        else:
            draws = sample(state)
            found = {
                "predictions": predict(draws, test).outputs,
                "log-joint": infos[-1]["log_joint"],
                "noise": log_noise(draws),
            }
            for name, rows in after.items():
                rows.append(np.asarray(found[name]).reshape(num_chains, per_chain, -1))
        if (iteration + 1) % 10 == 0 or iteration + 1 == num_iterations:
            say(
                f"Bias: adjusted transition {iteration + 1}/{num_iterations} of {total} draws, "
                f"acceptance {acceptance:.2f}."
            )
    if len(infos) < num_iterations and len(infos) - num_relaxing < MIN_COMPARED:
        return BiasReport({}, [UNKNOWN + NO_TIME], [], num_gradients=_gradients(infos))
    shifts = {}
    for name, values in before.items():
        columns = _columns(values)
        continued = np.stack(after[name], axis=2)[..., columns]
        shifts[name] = bias.shift(values[..., columns], continued)
    report = _report(shifts, infos[num_relaxing:], before["predictions"], _gradients(infos), remedy)
    if len(infos) < num_iterations:
        report.notes.append(
            f"time_limit ended the estimate of bias after {len(infos)} of {num_iterations} "
            "adjusted transitions: its errors are larger, and a part of a bias may not show."
        )
    return report


def _with_longer_steps(state: State, factor: float) -> State:
    if isinstance(state, CollapsedState):
        return state._replace(sampler=_with_longer_steps(state.sampler, factor))
    return state._replace(step_size=state.step_size * factor)


def _quantities(result: RunResult, num_burn_in: int) -> dict[str, np.ndarray]:
    """What is compared, as (chains, draws, quantities); without groups in which nothing varies."""
    noise = [noise for part in result.store.parts() if (noise := log_noise(part)) is not None]
    return quantities(
        result.test_predictions.outputs,
        result.history["log_joint"][:, num_burn_in:],
        np.concatenate(noise, axis=1) if noise else None,
    )


def quantities(
    outputs: np.ndarray, log_joints: np.ndarray, noise: np.ndarray | None
) -> dict[str, np.ndarray]:
    """The same from predictions (chains, draws, ...) and numbers (chains, draws) of each draw."""
    found = {
        "predictions": outputs.reshape(*outputs.shape[:2], -1),
        "log-joint": log_joints[..., None],
    }
    if noise is not None:
        found["noise"] = noise[..., None]
    found = {name: values for name, values in found.items() if len(_columns(values))}
    return found if "predictions" in found else {}


def log_noise(draws: Params) -> np.ndarray | None:
    """The learned noise's parameter, (chains, draws), if there is one."""
    noise = draws.get(likelihoods.PARAMETER_GROUP, {}).get("log_noise_std")
    return None if noise is None else np.asarray(noise)


def _columns(values: np.ndarray) -> np.ndarray:
    """Some of the quantities that vary in every chain, none of them twice."""
    varying = np.flatnonzero(np.all(np.ptp(values, axis=1) > 0, axis=0))
    # One noise for all rows is predicted for each of them.
    _, first = np.unique(values[:, 0, varying], axis=1, return_index=True)
    distinct = varying[np.sort(first)]
    some = np.linspace(0, len(distinct) - 1, PREDICTIONS_COMPARED).astype(int)
    return distinct[np.unique(some)] if len(distinct) else distinct


def _gradients(infos: list[dict[str, np.ndarray]]) -> int:
    return sum(int(np.sum(info["num_leapfrog_steps"])) for info in infos)


def _report(
    shifts: dict[str, Shift],
    frozen: list[dict[str, np.ndarray]],
    predictions: np.ndarray,
    num_gradients: int,
    remedy: str,
) -> BiasReport:
    """In sentences; `frozen` are the infos of the transitions that were compared."""
    summary = bias.summarise(shifts)
    problems, notes = bias.problems(summary, remedy), []
    acceptance = float(np.mean([info["acceptance_probability"] for info in frozen]))
    if acceptance < diagnostics.ACCEPTANCE_RANGE[0]:
        problems.append(
            f"{UNKNOWN}the adjusted transitions that should tell accept {acceptance:.0%}; raise "
            "bias_iterations."
        )
    least = np.nanmin(diagnostics.bulk_ess(predictions), initial=np.inf)
    if predictions.shape[0] * predictions.shape[1] > len(frozen) * least:
        notes.append(
            f"The slowest prediction takes longer to forget its start than the {len(frozen)} "
            "transitions which lead away from the bias: a part of it may not show. Raise "
            "bias_iterations."
        )
    return BiasReport(summary, problems, notes, acceptance, num_gradients)
