"""Generators from YAML files.

    kind: mlp                      kind: matrix
    latent_size: 60                latent_shape: [40, 40]
    hidden_sizes: [105]            trunk: [[40, 40], [40, 40]]
    linear_path: false             head: [[60, 60]]

The keys are the fields of `core.implicit.generators.MLP` and `Matrix`. Heads are made for the
network at hand, so that one file suits any.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import yaml

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import generators
from haiku_posteriors.core.trees import Params

KINDS: dict[str, type] = {"mlp": generators.MLP, "matrix": generators.Matrix}


def describe_generator(
    name: str, shapes: Params, max_parameters: int | None = None
) -> generators.MLP | generators.Matrix:
    """What `--generator` means: `auto`, or a YAML file."""
    if name == "auto":
        return generators.automatic(shapes, max_parameters)
    path = pathlib.Path(name)
    if not path.is_file():
        raise UserError(f"generator is 'auto' or a YAML file, and there is no file {path}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict) or content.get("kind") not in KINDS:
        raise UserError(f"{path} needs a line 'kind: mlp' or 'kind: matrix'.")
    kind = KINDS[content.pop("kind")]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in content:
        if key not in fields:
            raise UserError(f"{path}: '{key}' is none of {', '.join(fields)}.")
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in content
    ]
    if missing:
        raise UserError(f"{path} lacks '{missing[0]}'.")
    values = {key: _checked(path, key, value) for key, value in content.items()}
    return kind(**values)


def _checked(path: pathlib.Path, key: str, value: Any) -> Any:
    """Lists as tuples; anything but the wholes, pairs and lists that `key` asks for is refused."""

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(whole, value))

    def list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda value: isinstance(value, list) and all(map(kind, value))

    forms: dict[str, Callable[[Any], bool]] = {
        "latent_size": whole,
        "hidden_sizes": list_of(whole),
        "linear_path": lambda value: isinstance(value, bool),
        "latent_shape": pair,
        "trunk": list_of(pair),
        "head": list_of(pair),
    }
    if forms[key](value):
        return _tuples(value)
    raise UserError(f"{path}: '{key}: {value}' is not of the form that generators have.")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
