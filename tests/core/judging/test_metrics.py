"""Metrics against hand arithmetic, scikit-learn, SciPy and published HMC predictions."""

import pathlib

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from haiku_posteriors.core import errors
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.judging.predictions import Predictions

RNG_SEED = 20


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(RNG_SEED)


def _random_classification(rng, draws=5, rows=200, classes=4):
    probabilities = rng.dirichlet(np.full(classes, 0.5), size=(draws, rows))
    targets = rng.integers(classes, size=rows)
    observed = probabilities[:, np.arange(rows), targets]
    return probabilities, np.log(np.maximum(observed, 1e-300)), targets


def _two_class(confidence, correct):
    """Rows that predict class 0 with the given confidence (>= 1/2), and are right or not."""
    confidence = np.asarray(confidence, float)
    return np.stack([confidence, 1 - confidence], 1), np.where(correct, 0, 1)


def test_log_mean_exp_by_hand_and_at_the_extremes():
    # log((1 + 3) / 2) = log 2, shifted by -1000 where exp underflows.
    values = np.log([[1.0], [3.0]]) - 1000
    np.testing.assert_allclose(metrics.log_mean_exp(values), [np.log(2) - 1000])
    columns = [[-np.inf, -np.inf, np.nan, 800.0], [-np.inf, 0.0, 0.0, 800.0]]
    np.testing.assert_allclose(
        metrics.log_mean_exp(columns), [-np.inf, -np.log(2), np.nan, 800.0], equal_nan=True
    )
    assert metrics.log_mean_exp(np.zeros((2, 3)), axis=1).shape == (2,)


def test_classification_by_hand():
    # Two draws, two rows. Mean predictions (.7, .3) and (.4, .6); labels 0 and 0.
    predictions = np.array([[[0.8, 0.2], [0.5, 0.5]], [[0.6, 0.4], [0.3, 0.7]]])
    result = metrics.evaluate(
        "classification", predictions, np.log(predictions[:, :, 0]), np.array([0, 0])
    )
    assert result["accuracy"] == 0.5
    assert result["nll"] == pytest.approx(-(np.log(0.7) + np.log(0.4)) / 2)
    # Brier: (.3² + .3² + .6² + .6²) / 2 = .45.
    assert result["brier"] == pytest.approx(0.45)
    # Confidence .7 right and .6 wrong, in different bins: (.3 + .6) / 2, and so for equal mass.
    assert result["ece"] == pytest.approx(0.45)
    assert result["ece_equal_mass"] == pytest.approx(0.45)

    def h(p):
        return -p * np.log(p) - (1 - p) * np.log(1 - p)

    total, aleatoric = (h(0.7) + h(0.4)) / 2, (h(0.8) + h(0.5) + h(0.6) + h(0.3)) / 4
    assert result["entropy"] == pytest.approx(total)
    assert result["aleatoric"] == pytest.approx(aleatoric)
    assert result["epistemic"] == pytest.approx(total - aleatoric)
    assert result["disagreement"] == result["epistemic"]


def test_regression_by_hand():
    # One row, two targets; draws have means (1, 4), (3, 8) and deviations (1, 2), (1, 4).
    predictions = np.array([[[1.0, 4.0, 1.0, 2.0]], [[3.0, 8.0, 1.0, 4.0]]])
    log_likelihoods = np.array([[np.log(0.1)], [np.log(0.3)]])
    result = metrics.evaluate("regression", predictions, log_likelihoods, np.array([[2.0, 8.0]]))
    # Mixture means 2 and 6, errors 0 and 2: sqrt((0 + 4) / 2).
    assert result["rmse"] == pytest.approx(np.sqrt(2))
    assert result["nll"] == pytest.approx(-np.log(0.2))
    # sqrt((1 + 1) / 2) = 1 and sqrt((4 + 16) / 2) = sqrt(10); spread of means 1 and 2.
    assert result["aleatoric"] == pytest.approx((1 + np.sqrt(10)) / 2)
    assert result["epistemic"] == result["disagreement"] == pytest.approx(1.5)
    # u = (Φ(1) + Φ(-1)) / 2 = 1/2 and (Φ(2) + Φ(0)) / 2 = .7386, .2386 away from 1/2: the 50 %
    # interval (reach .25) holds both, one of 45 % (reach .225) only the first.
    transform = metrics.probability_integral_transform(predictions, [[2.0, 8.0]])
    np.testing.assert_allclose(transform, [[0.5, (stats.norm.cdf(2) + 0.5) / 2]])
    assert result["coverage_50"] == result["coverage_90"] == result["coverage_95"] == 1.0
    assert metrics.interval_coverage(transform, 0.45) == 0.5


