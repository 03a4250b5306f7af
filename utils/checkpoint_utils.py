"""Arrays on disk: safetensors with a checksum, written under a temporary name and renamed.

Loading cannot run code, a damaged file is recognised, and an interrupted write leaves the file
before it as it was. Arrays are stored by their path in the pytree, e.g. `params/linear/w`.
"""

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils.files import write_atomically
from haiku_posteriors.version import __version__

FORMAT = "haiku-posteriors 1"
CHECKPOINTS_KEPT = 3  # the newest, and two to fall back on if it is damaged


class DamagedFileError(UserError):
    """A file that is not what was once written."""


def save_tree(path: pathlib.Path, tree: Params, metadata: Mapping[str, str] | None = None) -> None:
    """Saves a pytree of arrays."""
    tensors = {name: np.ascontiguousarray(leaf) for name, leaf in trees.named_leaves(tree).items()}
    header = {
        **(metadata or {}),
        "format": FORMAT,
        "version": __version__,
        "sha256": _checksum(tensors),
    }
    write_atomically(path, safetensors.numpy.save(tensors, header))


def load_tensors(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All arrays of a file by name, and its metadata, after checking the checksum."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DamagedFileError(f"{path} is damaged or no safetensors file ({error}).") from error
    if metadata.get("format") != FORMAT:
        raise DamagedFileError(f"{path} was not written by this program.")
    if metadata.get("sha256") != _checksum(tensors):
        raise DamagedFileError(f"{path} is damaged: its checksum does not match.")
    return tensors, metadata


def save_checkpoint(
    directory: pathlib.Path, epoch: int, state: Any, metadata: Mapping[str, str]
) -> None:
    """Saves the state after `epoch` and drops all but the newest few checkpoints."""
    save_tree(directory / f"epoch_{epoch:08d}.safetensors", state, metadata)
    for old in _checkpoints(directory)[CHECKPOINTS_KEPT:]:
        old.unlink(missing_ok=True)


def load_newest_checkpoint(
    directory: pathlib.Path, template: Any
) -> tuple[int, Any, dict[str, str], list[str]] | None:
    """The newest undamaged checkpoint that fits `template`.

    Returns:
      Epoch, state, metadata and a sentence for each damaged file passed over; None when there is
      no checkpoint at all.
    """
    paths = _checkpoints(directory)
    damage = []
    for path in paths:
        try:
            tensors, metadata = load_tensors(path)
        except DamagedFileError as error:
            damage.append(str(error))
            continue
        state = _fit(path, tensors, template)
        return _epoch(path), state, metadata, damage
    if paths:
        raise UserError(
            f"No checkpoint in {directory} can be read: {' '.join(damage)} "
            "Remove the folder to start again."
        )
    return None


def has_checkpoint(directory: pathlib.Path) -> bool:
    """Whether a run's folder holds a state to go on from."""
    return bool(_checkpoints(directory / "checkpoints"))


def save_draws(directory: pathlib.Path, last_epoch: int, draws: Params) -> pathlib.Path:
    """Saves draws with leading axes (chain, draw), all taken up to `last_epoch`."""
    path = directory / f"epoch_{last_epoch:08d}.safetensors"
    part = 0
    while path.exists():  # draws of one epoch may come in several parts
        part += 1
        path = directory / f"epoch_{last_epoch:08d}_{part:04d}.safetensors"
    save_tree(path, draws)
    return path


def draw_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files of a run's draws, in the order they were taken."""
    return sorted(directory.glob("*.safetensors"))


def draw_shape(path: pathlib.Path) -> tuple[int, int]:
    """(chains, draws) of a file of draws, from its header alone."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            name = next(iter(file.keys()))
            chains, draws = file.get_slice(name).get_shape()[:2]
    except (safetensors.SafetensorError, OSError, ValueError, StopIteration) as error:
        raise DamagedFileError(f"{path} is damaged or no file of draws ({error}).") from error
    return chains, draws


def load_draws(directory: pathlib.Path) -> dict[str, np.ndarray] | None:
    """All draws of a run by parameter name, (chain, draw, ...); None if there are none.

    For small networks: all of them are in memory. `utils.draws.DrawStore` reads them in pieces.
    """
    files = [load_tensors(path)[0] for path in draw_files(directory)]
    if not files:
        return None
    return {name: np.concatenate([f[name] for f in files], axis=1) for name in files[0]}


def drop_draws_after(directory: pathlib.Path, epoch: int) -> None:
    """Removes draws taken after a checkpoint: the resumed run takes them again."""
    for path in draw_files(directory):
        if _epoch(path) > epoch:
            path.unlink()


def load_params(path: pathlib.Path, template: Params) -> Params:
    """Parameters to start from, stacked along a leading axis (one per chain and draw).

    Args:
      path: a run's folder, a file of draws, or a checkpoint whose state has `params`, by itself or
        in a `position`, or that of an optimiser in a `state`.
      template: the network's parameters (shapes suffice), which the file must fit.

    Returns:
      The parameters of the last draw of each chain, (chains, ...).
    """
    if path.is_dir():
        candidates = draw_files(path / "draws") or _checkpoints(path / "checkpoints")
        if not candidates:
            raise UserError(f"{path} holds neither draws nor checkpoints.")
        path = candidates[-1] if candidates[-1].parent.name == "draws" else candidates[0]
    tensors, _ = load_tensors(path)
    in_state = {
        found[1]: leaf
        for name, leaf in tensors.items()
        if (found := re.match(r"(?:state/)?(?:position/)?params/(.+)", name))
    }
    stacked = in_state or {name: leaf[:, -1] for name, leaf in tensors.items()}
    chains = next(iter(stacked.values())).shape[0] if stacked else 0
    with_chains = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((chains, *leaf.shape), leaf.dtype), template
    )
    return _fit(path, stacked, with_chains)


def load_starts(
    path: str | None, template: Params, num_chains: int, flag: str = "num_chains"
) -> Params | None:
    """Parameters for each chain to start from, (num_chains, ...); None when there is no path.

    A file with one set of parameters starts every chain; otherwise there must be one per chain, and
    `flag` is what sets their number.
    """
    if path is None:
        return None
    params = load_params(pathlib.Path(path), template)
    found = jax.tree.leaves(params)[0].shape[0]
    if found not in (1, num_chains):
        raise UserError(
            f"{path} holds {found} sets of parameters, each to start one of {num_chains}: give "
            f"--{flag}={found}."
        )
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_chains, *leaf.shape[1:])), params)


def seconds_spent(directory: pathlib.Path) -> float:
    """What a run had taken at its newest undamaged checkpoint; 0 where there is none."""
    for path in _checkpoints(directory / "checkpoints"):
        with contextlib.suppress(DamagedFileError):
            return float(load_tensors(path)[1]["seconds"])
    return 0.0


def load_newest_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint of a run, by name."""
    candidates = _checkpoints(directory / "checkpoints")
    if not candidates:
        raise UserError(f"{directory} holds no checkpoints.")
    return load_tensors(candidates[0])[0]


def load_part(directory: pathlib.Path, part: str, template: Params) -> Params:
    """A part of the newest checkpoint's state, such as `variational`.

    Args:
      directory: of the run.
      part: its name in the state.
      template: shapes that the part must have.
    """
    candidates = _checkpoints(directory / "checkpoints")
    if not candidates:
        raise UserError(f"{directory} holds no checkpoints.")
    tensors, _ = load_tensors(candidates[0])
    found = {
        match[1]: leaf
        for name, leaf in tensors.items()
        if (match := re.fullmatch(rf"(?:state/)?{part}/(.+)", name))
    }
    return _fit(candidates[0], found, template)


def _fit(path: pathlib.Path, tensors: dict[str, np.ndarray], template: Any) -> Any:
    """The tensors in the structure of `template`, or a sentence on the first difference."""
    expected = trees.named_leaves(template)
    for name in sorted(expected.keys() ^ tensors.keys()):
        where = "only in the file" if name in tensors else "not in the file"
        raise UserError(f"{path} belongs to another network or method: '{name}' is {where}.")
    for name, leaf in expected.items():
        found = tensors[name]
        if found.shape != leaf.shape:
            raise UserError(
                f"{path} belongs to another network or method: '{name}' has shape "
                f"{found.shape} there and {leaf.shape} here."
            )
    cast = {name: tensors[name].astype(leaf.dtype) for name, leaf in expected.items()}
    return trees.from_named_leaves(template, cast)


def _checkpoints(directory: pathlib.Path) -> list[pathlib.Path]:
    """Newest first."""
    return sorted(directory.glob("epoch_*.safetensors"), reverse=True)


def _epoch(path: pathlib.Path) -> int:
    match = re.fullmatch(r"epoch_(\d+)(?:_\d+)?\.safetensors", path.name)
    if match is None:
        raise UserError(f"{path} is not a file of this program; move it away.")
    return int(match.group(1))


def _checksum(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        leaf = tensors[name]
        digest.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(leaf).data)
    return digest.hexdigest()
