"""Draws of any approximation, moved towards the posterior by a few HMC transitions each.

Every transition leaves p_T(w | D) invariant, so that with each the law of the draws comes nearer to
it in total variation, or at least no farther; how near after a few is to be measured. All draws
share one step size, which a pilot adapts: were it to depend on a draw's own past, its transitions
would not leave the posterior invariant.
"""

from collections.abc import Callable

import jax
import numpy as np

from haiku_posteriors.core import hmc
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.logging_utils import Sign, tell

PILOT_CHAINS = 4
PILOT_ITERATIONS = 60


def refine(
    log_joint: LogJoint,
    dataset: Dataset,
    draws: Params,
    *,
    seed: int,
    num_iterations: int,
    step_size: float | None = None,
    trajectory_len: float | None = None,
    max_num_leapfrog_steps: int = 10_000,
    say: Callable[[str], None] = tell,
) -> Params:
    """Moves every draw by `num_iterations` HMC transitions, all draws side by side.

    Args:
      log_joint: the target.
      dataset: of which the training rows are the data.
      draws: host arrays, (chains, draws, ...).
      seed: of the run.
      num_iterations: transitions of each draw.
      step_size: of a leapfrog step; found by the pilot by default.
      trajectory_len, max_num_leapfrog_steps: see `core.hmc.hmc`.
      say: where progress goes.

    Returns:
      The moved draws, in the same shapes.
    """
    leading = jax.tree.leaves(draws)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), draws)
    total = leading[0] * leading[1]
    if step_size is None:
        some = np.unique(np.linspace(0, total - 1, PILOT_CHAINS).astype(int))
        method = hmc.hmc(
            log_joint,
            num_burn_in=PILOT_ITERATIONS,
            adapt_mass_matrix=False,  # the moved draws have the prior's
            trajectory_jitter=0.0,
            trajectory_length=trajectory_len,
            max_num_leapfrog_steps=max_num_leapfrog_steps,
        )
        program, data = chains.compile_stage(
            log_joint, dataset, method, seed, len(some), chains.PILOT
        )
        state = program.init(jax.tree.map(lambda leaf: leaf[some], flat))
        say(f"Refinement: a pilot of {PILOT_ITERATIONS} transitions of {len(some)} draws ...")
        sign = Sign(say)
        for iteration in range(PILOT_ITERATIONS):
            state, info, *_ = program.run(state, data, iteration, iteration + 1)
            jax.block_until_ready(state)
            sign(f"Refinement: transition {iteration + 1} of the pilot ...")
        step_size = float(np.median(devices.to_host(state.step_size)))
        num_steps = int(np.max(info["num_leapfrog_steps"]))
        trajectory_len = step_size * num_steps
        say(
            f"Refinement: step size {step_size:.3g}, adapted in {PILOT_ITERATIONS} transitions "
            f"of {len(some)} draws; {num_steps} leapfrog steps a transition."
        )
    method = hmc.hmc(
        log_joint,
        step_size=step_size,
        num_burn_in=0,
        trajectory_length=trajectory_len,
        max_num_leapfrog_steps=max_num_leapfrog_steps,
    )
    program, data = chains.compile_stage(log_joint, dataset, method, seed, total, chains.REFINE)
    say(f"Refinement: compiling, then {num_iterations} transition(s) of {total} draws ...")
    state = program.init(flat)
    for iteration in range(num_iterations):
        state, info, *_ = program.run(state, data, iteration, iteration + 1)
        say(
            f"Refinement {iteration + 1}/{num_iterations}: log-joint "
            f"{np.mean(info['log_joint']):.6g}, acceptance "
            f"{np.mean(info['acceptance_probability']):.2f}, "
            f"divergences {int(np.sum(info['divergent']))} of {total}."
        )
    moved = devices.to_host(state.position.params)
    return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), moved)
