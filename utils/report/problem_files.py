"""problem.json: all that a folder's draws need to predict without the data they were made of."""

import dataclasses
import importlib.metadata
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import files, models
from haiku_posteriors.utils.datasets import forms
from haiku_posteriors.utils.datasets.forms import DataForm
from haiku_posteriors.utils.problem import Problem
from haiku_posteriors.version import __version__

NAME = "problem.json"
FORMAT = 1
PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy")


class StoredProblem(NamedTuple):
    """What problem.json holds.

    Attributes:
      problem: the posterior, complete.
      form: of its data.
      num_chains: chains of the run.
      draws_at_once: draws of each chain that were predicted with by one call, so that the same
        program can be used again.
      num_test_rows: rows that were predicted by one call, likewise.
      network: file and checksum of the network's source, see `models.source_of`.
      fixed_sums: whether the run was made with --deterministic_sums, and predicted accordingly.
    """

    problem: Problem
    form: DataForm
    num_chains: int
    draws_at_once: int
    num_test_rows: int
    network: dict[str, str | None]
    fixed_sums: bool = False


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {package: importlib.metadata.version(package) for package in PACKAGES} | {
        "haiku-posteriors": __version__,
        "python": sys.version.split()[0],
    }


def write(directory: pathlib.Path, stored: StoredProblem) -> None:
    """Writes problem.json, unless it is there: a run that goes on is the one that began."""
    path = directory / NAME
    if path.is_file():
        return
    content = stored._asdict() | {
        "format": FORMAT,
        "problem": dataclasses.asdict(stored.problem),
        "form": forms.to_json(stored.form),
        "versions": versions(),
    }
    files.write_json(path, content)


def read(directory: pathlib.Path) -> StoredProblem:
    """Reads problem.json.

    Raises:
      UserError: there is no run, or the file is damaged or of another version.
    """
    path = directory / NAME
    if not directory.is_dir():
        raise UserError(f"There is no run folder {directory}.")
    if not path.is_file():
        raise UserError(
            f"{directory} holds no {NAME}: no run, or one of a version before 0.3.0; the command "
            "that made it adds the file when it is given again."
        )
    content = files.read_json(path)
    if content.get("format") != FORMAT:
        raise UserError(f"{path} is of another version of this program (format {FORMAT} is known).")
    try:
        return _from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__} {error}.") from error


def _from_json(content: dict[str, Any]) -> StoredProblem:
    return StoredProblem(
        Problem.from_mapping(content["problem"]),
        forms.from_json(content["form"]),
        int(content["num_chains"]),
        int(content["draws_at_once"]),
        int(content["num_test_rows"]),
        dict(content["network"]),
        bool(content.get("fixed_sums", False)),  # the first files with this format have none
    )


def find_network(stored: StoredProblem) -> str:
    """The name by which the run's network is found: its own, or by the file it was in."""
    name, file = stored.problem.model_name, stored.network["file"]
    assert name is not None
    if file == models.IN_MEMORY:
        raise UserError(f"The run's network was a Python function, '{name}': give it as network=.")
    try:
        models.source_of(name)
    except UserError:
        if file is None or not pathlib.Path(file).is_file():
            raise
        return f"{file}:{name.rpartition(':')[2]}"  # the working directory is another one now
    return name


def refuse_changed_network(
    directory: pathlib.Path, stored: StoredProblem, network: str | Callable[..., jax.Array]
) -> None:
    """Refuses to give a run's draws to a network whose source is not the one they are of."""
    if models.source_of(network)["sha256"] != stored.network["sha256"]:
        raise UserError(
            f"The network '{stored.problem.model_name}' has changed since the run in {directory}: "
            "its source has another checksum. Restore it, or say that the change does not matter "
            "(--allow_changed_network)."
        )
