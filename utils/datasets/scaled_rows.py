"""Images that are scaled as they are taken: a process makes floats of its own rows alone."""

from typing import Any

import numpy as np

from haiku_posteriors.utils.datasets.forms import InputForm


class ScaledRows:
    """What `InputForm.to_inputs` gives, row by row: an array to those who take some of its rows.

    Attributes:
      shape, dtype: of the whole.
    """

    def __init__(self, form: InputForm, values: np.ndarray) -> None:
        """`values` are in their own units, bytes."""
        self._form, self._values = form, values
        self.shape, self.dtype = values.shape, form.dtype

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self._form.to_inputs(self._values[rows])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def first(self, num_rows: int) -> "ScaledRows":
        """The first rows alone."""
        return ScaledRows(self._form, self._values[:num_rows])
