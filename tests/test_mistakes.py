"""Wrong inputs by the hundred: one sentence, exit code 2, no traceback, and nothing is written.

All of them go through `main` of their script, in this process: what a process of its own shows
besides is in tests/test_scripts.py and at the end.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest
import synthetic_runs

import calibrate_method
import compare_posteriors
import demo
import distill
import evaluate_uncertainty
import list_runs
import make_posterior_surface_plot
import predict
import run_hmc
import run_implicit
import run_laplace
import run_mclmc
import run_sgd
import run_sgmcmc
import run_smc
import run_swag
import run_vi
import stream
import sweep_temperatures
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import checkpoint_utils, files, locks

pytestmark = pytest.mark.usefixtures("first_device_only")

RUNNERS = (run_sgd, run_hmc, run_mclmc, run_smc, run_sgmcmc, run_vi, run_implicit)
OTHERS = (
    predict,
    list_runs,
    sweep_temperatures,
    calibrate_method,
    run_laplace,
    run_swag,
    distill,
    stream,
)
READERS = (compare_posteriors, evaluate_uncertainty, make_posterior_surface_plot)
SHORT = "--num_epochs=20 --eval_freq=10 --save_freq=10 --num_members=2 --dir=run"


# Networks that tests name as test_mistakes:function.
def good_network(inputs):
    return hk.Linear(1)(inputs)


def with_dropout(inputs):
    return hk.Linear(1)(inputs * jax.random.normal(hk.next_rng_key(), inputs.shape, inputs.dtype))


def of_two(inputs, other):
    return hk.Linear(1)(inputs + other)


def with_state(inputs):
    return hk.Linear(1)(inputs) + hk.get_state("mean", (1,), inputs.dtype, jnp.zeros)


def that_fails(inputs):
    return inputs @ jnp.zeros((7, 7))


def that_raises(inputs):
    raise RuntimeError("my\nown\nmistake")


def of_no_parameters(inputs):
    return inputs


def of_two_outputs(inputs):
    return hk.Linear(2)(inputs)


def of_a_tuple(inputs):
    return hk.Linear(1)(inputs), inputs


def that_returns_nothing(inputs):
    hk.Linear(1)(inputs)


def of_a_hundred_gigabytes(inputs):
    return hk.Linear(1)(hk.Linear(10**11)(inputs))


class AModule(hk.Module):
    def __call__(self, inputs):
        return hk.Linear(1)(inputs)


transformed = hk.transform(good_network)
not_a_function = 3


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with runs and files to be mistaken about; the working directory of every mistake."""
    folder = tmp_path_factory.mktemp("desk")
    write_data(folder)
    write_runs(folder)
    write_others(folder)
    (folder / "home").mkdir()
    (folder / "temporary").mkdir()
    return folder


def write_data(folder):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3))
    good = {"x_train": x, "y_train": x[:, 0], "x_test": x[:5], "y_test": x[:5, 0]}
    huge, mostly, labels = x * 1e300, x.copy(), np.arange(20) % 3
    mostly[3, 1] = np.nan
    changes = {
        "good": {},
        "huge_inputs": {"x_train": huge, "x_test": huge[:5]},
        "huge_targets": {"y_train": huge[:, 0], "y_test": huge[:5, 0]},
        "tiny_targets": {"y_train": x[:, 0] * 1e-300, "y_test": x[:5, 0] * 1e-300},
        "huge_test": {"x_test": huge[:5]},
        "missing_values": {"x_train": mostly},
        "float_labels": {"y_train": labels.astype(float), "y_test": labels[:5].astype(float)},
        "one_class": {"y_train": np.zeros(20, int), "y_test": np.zeros(5, int)},
        "one_trained_class": {"y_train": np.zeros(20, int), "y_test": np.arange(5) % 2},
        "gaps": {"y_train": 2 * labels, "y_test": 2 * labels[:5]},
        "negative_labels": {"y_train": labels - 1, "y_test": labels[:5] - 1},
        "negative_integers": {"x_train": -np.ones((20, 3), int), "x_test": np.ones((5, 3), int)},
        "other_columns": {"x_test": x[:5, :2]},
        "other_rows": {"y_train": x[:19, 0]},
        "no_rows": {"x_test": x[:0], "y_test": x[:0, 0]},
        "text": {"x_train": x.astype(str)},
        "complex": {"x_train": x + 1j},
        "three_axes": {"y_train": np.zeros((20, 2, 2)), "y_test": np.zeros((5, 2, 2))},
        "no_test": {"x_test": None, "y_test": None},
        "numbers": {"x_train": np.float64(1)},
    }
    for name, change in changes.items():
        arrays = {key: value for key, value in (good | change).items() if value is not None}
        np.savez(folder / f"{name}.npz", **arrays)
    np.savez(folder / "pickled.npz", **good | {"y_test": np.array([{}], object)})
    np.save(folder / "single.npy", x)
    shutil.move(folder / "single.npy", folder / "single.npz")
    (folder / "garbage.npz").write_bytes(b"no archive")
    (folder / "empty.npz").touch()
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:300])
    uci = folder / "data/uci/yacht"
    uci.mkdir(parents=True)
    np.savetxt(uci / "data.txt", x)
    np.savetxt(uci / "index_features.txt", [0, 1], fmt="%d")
    np.savetxt(uci / "index_target.txt", [2], fmt="%d")
    np.savetxt(uci / "index_train_0.txt", np.arange(15), fmt="%d")
    np.savetxt(uci / "index_test_0.txt", np.arange(14, 20), fmt="%d")