def test_agrees_with_scikit_learn(rng):
    predictions, log_likelihoods, targets = _random_classification(rng)
    mean, classes = predictions.mean(0), np.arange(4)
    result = metrics.evaluate("classification", predictions, log_likelihoods, targets)
    expected = sklearn_metrics.log_loss(targets, mean, labels=classes)
    assert result["nll"] == pytest.approx(expected)
    assert result["accuracy"] == sklearn_metrics.accuracy_score(targets, mean.argmax(1))
    # scikit-learn's binary score of each class against the rest, summed over classes.
    per_class = [sklearn_metrics.brier_score_loss(targets == k, mean[:, k]) for k in classes]
    assert result["brier"] == pytest.approx(sum(per_class))


@pytest.mark.parametrize("equal_mass", [False, True])
def test_calibration_error_counts_saturated_confidences(equal_mass):
    # All rows certain and half of them wrong: |1/2 - 1| = 1/2, wherever the wrong rows are.
    probabilities, targets = _two_class(np.ones(100), np.arange(100) < 50)
    error = metrics.expected_calibration_error(probabilities, targets, equal_mass=equal_mass)
    assert error == pytest.approx(0.5)


def test_every_confidence_is_in_exactly_one_bin():
    # All edges k / 15, their float neighbours, 0, 1 and float32's overshoot of 1.
    edges = np.arange(16) / 15
    confidence = np.concatenate(
        [edges, np.nextafter(edges, 2), np.nextafter(edges, -1), [1 + 2e-7]]
    )
    probabilities = confidence[:, None]  # One class, so that confidences below 1/2 can occur.
    bins = metrics.reliability_bins(probabilities, np.zeros(len(confidence), int))
    assert bins.weight.sum() == pytest.approx(1.0)
    # Upper edges belong to their bin: its edge, the float below it, the float above its lower edge.
    # The first also has 0 and the float below 0, the last the float above 1 and the overshoot.
    expected = np.full(15, 3.0)
    expected[0] += 2
    expected[-1] += 2
    np.testing.assert_allclose(bins.weight * len(confidence), expected)


def test_empty_bins_are_told_by_weight_and_left_out():
    # Confidence .55 (bin 9 of 15) and .95 (bin 15); accuracy 1/2 and 1: (.05 + .05) / 2.
    probabilities, targets = _two_class([0.55, 0.55, 0.95, 0.95], [True, False, True, True])
    bins = metrics.reliability_bins(probabilities, targets)
    np.testing.assert_array_equal(np.flatnonzero(bins.weight), [8, 14])
    assert np.isnan(bins.accuracy[0]) and np.isnan(bins.confidence[0])
    assert metrics.expected_calibration_error(probabilities, targets) == pytest.approx(0.05)


def test_equal_mass_bins_have_equal_mass_and_ignore_the_order_of_ties(rng):
    # Eight rows of confidence 3/4, six of them right: calibrated exactly, however they are cut.
    probabilities, targets = _two_class(np.full(8, 0.75), np.arange(8) < 6)
    for num_bins in (1, 3, 8, 20):
        for order in (np.arange(8), np.arange(8)[::-1], rng.permutation(8)):
            error = metrics.expected_calibration_error(
                probabilities[order], targets[order], num_bins, equal_mass=True
            )
            assert error == pytest.approx(0.0)
    # Distinct confidences in shuffled order, two bins: (.6, .7) one right, (.8, .9) both right.
    # Gaps |.5 - .65| = .15 and |1 - .85| = .15.
    probabilities, targets = _two_class([0.9, 0.6, 0.8, 0.7], [True, False, True, True])
    bins = metrics.reliability_bins(probabilities, targets, num_bins=2, equal_mass=True)
    np.testing.assert_allclose(bins.weight, [0.5, 0.5])
    np.testing.assert_allclose(bins.confidence, [0.65, 0.85])
    np.testing.assert_allclose(bins.accuracy, [0.5, 1.0])


