"""What a data set is without its rows: all that new rows need to become a network's inputs.

A run's folder stores it (problem.json), so that the run predicts without the data it was made of.
Numbers survive JSON exactly, and one function scales training rows and new ones: the same row
gives the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_posteriors.core.errors import UserError


class Column(NamedTuple):
    """A column of a table: its name, and its categories if it is not a number."""

    name: str
    categories: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """How many inputs it becomes: one for each category, or one."""
        return len(self.categories) or 1


class InputForm(NamedTuple):
    """How values in their own units become a network's inputs.

    Attributes:
      kind: "features", "images" (bytes of pixels) or "tokens".
      shape: of one row of inputs.
      dtype: of the inputs.
      unit: what values are divided by before anything else; 255 for bytes of pixels.
      mean: what is subtracted then, a number or one for each feature or channel, in float64.
      scale: what is divided by at last, likewise.
      columns: of the table that the rows come from; None for plain arrays.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    unit: float
    mean: np.ndarray
    scale: np.ndarray
    columns: tuple[Column, ...] | None = None

    @property
    def is_tokens(self) -> bool:
        """Whether the inputs are whole numbers that stand for words."""
        return self.kind == "tokens"

    def example(self) -> np.ndarray:
        """One row of inputs; only shape and dtype are meant."""
        return np.zeros((1, *self.shape), self.dtype)

    def to_inputs(self, values: Any) -> np.ndarray:
        """Values (rows, *shape) in their own units as the network's inputs."""
        if self.kind == "tokens":
            return values.astype(self.dtype)
        # Pixels are few-valued, so the wanted type is exact enough and saves memory, as does
        # working in place; features may be large with small differences, so they get float64.
        scaled = values.astype(self.dtype if self.kind == "images" else np.float64)
        scaled /= self.unit
        scaled -= self.mean.astype(scaled.dtype)
        scaled /= self.scale.astype(scaled.dtype)
        return scaled.astype(self.dtype, copy=False)

    def check_values(self, values: np.ndarray, source: str = "The inputs") -> np.ndarray:
        """The same values as (rows, *shape), of the right kind and finite, or a sentence."""
        if values.dtype.kind not in "biuf":
            raise UserError(f"{source} must hold real numbers, not values of {values.dtype}.")
        if values.ndim and (*values.shape[1:], 1) == self.shape:
            values = values[..., np.newaxis]  # one feature, or one channel
        if values.ndim == 0 or values.shape[1:] != self.shape:
            raise UserError(
                f"{source} have shape {values.shape}, but the run was trained on rows of shape "
                f"{self.shape}."
            )
        if len(values) == 0:
            raise UserError(f"{source} have no rows.")
        if self.kind == "images" and values.dtype != np.uint8:
            raise UserError(
                f"{source} are {values.dtype}, but the run was trained on images of bytes: give "
                "uint8, 0 to 255."
            )
        if self.kind == "tokens" and (values.dtype.kind not in "iu" or values.min() < 0):
            raise UserError(
                f"{source} must be tokens, whole numbers from 0, as in the run's training rows."
            )
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if bad.any():
            raise UserError(
                f"{source} hold numbers that are missing or not finite, in {name_rows(bad)}: "
                "fill or remove them."
            )
        return values


