"""Have the chains converged? R-hat, effective sample size, E-BFMI, and a verdict in sentences.

Rank-normalised split R-hat and bulk and tail effective sample sizes are those of Vehtari, Gelman,
Simpson, Carpenter & Buerkner (2021, arXiv 1903.08008). Arrays are (chains, draws, ...) throughout;
each scalar along the trailing axes is a quantity of its own. Everything is computed on the host
in float64. Where a quantity cannot be judged the answer is NaN: fewer than four draws per chain,
a value that is not finite, or the same value in every draw of every chain. Chains that are each
stuck, but at different values, have an infinite R-hat.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from haiku_posteriors.core.judging.chain_statistics import (
    effective_sample_size,
    halve_chains,
    plain_rhat,
    rank_normalise,
)
from haiku_posteriors.core.trees import Params

MIN_DRAWS = 4
BLOCK_SIZE = 2**22  # values worked on at once, so that memory does not grow with the quantities
MEDIAN_RHAT_LIMIT = 1.01
# The largest of thousands of R-hats is above 1.01 by chance alone: at the required effective
# sample size of 100 per chain, the largest of 1000 comes to about 1.03 when all is well.
LARGEST_RHAT_LIMIT = 1.05
MIN_ESS_PER_CHAIN = 100
MIN_ENERGY_BFMI = 0.3
ACCEPTANCE_RANGE = (0.4, 0.99)
# A chain whose transitions are shorter than this part of their intended length stands still.
MIN_REACH = 1e-3
MORE_DRAWS = (
    "Burn in longer, draw more, or lengthen the trajectory; where chains stay apart, compare with "
    "the populations of run_smc.py"
)


class Convergence(NamedTuple):
    """Diagnostics of each quantity; float64 arrays in the shape of the trailing axes."""

    rhat: np.ndarray
    bulk_ess: np.ndarray
    tail_ess: np.ndarray


class Verdict(NamedTuple):
    """Whether a run can be trusted.

    Attributes:
      converged: whether there are no problems.
      problems: sentences, each with what is wrong and what to change.
      notes: sentences on what is worth knowing but no reason for distrust.
    """

    converged: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def convergence(draws: ArrayLike) -> Convergence:
    """All three diagnostics of (chains, draws, ...)."""
    return Convergence(rhat(draws), bulk_ess(draws), tail_ess(draws))


def rhat(draws: ArrayLike) -> np.ndarray:
    """The larger of the rank-normalised split R-hats of the draws and of their folded values.

        R-hat = sqrt(((n - 1) / n W + B / n) / W)

    with W the mean variance within, and B / n the variance between, the n draws of half chains.
    Folding, |x - median|, makes of chains that differ in spread chains that differ in location.
    """

    def both(x: np.ndarray) -> np.ndarray:
        halves = halve_chains(x)
        folded = np.abs(halves - np.median(halves, axis=(0, 1)))
        return np.fmax(*(plain_rhat(rank_normalise(y)) for y in (halves, folded)))

    return _quantity_by_quantity(both, draws)


def bulk_ess(draws: ArrayLike) -> np.ndarray:
    """Effective sample size of the rank-normalised draws, for estimates of location."""

    def bulk(x: np.ndarray) -> np.ndarray:
        return effective_sample_size(rank_normalise(halve_chains(x)))

    return _quantity_by_quantity(bulk, draws)


def tail_ess(draws: ArrayLike) -> np.ndarray:
    """The smaller of the effective sample sizes of the 5 % and 95 % quantiles."""

    def tails(x: np.ndarray) -> np.ndarray:
        quantiles = np.quantile(x, (0.05, 0.95), axis=(0, 1))
        below = [halve_chains((x <= quantile).astype(float)) for quantile in quantiles]
        return np.fmin(*map(effective_sample_size, below))

    return _quantity_by_quantity(tails, draws)


def ess(draws: ArrayLike) -> np.ndarray:
    """Effective sample size of the mean of the draws as they are: Var[mean] = Var[x] / ESS."""
    return _quantity_by_quantity(lambda x: effective_sample_size(halve_chains(x)), draws)


def energy_bfmi(energies: ArrayLike) -> np.ndarray:
    """Energy Bayesian fraction of missing information (Betancourt 2016, arXiv 1604.00695).

        sum_n (E_n - E_{n-1})^2 / sum_n (E_n - mean E)^2,

    one for each chain of (chains, draws). Below 0.3, drawing the momentum anew changes the energy
    too little for the chain to reach all energies, the tails above all.
    """
    energies = np.asarray(energies, np.float64)
    deviations = energies - energies.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(np.diff(energies, axis=1) ** 2, axis=1) / np.sum(deviations**2, axis=1)


def choose_scalars(sizes: Sequence[int], max_scalars: int, seed: int = 0) -> list[np.ndarray]:
    """A fixed random subset of the scalars of several arrays, for diagnosing millions.

    The choice depends on the arguments alone, so that draws which are stored in several files are
    followed along the same scalars.

    Args:
      sizes: the number of scalars in each array.
      max_scalars: the number of scalars to choose; all of them if there are fewer.
      seed: of the choice.

    Returns:
      For each array, the increasing positions chosen in it.
    """
    total = sum(sizes)
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(total, min(max_scalars, total), replace=False))
    offsets = np.cumsum([0, *sizes])
    return [
        chosen[(chosen >= low) & (chosen < high)] - low for low, high in itertools.pairwise(offsets)
    ]


def subsample_parameters(
    params: Params, max_scalars: int, seed: int = 0, num_batch_axes: int = 0
) -> np.ndarray:
    """The scalars of `choose_scalars` in a parameter pytree.

    Args:
      params: leaves with `num_batch_axes` common leading axes, such as chains and draws.
      max_scalars: see `choose_scalars`.
      seed: see `choose_scalars`.
      num_batch_axes: the number of leading axes to leave as they are.

    Returns:
      An array (*batch axes, scalars), in the tree's order.
    """
    leaves = jax.tree.leaves(params)
    batch_shape = leaves[0].shape[:num_batch_axes]
    sizes = [leaf.size // int(np.prod(batch_shape, dtype=int)) for leaf in leaves]
    # Indexed leaf by leaf, where the leaf lives: only what is kept is copied to the host.
    kept = [
        np.asarray(leaf.reshape(*batch_shape, -1)[..., positions])
        for leaf, positions in zip(leaves, choose_scalars(sizes, max_scalars, seed), strict=True)
    ]
    return np.concatenate(kept, axis=-1)


def verdict(
    predictions: Convergence,
    *,
    num_chains: int,
    num_divergent: int,
    acceptance: ArrayLike | None,
    energy_bfmi: ArrayLike | None,
    parameters: Convergence | None = None,
    log_joint: Convergence | None = None,
    lost: ArrayLike = (),
    smaller_steps: str = "lower step_size, or raise target_accept",
    more_draws: str = MORE_DRAWS,
) -> Verdict:
    """Whether chains can serve as a reference, and if not, what to change.

    It is the predictions that must agree between chains. A network's weights need not: relabelling
    its units gives posteriors of equal height that no chain travels between, and that predict the
    same.

    Args:
      predictions: of predictions at test points, after burn-in.
      num_chains: the number of chains.
      num_divergent: divergent transitions after burn-in, of all chains.
      acceptance: mean acceptance probability of each chain after burn-in; (chains,). None where
        nothing is rejected.
      energy_bfmi: (chains,); None where momenta are not drawn.
      parameters: of a subset of the parameters; noted, not judged.
      log_joint: of the log-joint, which relabelled units leave alone: chains at different heights
        have not found the same posterior, whatever they predict at the test points.
      lost: numbers of the chains that stand still, see `lost_chains`.
      smaller_steps: what to do against divergences.
      more_draws: what to do where chains do not agree, or draws do not suffice.
    """
    problems, notes = [], []
    if len(lost := np.asarray(lost)):
        problems.append(
            f"Of {num_chains} chains these stand still: {', '.join(map(str, lost))}. They accepted "
            "nothing, or were tuned to a step of practically 0; their draws are one point each and "
            "no sample. Start from trained networks (warm_start_epochs), or burn in longer."
        )
    judged = np.isfinite(predictions.bulk_ess) & ~np.isnan(predictions.rhat)
    if not judged.any():
        problems.append(
            "No prediction can be diagnosed: there are fewer than four draws per chain, or they "
            "are all the same. Draw more, and see whether anything is accepted."
        )
    else:
        found = Convergence(*(x[judged] for x in predictions))
        problems += _mixing_problems(found, num_chains, more_draws)
        if not judged.all():
            notes.append(
                f"{np.sum(~judged)} of {judged.size} predictions never changed and are not judged."
            )
    if log_joint is not None and np.max(log_joint.rhat) > LARGEST_RHAT_LIMIT:
        problems.append(
            f"R-hat of the log-joint is {np.max(log_joint.rhat):.3f} (limit {LARGEST_RHAT_LIMIT}): "
            "the chains are at different heights. Burn in longer, or start from trained networks "
            "(warm_start_epochs, init_checkpoint)."
        )
    if num_divergent > 0:
        problems.append(
            f"{num_divergent} transitions diverged, so parts of the posterior may be missing: "
            f"{smaller_steps}."
        )
    if acceptance is not None:
        lowest, highest = np.min(acceptance), np.max(acceptance)
        if not lowest >= ACCEPTANCE_RANGE[0]:
            problems.append(
                f"A chain accepts only {lowest:.0%} of its proposals: lower step_size, or adapt it "
                "over a longer num_burn_in."
            )
        elif highest > ACCEPTANCE_RANGE[1]:
            notes.append(
                f"A chain accepts {highest:.1%} of its proposals: a larger step_size would be as "
                "exact and cheaper."
            )
    if energy_bfmi is not None and np.min(energy_bfmi) < MIN_ENERGY_BFMI:
        problems.append(
            f"E-BFMI is {np.min(energy_bfmi):.2f}, below {MIN_ENERGY_BFMI}: chains change their "
            "energy too slowly. Burn in longer and draw more; a prior with lighter tails helps."
        )
    if num_chains == 1:
        notes.append("One chain cannot show what it misses: run several (num_chains).")
    rhats = np.empty(0) if parameters is None else parameters.rhat[~np.isnan(parameters.rhat)]
    if rhats.size:
        notes.append(
            f"Of the parameters, {np.mean(rhats > LARGEST_RHAT_LIMIT):.0%} have an "
            f"R-hat above {LARGEST_RHAT_LIMIT}; symmetries of the network alone can cause that."
        )
    return Verdict(not problems, tuple(problems), tuple(notes))


def lost_chains(accepted: ArrayLike, reach: ArrayLike) -> np.ndarray:
    """Numbers of the chains that stand still, by their transitions after burn-in.

    Args:
      accepted: whether each moved; (chains, transitions).
      reach: how long each was, in its intended length; (chains, transitions). A step size that is
        tuned to practically 0 makes it small, since the number of steps has a limit.
    """
    moved = np.asarray(accepted, bool) & (np.asarray(reach) > MIN_REACH)
    return np.flatnonzero(~moved.any(axis=1))


def _mixing_problems(predictions: Convergence, num_chains: int, more_draws: str) -> list[str]:
    problems = []
    median, largest = np.median(predictions.rhat), np.max(predictions.rhat)
    if median > MEDIAN_RHAT_LIMIT or largest > LARGEST_RHAT_LIMIT:
        problems.append(
            f"R-hat of the predictions is {median:.3f} in the median and {largest:.3f} at most "
            f"(limits {MEDIAN_RHAT_LIMIT} and {LARGEST_RHAT_LIMIT}): the chains do not agree. "
            f"{more_draws}."
        )
    needed = MIN_ESS_PER_CHAIN * num_chains
    for name, values in (("Bulk", predictions.bulk_ess), ("Tail", predictions.tail_ess)):
        if np.nanmin(values, initial=np.inf) < needed:
            problems.append(
                f"{name} effective sample size is {np.nanmin(values):.0f} at least, below {needed} "
                f"({MIN_ESS_PER_CHAIN} per chain). {more_draws}."
            )
    return problems


def _quantity_by_quantity(
    function: Callable[[np.ndarray], np.ndarray], draws: ArrayLike
) -> np.ndarray:
    """Applies (chains, draws, quantities) -> (quantities,) in blocks, where there is an answer."""
    draws = np.asarray(draws)
    num_chains, num_draws = draws.shape[:2]
    if num_draws < MIN_DRAWS:
        return np.full(draws.shape[2:], np.nan)
    flat = draws.reshape(num_chains, num_draws, -1)
    result = np.full(flat.shape[2], np.nan)
    width = max(1, BLOCK_SIZE // (num_chains * num_draws))
    for start in range(0, flat.shape[2], width):
        block = flat[:, :, start : start + width].astype(np.float64)
        low, high = block.min(axis=(0, 1)), block.max(axis=(0, 1))
        judged = np.isfinite(low) & np.isfinite(high) & (low < high)
        if judged.any():
            result[start : start + width][judged] = function(block[:, :, judged])
    return result.reshape(draws.shape[2:])
