"""How wide q begins around trained networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import run_vi
from haiku_posteriors.core import trees, vi
from haiku_posteriors.utils import cmd_args_utils, tasks
from haiku_posteriors.utils.stages import local_scales, variational

pytestmark = pytest.mark.usefixtures("first_device_only")
ROWS, COLUMNS = 40, 20


def first_scales(path, inputs, targets, weights, *flags):
    """Standard deviations of the weights of mean-field q around `weights`, of a linear model."""
    np.savez(path, x_train=inputs, y_train=targets, x_test=inputs, y_test=targets)
    fixed = ["--model_name=logistic_regression", "--standardize=false", "--weight_decay=1"]
    settings = cmd_args_utils.parse(run_vi.GROUPS, [f"--dataset_name={path}", *fixed, *flags])
    task = tasks.load_task("vi", settings)

    def around(key, params, scales):
        return vi.around(task.log_joint, params, scales)

    leaves = trees.named_leaves(task.log_joint.shapes)
    given = {
        name: jnp.asarray(weights[:, None] if name.endswith("/w") else np.zeros(leaf.shape))[None]
        for name, leaf in leaves.items()
    }
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32), trees.from_named_leaves(task.log_joint.shapes, given)
    )
    q = local_scales.curvature_starts(task, params, around, variational.family_of(task))
    found = trees.named_leaves(q.raw_scale)
    (name,) = (name for name in found if name.endswith("/w"))
    return np.logaddexp(found[name][0, :, 0], 0)


def test_of_a_gaussian_posterior_q_has_its_conditional_deviations(tmp_path):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(ROWS, COLUMNS))
    truth = rng.normal(size=COLUMNS)
    mode = np.linalg.solve(inputs.T @ inputs + np.eye(COLUMNS), inputs.T @ (inputs @ truth))
    flags = ("--likelihood=gaussian", "--noise_std=1", "--learn_noise=false")
    found = first_scales(tmp_path / "d.npz", inputs, inputs @ truth, mode, *flags)
    # By 200 probes: a few per cent of an off-diagonal element's share each.
    np.testing.assert_allclose(found, (1 + np.sum(inputs**2, axis=0)) ** -0.5, rtol=0.15)


def test_around_weights_that_fit_all_rows_q_is_narrower_than_the_prior(tmp_path):
    """Rows that are beyond doubt have no curvature, but draws as wide as the prior doubt them.

    With inputs of deviation 10 and a margin of 10 a scale of 1 moves logits by 45, to cost hundreds
    of nats; in units of it the ELBO's best scale is far below 1/2.
    """
    rng = np.random.default_rng(1)
    inputs = 10 * rng.normal(size=(ROWS, COLUMNS))
    direction = rng.normal(size=COLUMNS)
    margins = inputs @ direction
    keep = np.abs(margins) > np.median(np.abs(margins))
    weights = 10 * direction / np.abs(margins[keep]).min()
    labels = (margins[keep] > 0).astype(int)
    found = first_scales(
        tmp_path / "d.npz", inputs[keep], labels, weights, "--likelihood=bernoulli"
    )
    assert np.all(found < 0.25)
    assert np.all(found > 1 / 32)
