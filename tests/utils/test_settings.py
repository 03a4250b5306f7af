"""One table of defaults: which value wins, where it comes from, and that no entry is dead."""

import dataclasses
import json

import pytest

import run_hmc
import run_implicit
import run_sgd
import run_sgmcmc
import run_smc
import run_vi
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, data_utils, problem, settings
from haiku_posteriors.utils.problem import Problem

SCRIPTS = {
    "hmc": run_hmc,
    "sgd": run_sgd,
    "sgmcmc": run_sgmcmc,
    "smc": run_smc,
    "vi": run_vi,
    "mc_dropout": run_vi,
    "gaussian_dropout": run_vi,
    "layerwise": run_vi,
    "implicit": run_implicit,
}


def resolved(method, *flags):
    return settings.resolve(method, cmd_args_utils.parse(SCRIPTS[method].GROUPS, flags))


def flag_names(script):
    return {flag.name for group in script.GROUPS.values() for flag in group}


def test_every_layer_sets_flags_that_its_methods_have():
    for layer in settings.LAYERS:
        for method in layer.methods or ("sgd", "sgmcmc"):
            unknown = layer.values.keys() - flag_names(SCRIPTS[method]) - {"optimizer"}
            assert not unknown, (layer.source, unknown)


def test_every_layer_applies_to_some_data_set():
    kinds = {"study", "uci", "own"}
    for layer in settings.LAYERS:
        assert all(name in kinds or name in data_utils.known_names() for name in layer.data)


@pytest.mark.parametrize(
    ("method", "flags", "name", "value", "source"),
    [
        ("sgd", "--dataset_name=cifar10", "weight_decay", 15.0, settings.STUDY),
        ("sgd", "--dataset_name=cifar10", "until_converged", False, None),
        ("sgd", "--dataset_name=energy_3", "weight_decay", 10.0, "UCI regression"),
        ("sgd", "--dataset_name=x.npz", "optimizer", "Adam", "data outside the study"),
        ("sgd", "", "num_epochs", None, "default"),
        ("sgd", "--num_epochs=auto", "until_converged", True, "default"),
        ("sgd", "--num_epochs=7", "until_converged", False, "num_epochs: given"),
        ("sgd", "--num_epochs=7 --until_converged", "until_converged", True, "given"),
        ("sgd", "--weight_decay=3", "weight_decay", 3.0, "given"),
        ("mc_dropout", "", "vi_estimator", None, "default"),
        ("vi", "--num_epochs=100", "warm_start_epochs", 0, "num_epochs: given"),
        ("layerwise", "--dataset_name=wine", "until_converged", False, "layerwise VI"),
        ("layerwise", "--dataset_name=mnist", "inducing", "minibatch", None),
        ("vi", "--num_epochs=100 --kl_warmup_epochs=70", "kl_warmup_epochs", 70.0, "given"),
        ("vi", "--dataset_name=imdb", "vi_sigma_init", 1e-3, f"{settings.STUDY}, VI"),
        ("sgmcmc", "--dataset_name=protein_1", "preconditioner", "curvature", None),
        ("sgmcmc", "--init_checkpoint=x", "warm_start_epochs", 0, None),
        ("sgmcmc", "--dataset_name=mnist", "num_burnin_epochs", 150, "half of num_epochs"),
        ("sgmcmc", "--init_step_size=1e-3", "final_step_size", 1e-3, "init_step_size was given"),
        ("sgmcmc", "--init_step_size=1e-3 --dataset_name=wine", "preconditioner", "None", None),
        ("sgmcmc", "--preconditioner=RMSprop", "init_step_size", 1e-4, None),
        ("sgmcmc", "--final_step_size=1e-6", "preconditioner", "None", "final_step_size was given"),
        ("sgmcmc", "--momentum=0", "momentum_decay", 0.0, "given"),
        ("hmc", "", "num_burn_in_iterations", 200, "200, or half of num_iterations"),
        ("hmc", "--num_iterations=30", "num_burn_in_iterations", 15, None),
        ("hmc", "--step_size=0.1", "num_burn_in_iterations", 0, "none: step_size was given"),
        ("implicit", "--num_epochs=400 --dataset_name=wine", "pretrain_epochs", 100, None),
    ],
)
def test_which_value_wins_and_where_it_comes_from(method, flags, name, value, source):
    found = resolved(method, *flags.split())
    assert found.values[name] == value
    assert source in (None, found.sources[name])


