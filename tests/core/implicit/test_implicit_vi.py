"""Implicit VI against the closed forms of a linear-Gaussian model, and against mean-field VI.

Where draws are compared with expectations, tests are at 5 standard errors, see `scenarios`. A step
of implicit VI takes seconds to compile: tests share the programs of `fitted` where they can, and
otherwise use a small generator on the linear network.
"""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from scenarios import LinearGaussian, coefficients, tanh_mlp

from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.data import take
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import generators, implicit_vi, objectives, samplers
from haiku_posteriors.core.implicit.generators import MLP
from haiku_posteriors.core.implicit.objectives import Estimator, ImplicitTerms, Objective
from haiku_posteriors.core.implicit.samplers import Sampler, Start
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import chains, devices

ROWS, FEATURES, NOISE, PRIOR_STD = 24, 3, 0.7, 1.3
RANDOM = np.random.default_rng(0)
MIXING = [[1, 0.9, 0], [0, 0.45, 0], [0, 0, 2]]  # correlated columns, so that weights are, too
INPUTS = (RANDOM.normal(size=(ROWS, FEATURES)) @ MIXING).astype(np.float32)
TARGETS = (INPUTS @ [[1.0], [-2.0], [0.5]] + NOISE * RANDOM.normal(size=(ROWS, 1))).astype(
    np.float32
)
EXACT = LinearGaussian(INPUTS, TARGETS, NOISE, PRIOR_STD, with_bias=False)
DATA = EXACT.data()
evidence_terms = jax.jit(objectives.evidence_terms, static_argnums=(1, 2, 3, 6))


def make(log_joint, description, center=None, spread=0.3, noise_scale=0.2, seed=0):
    """A generator and a sampler around `center`."""
    params = log_joint.init(jax.random.key(seed)) if center is None else center
    random, point = log_joint.partition(params)
    generator = generators.make_generator(description, random)
    spreads = jax.tree.map(lambda leaf: jnp.array(spread, leaf.dtype), random)
    log_scale = jax.tree.map(lambda leaf: jnp.full(leaf.shape, math.log(noise_scale)), random)
    weights = generator.init(jax.random.key(seed + 1), random, spreads)
    return generator, Sampler(weights, log_scale, point)


def make_method(*arguments, **settings):
    """A method of compiled functions: run one by one, operations take seconds here."""
    method = implicit_vi.implicit_vi(*arguments, **settings)
    sample = jax.jit(method.sample, static_argnums=2)
    return Method(jax.jit(method.init), jax.jit(method.step), sample)


def small_generator(log_joint, latent_size=2):
    return generators.make_generator(MLP(latent_size), log_joint.random_shapes)


class Fitted:
    """A linear generator on the linear-Gaussian network, and its state after training."""

    def __init__(self):
        self.log_joint = EXACT.log_joint()
        self.generator = small_generator(self.log_joint, FEATURES)
        schedule = optax.cosine_decay_schedule(3e-2, 3000)
        self.method = make_method(
            self.log_joint, optax.adam(schedule), ROWS, generator=self.generator, num_samples=8
        )
        keys = jax.random.split(jax.random.key(0), 3000)
        self.train = jax.jit(
            lambda state: jax.lax.scan(lambda s, key: self.method.step(key, s, DATA), state, keys)
        )
        self.state, _ = self.train(self.method.init(jax.random.key(0), None))


@pytest.fixture(scope="module")
def fitted():
    return Fitted()


def test_linear_generator_reaches_the_evidence(fitted):
    """On a Gaussian posterior the family is exact: the ELBO is the evidence, at *every* (z, e).

    (The integrand log p(w, D) - log q(w) is constant at the optimum but for the entropy's part,
    which is replaced by its expectation; so the mean has an error.)
    """
    terms, _ = evidence_terms(
        jax.random.key(5),
        fitted.log_joint,
        fitted.generator,
        Estimator("exact"),
        fitted.state.sampler,
        DATA,
        5000,
    )
    elbos = np.asarray(terms.total, float)
    error = elbos.std() / math.sqrt(len(elbos))
    assert abs(elbos.mean() - EXACT.log_evidence()) < 5 * error + 0.02
    # The best mean-field posterior misses it by more than the tolerance can hide.
    assert EXACT.mean_field_gap() > 0.5
    assert error < 0.05


