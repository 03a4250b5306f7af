"""Lower and upper bounds of an implicit posterior's ELBO, closing with the number of draws K.

`core.implicit.semi_implicit` has the mathematics. They judge any sampler, however it was trained.
"""

import pathlib
from typing import Any

import jax
import numpy as np

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.implicit import semi_implicit
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler
from haiku_posteriors.utils.plots import bounds
from haiku_posteriors.utils.stages import mixture
from haiku_posteriors.utils.tasks import Task

PICTURE = "sandwich.png"


def find(task: Task, generator: Generator, samplers: Sampler) -> dict[str, Any]:
    """Of every member: means and standard errors, (members, numbers K), as evidence.json has them.

    Args:
      task: what is worked on; K goes to its `sandwich_draws`.
      generator: of the members.
      samplers: with a leading member axis.
    """
    settings, log_joint = task.settings, task.log_joint
    counts = _counts(settings.sandwich_draws)

    def bounds_of(
        key: jax.Array, sampler: Sampler, data: Data, at_once: int, place: mixture.Place
    ) -> semi_implicit.Sandwich:
        return semi_implicit.sandwich(
            key, log_joint, generator, sampler, data, num_samples=at_once, counts=counts
        )

    found = mixture.over_draws(
        bounds_of, log_joint, task.dataset, samplers, settings.seed, settings.num_evidence_draws
    )
    joint = found.log_joint[..., None]
    content: dict[str, Any] = {"num_mixture_draws": list(counts)}
    for name, values in (
        ("elbo_lower", joint + found.lower),
        ("elbo_upper", joint + found.upper),
        ("entropy_lower", found.lower),
        ("entropy_upper", found.upper),
    ):
        errors = values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])
        content |= {name: values.mean(axis=1).tolist(), f"{name}_error": errors.tolist()}
    return content


def tell(directory: pathlib.Path, title: str, found: dict[str, Any]) -> str:
    """Draws the picture; the sentence for the user."""
    bounds.closing_bounds(directory / PICTURE, found, title)
    each = ", ".join(
        f"{low[-1]:.2f} to {high[-1]:.2f} (errors {below[-1]:.2f}, {above[-1]:.2f})"
        for low, high, below, above in zip(
            *(found[f"elbo_{name}"] for name in ("lower", "upper", "lower_error", "upper_error")),
            strict=True,
        )
    )
    return f"Semi-implicit bounds of the ELBO, K = {found['num_mixture_draws'][-1]}: {each}."


def _counts(most: int) -> tuple[int, ...]:
    """1, 3, 10, 30, ... and the largest."""
    ladder = [factor * 10**power for power in range(9) for factor in (1, 3)]
    return (*(count for count in ladder if count < most), most)
