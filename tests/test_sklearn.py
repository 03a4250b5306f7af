"""The estimators: scikit-learn's own checks, its tools, every method, save and load."""

import pickle
import sys
import types
import warnings

import haiku as hk
import jax
import numpy as np
import pytest
import sklearn
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine, make_blobs
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import haiku_posteriors
import haiku_posteriors.sklearn
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.sklearn import PosteriorClassifier, PosteriorRegressor
from haiku_posteriors.utils.estimators.plans import PLANS

pytestmark = pytest.mark.usefixtures("first_device_only")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
Y = 20 + 5 * X[:, 0] + RNG.normal(0, 0.5, 60)
LABELS = np.where(X[:, 1] > 0, "yes", "no")
# What compiles fastest: the checks are of the estimators and not of the methods.
QUICK = {"method": "map", "network": "logistic_regression", "weight_decay": 0.01}
QUICK |= {"step_size": 0.1, "num_steps": 30}
# What is needed of ArviZ, which is not installed everywhere: the groups as they are handed over.
AN_ARVIZ = types.SimpleNamespace(__version__="1.0", from_dict=lambda groups: groups)


def network(inputs, num_outputs):
    return hk.nets.MLP([3, num_outputs], activation=jax.nn.tanh)(inputs)


@pytest.fixture(scope="module")
def regressor():
    return PosteriorRegressor(**QUICK | {"method": "ensemble", "num_chains": 3}).fit(X, Y)


@pytest.fixture(scope="module")
def classifier():
    return PosteriorClassifier(**QUICK | {"method": "ensemble", "num_chains": 3}).fit(X, LABELS)


@parametrize_with_checks([PosteriorClassifier(**QUICK)])
def test_scikit_learns_own_checks_of_the_classifier(estimator, check):
    check(estimator)


@pytest.mark.slow  # 50 seconds of a core, as those above, which share most of its code
@parametrize_with_checks([PosteriorRegressor(**QUICK)])
def test_scikit_learns_own_checks_of_the_regressor(estimator, check):
    check(estimator)


def test_predictions_are_in_the_units_of_y(regressor):
    mean, std, quantiles = regressor.predict(X, return_std=True, quantiles=[0.05, 0.95])
    assert mean.shape == std.shape == (60,) and quantiles.shape == (2, 60)
    assert np.corrcoef(mean, Y)[0, 1] > 0.9 and abs(mean.mean() - Y.mean()) < 1
    assert np.all((quantiles[0] < mean) & (mean < quantiles[1]))
    np.testing.assert_array_equal(regressor.predict(X), mean)
    outputs = regressor.predictive(X).outputs.astype(float)
    density = stats.norm.pdf(Y, outputs[..., 0], outputs[..., 1]).mean(axis=0)
    assert regressor.score(X, Y) == pytest.approx(np.log(density).mean(), rel=1e-4)
    assert regressor.draws_["output"]["w"].shape == (3, 1, 3, 1)
    assert regressor.sample_functions(X, 2).shape == (2, 60, 1)
    assert regressor.diagnostics_ == {} and regressor.train_metrics_["rmse"] < 3


def test_new_observations_have_the_predictive_moments(regressor, classifier):
    """At 5 standard errors over 60 + 60 comparisons: a correct one fails once in 10^4 seeds."""
    count = 4000
    samples = regressor.sample_y(X, count, random_state=1)
    mean, std = regressor.predict(X, return_std=True)
    assert samples.shape == (60, count)
    assert np.all(np.abs(samples.mean(axis=1) - mean) < 5 * std / np.sqrt(count))
    assert np.all(np.abs(samples.std(axis=1) / std - 1) < 0.1)
    drawn = classifier.sample_y(X, count, random_state=2) == "yes"
    probability = classifier.predict_proba(X)[:, 1]
    error = np.sqrt(probability * (1 - probability) / count)
    assert np.all(np.abs(drawn.mean(axis=1) - probability) <= 5 * error + 1e-3)


