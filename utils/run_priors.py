"""An earlier run's posterior as a prior (`--prior_from`): read from its folder, kept in the next.

Exact where the run's posterior is one Gaussian of run_vi.py, mean-field or of low rank: the last
checkpoint has it. Of all other runs, and of several members, independent Gaussians with the mean
and the standard deviation of each parameter over the draws.
"""

import pathlib
import re
from collections.abc import Mapping

import jax
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.gaussian_priors import Gaussian
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.utils import checkpoint_utils
from haiku_posteriors.utils.report import run_folders

NAME = "prior.safetensors"  # in the folder of a run that was given one
EXACT_FAMILIES = ("mean_field", "low_rank")
FIELDS = Gaussian._fields


def load(path: pathlib.Path, log_joint: LogJoint) -> tuple[Gaussian, str]:
    """The Gaussian of a finished run's folder, or of a file of this kind, and a sentence on it.

    Args:
      path: the folder or the file.
      log_joint: of the problem that is to have the prior: names and shapes must be the same, and
        the same parameters random.
    """
    if path.is_file():
        tensors, metadata = checkpoint_utils.load_tensors(path)
        gaussian, sentence = _from_tensors(tensors), metadata.get("sentence", "")
    else:
        gaussian, sentence = _of_run(path, log_joint)
    random, point = log_joint.partition(log_joint.shapes)
    for part, expected in (("mean", random), ("point", point)):
        found, shapes = getattr(gaussian, part), trees.named_leaves(expected)
        differing = [
            name
            for name in sorted(found.keys() | shapes.keys())
            if name not in found or name not in shapes or found[name].shape != shapes[name].shape
        ]
        if differing:
            raise UserError(
                f"The posterior in {path} is not of this network, or other parameters of it are "
                f"random: '{differing[0]}' differs."
            )
    return gaussian, sentence


def path_of(directory: pathlib.Path, prior_from: str) -> pathlib.Path:
    """Where a run reads its prior: from its own copy, once it has one."""
    own = directory / NAME
    return own if own.is_file() else pathlib.Path(prior_from)


def save(directory: pathlib.Path, gaussian: Gaussian, sentence: str) -> None:
    """Keeps it in a run's folder, unless it is there: a run that goes on is the one that began."""
    path = directory / NAME
    if not path.is_file():
        tree = {field: getattr(gaussian, field) for field in FIELDS if getattr(gaussian, field)}
        checkpoint_utils.save_tree(path, tree, {"sentence": sentence})


def _from_tensors(tensors: Mapping[str, np.ndarray]) -> Gaussian:
    parts: dict[str, dict[str, np.ndarray]] = {field: {} for field in FIELDS}
    for name, leaf in tensors.items():
        part, _, rest = name.partition("/")
        if part not in parts:
            raise UserError(f"A prior has no '{part}': the file is another one.")
        parts[part][rest] = leaf
    return Gaussian(**parts)


def _of_run(folder: pathlib.Path, log_joint: LogJoint) -> tuple[Gaussian, str]:
    run = run_folders.open_run(folder)
    temperature = run.flags.get("temperature", 1.0)
    if temperature != 1:
        raise UserError(
            f"The run in {folder} is at temperature {temperature}: only the posterior at 1 is the "
            "next prior."
        )
    is_one = run.predictions.num_chains == 1 and run.flags.get("refine") is None
    is_gaussian = run.flags["method"] == "vi" and run.flags.get("vi_family") in EXACT_FAMILIES
    if is_one and is_gaussian and not run.flags.get("anneal_steps"):
        gaussian = _variational(folder)
        family = f"of rank {gaussian.rank} plus a diagonal" if gaussian.rank else "mean-field"
        return gaussian, f"The prior is the posterior of {folder}, {family}, exactly."
    num_draws = run.predictions.num_draws
    if num_draws < 2:
        raise UserError(
            f"The run in {folder} has one draw, and so no spread: a prior needs a posterior "
            "(run_vi.py, run_hmc.py, run_laplace.py, ...)."
        )
    random = trees.named_leaves(log_joint.random_shapes)
    return _moments(run, set(random)), (
        f"The prior has the means and standard deviations of {num_draws} draws of {folder}: "
        "independent Gaussians, without the correlations of that posterior."
    )


def _variational(folder: pathlib.Path) -> Gaussian:
    """q of the newest checkpoint of run_vi.py."""
    tensors = checkpoint_utils.load_newest_tensors(folder)
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, leaf in tensors.items():
        match = re.fullmatch(r"state/[^/]+/(mean|raw_scale|factor|unit|point)/(.+)", name)
        if match:
            parts.setdefault(match[1], {})[match[2]] = leaf[0]
    if not {"mean", "raw_scale"} <= parts.keys():
        raise UserError(f"The newest checkpoint in {folder} holds no Gaussian posterior.")
    scale = {name: np.logaddexp(leaf, 0) for name, leaf in parts["raw_scale"].items()}
    factor = {name: leaf * parts["unit"][name] for name, leaf in parts.get("factor", {}).items()}
    return Gaussian(parts["mean"], scale, factor, parts.get("point", {}))


def _moments(run: run_folders.OpenedRun, random: set[str]) -> Gaussian:
    """Means and deviations over all draws, file by file; the last values of point estimates."""

    def sums(named: dict[str, np.ndarray], start: int) -> dict[str, tuple[np.ndarray, ...]]:
        flat = {
            name: leaf.reshape(-1, *leaf.shape[2:]).astype(np.float64)
            for name, leaf in named.items()
        }
        return {
            name: (leaf[-1], leaf.mean(axis=0), leaf.var(axis=0), np.array(len(leaf)))
            for name, leaf in flat.items()
        }

    parts = run_folders.map_draw_files(run, sums)
    mean, scale, point = {}, {}, {}
    for name, (last, *_) in parts[-1].items():
        if name not in random:
            point[name] = last.astype(np.float32)
            continue
        counts = np.array([float(part[name][3]) for part in parts])
        total = counts.sum()
        means, variances = (np.stack([part[name][k] for part in parts]) for k in (1, 2))
        center = np.tensordot(counts, means, 1) / total
        spread = np.tensordot(counts, variances + (means - center) ** 2, 1) / (total - 1)
        if not np.all(spread > 0):
            raise UserError(
                f"'{name}' has the same value in all draws of {run.path}: they are no posterior."
            )
        mean[name], scale[name] = center, np.sqrt(spread)
    return Gaussian(mean, scale, {}, point)


def start_from(gaussian: Gaussian, log_joint: LogJoint, rng_key: jax.Array) -> trees.Params:
    """A draw of the prior, with the point estimates of the run it is from."""
    random, point = log_joint.partition(log_joint.shapes)
    stored = trees.map_with_name(lambda name, leaf: gaussian.point[name].astype(leaf.dtype), point)
    return trees.merge(log_joint.prior.sample(rng_key, random), stored)
