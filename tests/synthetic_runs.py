"""Run folders written by hand, as the scripts that read them need them, without training."""

import dataclasses
import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from haiku_posteriors.core import trees
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.utils import checkpoint_utils, data_utils, files, models
from haiku_posteriors.utils.problem import Problem, build_log_joint, complete, load_data
from haiku_posteriors.utils.report import problem_files
from haiku_posteriors.utils.report.problem_files import StoredProblem

TOY = Problem(weight_decay=1 / 1.5**2, noise_std=0.3)
DIGITS = Problem(dataset_name="digits", model_name="mlp_20_20")


def write_run(path, problem, dataset, draws, outputs, log_likelihoods, *, draws_per_file):
    """Writes the folder of a finished run.

    `draws` are (chains, draws, ...) by parameter name; `outputs` (draws of all chains, rows, p) are
    in the original units, as is the metric in the summary.
    """
    targets = dataset.y_test
    if dataset.task == "regression":
        targets = targets * dataset.target_scale + dataset.target_mean
    chains, per_chain = next(iter(draws.values())).shape[:2]
    for start in range(0, per_chain, draws_per_file):
        stop = min(start + draws_per_file, per_chain)
        part = {name: leaf[:, start:stop] for name, leaf in draws.items()}
        checkpoint_utils.save_draws(path / "draws", stop, part)
    files.write_arrays(
        path / "predictions.npz",
        test_predictions=outputs,
        test_log_likelihoods=log_likelihoods,
        test_targets=targets,
        num_chains=np.array(chains),
    )
    rows = len(dataset.y_train)
    likelihoods = np.random.default_rng(len(outputs)).normal(-1, 0.3, (chains, per_chain, rows))
    files.write_arrays(
        path / "train_log_likelihoods.npz",
        log_likelihoods=likelihoods.astype(np.float32),
        draws=np.arange(per_chain),
    )
    files.write_json(path / "flags.json", {"method": "synthetic", **dataclasses.asdict(problem)})
    summary = {
        "dataset": dataset.name,
        "num_draws": len(outputs),
        "test": metrics.evaluate(dataset.task, outputs, log_likelihoods, targets),
        "seconds": 1.5,
        "peak_memory_bytes": 2_000_000,
        "data_sha256": data_utils.fingerprint(dataset),
    }
    files.write_json(path / "summary.json", summary)
    return path


def write_toy_run(path, *, seed=0, chains=2, draws=6, draws_per_file=4, **changes):
    """Random weights on the toy regression, with predictions that scatter about its targets."""
    problem = dataclasses.replace(TOY, **changes)
    dataset = load_data(problem)
    problem = complete(problem, dataset.form)
    log_joint = build_log_joint(problem, dataset.form)
    shapes = trees.named_leaves(log_joint.shapes)
    rng = np.random.default_rng(seed)
    dtype = dataset.x_train.dtype
    weights = {
        name: rng.normal(0, 0.5, (chains, draws, *leaf.shape)).astype(dtype)
        for name, leaf in shapes.items()
    }
    means = dataset.y_test + rng.normal(0, 0.3, (chains * draws, *dataset.y_test.shape))
    outputs = np.concatenate([means, np.full_like(means, 0.3)], axis=-1).astype(dtype)
    residual = (dataset.y_test - outputs[..., :1])[..., 0] / 0.3
    log_likelihoods = -0.5 * residual**2 - np.log(0.3 * np.sqrt(2 * np.pi))
    return write_run(
        path,
        problem,
        dataset,
        weights,
        outputs,
        log_likelihoods.astype(dtype),
        draws_per_file=draws_per_file,
    )


def write_loadable_run(path, problem, chains=2, draws=3, seed=0):
    """What `load_run` reads, with random weights."""
    dataset = load_data(problem)
    problem = complete(problem, dataset.form)
    shapes = trees.named_leaves(build_log_joint(problem, dataset.form).shapes)
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.normal(0, 0.5, (chains, draws, *leaf.shape)).astype(leaf.dtype)
        for name, leaf in shapes.items()
    }
    checkpoint_utils.save_draws(path / "draws", draws, weights)
    source = models.source_of(problem.model_name)
    stored = StoredProblem(problem, dataset.form, chains, 1, len(dataset.x_test), source)
    problem_files.write(path, stored)
    return path


def write_digits_ensemble(path, members=3):
    """Networks that scikit-learn has trained, one a chain: quicker than to compile our own."""
    dataset = load_data(DIGITS)
    networks = []
    for seed in range(members):
        network = MLPClassifier((20, 20), max_iter=30, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # 30 epochs are enough here
            networks.append(network.fit(dataset.x_train, dataset.y_train))
    layers = ("hidden_0", "hidden_1", "output")
    draws = {}
    for index, layer in enumerate(layers):
        for name, parts in (("w", "coefs_"), ("b", "intercepts_")):
            values = [getattr(network, parts)[index] for network in networks]
            draws[f"{layer}/{name}"] = np.stack(values)[:, None].astype(np.float32)
    outputs = np.stack([network.predict_proba(dataset.x_test) for network in networks])
    observed = np.log(outputs[:, np.arange(len(dataset.y_test)), dataset.y_test])
    problem = complete(DIGITS, dataset.form)
    return write_run(path, problem, dataset, draws, outputs, observed, draws_per_file=1)