def test_linear_generator_recovers_the_covariance(fitted):
    """Full covariance J J^T + diag(s)^2 within 5 %, the mean within 5 % of a standard deviation."""
    sampler, covariance = fitted.state.sampler, EXACT.covariance
    flat = lambda z: ravel_pytree(fitted.generator.apply(sampler.generator, z))[0]  # noqa: E731
    zero = jnp.zeros(FEATURES)
    jacobian = np.asarray(jax.jacfwd(flat)(zero), float)
    scale = np.exp(np.asarray(ravel_pytree(sampler.log_scale)[0], float))
    found = jacobian @ jacobian.T + np.diag(scale**2)
    assert np.linalg.norm(found - covariance) < 0.05 * np.linalg.norm(covariance)
    assert np.abs(np.asarray(flat(zero)) - EXACT.mean).max() < 0.05 * np.sqrt(covariance.max())
    strongest = np.corrcoef(np.linalg.cholesky(covariance)).min()
    assert strongest < -0.5  # what mean-field cannot have


def test_draws_have_the_law_of_the_sampler(fitted):
    values = coefficients(fitted.method.sample(jax.random.key(1), fitted.state, 20_000))
    np.testing.assert_allclose(values.mean(axis=0), EXACT.mean, atol=0.05)
    largest = EXACT.covariance.max()
    np.testing.assert_allclose(np.cov(values.T), EXACT.covariance, atol=0.1 * largest)


class Nonlinear:
    """A nonlinear generator of the weights of a small network; terms by one program each."""

    ESTIMATORS = {  # noqa: RUF012
        "exact": Estimator("exact"),
        "lanczos": Estimator("lanczos", 6, 20),  # exact but for the noise of the probes
        "singular_value": Estimator("singular_value", 30),
    }
    NUM_DRAWS = 256

    def __init__(self, **settings):
        self.log_joint = EXACT.log_joint(tanh_mlp, **settings)
        self.params = self.log_joint.init(jax.random.key(3))
        self.generator, self.sampler = make(self.log_joint, MLP(6, (9,)), self.params)

    def terms(self, estimator, sampler=None, data=DATA):
        sampler = self.sampler if sampler is None else sampler
        arguments = (self.log_joint, self.generator, self.ESTIMATORS[estimator], sampler, data)
        return evidence_terms(jax.random.key(0), *arguments, self.NUM_DRAWS)[0]


@pytest.fixture(scope="module")
def nonlinear():
    return Nonlinear()


@pytest.mark.slow
def test_constant_generator_is_mean_field(nonlinear):
    """J = 0: the terms of mean-field VI with the same mean and s."""
    log_joint = nonlinear.log_joint
    zeros = jax.tree.map(jnp.zeros_like, nonlinear.sampler.generator)
    zeros["output"]["b"] = nonlinear.sampler.generator["output"]["b"]
    sampler = nonlinear.sampler._replace(generator=zeros)
    mean_field = vi.initial_variational(log_joint, nonlinear.params, 0.2)
    estimate = jax.jit(functools.partial(vi.evidence_terms, num_samples=1000), static_argnums=1)
    theirs = estimate(jax.random.key(1), log_joint, mean_field, DATA)
    for name in Nonlinear.ESTIMATORS:
        ours = nonlinear.terms(name, sampler)
        np.testing.assert_allclose(
            ours.entropy + ours.expected_log_prior, -theirs.divergence, rtol=1e-5
        )
        likelihoods = np.asarray(ours.expected_log_likelihood, float)
        error = likelihoods.std() * math.sqrt(1 / len(likelihoods) + 1 / 1000)
        assert abs(likelihoods.mean() - theirs.expected_log_likelihood) < 5 * error


def test_estimators_agree_or_bound(nonlinear):
    """That few steps of lanczos bound the value from both sides, test_jacobian.py shows."""
    each = {name: nonlinear.terms(name) for name in Nonlinear.ESTIMATORS}
    exact, lanczos, bound = (jnp.mean(terms.entropy) for terms in each.values())
    np.testing.assert_allclose(lanczos, exact, rtol=0.01)
    assert bound < exact
    for terms in each.values():  # the same (z, e)
        np.testing.assert_allclose(
            terms.expected_log_likelihood, each["exact"].expected_log_likelihood, rtol=1e-5
        )


def test_gradient_of_the_expected_value(nonlinear):
    """Common random numbers: the gradient is the slope of the Monte Carlo estimate itself."""
    flat, unravel = ravel_pytree(nonlinear.sampler)

    def value(flat):
        return jnp.mean(nonlinear.terms("exact", unravel(flat)).total)

    direction = jax.random.normal(jax.random.key(1), flat.shape)
    direction = direction / jnp.linalg.norm(direction)
    step = 1e-2
    slope = (value(flat + step * direction) - value(flat - step * direction)) / (2 * step)
    assert float(jax.jit(jax.grad(value))(flat) @ direction) == pytest.approx(
        float(slope), rel=2e-2
    )