def test_the_groups_of_arviz(regressor, classifier, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", AN_ARVIZ)
    groups = regressor.to_arviz()
    outputs = regressor.predictive(X).outputs.astype(float)
    density = stats.norm.logpdf(Y, outputs[..., 0], outputs[..., 1])
    np.testing.assert_allclose(groups["log_likelihood"]["y"][:, 0], density, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(groups["observed_data"]["y"][:, 0], Y, rtol=1e-5)
    assert groups["posterior_predictive"]["y"].shape == (3, 1, 60, 1)
    drawn = classifier.to_arviz()["posterior_predictive"]["y"]
    assert drawn.shape == (3, 1, 60) and np.mean(drawn == (LABELS == "yes")) > 0.65


def test_labels_are_of_any_type(classifier):
    assert classifier.classes_.tolist() == ["no", "yes"]
    assert np.mean(classifier.predict(X) == LABELS) > 0.9
    probability = classifier.predict_proba(X)
    np.testing.assert_allclose(probability.sum(axis=1), 1, rtol=1e-6)
    of_labels = probability[np.arange(60), (LABELS == "yes").astype(int)]
    assert classifier.score(X, LABELS) == pytest.approx(np.log(of_labels).mean(), rel=1e-4)


def test_several_targets():
    both = np.stack([Y, -3 * Y], axis=1)
    model = PosteriorRegressor(**QUICK | {"num_steps": 300}).fit(X, both)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 2) and model.sample_y(X, 4).shape == (60, 2, 4)
    np.testing.assert_allclose(mean[:, 1], -3 * mean[:, 0], atol=0.5)


def test_tools_of_scikit_learn():
    pipeline = make_pipeline(StandardScaler(), PosteriorClassifier(**QUICK))
    assert pipeline.fit(X, LABELS).predict_proba(X).shape == (60, 2)
    model = PosteriorRegressor(**QUICK)
    scores = cross_val_score(model, X, Y, cv=2)
    assert scores.shape == (2,) and np.isfinite(scores).all()
    search = GridSearchCV(model, {"weight_decay": [0.01, 1e4]}, cv=2).fit(X, Y)
    assert search.best_params_ == {"weight_decay": 0.01}  # by the log-likelihood
    copy = sklearn.clone(search.best_estimator_)
    assert copy.get_params() == search.best_estimator_.get_params()
    assert not hasattr(copy, "draws_")


@pytest.mark.parametrize("kind", ["regressor", "classifier"])
def test_saved_and_loaded_without_pickle(kind, request, tmp_path, monkeypatch):
    model = request.getfixturevalue(kind)
    model.save(tmp_path / "model")
    suffixes = {path.suffix for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".npz", ".safetensors"}
    loaded = haiku_posteriors.sklearn.load(tmp_path / "model")
    assert type(loaded) is type(model) and loaded.get_params() == model.get_params()
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    np.testing.assert_array_equal(loaded.sample_y(X, 3), model.sample_y(X, 3))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))
    monkeypatch.setitem(sys.modules, "arviz", AN_ARVIZ)
    jax.tree.map(np.testing.assert_array_equal, loaded.to_arviz(), model.to_arviz())
    run = haiku_posteriors.load_run(tmp_path / "model")
    np.testing.assert_array_equal(run.predict(X).outputs, model.predictive(X).outputs)
    with pytest.raises(UserError, match="not an empty folder"):
        model.save(tmp_path / "model")


def test_a_function_is_given_again_when_it_is_loaded(tmp_path):
    model = PosteriorRegressor(**QUICK | {"network": network, "num_steps": 2}).fit(X, Y)
    model.save(tmp_path / "model")
    with pytest.raises(UserError, match="was a Python function, 'network': give it as network="):
        haiku_posteriors.sklearn.load(tmp_path / "model")
    loaded = haiku_posteriors.sklearn.load(tmp_path / "model", network=network)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))

    def other(inputs, num_outputs):
        return hk.nets.MLP([3, num_outputs])(inputs)

    with pytest.raises(UserError, match="'network' has changed since the run"):
        haiku_posteriors.sklearn.load(tmp_path / "model", network=other)


