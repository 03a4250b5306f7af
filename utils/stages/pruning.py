"""How many weights of Gaussian dropout can go, at what NLL: pruning.json and pruning.png."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import gaussian_dropout
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.trees import Params
from haiku_posteriors.core.vi import VariationalParams
from haiku_posteriors.utils import chains, devices, ensemble_utils, files
from haiku_posteriors.utils.plots import sweep
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

NAME, PICTURE = "pruning.json", "pruning.png"
SHARES = (
    0.0,
    0.2,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.85,
    0.9,
    0.925,
    0.95,
    0.97,
    0.98,
    0.99,
    0.995,
    0.998,
    0.999,
    0.9995,
)
NUM_DRAWS = 50


def tell(task: Task, directory: pathlib.Path, result: RunResult) -> None:
    """Removes the weights of largest alpha, share by share, and says what the test rows lose."""
    q: VariationalParams = result.state.variational
    found = np.concatenate([np.ravel(a) for a in gaussian_dropout.log_alphas(q).values()])
    limit = task.settings.prune_above
    own_share = float(np.mean(found > limit))
    members = len(jax.tree.leaves(q.mean)[0])
    num_draws = min(NUM_DRAWS, task.settings.vi_ensemble_size)

    @jax.jit
    def draws(q: VariationalParams, threshold: jax.Array) -> Params:
        def of_member(q: VariationalParams, member: jax.Array) -> Params:
            key = chains.chain_key(task.settings.seed, chains.PRUNING, 0, member)
            keys = jax.random.split(key, num_draws)
            return jax.vmap(lambda k: gaussian_dropout.draw(k, q, threshold))(keys)

        return jax.vmap(of_member)(q, jnp.arange(members))

    dataset = task.dataset
    predict = ensemble_utils.make_predictor(task.log_joint, dataset.form)
    mesh = devices.make_mesh(members)
    data = devices.place_data(dataset.x_test, dataset.y_test, mesh)
    targets = ensemble_utils.targets_in_original_units(dataset.y_test, dataset.form)
    score = "accuracy" if dataset.task == "classification" else "rmse"
    rows = []
    for share in sorted({*SHARES, own_share}):
        threshold = limit if share == own_share else float(np.quantile(found, 1 - share))
        predictions = predict(draws(q, np.float32(threshold)), data)._replace(targets=targets)
        measured = metrics.of_predictions(predictions)
        rows.append(
            {
                "share": share,
                "log_alpha": threshold,
                "nll": measured["nll"],
                score: measured[score],
                "of_draws": share == own_share,
            }
        )
    files.write_json(directory / NAME, {"num_weights": int(found.size), "rows": rows})
    sweep.pruning_curves(directory / PICTURE, rows, {"nll": "NLL", score: score})
    own = next(row for row in rows if row["of_draws"])
    print(
        f"Weights with log alpha above {limit:g}, {own_share:.1%} of {found.size:,}, are removed: "
        f"NLL {own['nll']:.4g}, {score} {own[score]:.4g}, and {rows[0]['nll']:.4g}, "
        f"{rows[0][score]:.4g} with all of them ({directory / PICTURE})."
    )