def write_runs(folder):
    """Finished runs, of which something is then damaged."""
    synthetic_runs.write_toy_run(folder / "hmc", chains=2, draws=4)
    synthetic_runs.write_toy_run(folder / "fewer", subset_train_to=40)
    for name, file, content in (
        ("flags_list", "flags.json", "[1, 2]"),
        ("flags_bare", "flags.json", '{"a": 1}'),
        ("flags_cut", "flags.json", '{"method": "sg'),
        ("summary_list", "summary.json", "[1, 2]"),
        ("summary_bare", "summary.json", '{"a": 1}'),
        ("summary_typed", "summary.json", '{"num_draws": "8", "test": {}}'),
        ("no_predictions", "predictions.npz", None),
        ("cut_predictions", "predictions.npz", "PK"),
        ("unfinished", "summary.json", None),
        ("no_flags", "flags.json", None),
        ("no_draws", "draws/epoch_00000004.safetensors", None),
        ("bad_draws", "draws/epoch_00000004.safetensors", "nonsense"),
        ("bad_diagnostics", "diagnostics.json", "{"),
    ):
        shutil.copytree(folder / "hmc", folder / name)
        (folder / name / file).unlink(missing_ok=True)
        if content is not None:
            (folder / name / file).write_text(content)
    shutil.copytree(folder / "hmc", folder / "other_draws")
    summary = json.loads((folder / "hmc/summary.json").read_text())
    files.write_json(folder / "other_draws/summary.json", summary | {"num_draws": 3})


def write_others(folder):
    rng = np.random.default_rng(0)
    good = rng.dirichlet(np.ones(3), size=6)
    for name, row in (("negative", [-0.5, 1.0, 0.5]), ("unsummed", [0.5, 1.0, 0.5])):
        table = good.copy()
        table[4] = row
        np.savetxt(folder / f"{name}.csv", table, delimiter=",")
    np.savetxt(folder / "probabilities.csv", good)
    np.savetxt(folder / "others.csv", good[:5])
    np.savetxt(folder / "labels.csv", [0, 1, 2, 0, 1, 2], fmt="%d")
    np.savetxt(folder / "few_labels.csv", [0, 1], fmt="%d")
    np.savetxt(folder / "large_labels.csv", [0, 1, 2, 3, 4, 9], fmt="%d")
    np.savetxt(folder / "half_labels.csv", [0.5] * 6)
    (folder / "words.csv").write_text("a,b\nc,d\n")
    (folder / "empty.csv").touch()
    np.savez(folder / "nameless.npz", x=good)
    np.savez(folder / "flat.npz", probabilities=good[0])
    for name, content in {
        "list": "- 1",
        "kindless": "latent_size: 3",
        "unknown_kind": "kind: transformer",
        "unknown_key": "kind: mlp\nlatent_size: 3\ndepth: 2",
        "lacking": "kind: mlp",
        "text_size": "kind: mlp\nlatent_size: many",
        "broken": "kind: [",
        "zero": "kind: mlp\nlatent_size: 0",
    }.items():
        (folder / f"{name}.yaml").write_text(content)
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "file").touch()
    (folder / "full").mkdir()
    (folder / "full/something").touch()
    (folder / "broken_module.py").write_text("import nothing_of_this_name\n")
    (folder / "syntax.py").write_text("def f(:\n")
    five = {"hidden_0": {"w": np.zeros((5, 1, 1, 7), np.float32)}}
    checkpoint_utils.save_tree(folder / "other_network.safetensors", five)
    (folder / "nonsense.safetensors").write_bytes(b"nonsense")