def test_mutual_information_of_equal_and_of_opposed_draws(rng):
    same = np.repeat(rng.dirichlet(np.ones(5), size=(1, 50)), 7, axis=0)
    np.testing.assert_allclose(metrics.mutual_information(same), 0.0, atol=1e-15)
    assert (metrics.mutual_information(same) >= 0).all()
    opposed = np.eye(5)[:, None, :]  # Draw s is certain of class s; zeros must not give NaN.
    np.testing.assert_allclose(metrics.mutual_information(opposed), np.log(5))
    np.testing.assert_allclose(metrics.entropy(opposed), 0.0)


def test_float32_predictions_are_averaged_in_float64():
    # Summed in float32, 20,000 copies of 0.1 drift by more than 1e-7 relative.
    predictions = np.full((20_000, 1, 10), 0.1, np.float32)
    result = metrics.evaluate(
        "classification", predictions, np.log(predictions[:, :, 0]), np.array([0])
    )
    assert result["entropy"] == pytest.approx(np.log(10), rel=1e-7)
    assert result["nll"] == pytest.approx(np.log(10), rel=1e-7)


def test_mixture_likelihood_is_not_that_of_one_gaussian():
    means, deviations, observed = np.array([-3.0, 3.0]), np.array([0.5, 1.0]), np.array([-3.0, 0.0])
    components = stats.norm(means[:, None], deviations[:, None])
    nll = metrics.negative_log_likelihood(components.logpdf(observed))
    density = 0.5 * stats.norm.pdf(observed, -3, 0.5) + 0.5 * stats.norm.pdf(observed, 3, 1)
    assert nll == pytest.approx(-np.log(density).mean())
    matched = stats.norm(0, np.sqrt(np.mean(deviations**2) + 9)).logpdf(observed)
    assert abs(nll + matched.mean()) > 0.1


def test_coverage_of_targets_drawn_from_the_mixture(rng):
    # Targets come from a random component of their own three-draw mixture. Each of the 3 counts is
    # binomial; 5 standard errors are exceeded with probability below 2e-6 over seeds.
    rows = 20_000
    predictions = np.concatenate(
        [rng.normal(0, 3, (3, rows, 1)), rng.uniform(0.2, 2.0, (3, rows, 1))], axis=-1
    )
    chosen = predictions[rng.integers(3, size=rows), np.arange(rows)]
    targets = rng.normal(chosen[:, :1], chosen[:, 1:])
    result = metrics.evaluate("regression", predictions, np.zeros((3, rows)), targets)
    for level in metrics.COVERAGE_LEVELS:
        error = 5 * np.sqrt(level * (1 - level) / rows)
        assert result[f"coverage_{round(100 * level)}"] == pytest.approx(level, abs=error)


def test_nan_in_one_prediction_reaches_every_metric(rng):
    predictions, log_likelihoods, targets = _random_classification(rng)
    # The NaN sits at the row's label, where an unguarded argmax would count it as right.
    predictions[2, 3, targets[3]] = log_likelihoods[2, 3] = np.nan
    result = metrics.evaluate("classification", predictions, log_likelihoods, targets)
    assert all(np.isnan(value) for value in result.values()), result

    predictions, targets = rng.uniform(1, 2, (4, 30, 2)), rng.normal(size=(30, 1))
    predictions[1, 7] = np.nan
    log_likelihoods = np.where(np.arange(30) == 7, np.nan, np.zeros((4, 30)))
    result = metrics.evaluate("regression", predictions, log_likelihoods, targets)
    assert all(np.isnan(value) for value in result.values()), result


def test_infinities_of_a_diverged_draw_raise_no_warning(rng):
    predictions = rng.uniform(1, 2, (4, 30, 2))
    predictions[1, 7] = np.inf
    log_likelihoods = np.full((4, 30), -np.inf)
    result = metrics.evaluate("regression", predictions, log_likelihoods, np.zeros((30, 1)))
    assert result["rmse"] == np.inf and result["nll"] == np.inf


