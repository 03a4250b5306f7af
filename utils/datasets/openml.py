"""Data sets of OpenML by number, where there is a network."""

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.datasets import tables
from haiku_posteriors.utils.datasets.tables import Table


def fetch(data_id: int) -> tuple[Table, tuple[str, ...]]:
    """A data set as a table, and the names of its targets; scikit-learn keeps a copy on disk.

    Raises:
      UserError: OpenML cannot be reached, does not have it, or gave what is no table.
    """
    from sklearn import datasets

    try:
        bunch = datasets.fetch_openml(
            data_id=data_id, as_frame=False, parser="liac-arff", n_retries=1
        )
        values = np.asarray(bunch.data)
        if values.ndim != 2:
            raise ValueError("its rows are sparse, or no rows of columns")
        columns = {
            name: _decoded(values[:, index], (bunch.categories or {}).get(name))
            for index, name in enumerate(bunch.feature_names)
        }
        target = np.asarray(bunch.target).reshape(len(values), -1)
        names = [*(bunch.get("target_names") or [f"target_{i}" for i in range(target.shape[1])])]
        columns |= {name: target[:, index] for index, name in enumerate(names)}
    except (OSError, ValueError) as error:
        raise UserError(f"OpenML did not give data set {data_id}: {error}.") from error
    return tables.from_columns(columns, f"OpenML's data set {data_id}"), tuple(names)


def _decoded(codes: np.ndarray, values: list[str] | None) -> np.ndarray:
    """Columns declared nominal arrive as positions in their list of values: undo that."""
    if values is None:
        return codes
    positions = np.asarray(codes, np.float64)
    words = np.array(["", *values])  # a missing one has no position
    return words[np.where(np.isnan(positions), 0, positions + 1).astype(np.int64)]