def tree(folder):
    """All files of a folder, by name, size and time, and all folders."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def numbers():
    """Every flag of any script that is a number, with what is none or none that can be."""
    seen = set()
    for script in (*RUNNERS, *READERS, *OTHERS):
        for flag in (flag for group in script.GROUPS.values() for flag in group):
            if flag.kind not in ("float", "integer") or flag.name in seen:
                continue
            seen.add(flag.name)
            wrong = {"float": ["nan", "-inf", "1e300"], "integer": ["1.5", "99999999999999999999"]}
            yield from ((script, f"--{flag.name}={v}", flag.name) for v in wrong[flag.kind])
            if flag.lower_bound is not None:
                yield script, f"--{flag.name}={flag.lower_bound - 1}", flag.name
            if flag.above is not None:
                yield script, f"--{flag.name}={flag.above}", flag.name
            if flag.below is not None:
                yield script, f"--{flag.name}={flag.below}", flag.name


def own(name):
    return f"--likelihood=gaussian --model_name=test_mistakes:{name}"


COMPARE = "--reference=hmc --candidates="
SURFACE = "--checkpoint1=hmc@0 --checkpoint2=hmc@1 --checkpoint3="
MISTAKES = {
    run_sgd: {
        # the command
        "digits": "Not a flag: digits",
        "--num_epoch=3": "Did you mean: num_epochs",
        "--num_epochs": "num_epochs",
        "--optimizer=Adan": "optimizer",
        "--standardize=perhaps": "standardize",
        "--momentum=1": "momentum_decay must be at least 0 and below 1, not 1.0",
        "--temperature=1e-50": "temperature = 1e-50 is too small",
        "--weight_decay=1e30": "weight_decay = 1e+30 is too large",
        "--seed=4294967296": "seed must be at least 0 and at most 4294967295",
        "--seed=-1": "seed must be at least 0",
        "--tabulate_freq=0": "tabulate_freq must be at least 1",
        "--batch_size=71": "batch_size must be between 1 and the number of training rows (70)",
        # folders
        "--dir=": "--dir is empty",
        "--dir=file": "file is a file",
        "--dir=file/below": "file is a file",
        "--dir=/dev/null/x": "/dev/null is a file",
        "--dir=/proc/run": "cannot be written to",
        "--dir=full": "is not empty and holds no run",
        "--dir=~nobody_of_this_name/x": "there is no user ~nobody_of_this_name",
        f"--dir={'x' * 300}": "too long",
        "--data_dir=nowhere": "The data folder nowhere does not exist",
        "--dir=flags_list": "flags.json is damaged or of another kind: not an object",
        "--dir=flags_cut": "flags.json is damaged",
        # data
        "--dataset_name=digist": "Did you mean 'digits'",
        "--dataset_name=": "Unknown data set ''",
        "--dataset_name=yacht": "as in 'yacht_0'",
        "--dataset_name=yatch_1": "Did you mean",
        "--dataset_name=yacht_99 --data_dir=data": "There is no split 99 of data set 'yacht'",
        "--dataset_name=yacht_0 --data_dir=data": "has rows that both train and test",
        "--dataset_name=nowhere.npz": "There is no file nowhere.npz",
        "--dataset_name=~nobody_of_this_name/a.npz": "there is no user",
        "--dataset_name=garbage.npz": "it is no .npz archive",
        "--dataset_name=empty.npz": "empty.npz is damaged",
        "--dataset_name=cut.npz": "cut.npz is damaged",
        "--dataset_name=single.npz": "it is no .npz archive",
        "--dataset_name=pickled.npz": "pickled objects",
        "--dataset_name=huge_inputs.npz": "too large or too close together",
        "--dataset_name=huge_targets.npz": "too large or too close together",
        "--dataset_name=tiny_targets.npz": "too large or too close together",
        "--dataset_name=huge_test.npz": "too large or too close together",
        "--dataset_name=huge_inputs.npz --nostandardize": "too large or too close together",
        "--dataset_name=missing_values.npz": "not finite",
        "--dataset_name=float_labels.npz": "(--task)",
        "--dataset_name=one_class.npz": "one class only",
        "--dataset_name=one_trained_class.npz": "one class only",
        "--dataset_name=gaps.npz": "class labels 0 to K - 1",
        "--dataset_name=negative_labels.npz": "class labels 0 to K - 1",
        "--dataset_name=negative_integers.npz --inputs=tokens": "negative",
        "--dataset_name=other_columns.npz": "different row shapes",
        "--dataset_name=other_rows.npz": "same number of rows",
        "--dataset_name=no_rows.npz": "at least one",
        "--dataset_name=text.npz": "must hold real numbers",
        "--dataset_name=complex.npz": "must hold real numbers",
        "--dataset_name=three_axes.npz": "(rows, targets)",
        "--dataset_name=no_test.npz": "lacks the arrays x_test, y_test",
        "--dataset_name=numbers.npz": "same number of rows",
        "--dataset_name=good.npz --subset_train_to=21": "subset of 21 training rows",
        "--dataset_name=digits --task=regression": "is for classification",
        # model
        "--model_name=mlp_toi": "Did you mean 'mlp_toy'",
        "--model_name=lenet": "needs inputs of shape",
        "--model_name=cnn_lstm": "needs integer tokens",
        "--model_name=nowhere:network": "modules are looked for in",
        "--model_name=broken_module:network": "No module named 'nothing_of_this_name'",
        "--model_name=syntax:f": "SyntaxError",
        "--model_name=test_mistakes:absent": "has no 'absent'",
        "--model_name=:f": "cannot be imported",
        own("not_a_function"): "is not a function (int)",
        own("transformed"): "is not a function (Transformed)",
        own("AModule"): "'AModule' is a class",
        own("of_two"): "cannot be called with the inputs alone",
        own("with_dropout"): "draws random numbers",
        own("with_state"): "keeps non-trainable state",
        own("that_fails"): "test_mistakes.py, line",
        own("that_raises"): "RuntimeError: my own mistake",
        own("of_no_parameters"): "has no parameters",
        own("of_two_outputs"): "outputs of shape (rows, 1)",
        own("of_a_tuple"): "gives a tuple",
        own("that_returns_nothing"): "gives a NoneType",
        own("of_a_hundred_gigabytes") + " --dir=run": "fewer chains or members",
        "--likelihood=categorical": "does not fit a task of regression",
        "--dataset_name=digits --likelihood=bernoulli": "needs 2 classes, not 10",
        "--prior_family=gauss": "prior_family",
        "--prior_group=oops": "not of the form REGEX=NUMBER",
        "--prior_group=w=many": "not of the form REGEX=NUMBER",
        "--prior_group=w=nan": "weight_decay must be positive and finite",
        "--prior_group=w=-1": "weight_decay must be positive and finite",
        "--prior_group=(=3": "is not a regular expression",
        "--prior_group=zzz=3": "prior_group 'zzz' matches no parameter",
        "--prior_group=w=3 --prior_group=hidden_0/w=5": "'hidden_0/w' matches no parameter",
        "--stochastic_params=zzz": "matches no parameter",
        "--stochastic_params=(": "is not a regular expression",
        # starts
        "--init_checkpoint=nowhere": "There is no file nowhere",
        "--init_checkpoint=full": "holds neither draws nor checkpoints",
        "--init_checkpoint=nonsense.safetensors": "damaged or no safetensors file",
        "--init_checkpoint=other_network.safetensors": "belongs to another network",
        "--init_checkpoint=hmc --num_members=3": "give --num_members=2",
    },
    run_hmc: {
        "--step_size=1e-6": "more than max_num_leapfrog_steps = 10000",
        "--step_size=-1": "step_size must be positive",
        "--num_burn_in_iterations=0": "Without burn-in the step size cannot be adapted",
        "--step_size=1e-3 --trajectory_jitter=2": "trajectory_jitter",
        "--target_accept=1.5": "target_accept",
        "--num_iterations=9 --num_burn_in_iterations=9 --warm_start_epochs=0": "No draws would be",
        "--stochastic_params=output --warm_start_epochs=0": "give an init_checkpoint",
        "--init_checkpoint=hmc --num_chains=5": "give --num_chains=2",
    },
    run_sgmcmc: {
        "--num_burnin_epochs=3000000": "There would be no draws",
        "--num_epochs=90 --step_size_schedule=cyclical": "step_size_cycle_length_epochs",
        "--final_step_size=0": "final_step_size must be positive and finite, not 0.0",
        "--optimizer=Adam": "Unknown command line flag 'optimizer'",
        "--preconditioner=Adam": "preconditioner",
    },
    run_vi: {
        "--method=gaussian_dropout --temperature=0.5": "has no temperature",
        "--method=gaussian_dropout --kl=forward": "kl is for --method=vi",
        "--dropout_prior=empirical_bayes": "dropout_prior is for --method=gaussian_dropout",
        "--method=gaussian_dropout --stochastic_params=/b$": "none is random",
        "--prior_from=hmc --learn_prior_scale=one": "nothing learned",
        "--prior_from=hmc --method=gaussian_dropout": "brings a prior of its own",
        "--kl_weight=grave": "Did you mean 'graves'",
        "--kl_weight=nan": "kl_weight must be finite",
        "--kl_weight=-1": "kl_weight must be finite",
        "--vi_estimator=lokal": "vi_estimator",
        "--dropout_rate=0.5": "dropout_rate is for --method=mc_dropout, not vi",
        "--method=map --vi_num_samples=2": "vi_num_samples is for --method=vi, not map",
        "--method=mc_dropout --model_name=logistic_regression": "nothing to drop",
        "--num_inducing=5": "num_inducing is for --vi_family=layerwise, not mean_field",
        "--vi_family=layerwise --kl_weight=2": "kl_weight is for --vi_family=mean_field",
        "--vi_family=mnf --anneal_steps=5": "anneal_steps needs a density",
        "--vi_family=mnf --vi_rank=5": "vi_rank is for --vi_family=low_rank, not mnf",
        "--vi_rank=5": "vi_rank is for --vi_family=low_rank, not mean_field",
        "--vi_family=low_rank --kl_weight=2": "kl_weight is for --vi_family=mean_field",
        "--vi_family=low_rank --vi_rank=106": "at most the number of random weights (105)",
        "--vi_family=layerwise --num_inducing=71": "num_inducing must be at most the number",
        "--vi_family=layerwise --prior_family=laplace": "needs a Gaussian prior",
        "--vi_family=layerwise --num_evidence_draws=1": "Fewer than 4 draws",
        "--vi_family=layerwise --member_weights=stacking": "at least 25",
        "--refine_step_size=1e-3": "give refine, too",
        "--member_weights=evidence": "give num_evidence_draws",
        "--anneal_steps=4 --learn_prior_scale=one": "needs a fixed prior",
        "--anneal_steps=4 --member_weights=evidence": "mixed evenly",
        "--method=map --anneal_steps=4": "is for --method=vi",
        "--mean_init_checkpoint=a --init_checkpoint=b": "not both",
        "--kl=forward --temperature=2": "temperature must be 1",
    },
    run_implicit: {
        "--generator=nowhere.yaml": "there is no file nowhere.yaml",
        "--generator=full": "there is no file full",
        "--generator=list.yaml": "needs a line 'kind: mlp'",
        "--generator=kindless.yaml": "needs a line 'kind: mlp'",
        "--generator=unknown_kind.yaml": "needs a line 'kind: mlp'",
        "--generator=unknown_key.yaml": "'depth' is none of",
        "--generator=lacking.yaml": "lacks 'latent_size'",
        "--generator=text_size.yaml": "is not of the form",
        "--generator=broken.yaml": "is no YAML",
        "--generator=bytes.yaml": "is no YAML",
        "--generator=zero.yaml": "",
        "--vi_checkpoint=x --start=prior": "vi_checkpoint is a start of its own",
        "--vi_checkpoint=nowhere --num_epochs=10": "nowhere holds no checkpoints",
        "--max_generator_parameters=50": "No generator of at most 50 parameters",
        "--member_weights=evidence --num_evidence_draws=0": "give num_evidence_draws",
        "--num_evidence_draws=1": "must be 0 or above 1",
        "--num_mixture_draws=5": "is for --objective=sivi or uivi, not for the default",
        "--objective=sivi --reverse_transitions=4": "is for --objective=uivi, not sivi",
        "--dir=full": "is not empty and holds no run",
        "--refine_step_size=0": "refine_step_size must be positive",
        "--refine_step_size=1e-3": "give refine, too",
        "--refine=nuts": "refine",
        "--refine_collapse_output": "give refine, too",
        "--dataset_name=wine --refine=mclmc --refine_collapse_output": "a Gaussian likelihood",
        "--refine_steps=0": "refine_steps must be at least 1",
        "--objective=hierarchical --entropy=exact": "entropy is for the linearised entropy",
        "--clip_gradient=-1": "clip_gradient must be at least 0, not -1.0",
    },
    compare_posteriors: {
        "": "as --reference",
        "--dataset_name=digits": "Unknown command line flag 'dataset_name'",
        "--reference=nowhere": "There is no run folder nowhere",
        "--reference=nowhere.csv": "There is no file nowhere.csv",
        "--reference=full": "it has no flags.json",
        COMPARE + "fewer": "runs on different data: subset_train_to",
        COMPARE + "hmc": "was given twice",
        COMPARE + "flags_list": "flags_list/flags.json is damaged or of another kind",
        COMPARE + "flags_bare": "flags_bare/flags.json is damaged or of another kind: it has no",
        COMPARE + "summary_list": "summary_list/summary.json is damaged or of another kind",
        COMPARE + "summary_bare": "summary_bare/summary.json is damaged or of another kind: it has",
        COMPARE + "summary_typed": "its 'num_draws' is '8'",
        COMPARE + "no_predictions": "There is no file no_predictions/predictions.npz",
        COMPARE + "cut_predictions": "cut_predictions/predictions.npz is damaged",
        COMPARE + "unfinished": "is not finished",
        COMPARE + "no_flags": "it has no flags.json",
        COMPARE + "bad_diagnostics": "bad_diagnostics/diagnostics.json is damaged",
        COMPARE + "other_draws": "summary.json tells of 3 draws",
        COMPARE + "fewer --dir=full": "different data",
        COMPARE + " --dir=full": "holds no comparison.html",
        COMPARE + " --dir=hmc": "holds no comparison.html",
        COMPARE + " --dir=file": "file is a file",
        "--reference=negative.csv": "row 4 has [-0.5, 1.0, 0.5]",
        "--reference=unsummed.csv": "row 4 has [0.5, 1.0, 0.5]",
        "--reference=words.csv": "cannot be read as a table of numbers",
        "--reference=empty.csv": "there are no rows",
        "--reference=nameless.npz": "has none of the arrays",
        "--reference=flat.npz": "class probabilities are (rows, classes)",
        "--reference=text.npz": "has none of the arrays",
        "--reference=probabilities.csv --candidates=others.csv": "do not predict the same rows",
        "--reference=probabilities.csv --candidates=hmc": "6 whole numbers are needed",
        "--reference=probabilities.csv --targets=few_labels.csv": "6 whole numbers are needed",
        "--reference=probabilities.csv --targets=large_labels.csv": "has 3 classes",
        "--reference=probabilities.csv --targets=half_labels.csv": "are no labels",
        "--reference=probabilities.csv --targets=diabetes": "has no class labels",
        "--reference=probabilities.csv --targets=nothing": "Unknown data set 'nothing'",
    },
    evaluate_uncertainty: {
        "": "as --runs",
        "--runs=nowhere": "There is no run folder nowhere",
        "--runs=hmc,fewer": "different data",
        "--runs=hmc,hmc": "was given twice",
        "--runs=summary_bare": "summary_bare/summary.json is damaged",
        "--runs=hmc --dir=full": "holds no uncertainty.html",
        "--runs=hmc --num_rows=1": "num_rows must be at least 2",
        "--runs=no_draws --dir=u1": "The run in no_draws has no draws",
        "--runs=bad_draws --dir=u2": "damaged or no safetensors file",
    },
    predict: {
        "": "Give --run",
        "--run=hmc": "Give --inputs",
        "--run=hmc --inputs=good.npz": "Give --output",
        "--run=nowhere --inputs=good.npz --output=p.csv": "There is no run folder nowhere",
        "--run=hmc --inputs=good.npz --output=p.csv": "holds no problem.json",
        "--run=hmc --inputs=good.npz --output=p.txt": "none of the files that can be written",
        "--run=hmc --inputs=good.npz --output=nowhere/p.csv": "its folder does not exist",
        "--run=hmc --inputs=good.npz --output=p.csv --per_draw": "needs an --output that ends in",
        "--run=hmc --inputs=good.npz --output=p.csv --quantiles=2": "must be numbers between 0",
    },
    list_runs: {"nowhere": "There is no folder nowhere"},
    run_smc: {
        "--prior_from=nowhere": "There is no run folder nowhere",
        "--prior_from=hmc --weight_decay=3": "Give weight_decay or prior_from",
        "--prior_from=hmc --temperature=0.5": "prior_from is for temperature 1",
        "--prior_from=hmc --model_name=mlp_20_20": "is not of this network",
        "--prior_from=nonsense.safetensors": "is damaged or no safetensors file",
        "--prior_from=other_network.safetensors": "A prior has no 'hidden_0'",
        "--train_part=6/5": "train_part is a number of so many",
        "--train_part=1": "train_part is a number of so many",
        "--train_part=1/9999": "do not make 9999 parts",
    },
    run_laplace: {
        "": "Give the folder of the finished run",
        "--run=nowhere": "There is no run folder nowhere",
        "--run=unfinished": "is not finished",
        "--run=hmc --structure=block": "structure",
        "--run=hmc --num_draws=0": "num_draws",
        "--run=hmc --dir=file": "file is a file",
        "--run=bad_draws": "is damaged or no safetensors file",
    },
    distill: {
        "": "Give the folder of the finished run",
        "--run=nowhere": "There is no run folder nowhere",
        "--run=hmc --num_draws=5 --on_the_fly": "num_draws is for on_the_fly=false",
        "--run=hmc --bias_tolerance=0.1": "bias_tolerance is for on_the_fly=true",
        "--run=hmc --model_name=no_such": "no_such",
        "--run=hmc --extra_inputs=no_such": "no_such",
    },
    run_swag: {
        "": "Give the folder of the finished run",
        "--run=flags_cut": "flags.json is damaged",
        "--run=hmc --num_epochs=4 --num_burnin_epochs=3": "Two epochs at least",
        "--run=hmc --rank=1": "rank must be at least 2",
        "--run=hmc --batch_size=1000": "no gradient noise",
    },
    make_posterior_surface_plot: {
        "": "Three points are needed",
        SURFACE + "hmc": "choose one of hmc@0 to @1",
        SURFACE + "hmc@7": "choose one of hmc@0 to @1",
        SURFACE + "nowhere": "There is no file nowhere",
        SURFACE + "hmc@0 --dir=file": "file is a file",
        SURFACE + "hmc@0 --limit_left=2": "limit_left must be below limit_right",
        "--checkpoint1=flags_list --checkpoint2=hmc@0 --checkpoint3=hmc@1": "flags.json is damaged",
    },
}
CASES = [
    *numbers(),
    *((script, *case) for script, cases in MISTAKES.items() for case in cases.items()),
]


def refused(script, flags, capsys, monkeypatch):
    """What a script says as it refuses."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py"])
    with pytest.raises(SystemExit) as end:
        script.main(flags.split())
    said = capsys.readouterr()
    assert end.value.code == 2, said
    assert said.err.count("\n") == 1 and said.err.startswith(f"{script.__name__}.py: "), said.err
    assert "Traceback" not in said.out + said.err
    return said.err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("-h", 0, "Every method on the embedded toy regression"),
        ("--help", 0, "python demo.py"),
        ("--version", 0, "haiku-posteriors "),
        ("--seed=3", 2, "demo.py: takes one argument"),
        ("a b", 2, "demo.py: takes one argument"),
    ],
)
def test_the_demo_answers_as_the_scripts_do(flags, code, words, capsys):
    with pytest.raises(SystemExit) as end:
        demo.main(flags.split())
    said = capsys.readouterr()
    assert end.value.code == code and words in said.out + said.err