def test_noise_of_layers_has_the_expectation_and_a_gradient_of_less_variance(nonlinear):
    """Given z the weights are independent Gaussians: their layers may be drawn row by row.

    Values over 1,000 draws at 5 standard errors, gradients at 6. Of the gradients by s and by the
    center of g, where z adds little, `local` has a tenth and a third of the variance.
    """
    _, narrow = make(nonlinear.log_joint, MLP(6, (9,)), nonlinear.params, spread=0.02)
    arguments = (nonlinear.log_joint, nonlinear.generator, Estimator("exact"))

    def draws(noise):
        def likelihood(sampler, key):
            terms, _ = objectives.evidence_terms(key, *arguments, sampler, DATA, 1, noise=noise)
            return terms.expected_log_likelihood[0]

        each = jax.vmap(jax.value_and_grad(likelihood), in_axes=(None, 0))
        keys = jax.random.split(jax.random.key(len(noise)), 1000)
        values, gradient = jax.jit(each)(narrow, keys)
        scales = jax.vmap(lambda tree: ravel_pytree(tree)[0])(gradient.log_scale)
        center = gradient.generator["output"]["b"]
        return [np.asarray(found, float) for found in (values, scales, center)]

    pairs = zip(draws("reparameterization"), draws("local"), (5, 6, 6), (1, 10, 3), strict=True)
    for drawn, local, errors, factor in pairs:
        error = np.sqrt((drawn.var(axis=0) + local.var(axis=0)) / 1000)
        assert np.all(np.abs(drawn.mean(axis=0) - local.mean(axis=0)) < errors * error)
        assert local.var(axis=0).sum() < drawn.var(axis=0).sum() / factor


