"""Steps of VI, by estimator, family and objective, and of MC dropout against plain steps of SGD.

All methods run epochs of the loop's program in turns, each as many as take about a tenth of a
second, so that a noisy machine slows them alike; what counts is the median over rounds of the ratio
of times a step within a round.

  python benchmarks/vi_step.py
  python benchmarks/vi_step.py --families      by family, objective and K, 8 draws a step each
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import optax
from tabulate import tabulate

sys.path.insert(0, ".")

from sgd_epoch import seconds

from haiku_posteriors.core import dropout, low_rank, multiplicative_flows, sgd, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.implicit import implicit_vi, objectives, semi_implicit, unbiased
from haiku_posteriors.core.layerwise import layerwise_vi
from haiku_posteriors.core.likelihoods import categorical, heteroscedastic_gaussian
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import chains, data_utils, devices, models

ROUNDS, SECONDS, NUM_SAMPLES = 9, 0.1, 8
NUM_BATCHES = 4  # of an epoch: the cost of a step does not depend on how many there are
CASES = {  # data set -> (network, batch size)
    "sine_regression": ("mlp_20_20", 8),
    "digits": ("mlp_classification", 80),
}
FAMILY_CASES = {**CASES, "digits": ("mlp_20_20", 80)}  # columns and mixtures of all weights


def by_estimator(
    log_joint: LogJoint, optimizer: optax.GradientTransformation, batch_size: int
) -> dict[str, Method]:
    """MC dropout, and mean-field VI by each estimator, one draw a step."""
    return {"MC dropout": dropout.mc_dropout(log_joint, 0.1, optimizer, batch_size)} | {
        f"VI, {estimator}": vi.mean_field_vi(log_joint, optimizer, batch_size, estimator=estimator)
        for estimator in vi.ESTIMATORS
    }


def by_family(
    log_joint: LogJoint, optimizer: optax.GradientTransformation, batch_size: int
) -> dict[str, Method]:
    """Families of run_vi.py and objectives of run_implicit.py, NUM_SAMPLES draws a step."""
    arguments = (log_joint, optimizer, batch_size)
    found = {
        "mean_field": vi.mean_field_vi(*arguments, num_samples=NUM_SAMPLES),
        "mnf": multiplicative_flows.multiplicative_flow_vi(*arguments, num_samples=NUM_SAMPLES),
        "layerwise, 10 inducing": layerwise_vi.layerwise_vi(*arguments, num_samples=NUM_SAMPLES),
    }
    for rank in (1, 10, 50):
        found[f"low_rank, R = {rank}"] = low_rank.low_rank_vi(
            *arguments, rank=rank, num_samples=NUM_SAMPLES
        )
    estimators: dict[str, tuple[str, objectives.EntropyEstimator]] = {
        "linearised": ("linearised", None),
        "hierarchical": ("hierarchical", None),
        **{f"sivi, K = {k}": ("sivi", semi_implicit.Mixture(k)) for k in (10, 100, 1000)},
        **{
            f"uivi, {2 * n} transitions, K = 10": ("uivi", unbiased.Unbiased(n, n, num_draws=10))
            for n in (1, 3)
        },
    }
    for name, (objective, estimator) in estimators.items():
        found[name] = implicit_vi.implicit_vi(
            *arguments,
            estimator=estimator,
            num_samples=NUM_SAMPLES,
            objective=objectives.Objective(objective),
        )
    return found


def compare(name: str, families: bool, only: str) -> list[list]:
    """Rows of the table for one data set, of methods whose names have `only` in them."""
    network, batch_size = (FAMILY_CASES if families else CASES)[name]
    dataset = data_utils.load(name)
    regression = dataset.task == "regression"
    likelihood = heteroscedastic_gaussian() if regression else categorical(dataset.num_classes)
    log_joint = make_log_joint(
        models.get_network(network, likelihood.num_outputs),
        dataset.x_train,
        make_prior(1.0),
        likelihood,
    )
    make = by_family if families else by_estimator
    optimizer = optax.adam(1e-3)
    methods = {"SGD": sgd.sgd(log_joint, optimizer, batch_size)}
    chosen = make(log_joint, optimizer, batch_size)
    methods |= {method: value for method, value in chosen.items() if only in method}
    mesh = devices.make_mesh(1)
    rows = slice(NUM_BATCHES * batch_size)
    data = devices.place_data(dataset.x_train[rows], dataset.y_train[rows], mesh)
    num_batches = num_minibatches(data.num_rows, batch_size)

    def timed(method: Method) -> Callable[[], float]:
        """Seconds a step, of about SECONDS."""
        program = chains.compile_method(method, 0, 1, mesh)
        state = program.init(None)

        def run(epochs: int) -> float:
            return seconds(lambda: program.run(state, data, 0, epochs))

        run(1)  # compiles
        epochs = max(1, round(SECONDS / run(1)))
        return lambda: run(epochs) / (epochs * num_batches)

    def tell_and_time(method: str) -> Callable[[], float]:
        print(f"{name}: {method} ...", file=sys.stderr, flush=True)
        return timed(methods[method])

    clocks = [tell_and_time(method) for method in methods]
    rounds = [[clock() for clock in clocks] for _ in range(ROUNDS)]
    return [
        [
            f"{name}, {network}, batch {batch_size}" if index == 0 else "",
            method,
            1e6 * statistics.median(times[index] for times in rounds),
            statistics.median(times[index] / times[0] for times in rounds),
        ]
        for index, method in enumerate(methods)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", action="store_true", help="by family, objective and K")
    parser.add_argument("--cases", default=",".join(CASES), help="data sets")
    parser.add_argument("--only", default="", help="a part of the methods' names")
    arguments = parser.parse_args()
    heads = ["", "method", "us/step", "over SGD"]
    for name in arguments.cases.split(","):
        table = compare(name, arguments.families, arguments.only)
        print(tabulate(table, heads, floatfmt=".3g", tablefmt="github"), flush=True)
