"""Chains in one program against separate runs of one chain, and against chains as a batch.

python benchmarks/chains.py [--data_dir=FOLDER with mnist]

Processor time of full-batch gradient steps (SGD with one minibatch per epoch), which is what
Hamiltonian transitions spend theirs on. All cases take turns; the least of several rounds counts.
"""

import sys
import time

import jax
import numpy as np
import optax

sys.path.insert(0, ".")

from haiku_posteriors.core import sgd
from haiku_posteriors.utils import chains, devices
from haiku_posteriors.utils.problem import Problem, load_problem

CHAINS, ROUNDS = 4, 5
DATA_DIR = next((a.split("=")[1] for a in sys.argv[1:] if a.startswith("--data_dir=")), None)
PROBLEMS = {
    "logistic regression, breast_cancer": (
        Problem("breast_cancer", model_name="logistic_regression"),
        4000,
    ),
    "mlp_toy, toy_regression": (Problem("toy_regression"), 4000),
    "mlp of 50, diabetes": (Problem("diabetes"), 1000),
    "mlp_20_20, digits": (Problem("digits", model_name="mlp_20_20"), 100),
}
if DATA_DIR:
    lenet = Problem("mnist", data_dir=DATA_DIR, model_name="lenet", subset_train_to=200)
    PROBLEMS["lenet, 200 rows of mnist"] = (lenet, 4)


def make_runner(log_joint, dataset, num_chains, num_steps, as_batch=False):
    """A function that runs all chains for some steps, compiled, and returns processor seconds."""
    mesh = devices.make_mesh(num_chains)
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh)
    method = sgd.sgd(log_joint, optax.sgd(1e-9), batch_size=len(dataset.x_train))
    take_turns = devices.chains_take_turns
    devices.chains_take_turns = lambda mesh: not as_batch and take_turns(mesh)
    try:
        program = chains.compile_method(method, 0, num_chains, mesh)
        state = program.init(None)
        jax.block_until_ready(program.run(state, data, 0, num_steps))
    finally:
        devices.chains_take_turns = take_turns

    def run():
        started = time.process_time()
        jax.block_until_ready(program.run(state, data, 0, num_steps))
        return time.process_time() - started

    return run


def main():
    """Prints microseconds of a chain's step, and ratios to separate runs."""
    print(f"{CHAINS} chains".ljust(38), "alone, us", "in turn", "as a batch", sep="  ")
    for name, (problem, num_steps) in PROBLEMS.items():
        _, dataset, log_joint = load_problem(problem)
        alone = make_runner(log_joint, dataset, 1, num_steps)
        in_turn = make_runner(log_joint, dataset, CHAINS, num_steps)
        batch = make_runner(log_joint, dataset, CHAINS, num_steps, as_batch=True)
        rounds = np.array([[alone(), in_turn(), batch()] for _ in range(ROUNDS)])
        single, turns, together = rounds.min(axis=0) / np.array([1, CHAINS, CHAINS])
        print(
            name.ljust(38),
            f"{single / num_steps * 1e6:9.1f}",
            f"{turns / single:7.2f}",
            f"{together / single:10.2f}",
            sep="  ",
        )


if __name__ == "__main__":
    main()
