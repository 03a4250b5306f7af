"""What the prior says of the data before any of them is seen: a picture, in the units of y."""

import pathlib

import jax
import numpy as np

from haiku_posteriors.core.data import Inputs, count_rows, make_data, take_rows
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params, merge
from haiku_posteriors.utils import chains, ensemble_utils
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.plots import predictive
from haiku_posteriors.utils.report.pictures import GRID_POINTS, grid_axis

NUM_DRAWS = 200
MAX_ROWS = 500


def sample_prior(rng_key: jax.Array, log_joint: LogJoint, num_draws: int) -> Params:
    """Draws of the prior, (1, num_draws, ...); point estimates are where the network starts."""

    def sample(key: jax.Array) -> Params:
        point = log_joint.partition(log_joint.init(jax.random.fold_in(key, 0)))[1]
        return merge(log_joint.sample_prior(jax.random.fold_in(key, 1)), point)

    draws = jax.vmap(sample)(jax.random.split(rng_key, num_draws))
    return jax.tree.map(lambda leaf: leaf[None], draws)


def draw(path: pathlib.Path, log_joint: LogJoint, dataset: Dataset, seed: int) -> None:
    """The picture: functions over one input; else predictions beside the targets of the data."""
    key = jax.random.fold_in(jax.random.key(seed), chains.PRIOR_PREDICTIVE)
    draws = jax.jit(sample_prior, static_argnums=(1, 2))(key, log_joint, NUM_DRAWS)
    predict = ensemble_utils.make_predictor(log_joint, dataset.form)

    def outputs(inputs: Inputs) -> np.ndarray:
        data = make_data(inputs, dataset.form.empty_targets(count_rows(inputs)))
        return predict(draws, jax.device_put(data)).flat_outputs

    targets = ensemble_utils.targets_in_original_units(dataset.y_train, dataset.form)
    if dataset.task == "regression" and dataset.form.inputs.shape == (1,) == targets.shape[1:]:
        grid = grid_axis(dataset.x_train, GRID_POINTS)
        found = outputs(grid[:, None].astype(dataset.x_train.dtype))
        predictive.predictive_panel(
            path, {"prior": found}, grid, dataset.x_train, targets, show_bands=True
        )
        return
    found = outputs(take_rows(dataset.x_train, slice(MAX_ROWS)))
    predictive.prior_histograms(path, dataset.task, found, targets)
