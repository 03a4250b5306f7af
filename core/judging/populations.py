"""Do independent populations agree? Nested R-hat, the log-evidence of all, and a verdict.

A population is what one run of sequential Monte Carlo ends with, or a group of short chains that
started together. Within one, members may agree because they share ancestors or a start; only other
populations show what it missed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from haiku_posteriors.core.judging.chain_statistics import plain_nested_rhat, rank_normalise
from haiku_posteriors.core.judging.diagnostics import (
    ACCEPTANCE_RANGE,
    LARGEST_RHAT_LIMIT,
    MEDIAN_RHAT_LIMIT,
    Verdict,
)

# A population that is a nat below another stands for a part of the posterior, or for bad luck.
LOG_EVIDENCE_SPREAD_LIMIT = 1.0
MIN_ANCESTORS = 2


class LogEvidence(NamedTuple):
    """What several independent estimates of Z say together.

    Attributes:
      value: log of the mean of the estimates.
      error: its standard error; NaN for a single one. From the spread of the estimates, by the
        delta method, which cannot exceed 1: where `spread` is above 1, only that tells.
      spread: standard deviation of the logarithms.
      weights: each estimate's part of their sum; (populations,).
    """

    value: float
    error: float
    spread: float
    weights: np.ndarray


def nested_rhat(draws: ArrayLike) -> np.ndarray:
    """Nested R-hat of (superchains, chains, draws, ...), rank-normalised; a float64 array.

    As `diagnostics.rhat` does, it takes the larger of those of the draws and of their folded values
    |x - median|; but it does not halve chains, which may be of a single draw. NaN where a quantity
    cannot be judged: one superchain, or one draw in each, or a value that is not finite, or the
    same value everywhere. Superchains that are each stuck at values of their own have an infinite
    one.
    """
    draws = np.asarray(draws)
    leading, trailing = draws.shape[:3], draws.shape[3:]
    flat = draws.reshape(*leading, -1).astype(np.float64)
    result = np.full(flat.shape[3], np.nan)
    low, high = flat.min(axis=(0, 1, 2)), flat.max(axis=(0, 1, 2))
    judged = np.isfinite(low) & np.isfinite(high) & (low < high)
    if leading[0] > 1 and leading[1] * leading[2] > 1 and judged.any():
        chosen = flat[..., judged]
        folded = np.abs(chosen - np.median(chosen, axis=(0, 1, 2)))
        result[judged] = np.fmax(*(_of_ranks(x) for x in (chosen, folded)))
    return result.reshape(trailing)


def _of_ranks(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(1, -1, x.shape[3])
    return plain_nested_rhat(rank_normalise(flat).reshape(x.shape))


def combine_log_evidences(log_evidences: ArrayLike) -> LogEvidence:
    """The log of the mean of independent unbiased estimates of Z, given their logarithms."""
    logs = np.asarray(log_evidences, np.float64)
    ratios = np.exp(logs - logs.max())
    value = float(logs.max() + np.log(ratios.mean()))
    single = len(logs) == 1
    relative = ratios / ratios.mean()
    return LogEvidence(
        value,
        float("nan") if single else float(relative.std(ddof=1) / np.sqrt(len(logs))),
        float("nan") if single else float(logs.std(ddof=1)),
        ratios / ratios.sum(),
    )


def verdict(
    rhat: np.ndarray,
    evidence: LogEvidence,
    *,
    fractions: np.ndarray,
    num_ancestors: np.ndarray,
    num_particles: int,
    acceptance: np.ndarray,
) -> Verdict:
    """Whether populations of sequential Monte Carlo can serve as a reference.

    Args:
      rhat: nested, of predictions.
      evidence: of all populations.
      fractions: b of each population at the end; (populations,).
      num_ancestors: particles of the start that have descendants, of each.
      num_particles: of each.
      acceptance: mean acceptance probability of the moves at b = 1, of each.
    """
    problems, notes = [], []
    if np.min(fractions) < 1:
        problems.append(
            f"A population has come to b = {np.min(fractions):.3g} only, and holds no draws of the "
            "posterior: raise max_num_temperatures."
        )
    known = rhat[~np.isnan(rhat)]
    if known.size:
        median, largest = np.median(known), np.max(known)
        if median > MEDIAN_RHAT_LIMIT or largest > LARGEST_RHAT_LIMIT:
            problems.append(
                f"Nested R-hat of the predictions is {median:.3f} in the median and {largest:.3f} "
                f"at most (limits {MEDIAN_RHAT_LIMIT} and {LARGEST_RHAT_LIMIT}): the populations "
                "do not agree. Raise num_particles, num_moves or num_final_moves."
            )
    elif len(fractions) > 1:
        problems.append("No prediction can be diagnosed: they are all the same.")
    if len(fractions) == 1:
        notes.append("One population cannot show what it misses: run several (num_chains).")
    elif evidence.spread > LOG_EVIDENCE_SPREAD_LIMIT:
        problems.append(
            f"The log-evidences of the populations have a standard deviation of "
            f"{evidence.spread:.2f} (limit {LOG_EVIDENCE_SPREAD_LIMIT}), more than the stated "
            "error can tell: raise num_particles or num_moves, or target_ess towards 1."
        )
    if np.min(acceptance) < ACCEPTANCE_RANGE[0]:
        problems.append(
            f"A population accepts only {np.min(acceptance):.0%} of its moves at the posterior: "
            "raise target_accept or num_final_moves."
        )
    least = int(np.min(num_ancestors))
    sentence = f"The {num_particles} particles of a population descend from {least} of the start"
    if least < MIN_ANCESTORS:
        notes.append(f"{sentence}: all that differs between them, moves have made.")
    else:
        notes.append(f"{sentence} at least.")
    return Verdict(not problems, tuple(problems), tuple(notes))