class SeveralInputs(NamedTuple):
    """The forms of several inputs, which a network takes as a dict, or as a tuple.

    Attributes:
      names: of the inputs.
      forms: of each.
      is_tuple: whether the network takes a tuple, in the order of the names.
    """

    names: tuple[str, ...]
    forms: tuple[InputForm, ...]
    is_tuple: bool = False

    @property
    def shape(self) -> None:
        """There is no single one."""

    @property
    def is_tokens(self) -> bool:
        """Not all of them."""
        return False

    @property
    def columns(self) -> tuple[Column, ...] | None:
        """Of the table that the rows come from, each once; None for plain arrays."""
        if any(form.columns is None for form in self.forms):
            return None
        return tuple(dict.fromkeys(column for form in self.forms for column in form.columns or ()))

    def join(self, parts: Iterable[Any]) -> dict[str, Any] | tuple[Any, ...]:
        """One value for each input, in their order, as the network takes them."""
        return tuple(parts) if self.is_tuple else dict(zip(self.names, parts, strict=True))

    def parts(self, values: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """The inverse of `join`."""
        return [values[name] for name in self.names] if isinstance(values, Mapping) else [*values]

    def example(self) -> Any:
        """One row of inputs; only shapes and dtypes are meant."""
        return self.join(form.example() for form in self.forms)

    def to_inputs(self, values: Any) -> Any:
        """Values in their own units as the network's inputs."""
        pairs = zip(self.forms, self.parts(values), strict=True)
        return self.join(form.to_inputs(part) for form, part in pairs)

    def check_values(self, values: Any, source: str = "The inputs") -> Any:
        """The same values, of the right shapes and kinds and finite, or a sentence."""
        names = ", ".join(self.names)
        given = [*values] if isinstance(values, Mapping) else None
        if given is not None and {*given} != {*self.names}:
            raise UserError(
                f"{source} are {', '.join(map(str, given))}, but the run was trained on {names}."
            )
        if given is None and (not isinstance(values, tuple) or len(values) != len(self.names)):
            raise UserError(
                f"The run was trained on several inputs: give a dict of arrays ({names}), or a "
                f"tuple of {len(self.names)}."
            )
        checked = [
            form.check_values(np.asarray(part), f"{source}, {name},")
            for name, form, part in zip(self.names, self.forms, self.parts(values), strict=True)
        ]
        if len({len(part) for part in checked}) > 1:
            raise UserError(f"{source} ({names}) must have equally many rows.")
        return self.join(checked)


class DataForm(NamedTuple):
    """A data set without its rows.

    Attributes:
      task: "classification" or "regression".
      inputs: how rows become inputs.
      num_classes: number of classes; 0 for regression.
      classes: their names; empty where they have none but their numbers.
      target_names: names of the targets; empty where they have none.
      target_mean: (targets,); shape (0,) for classification.
      target_scale: (targets,); a target in its own unit is y * target_scale + target_mean.
    """

    task: str
    inputs: InputForm | SeveralInputs
    num_classes: int
    classes: tuple[str, ...]
    target_names: tuple[str, ...]
    target_mean: np.ndarray
    target_scale: np.ndarray

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.classes or tuple(map(str, range(self.num_classes)))

    def empty_targets(self, num_rows: int) -> np.ndarray:
        """Targets that say nothing, for programs that need some."""
        if self.task == "classification":
            return np.zeros(num_rows, np.int32)
        return np.zeros((num_rows, len(self.target_mean)), self.target_mean.dtype)


def name_rows(chosen: np.ndarray) -> str:
    """`row 3`, or `rows 3, 17 and 5 more`: where a mask is true, counted from 1."""
    numbers = (np.flatnonzero(chosen) + 1).tolist()
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"rows {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def to_json(form: DataForm) -> dict[str, Any]:
    """The form as plain values."""
    inputs = form.inputs
    return form._asdict() | {
        "inputs": _input_to_json(inputs)
        if isinstance(inputs, InputForm)
        else inputs._asdict() | {"forms": [_input_to_json(one) for one in inputs.forms]},
        "target_mean": form.target_mean.tolist(),
        "target_scale": form.target_scale.tolist(),
        "target_dtype": str(form.target_mean.dtype),
    }


def _input_to_json(form: InputForm) -> dict[str, Any]:
    columns = form.columns
    return form._asdict() | {
        "dtype": str(form.dtype),
        "shape": list(form.shape),
        "mean": form.mean.tolist(),
        "scale": form.scale.tolist(),
        "columns": None if columns is None else [column._asdict() for column in columns],
    }


def _input_from_json(content: Mapping[str, Any]) -> InputForm:
    inputs = dict(content)
    if inputs["columns"] is not None:
        inputs["columns"] = tuple(
            Column(column["name"], tuple(column["categories"])) for column in inputs["columns"]
        )
    inputs |= {
        "shape": tuple(inputs["shape"]),
        "dtype": np.dtype(inputs["dtype"]),
        "mean": np.asarray(inputs["mean"], np.float64),
        "scale": np.asarray(inputs["scale"], np.float64),
    }
    return InputForm(**inputs)


def from_json(content: Mapping[str, Any]) -> DataForm:
    """The inverse of `to_json`."""
    inputs, dtype = content["inputs"], np.dtype(content["target_dtype"])
    return DataForm(
        content["task"],
        SeveralInputs(
            tuple(inputs["names"]),
            tuple(map(_input_from_json, inputs["forms"])),
            bool(inputs["is_tuple"]),
        )
        if "forms" in inputs
        else _input_from_json(inputs),
        content["num_classes"],
        tuple(content["classes"]),
        tuple(content["target_names"]),
        np.asarray(content["target_mean"], dtype),
        np.asarray(content["target_scale"], dtype),
    )