@pytest.mark.parametrize("script", [*READERS, *OTHERS], ids=lambda script: script.__name__)
@pytest.mark.parametrize("flag", ["-h", "-help", "--help", "--version"])
def test_help_and_version_end_well(script, flag, capsys):
    with pytest.raises(SystemExit) as end:
        script.main([flag])
    assert end.value.code == 0 and len(capsys.readouterr().out) > 10


def test_there_are_enough_of_them():
    assert len(CASES) > 300


@pytest.mark.parametrize(
    ("script", "flags", "sentence"),
    CASES,
    ids=[f"{script.__name__} {flags}"[:80] for script, flags, _ in CASES],
)
def test_a_mistake_is_a_sentence_and_leaves_nothing(
    script, flags, sentence, desk, capsys, monkeypatch
):
    monkeypatch.chdir(desk)
    # Where else a program may write: the home folder and that of temporary files.
    monkeypatch.setenv("HOME", str(desk / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(desk / "temporary"))
    before = tree(desk)
    assert sentence in refused(script, flags, capsys, monkeypatch)
    assert tree(desk) == before


# What is refused where a run has been before.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of a network of one's own, as its working directory."""
    folder = tmp_path_factory.mktemp("finished")
    source = "import haiku as hk\n\ndef network(x):\n    return hk.Linear(1)(x)\n"
    (folder / "my_network_file.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: first)
        with pytest.raises(SystemExit) as end:
            run_sgd.main([*SHORT.split(), *OWN.split()])
    assert end.value.code == 0
    return folder


OWN = "--likelihood=gaussian --model_name=my_network_file:network"


def change_network(folder):
    path = folder / "my_network_file.py"
    path.write_text(path.read_text().replace("(1)(x)", "(1)(2 * x)"))


def shorten_draws(folder):
    (path,) = (folder / "run/draws").iterdir()
    tensors, _ = checkpoint_utils.load_tensors(path)
    checkpoint_utils.save_tree(path, {name: leaf[:, :0] for name, leaf in tensors.items()})


DAMAGES = {
    "changed network": (change_network, "The file of the network my_network_file:network has"),
    "no draws": (lambda f: shutil.rmtree(f / "run/draws"), "draws/ holds 0"),
    "other draws": (shorten_draws, "draws/ holds 0"),
    "flags": (lambda f: (f / "run/flags.json").write_text("[1]"), "flags.json is damaged"),
    "no flags": (lambda f: (f / "run/flags.json").unlink(), "holds no run"),
    "metrics": (
        lambda f: (f / "run/metrics.jsonl").write_text('{"a": 1}\n{"epoch": 3}\n'),
        "metrics.jsonl is damaged in line 1: no record of an epoch",
    ),
    "checkpoints": (
        lambda f: [p.write_bytes(b"") for p in (f / "run/checkpoints").iterdir()],
        "No checkpoint in run/checkpoints can be read",
    ),
    "foreign checkpoint": (
        lambda f: checkpoint_utils.save_checkpoint(f / "run/checkpoints", 99, {}, {}),
        "belongs to another network or method",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_not_gone_on_with(name, finished, tmp_path, capsys, monkeypatch):
    damage, sentence = DAMAGES[name]
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "my_network_file", raising=False)  # as in a new process
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    damage(folder)
    assert sentence in refused(run_sgd, f"{SHORT} {OWN}", capsys, monkeypatch)
    assert (folder / "run/summary.json").exists()


def test_the_leftover_of_a_crash_is_no_checkpoint(tmp_path, monkeypatch):
    """Taken for one, it would have left out the pretraining."""
    flags = ["--pretrain_epochs=3", "--noise_scale=0.01"]  # scales of its own need parameters
    settings = run_implicit.cmd_args_utils.parse(run_implicit.GROUPS, flags)
    task = run_implicit.tasks.load_task("implicit", settings)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.epoch_00000003.safetensors.99.tmp").touch()
    monkeypatch.setattr(run_implicit.implicit.pretrain, "pretrain", lambda *_, **__: "pretrained")
    assert run_implicit.implicit.find_starts(task, tmp_path) == "pretrained"
    files.drop_leftovers(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_one_process_at_a_time_and_none_after_a_kill(tmp_path):
    code = "import pathlib, sys; from haiku_posteriors.utils import locks; " + (
        "locks.hold(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=program.ROOT, stdin=pipe, stdout=pipe) as other:
        assert other.stdout.readline() == b"held\n"
        who = f"in use by process {other.pid} on {socket.gethostname()}"
        with pytest.raises(UserError, match=who):
            locks.hold(tmp_path / "run")
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (tmp_path / "run/.lock").exists()
    assert locks.hold(tmp_path / "run") and not locks.hold(tmp_path / "run")
    locks.release(tmp_path / "run")
    assert not (tmp_path / "run/.lock").exists()


# What only a process of its own shows.


def start(*command, stdout=subprocess.PIPE, **environment):
    return subprocess.run(
        [sys.executable, *command],
        cwd=program.ROOT,
        env=program.ENVIRONMENT | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=600,
    )


@pytest.mark.slow  # tests/utils/test_script_utils.py says what JAX is made to say
@pytest.mark.parametrize("name", ["foo", "cuda", "cpu"])
def test_no_such_device_is_a_sentence(name, tmp_path):
    zero = {"XLA_FLAGS": "--xla_force_host_platform_device_count=0"} if name == "cpu" else {}
    done = start("run_sgd.py", f"--dir={tmp_path / 'run'}", JAX_PLATFORMS=name, **zero)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr.decode()
    assert b"JAX finds no device" in done.stderr or b"JAX has no devices" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_closed_pipe_is_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    done = start("run_sgd.py", "--help", stdout=writing)
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == b"run_sgd.py: " + (
        b"Stopped: nobody reads the output. The last checkpoint, if any, stands.\n"
    )


@pytest.mark.slow  # tests/utils/test_script_utils.py has the streams alone
def test_letters_that_the_locale_does_not_know(tmp_path):
    synthetic_runs.write_toy_run(tmp_path / "grün")
    flags = [f"--reference={tmp_path / 'grün'}", f"--dir={tmp_path / '比較'}"]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = start("compare_posteriors.py", *flags, **ascii_only)
    assert done.returncode == 0, done.stderr.decode()
    assert "比較/comparison.html" in done.stdout.decode()
    assert "Against grün" in (tmp_path / "比較/comparison.html").read_text(encoding="utf-8")
