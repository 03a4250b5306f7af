"""Predictions of many draws: computed on the devices, kept on the host in original units."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from haiku_posteriors.core import fixed_sums
from haiku_posteriors.core.data import Data, Inputs, pad, spread
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import devices
from haiku_posteriors.utils.datasets.forms import DataForm

# Rows that pass through the network at once in prediction: bounds memory, not results.
ROWS_AT_ONCE = 1000


def make_predictor(log_joint: LogJoint, form: DataForm) -> Callable[[Params, Data], Predictions]:
    """A compiled function from draws (chains, draws, ...) and data to `Predictions`."""

    def predict_rows(
        params: Params, data: Data, multiple_of: int = 1
    ) -> tuple[jax.Array, jax.Array]:
        """In pieces of ROWS_AT_ONCE; with padding after the rows."""
        pieces = -(-data.weights.shape[0] // ROWS_AT_ONCE)
        data = spread(pad(data, pieces * multiple_of))

        def split(leaf: jax.Array) -> jax.Array:
            # Strided, as in `core.log_joint`, so that rows spread over devices stay where they are.
            return leaf.reshape(-1, pieces, *leaf.shape[1:]).swapaxes(0, 1)

        def predict_chunk(chunk: tuple[Inputs, jax.Array]) -> tuple[jax.Array, jax.Array]:
            inputs, targets = chunk
            return (
                log_joint.predict(params, inputs),
                log_joint.log_likelihoods(params, inputs, targets),
            )

        chunks = jax.tree.map(split, (data.inputs, data.targets))
        outputs, log_likelihoods = jax.lax.map(predict_chunk, chunks)
        return tuple(
            array.swapaxes(0, 1).reshape(-1, *array.shape[2:])
            for array in (outputs, log_likelihoods)
        )

    def predict_one(params: Params, data: Data) -> tuple[jax.Array, jax.Array]:
        if data.placement is None or data.placement.num_blocks is None:
            return predict_rows(params, data, data.placement.multiple_of if data.placement else 1)
        size = data.weights.shape[0] // data.placement.num_blocks

        def predict_block(block: Data) -> tuple[jax.Array, jax.Array]:
            outputs, log_likelihoods = predict_rows(params, block)
            return outputs[:size], log_likelihoods[:size]

        return fixed_sums.map_in_blocks(predict_block, data)

    def predict(draws: Params, data: Data) -> tuple[jax.Array, jax.Array]:
        # Chains may be spread over devices; draws go one after another to bound memory.
        return jax.vmap(lambda chain: jax.lax.map(lambda params: predict_one(params, data), chain))(
            draws
        )

    compiled = jax.jit(predict)
    compiled_as_written = jax.jit(predict, compiler_options=fixed_sums.AS_WRITTEN)

    def predictor(draws: Params, data: Data) -> Predictions:
        is_fixed = data.placement is not None and data.placement.num_blocks is not None
        program = compiled_as_written if is_fixed else compiled
        outputs, log_likelihoods = devices.to_host(program(draws, data))
        return Predictions(
            form.task,
            to_original_units(outputs[:, :, : data.num_rows], form),
            # The density of scale * y is that of y divided by the scale.
            log_likelihoods[:, :, : data.num_rows]
            - np.log(form.target_scale).sum().astype(log_likelihoods.dtype),
        )

    return predictor


def predict_part(
    predict: Callable[[Params, Data], Predictions],
    draws: Params,
    data: Data,
    draws_at_once: int,
    sharding: jax.sharding.Sharding,
) -> Iterator[Predictions]:
    """Predictions of stored draws, host arrays (chains, draws, ...), collection by collection.

    One collection at a time, as they were predicted the first time: the same program, the same
    bits.
    """
    for first in range(0, jax.tree.leaves(draws)[0].shape[1], draws_at_once):
        part = jax.tree.map(lambda leaf: leaf[:, first : first + draws_at_once], draws)  # noqa: B023
        yield predict(devices.put(part, sharding), data)


def to_original_units(outputs: np.ndarray, form: DataForm) -> np.ndarray:
    """Means and standard deviations (..., 2 * targets) in the units of y; probabilities as is."""
    if form.task == "classification":
        return outputs
    means, stds = np.split(outputs, 2, axis=-1)
    return np.concatenate(
        [means * form.target_scale + form.target_mean, stds * form.target_scale], axis=-1
    )


def targets_in_original_units(targets: np.ndarray, form: DataForm) -> np.ndarray:
    """Labels as they are, or targets in the units of y; the best guess of uncertain ones."""
    if form.task == "classification":
        return targets if targets.ndim == 1 else targets.argmax(axis=1).astype(np.int32)
    targets = targets[:, : len(form.target_mean)]
    return targets * form.target_scale + form.target_mean