SLOW_TO_COMPILE = ("hmc", "mclmc", "mean_field", "mc_dropout", "implicit", "sgld")
METHODS = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW_TO_COMPILE else name
    for name in PLANS
]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_table(method, monkeypatch):
    wishes = {"num_draws": 4, "num_chains": 2}
    if method in ("hmc", "mclmc"):
        wishes["warm_start_epochs"] = 3
    if method in ("ensemble", "map"):
        wishes["num_draws"] = 1
    model = PosteriorRegressor(method, network, num_steps=12, **wishes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of so few steps
        mean, std = model.fit(X, Y).predict(X, return_std=True)
    assert np.isfinite(mean).all() and np.all(std > 0)
    assert model.draws_["mlp/~/linear_0"]["w"].shape == (2, wishes["num_draws"], 3, 3)
    assert ("predictions" in model.diagnostics_) == (method in ("hmc", "mclmc", "sghmc", "sgld"))
    is_chain = method in ("hmc", "mclmc")
    assert ("converged" in model.diagnostics_) == is_chain
    monkeypatch.setitem(sys.modules, "arviz", AN_ARVIZ)
    groups = model.to_arviz()
    assert groups["posterior"]["mlp.~.linear_0.w"].shape == (2, wishes["num_draws"], 3, 3)
    assert ("sample_stats" in groups) == is_chain
    if is_chain:
        # lp is of the very draws beside it: prior, likelihood and the scale of y make it up.
        assert "warm_start_epochs" in model.diagnostics_["notes"][-1]
        log_prior = jax.vmap(jax.vmap(model._run.log_joint.log_prior))(model.draws_)
        in_units = groups["log_likelihood"]["y"].sum(axis=2) + 60 * np.log(Y.std())
        lp = groups["sample_stats"]["lp"]
        np.testing.assert_allclose(lp, log_prior + in_units, rtol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"method": "hmcc"}, "Did you mean 'hmc'"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"num_burn_in": 3}, "num_burn_in is for Markov chains"),
        ({"num_draws": 3}, "give num_chains, not num_draws"),
        ({"method": "sghmc", "num_burn_in": 30}, "below num_steps"),
        ({"method": "sghmc", "num_burn_in": 20, "num_draws": 11}, "10 steps after burn-in give no"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"network": "mlp_toi"}, "Did you mean 'mlp_toy'"),
        ({"likelihood": "categorical"}, "does not fit a task of regression"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        PosteriorRegressor(**QUICK | wrong).fit(X, Y)


@pytest.mark.slow
def test_a_run_that_has_not_converged_says_so():
    with pytest.warns(ConvergenceWarning, match="Not converged"):
        PosteriorRegressor("hmc", network, num_steps=20, num_chains=2).fit(X, Y)


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("map", "log-joint"),
        pytest.param("mean_field", "ELBO", marks=pytest.mark.slow),
        pytest.param("implicit", "ELBO", marks=pytest.mark.slow),
        pytest.param("mc_dropout", "log-joint", marks=pytest.mark.slow),
    ],
)
def test_an_optimiser_without_a_number_of_steps_ends_by_itself(method, objective):
    model = PosteriorRegressor(method, network).fit(X, Y)
    found = model.diagnostics_
    assert found["converged"] and found["ended_by_itself"] == [True]
    assert found["objective"] == objective and found["gain"][0] < found["tolerance"]
    # The network can be as good as the line that made Y, whose noise is a tenth of its spread.
    assert np.std(model.predict(X) - Y) < (1.0 if method != "mc_dropout" else 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sghmc", "sgld"])
def test_samplers_without_a_number_of_steps_fit_their_steps(method):
    """Standard deviations of a linear regression's predictions, against the closed form.

    400 effective draws leave 4 % of a standard deviation; SGLD has a bias by steps of some 3 %.
    """
    model = PosteriorRegressor(
        method, "logistic_regression", likelihood="gaussian", noise_std=0.5, standardize=False
    )
    found = model.fit(X, Y - 20).diagnostics_
    assert found["converged"] and found["predictions"]["smallest_bulk_ess"] > 400
    assert abs(found["configurational_temperature"] - 1) < 0.1
    design = np.concatenate([np.ones((60, 1)), X], axis=1)
    precision = design.T @ design / 0.5**2 + np.eye(4)
    mean = design @ np.linalg.solve(precision, design.T @ (Y - 20) / 0.5**2)
    std = np.sqrt(np.sum(design @ np.linalg.inv(precision) * design, axis=1))
    functions = model.sample_functions(X, 1600)[:, :, 0]  # the fewest draws of a run that ends
    np.testing.assert_allclose(functions.std(axis=0) / std, 1, atol=0.2)
    assert np.max(np.abs(functions.mean(axis=0) - mean) / std) < 0.25


def test_classes_far_apart_are_told_apart():
    points, labels = make_blobs(60, centers=3, cluster_std=0.3, random_state=0)
    model = PosteriorClassifier(**QUICK).fit(points, labels * 10)
    assert np.mean(model.predict(points) == labels * 10) == 1.0


@pytest.mark.slow  # half a minute of a core each
@pytest.mark.parametrize(
    ("model", "load"),
    [
        (PosteriorClassifier("hmc"), load_wine),
        (PosteriorClassifier("mclmc"), load_breast_cancer),
        (PosteriorRegressor("hmc"), load_diabetes),
    ],
)
def test_defaults_converge(model, load):
    x, y = load(return_X_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model.fit(x[::2], y[::2])
    found = model.diagnostics_
    assert found["converged"] and found["problems"] == [] and found["divergent"] == 0
    assert found["predictions"]["largest_rhat"] < 1.05
    assert found["predictions"]["smallest_bulk_ess"] > 400
    baseline = np.log(np.bincount(y)[y[1::2]] / len(y)).mean() if y.dtype.kind == "i" else -5.8
    assert model.score(x[1::2], y[1::2]) > baseline