def test_minibatches_are_unbiased(nonlinear):
    halves = [take(DATA, jnp.arange(i, ROWS, 2), jnp.full(ROWS // 2, 2.0)) for i in (0, 1)]
    parts = [nonlinear.terms("exact", data=half) for half in halves]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    for ours, whole in zip(mean[:3], nonlinear.terms("exact")[:3], strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5)


def test_temperature_divides_likelihood_and_prior(nonlinear):
    hot = Nonlinear(temperature=4.0)
    one, four = nonlinear.terms("exact"), hot.terms("exact")
    divided = (four.expected_log_likelihood, four.expected_log_prior, four.entropy)
    expected = (one.expected_log_likelihood / 4, one.expected_log_prior / 4, one.entropy)
    np.testing.assert_allclose(divided, expected, rtol=1e-6)


def test_the_objective_has_its_weights_and_the_sum_has_not():
    """One step of plain gradient ascent, half-way through the annealing of the likelihood."""
    log_joint = EXACT.log_joint()
    generator = small_generator(log_joint)
    objective = Objective(
        annealing_start=0.01, annealing_steps=10, prior_weight=0.1, entropy_weight=3.0
    )
    method = make_method(
        log_joint, optax.sgd(1e-3), ROWS, generator=generator, num_samples=2, objective=objective
    )
    state = method.init(jax.random.key(1), None)._replace(num_steps=jnp.int32(5))
    new, info = method.step(jax.random.key(2), state, DATA)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(2), 1), 0)

    def weighted(sampler):
        terms, _ = evidence_terms(key, log_joint, generator, Estimator("exact"), sampler, DATA, 2)
        weights = (0.01**0.5, 0.1, 3.0)
        return sum(w * jnp.mean(t) for w, t in zip(weights, terms, strict=False)) / ROWS

    gradient = jax.jit(jax.grad(weighted))(state.sampler)
    expected = jax.tree.map(lambda p, g: p + 1e-3 * g, state.sampler, gradient)
    for a, b in zip(jax.tree.leaves(new.sampler), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    parts = ("expected_log_likelihood", "expected_log_prior", "entropy")
    np.testing.assert_allclose(
        info["linearised_estimate"], sum(info[name] for name in parts), rtol=1e-6
    )


def test_objective_by_default_and_after_annealing_is_the_sum():
    terms = ImplicitTerms(*(jnp.array(value) for value in (-3.0, -5.0, 7.0)), log_det=None)
    assert float(Objective().value(terms, jnp.int32(0))) == float(terms.total)
    annealed = Objective(annealing_start=0.01, annealing_steps=2)
    values = [float(annealed.value(terms, jnp.int32(done))) for done in range(4)]
    expected = [float(terms.total) + 3 * (1 - factor) for factor in (0.01, 0.1, 1.0, 1.0)]
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_a_fixed_noise_scale_stays_one_number():
    """That a learned one is trained, the whole step of the weighted objective shows."""
    log_joint = EXACT.log_joint()
    settings = {"generator": small_generator(log_joint), "num_samples": 1}
    method = make_method(log_joint, batch_size=ROWS, learn_noise_scale=False, **settings)
    state = method.init(jax.random.key(0), None)
    after, _ = method.step(jax.random.key(1), state, DATA)
    assert jax.tree.map(jnp.shape, after.sampler.log_scale) == {"linear": {"w": ()}}
    assert float(after.sampler.log_scale["linear"]["w"]) == np.float32(math.log(1e-2))
    assert not np.allclose(
        after.sampler.generator["output"]["w"], state.sampler.generator["output"]["w"]
    )
    learned = implicit_vi.implicit_vi(log_joint, **settings)
    shapes = jax.eval_shape(learned.init, jax.random.key(0), None).sampler.log_scale
    assert shapes["linear"]["w"].shape == (FEATURES, 1)


def test_warm_start_keeps_the_vectors():
    log_joint = EXACT.log_joint()
    method = make_method(
        log_joint,
        batch_size=ROWS,
        generator=small_generator(log_joint),
        estimator=Estimator("singular_value", 3, warm_start=True),
    )
    state = method.init(jax.random.key(0), None)
    after, info = method.step(jax.random.key(1), state, DATA)
    assert "log_det_upper" not in info and "log_det_lower" in info
    np.testing.assert_allclose(jnp.linalg.norm(after.vectors, axis=1), 1, rtol=1e-5)


def test_starting_from_mean_field(fitted):
    """The first draws have its marginals; and the ELBO ends above its, by most of the gap."""
    deviations = EXACT.mean_field_std()

    def tree(values):
        return {"linear": {"w": jnp.asarray(values, jnp.float32)[:, None]}}

    raw = np.log(np.expm1(deviations))
    start = vi.VariationalParams(tree(EXACT.mean), tree(raw), {"linear": {"w": None}}, {})
    method = implicit_vi.implicit_vi(
        fitted.log_joint,
        optax.adam(optax.cosine_decay_schedule(3e-2, 3000)),
        ROWS,
        generator=fitted.generator,
        num_samples=8,
        start=Start(init_spread=0.3),
    )
    state = jax.jit(method.init)(jax.random.key(0), start)
    noise = np.exp(coefficients(state.sampler.log_scale))
    np.testing.assert_allclose(noise, deviations * math.sqrt(1 - 0.3**2), rtol=1e-5)
    draws = coefficients(fitted.method.sample(jax.random.key(1), state, 20_000))
    np.testing.assert_allclose(draws.mean(axis=0), EXACT.mean, atol=5 * deviations.max() / 60)
    np.testing.assert_allclose(draws.std(axis=0), deviations, rtol=0.2)
    state, info = fitted.train(state)
    last = float(np.mean(info["linearised_estimate"][-300:]))
    assert last > EXACT.log_evidence() - EXACT.mean_field_gap() / 4
    assert last < EXACT.log_evidence() + 0.2


@pytest.mark.parametrize(
    ("network", "start"),
    [
        (lambda x: hk.Linear(1)(x), "network"),
        (lambda x: hk.Linear(1)(jnp.tanh(x)), "network"),
        (tanh_mlp, "mean_field"),
        # Its outputs are 0 wherever they start, and not affine for that.
        (lambda x: hk.Linear(1, w_init=jnp.zeros)(jax.nn.relu(hk.Linear(4)(x))), "mean_field"),
    ],
)
def test_the_default_start_asks_whether_outputs_are_affine(network, start):
    assert samplers.default_start(EXACT.log_joint(network), INPUTS[:5]) == start


def test_starts():
    """Around given parameters by a share of their size; or as wide as the prior, around 0."""
    log_joint = EXACT.log_joint(tanh_mlp)
    params = jax.tree.map(lambda leaf: leaf + 2.0, log_joint.init(jax.random.key(0)))
    generator = small_generator(log_joint, 20)
    near = make_method(log_joint, generator=generator, start=Start("network", 0.05, 1e-3))
    draws = near.sample(jax.random.key(2), near.init(jax.random.key(1), params), 500)
    for draw, start in zip(jax.tree.leaves(draws), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(draw.mean(axis=0), start, atol=0.1)
        assert 0.02 < float(jnp.mean(draw.std(axis=0))) < 0.5
    wide = make_method(log_joint, generator=generator, start=Start("prior"))
    draws = near.sample(jax.random.key(2), wide.init(jax.random.key(1), params), 500)
    flat = np.concatenate([leaf.reshape(500, -1) for leaf in jax.tree.leaves(draws)], axis=1)
    assert np.abs(flat.mean(axis=0)).mean() < 0.5
    assert flat.std(axis=0).mean() == pytest.approx(PRIOR_STD, rel=0.3)


def test_a_start_at_the_prior_has_the_prior_of_the_noise():
    """Around log 0.05, about one e-fold wide, and not around 0 as wide as the weights (0.1)."""
    log_joint = make_log_joint(
        lambda x: hk.Linear(1)(x), INPUTS, make_prior(100.0), gaussian(0.05, learn_noise=True)
    )
    generator = small_generator(log_joint, 8)
    method = implicit_vi.implicit_vi(log_joint, generator=generator, start=Start("prior"))
    draws = method.sample(jax.random.key(0), method.init(jax.random.key(1), None), 1000)
    noise = draws["likelihood"]["log_noise_std"]
    assert float(noise.std()) == pytest.approx(1, rel=0.5)
    assert float(noise.mean()) == pytest.approx(math.log(0.05), abs=0.5)


def test_point_estimates_are_trained_and_shared_by_all_draws():
    log_joint = EXACT.log_joint(tanh_mlp, stochastic_params="linear_1")
    method = make_method(log_joint, batch_size=ROWS, generator=small_generator(log_joint))
    state = method.init(jax.random.key(0), None)
    after, _ = method.step(jax.random.key(1), state, DATA)
    draws = trees.named_leaves(method.sample(jax.random.key(2), after, 5))
    before = trees.named_leaves(state.sampler.point)
    assert set(before) == {"mlp/~/linear_0/w", "mlp/~/linear_0/b"}
    for name, leaf in draws.items():
        assert (np.ptp(leaf, axis=0).max() == 0) == (name in before)
    assert not np.allclose(draws["mlp/~/linear_0/w"][0], before["mlp/~/linear_0/w"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"estimator": Estimator("slq")}, "slq"),
        ({"start": Start("here")}, "here"),
        ({"start": Start(noise_scale=0.0)}, "noise_scale must be positive"),
        ({"start": Start(init_spread=-1.0)}, "init_spread must be positive"),
        ({"objective": Objective(annealing_start=0.0)}, "annealing_start must be above 0"),
    ],
)
def test_mistakes_are_sentences(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        implicit_vi.implicit_vi(EXACT.log_joint(), **settings)


@pytest.mark.slow  # programs for four devices
def test_devices_share_the_draws_of_a_step():
    """Two for each of two members: the same result as if each did all draws, for half the work."""
    log_joint, members = EXACT.log_joint(), 2
    mesh = devices.make_mesh(members)
    assert mesh.shape["data"] == 2
    data = devices.place_data(INPUTS, TARGETS, mesh)
    generator, _ = make(log_joint, MLP(12, (64,)))
    found, work, state = [], [], None
    for place in (devices.draw_placement(mesh, 4), lambda array: array):
        method = implicit_vi.implicit_vi(
            log_joint,
            optax.sgd(1e-3),
            batch_size=ROWS,
            generator=generator,
            num_samples=4,
            place=place,
        )
        program = chains.compile_method(method, 0, members, mesh)
        state = program.init(None) if state is None else state
        arguments = (state, data, jnp.asarray(0), jnp.asarray(1))
        compiled = program.run.lower(*arguments).compile()
        work.append(compiled.cost_analysis()["flops"])
        found.append(compiled(*arguments)[0].sampler)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)
    assert work[0] < 0.6 * work[1]


def test_draws_that_devices_do_not_divide_stay_where_they_are():
    mesh = devices.make_mesh(1)
    array = jnp.ones((3, 2))
    assert devices.draw_placement(mesh, 3)(array) is array


def test_the_objective_is_a_bound_where_its_reverse_model_can_be_good():
    shapes = {"linear": {"w": jax.ShapeDtypeStruct((3, 100), jnp.float32)}}
    kinds = [
        objectives.default_entropy(generators.make_generator(generators.MLP(size), shapes))
        for size in (128, 129)
    ]
    assert kinds == ["hierarchical", "linearised"]
