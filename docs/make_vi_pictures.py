"""The pictures of docs/vi.md, from the run folders that its commands leave.

python docs/make_vi_pictures.py RUNS      RUNS holds point, map, dropout, rt, ... as in docs/vi.md
"""

import json
import pathlib
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, ".")

from haiku_posteriors.core import vi
from haiku_posteriors.core.data import make_data, num_minibatches, take
from haiku_posteriors.core.likelihoods import gaussian, heteroscedastic_gaussian
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import checkpoint_utils, data_utils, ensemble_utils, models, optim_utils
from haiku_posteriors.utils.logging_utils import read_rows
from haiku_posteriors.utils.plots import predictive, style

PICTURES = pathlib.Path("docs/pictures")
COLOURS = (
    style.BLUE,
    style.VERMILLION,
    style.ORANGE,
    style.SKY_BLUE,
    style.BLACK,
)
SERIES = {
    "point": "point estimate, known noise",
    "map": "MAP, predicted noise",
    "dropout": "MC dropout",
    "rt": "VI, reparameterisation",
    "lrt": "VI, local reparameterisation",
    "mixture": "VI, scale mixture prior",
}
BETAS = {
    "lrt": "1 / weights",
    "graves": "1 / M",
    "blundell": "2^(M-i) / (2^M - 1)",
    "one": "1",
    "zero": "0",
}
DATASET = data_utils.load("sine_regression")
CHECKPOINTS = (0, 1, 2, 5, 10, 20, 50, 100, 200)  # epochs at which gradients are compared
KEYS = 500


def problem(flags: Mapping) -> LogJoint:
    """The network and the likelihood of a run; the prior plays no part in predictions."""
    likelihood = (
        gaussian(flags["noise_std"])
        if flags["likelihood"] == "gaussian"
        else heteroscedastic_gaussian()
    )
    network = models.get_network(flags["model_name"], likelihood.num_outputs)
    return make_log_joint(network, DATASET.x_train, make_prior(flags["weight_decay"]), likelihood)


def series(runs: pathlib.Path, path: pathlib.Path) -> None:
    """Predictive distributions side by side."""
    grid = np.linspace(-1.5, 1.5, 300, dtype=np.float32)
    points = make_data(grid[:, None], np.zeros((len(grid), 1), np.float32))
    panels = {}
    for name, title in SERIES.items():
        log_joint = problem(json.loads((runs / name / "flags.json").read_text()))
        template = log_joint.shapes
        draws = checkpoint_utils.load_draws(runs / name / "draws", template)
        predict = ensemble_utils.make_predictor(log_joint, DATASET.form)
        panels[title] = predict(jax.device_put(draws), jax.device_put(points)).flat().outputs
    targets = ensemble_utils.targets_in_original_units(DATASET.y_train, DATASET.form)
    predictive.predictive_panel(
        path, panels, grid, DATASET.x_train, targets, lambda x: 10 * np.sin(2 * np.pi * x)
    )
    shrink(path)


def gradient_variances(runs: pathlib.Path, path: pathlib.Path) -> None:
    """Total variance of each estimator's gradient on one minibatch, along a run by `local`."""
    flags = json.loads((runs / "lrt" / "flags.json").read_text())
    log_joint, batch_size = problem(flags), flags["batch_size"]
    data = jax.device_put(make_data(DATASET.x_train, DATASET.y_train))
    steps = flags["num_epochs"] * num_minibatches(data.num_rows, batch_size)
    optimizer = optim_utils.make_optimizer(flags["optimizer"], flags["init_step_size"], steps)
    method = vi.mean_field_vi(
        log_joint,
        optimizer,
        batch_size,
        sigma_init=flags["vi_sigma_init"],
        estimator="local",
        kl=flags["kl"],
        kl_weight=flags["kl_weight"],
    )
    rows = jax.random.choice(jax.random.key(1), data.num_rows, (batch_size,), replace=False)
    batch = take(data, rows, jnp.full(batch_size, data.num_rows / batch_size))

    def variance(variational: vi.VariationalParams, estimator: str) -> jax.Array:
        def gradient(key: jax.Array) -> jax.Array:
            return ravel_pytree(
                jax.grad(
                    lambda v: (
                        vi.evidence_terms(
                            key, log_joint, v, batch, estimator
                        ).expected_log_likelihood
                    )
                )(variational)
            )[0]

        gradients = jax.lax.map(gradient, jax.random.split(jax.random.key(2), KEYS))
        return jnp.sum(jnp.var(gradients, axis=0))

    measure = jax.jit(variance, static_argnums=1)
    step = jax.jit(method.step)
    state = method.init(jax.random.key(0), None)
    found: dict[str, list[float]] = {name: [] for name in vi.ESTIMATORS}
    for epoch in range(max(CHECKPOINTS) + 1):
        if epoch in CHECKPOINTS:
            for name, values in found.items():
                values.append(float(measure(state.variational, name)))
        state, _ = step(jax.random.fold_in(jax.random.key(3), epoch), state, data)
    for name, values in found.items():
        ratios = np.array(found["reparameterization"]) / values
        print(name, [f"{v:.3g}" for v in values], [f"{r:.2f}" for r in ratios])
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for (name, values), colour in zip(found.items(), COLOURS, strict=False):
        axis.plot(CHECKPOINTS, values, "o-", color=colour, label=name)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks(CHECKPOINTS, [str(epoch) for epoch in CHECKPOINTS])
    axis.set(yscale="log", xlabel="epoch", ylabel="gradient variance, summed over q")
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)
    figure.savefig(path, dpi=110)


def betas(runs: pathlib.Path, path: pathlib.Path) -> None:
    """KL and errors over epochs for five weights of the KL."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    labels = {
        "kl": "KL(p || q), not weighted",
        "train_rmse": "training RMSE",
        "test_rmse": "test RMSE",
    }
    for (name, label), colour in zip(BETAS.items(), COLOURS, strict=True):
        rows = read_rows(runs / name / "metrics.jsonl")
        epochs = [row["epoch"] for row in rows]
        for axis, key in zip(axes, labels, strict=True):
            axis.plot(epochs, [row[key] for row in rows], color=colour, label=label)
    for axis, label in zip(axes, labels.values(), strict=True):
        axis.set(xlabel="epoch", ylabel=label)
        tidy(axis)
    axes[0].set_yscale("log")
    axes[1].legend(title="weight of the KL", frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#DDDDDD", linewidth=0.6)


def shrink(path: pathlib.Path) -> None:
    """Half the size and few colours: a picture for a page, not for print."""
    with Image.open(path) as image:
        small = image.convert("RGB").resize(
            (image.width // 2, image.height // 2), Image.Resampling.LANCZOS
        )
    small.quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("One argument is needed: the folder that holds the runs.")
    folder = pathlib.Path(sys.argv[1])
    series(folder, PICTURES / "vi_series.png")
    betas(folder, PICTURES / "vi_betas.png")
    gradient_variances(folder, PICTURES / "vi_gradient_variance.png")