@pytest.mark.parametrize(
    ("method", "flags", "expected"),
    [
        # All rows are one minibatch; steps by the prior's standard deviation.
        ("sgd", "", {"batch_size": 455, "num_epochs": 200_000, "init_step_size": 0.01 * 10**-0.5}),
        ("sgd", "--num_epochs=50", {"eval_freq": 5, "num_epochs": 50, "batch_size": 200}),
        ("sgd", "--until_converged --num_epochs=50", {"batch_size": 200}),
        # 8 draws a step, of 752 weights each: 332 rows of 455 are two minibatches.
        ("implicit", "", {"batch_size": 332, "num_epochs": 100_000}),
        # All rows are one minibatch: 200 of them would cost as much.
        ("sgmcmc", "", {"batch_size": 455, "num_epochs": 1_210_000, "num_burnin_epochs": 10_000}),
        ("sgmcmc", "", {"ensemble_freq": 50, "init_step_size": None, "momentum_decay": None}),
        ("sgmcmc", "--init_step_size=1e-3", {"batch_size": 200, "momentum_decay": 0.9}),
        ("implicit", "--weight_decay=1e-4", {"init_step_size": 0.01, "pretrain_starts": 20}),
    ],
)
def test_what_data_and_network_decide(method, flags, expected):
    found = resolved(method, "--dataset_name=energy_3", *flags.split())
    std = found.weight_decay**-0.5
    found = settings.complete(found, {}, num_rows=455, num_parameters=752, prior_std=std)
    assert {name: found.values[name] for name in expected} == pytest.approx(expected)


def test_settings_cannot_be_changed():
    found = resolved("sgd")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.values = {}
    with pytest.raises(AttributeError, match="no setting 'nonsense'"):
        _ = found.nonsense


def test_flags_a_json_file_and_python_describe_the_same_problem():
    flags = [
        "--dataset_name=diabetes",
        "--weight_decay=3",
        "--prior_group=b=2",
        "--task=regression",
    ]
    by_flags = Problem.from_mapping(resolved("sgd", *flags).values)
    by_json = Problem.from_mapping(json.loads(json.dumps(resolved("sgd", *flags).values)))
    by_python = Problem(
        dataset_name="diabetes", weight_decay=3.0, prior_group=("b=2",), task="regression"
    )
    assert by_flags == by_json == by_python


@pytest.mark.parametrize(
    ("described", "likelihood", "noise_std", "learn_noise"),
    [
        (Problem("diabetes"), "gaussian", 0.3, True),
        (
            Problem("diabetes", model_name="mlp_regression_small"),
            "heteroscedastic_gaussian",
            0.3,
            True,
        ),
        (Problem("diabetes", noise_std=0.2), "gaussian", 0.2, False),
        (Problem("diabetes", learn_noise=True), "gaussian", 0.3, True),
        (Problem("diabetes", model_name="mlp_toy"), "gaussian", 0.3, True),
        (Problem("wine"), "categorical", 0.3, True),
    ],
)
def test_what_is_chosen_from_the_data(described, likelihood, noise_std, learn_noise):
    chosen = problem.complete(described, problem.load_data(described).form)
    assert (chosen.likelihood, chosen.noise_std, chosen.learn_noise) == (
        likelihood,
        noise_std,
        learn_noise,
    )


@pytest.mark.parametrize(
    ("described", "weight_decay"),
    [
        (Problem("diabetes"), 10.0),
        (Problem("wine"), 10.0),
        (Problem("wine", model_name="logistic_regression"), 1.0),
        (Problem("diabetes", weight_decay=3.0), 3.0),
    ],
)
def test_the_prior_goes_with_the_network(described, weight_decay):
    chosen = problem.complete(described, problem.load_data(described).form)
    assert chosen.weight_decay == weight_decay


def test_a_known_noise_is_not_learned():
    toy = Problem()
    dataset = problem.load_data(toy)
    known = settings.KNOWN_NOISE_STD["toy_regression"]
    assert problem.complete(toy, dataset.form, known).learn_noise is False
    # The network's own scale is meant where it has one and no noise was given.
    network = Problem(model_name="mlp_regression")
    assert problem.complete(network, dataset.form, known).likelihood == "heteroscedastic_gaussian"


def test_float64_needs_jax_in_that_mode():
    with pytest.raises(UserError, match="jax_enable_x64"):
        problem.load_data(Problem(use_float64=True))


@pytest.mark.parametrize(
    ("flags", "objective"),
    [([], None), (["--entropy=lanczos"], "linearised"), (["--objective=sivi"], "sivi")],
)
def test_flags_of_an_objective_choose_it(flags, objective):
    settings = cmd_args_utils.parse(run_implicit.GROUPS, flags)
    assert run_implicit.choose_objective(settings).objective == objective