def test_mistakes_are_told():
    predictions, log_likelihoods = np.full((2, 3, 2), 0.5), np.zeros((2, 3))
    with pytest.raises(errors.UserError, match="Did you mean 'regression'"):
        metrics.evaluate("regresion", predictions, log_likelihoods, np.zeros((3, 1)))
    # A flat target would broadcast (3,) against (3, 1) to (3, 3); a column of labels likewise.
    with pytest.raises(errors.UserError, match="do not belong"):
        metrics.evaluate("regression", predictions, log_likelihoods, np.zeros(3))
    with pytest.raises(errors.UserError, match="do not belong"):
        metrics.evaluate("classification", predictions, log_likelihoods, np.zeros((3, 1), int))
    with pytest.raises(errors.UserError, match="do not belong"):
        metrics.evaluate("classification", predictions, log_likelihoods.T, np.zeros(3, int))
    with pytest.raises(errors.UserError, match="not empty"):
        metrics.evaluate("classification", predictions[:, :0], np.zeros((2, 0)), np.zeros(0, int))
    with pytest.raises(errors.UserError, match="do not belong"):
        metrics.root_mean_squared_error(predictions[0], np.zeros((3, 1)))


def _published(shared_data: pathlib.Path, name: str) -> np.ndarray:
    path = shared_data / "hmc_reference" / name
    if not path.exists():
        pytest.skip(f"{name} is absent")
    return np.loadtxt(path)


def _check_published(probabilities, targets, accuracy, nll, ece):
    observed = probabilities[np.arange(len(targets)), targets]
    # The files hold what is left of float32 sums; the smallest normal float32 is the honest floor.
    log_likelihoods = np.log(np.maximum(observed, np.finfo(np.float32).tiny))
    result = metrics.evaluate("classification", probabilities[None], log_likelihoods[None], targets)
    # Half a unit of the last published digit.
    assert result["accuracy"] == pytest.approx(accuracy, abs=5e-5)
    assert result["nll"] == pytest.approx(nll, abs=5e-5)
    assert result["ece"] == pytest.approx(ece, abs=5e-5)
    assert result["epistemic"] == 0.0  # One averaged prediction has nothing to disagree with.


def test_published_hmc_predictions_of_imdb(shared_data):
    probabilities = _published(shared_data, "imdb_cnnlstm_hmc_probs.csv.gz")
    with np.load(shared_data / "imdb" / "imdb_bnn_hmc_20000w_100len.npz") as data:
        _check_published(probabilities, data["y_test"], 0.8756, 0.2950, 0.0308)


def test_published_hmc_predictions_of_cifar10(shared_data):
    probabilities = _published(shared_data, "cifar10_resnet20_hmc_probs.csv.gz")
    tensorflow_datasets = pytest.importorskip("tensorflow_datasets")
    source = tensorflow_datasets.data_source(
        "cifar10",
        split="test",
        data_dir=shared_data / "tensorflow_datasets",
        builder_kwargs={"file_format": "array_record"},
        decoders={"image": tensorflow_datasets.decode.SkipDecoding()},
    )
    targets = np.array([example["label"] for example in source])
    _check_published(probabilities, targets, 0.9144, 0.2773, 0.0522)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_in_blocks_give_the_same_numbers(task, monkeypatch):
    """17 rows of 2 chains of 3 draws, 5 rows at a time, bit for bit."""
    rng = np.random.default_rng(0)
    outputs = rng.uniform(0.1, 1, size=(2, 3, 17, 4))
    if task == "classification":
        outputs /= outputs.sum(axis=-1, keepdims=True)
        targets = rng.integers(4, size=17)
    else:
        targets = rng.normal(size=(17, 2))
    predictions = Predictions(task, outputs, rng.normal(size=(2, 3, 17)), targets)
    monkeypatch.setattr(metrics, "ROWS_AT_ONCE", 5)
    flat = (predictions.flat_outputs, predictions.flat_log_likelihoods)
    assert metrics.of_predictions(predictions) == metrics.evaluate(task, *flat, targets)
