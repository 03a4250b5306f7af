"""Steps of VI, by each estimator, and of MC dropout against plain steps of SGD.

All methods run the same epochs of the loop's program in turns, so that a noisy machine slows them
alike; what counts is the median over rounds of the ratio within a round.

  python benchmarks/vi_step.py
"""

import statistics
import sys

import optax
from tabulate import tabulate

sys.path.insert(0, ".")

from sgd_epoch import seconds

from haiku_posteriors.core import dropout, sgd, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.likelihoods import categorical, heteroscedastic_gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import chains, data_utils, devices, models

ROUNDS = 15
CASES = {  # data set -> (network, batch size, epochs a round)
    "sine_regression": ("mlp_20_20", 8, 100),
    "digits": ("mlp_classification", 80, 3),
}


def compare(name: str) -> list[list]:
    """Rows of the table for one data set."""
    network, batch_size, epochs = CASES[name]
    dataset = data_utils.load(name)
    regression = dataset.task == "regression"
    likelihood = heteroscedastic_gaussian() if regression else categorical(dataset.num_classes)
    log_joint = make_log_joint(
        models.get_network(network, likelihood.num_outputs),
        dataset.x_train,
        make_prior(1.0),
        likelihood,
    )
    optimizer = optax.adam(1e-3)
    methods = {
        "SGD": sgd.sgd(log_joint, optimizer, batch_size),
        "MC dropout": dropout.mc_dropout(log_joint, 0.1, optimizer, batch_size),
    } | {
        f"VI, {estimator}": vi.mean_field_vi(log_joint, optimizer, batch_size, estimator=estimator)
        for estimator in vi.ESTIMATORS
    }
    mesh = devices.make_mesh(1)
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh)
    programs = [chains.compile_method(method, 0, 1, mesh) for method in methods.values()]
    states = [program.init(None) for program in programs]

    def round_of_all() -> list[float]:
        return [
            seconds(lambda: program.run(state, data, 0, epochs))  # noqa: B023
            for program, state in zip(programs, states, strict=True)
        ]

    round_of_all()  # compiles
    rounds = [round_of_all() for _ in range(ROUNDS)]
    steps = epochs * num_minibatches(len(dataset.x_train), batch_size)
    return [
        [
            f"{name}, {network}, batch {batch_size}" if index == 0 else "",
            method,
            1e6 * statistics.median(times[index] for times in rounds) / steps,
            statistics.median(times[index] / times[0] for times in rounds),
        ]
        for index, method in enumerate(methods)
    ]


if __name__ == "__main__":
    table = [row for name in CASES for row in compare(name)]
    print(tabulate(table, ["", "method", "us/step", "over SGD"], floatfmt=".3g", tablefmt="github"))
