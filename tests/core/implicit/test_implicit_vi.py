"""Implicit VI against the closed forms of a linear-Gaussian model, and against mean-field VI.

Where draws are compared with expectations, tests are at 5 standard errors: a false failure once in
1.7 million seeds; the seeds are fixed.
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

from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.data import make_data, take
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import generators, implicit_vi
from haiku_posteriors.core.implicit.generators import MLP
from haiku_posteriors.core.implicit.implicit_vi import Estimator, Sampler
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
evidence_terms = jax.jit(implicit_vi.evidence_terms, static_argnums=(1, 2, 3, 6))
DATA = jax.tree.map(jnp.asarray, make_data(INPUTS, TARGETS))


def linear(inputs):
    return hk.Linear(1, with_bias=False)(inputs)


def mlp(inputs):
    return hk.nets.MLP([4, 1], activation=jnp.tanh)(inputs)


def build(network=linear, **settings):
    return make_log_joint(
        network, INPUTS, make_prior(PRIOR_STD**-2), gaussian(NOISE, 1), **settings
    )


def exact_posterior():
    """Mean, covariance and log-evidence of the linear model, in float64."""
    x, y = INPUTS.astype(float), TARGETS[:, 0].astype(float)
    covariance = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(FEATURES) / PRIOR_STD**2)
    marginal = NOISE**2 * np.eye(ROWS) + PRIOR_STD**2 * x @ x.T
    log_det = np.linalg.slogdet(2 * np.pi * marginal)[1]
    log_evidence = -0.5 * (y @ np.linalg.solve(marginal, y) + log_det)
    return covariance @ x.T @ y / NOISE**2, covariance, log_evidence


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
    init, step, sample = implicit_vi.implicit_vi(*arguments, **settings)
    return Method(jax.jit(init), jax.jit(step), jax.jit(sample, static_argnums=2))


def run(method, state, epochs, seed=0, data=DATA):
    def body(state, key):
        return method.step(key, state, data)

    keys = jax.random.split(jax.random.key(seed), epochs)
    return jax.jit(lambda state: jax.lax.scan(body, state, keys))(state)


@pytest.fixture(scope="module")
def fitted():
    """A linear generator on the linear-Gaussian network, at the end of its training."""
    log_joint = build()
    generator = generators.make_generator(MLP(FEATURES), log_joint.init(jax.random.key(0)))
    schedule = optax.cosine_decay_schedule(3e-2, 3000)
    method = make_method(log_joint, optax.adam(schedule), ROWS, generator=generator, num_samples=8)
    state, _ = run(method, method.init(jax.random.key(0), None), 3000)
    return log_joint, generator, method, state


def test_linear_generator_reaches_the_evidence(fitted):
    """On a Gaussian posterior the family is exact: the ELBO is the evidence, at *every* (z, e).

    (The integrand log p(w, D) - log q(w) is constant at the optimum but for the entropy's part,
    which is replaced by its expectation; so the mean has an error.)
    """
    log_joint, generator, _, state = fitted
    terms, _ = evidence_terms(
        jax.random.key(5), log_joint, generator, Estimator("exact"), state.sampler, DATA, 5000
    )
    elbos = np.asarray(terms.elbo, float)
    error = elbos.std() / math.sqrt(len(elbos))
    log_evidence = exact_posterior()[2]
    assert abs(elbos.mean() - log_evidence) < 5 * error + 0.02
    # The best mean-field posterior misses it by more than the tolerance can hide.
    _, covariance, _ = exact_posterior()
    gap = 0.5 * (np.log(1 / np.diag(np.linalg.inv(covariance))).sum())
    gap = 0.5 * np.linalg.slogdet(covariance)[1] - gap
    assert gap > 0.5
    assert error < 0.05


def test_linear_generator_recovers_the_covariance(fitted):
    """Full covariance J J^T + diag(s)^2 within 5 %, the mean within 5 % of a standard deviation."""
    _, generator, _, state = fitted
    mean, covariance, _ = exact_posterior()
    flat = lambda z: ravel_pytree(generator.apply(state.sampler.generator, z))[0]  # noqa: E731
    zero = jnp.zeros(FEATURES)
    jacobian = np.asarray(jax.jacfwd(flat)(zero), float)
    scale = np.exp(np.asarray(ravel_pytree(state.sampler.log_scale)[0], float))
    found = jacobian @ jacobian.T + np.diag(scale**2)
    assert np.linalg.norm(found - covariance) < 0.05 * np.linalg.norm(covariance)
    assert np.abs(np.asarray(flat(zero)) - mean).max() < 0.05 * np.sqrt(covariance.max())
    strongest = np.corrcoef(np.linalg.cholesky(covariance)).min()
    assert strongest < -0.5  # what mean-field cannot have


def test_draws_have_the_law_of_the_sampler(fitted):
    _, _, method, state = fitted
    mean, covariance, _ = exact_posterior()
    draws = method.sample(jax.random.key(1), state, 20_000)
    values = np.asarray(jax.tree.leaves(draws)[0], float)[..., 0]
    np.testing.assert_allclose(values.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(np.cov(values.T), covariance, atol=0.1 * covariance.max())


def test_constant_generator_is_mean_field():
    """J = 0: the terms of mean-field VI with the same mean and s."""
    log_joint = build(mlp)
    params = log_joint.init(jax.random.key(3))
    generator, sampler = make(log_joint, MLP(5), params, spread=0.0)
    mean_field = vi.initial_variational(log_joint, params, 0.2)
    estimate = jax.jit(functools.partial(vi.evidence_terms, num_samples=1000), static_argnums=1)
    theirs = estimate(jax.random.key(1), log_joint, mean_field, DATA)
    for name, draws in (("exact", 1000), ("lanczos", 3), ("singular_value", 3)):
        ours, _ = evidence_terms(
            jax.random.key(2), log_joint, generator, Estimator(name, 3), sampler, DATA, draws
        )
        np.testing.assert_allclose(
            ours.entropy + ours.expected_log_prior, -theirs.divergence, rtol=1e-5
        )
        if name == "exact":
            likelihoods = np.asarray(ours.expected_log_likelihood, float)
            error = likelihoods.std() * math.sqrt(2 / draws)
            assert abs(likelihoods.mean() - theirs.expected_log_likelihood) < 5 * error


def test_estimators_agree_or_bound():
    log_joint = build(mlp)
    generator, sampler = make(log_joint, MLP(6, (9,)))
    by_name = {
        name: jax.tree.map(
            jnp.mean,
            evidence_terms(jax.random.key(0), log_joint, generator, estimator, sampler, DATA, 64)[
                0
            ],
        )
        for name, estimator in {
            "exact": Estimator("exact"),
            "few": Estimator("lanczos", 2, 50),
            "all": Estimator("lanczos", 6, 50),
            "bound": Estimator("singular_value", 30),
        }.items()
    }
    exact = by_name["exact"].entropy
    few, everything = by_name["few"].log_det, by_name["all"].log_det
    np.testing.assert_allclose(by_name["all"].entropy, exact, rtol=0.01)
    assert few.lower < by_name["exact"].log_det.value < few.upper
    assert few.upper - few.lower > everything.upper - everything.lower
    assert by_name["bound"].entropy < exact
    for terms in by_name.values():  # the same (z, e)
        np.testing.assert_allclose(
            terms.expected_log_likelihood, by_name["exact"].expected_log_likelihood, rtol=1e-5
        )


def test_gradient_of_the_expected_value():
    """Common random numbers: the gradient is the slope of the Monte Carlo estimate itself."""
    log_joint = build(mlp)
    generator, sampler = make(log_joint, MLP(4, (5,)))
    flat, unravel = ravel_pytree(sampler)

    @jax.jit
    def value(flat):
        terms, _ = evidence_terms(
            jax.random.key(0), log_joint, generator, Estimator("exact"), unravel(flat), DATA, 8
        )
        return jnp.mean(terms.elbo)

    direction = jax.random.normal(jax.random.key(1), flat.shape)
    direction = direction / jnp.linalg.norm(direction)
    step = 1e-2
    slope = (value(flat + step * direction) - value(flat - step * direction)) / (2 * step)
    assert float(jax.jit(jax.grad(value))(flat) @ direction) == pytest.approx(
        float(slope), rel=2e-2
    )


def test_minibatches_are_unbiased():
    log_joint = build(mlp)
    generator, sampler = make(log_joint, MLP(4, (5,)))

    def terms(data):
        found, _ = evidence_terms(
            jax.random.key(0), log_joint, generator, Estimator("exact"), sampler, data, 4
        )
        return found

    halves = [take(DATA, jnp.arange(i, ROWS, 2), jnp.full(ROWS // 2, 2.0)) for i in (0, 1)]
    parts = [terms(half) for half in halves]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    for ours, whole in zip(mean[:3], terms(DATA)[:3], strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5)


def test_temperature_divides_likelihood_and_prior():
    hot, cold = build(temperature=4.0), build()
    generator, sampler = make(cold, MLP(2))
    one, four = (
        evidence_terms(
            jax.random.key(0), log_joint, generator, Estimator("exact"), sampler, DATA, 3
        )[0]
        for log_joint in (cold, hot)
    )
    np.testing.assert_allclose(four.expected_log_likelihood, one.expected_log_likelihood / 4)
    np.testing.assert_allclose(four.expected_log_prior, one.expected_log_prior / 4)
    np.testing.assert_allclose(four.entropy, one.entropy)


def step_by_hand(weights, **settings):
    """The change by one step of plain gradient descent, and the one that the objective says."""
    log_joint = build(mlp)
    random = log_joint.init(jax.random.key(0))
    generator = generators.make_generator(MLP(3), random)
    method = make_method(
        log_joint, optax.sgd(1e-3), ROWS, generator=generator, num_samples=2, **settings
    )
    state = method.init(jax.random.key(1), None)
    new, info = method.step(jax.random.key(2), state, DATA)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(2), 1), 0)

    def objective(sampler):
        terms, _ = evidence_terms(key, log_joint, generator, Estimator("exact"), sampler, DATA, 2)
        return sum(w * jnp.mean(t) for w, t in zip(weights, terms, strict=False)) / ROWS

    gradient = jax.jit(jax.grad(objective))(state.sampler)
    expected = jax.tree.map(lambda p, g: p + 1e-3 * g, state.sampler, gradient)
    return new.sampler, expected, info


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        ((1, 1, 1), {}),
        (
            (0.01, 0.1, 3.0),
            {
                "annealing_start": 0.01,
                "annealing_steps": 10,
                "prior_weight": 0.1,
                "entropy_weight": 3.0,
            },
        ),
    ],
)
def test_the_objective_has_its_weights_and_the_elbo_has_not(weights, settings):
    new, expected, info = step_by_hand(weights, **settings)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    parts = ("expected_log_likelihood", "expected_log_prior", "entropy")
    np.testing.assert_allclose(info["elbo"], sum(info[name] for name in parts), rtol=1e-6)


def test_annealing_ends():
    """After its steps the objective is the ELBO: 2 steps of annealing, the third has none."""
    log_joint = build()
    generator = generators.make_generator(MLP(2), log_joint.init(jax.random.key(0)))
    settings = {"generator": generator, "num_samples": 1}
    plain = make_method(log_joint, optax.sgd(1e-2), ROWS, **settings)
    annealed = make_method(log_joint, optax.sgd(1e-2), ROWS, annealing_steps=2, **settings)
    state = plain.init(jax.random.key(0), None)
    for done, same in ((0, False), (1, False), (2, True)):
        at = state._replace(num_steps=jnp.int32(done))
        a, b = (method.step(jax.random.key(4), at, DATA)[0] for method in (plain, annealed))
        equal = [
            np.allclose(x, y, rtol=1e-6)
            for x, y in zip(jax.tree.leaves(a.sampler), jax.tree.leaves(b.sampler), strict=True)
        ]
        assert all(equal) == same


@pytest.mark.parametrize("learned", [True, False])
def test_noise_scale_is_learned_or_fixed(learned):
    log_joint = build(mlp)
    method = make_method(log_joint, batch_size=8, learn_noise_scale=learned, num_samples=1)
    state = method.init(jax.random.key(0), None)
    after, _ = method.step(jax.random.key(1), state, DATA)
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(
            jax.tree.leaves(state.sampler.log_scale),
            jax.tree.leaves(after.sampler.log_scale),
            strict=True,
        )
    ]
    assert all(moved) == any(moved) == learned
    shapes = {leaf.shape for leaf in jax.tree.leaves(after.sampler.log_scale)}
    assert (shapes == {()}) == (not learned)


def test_warm_start_keeps_the_vectors():
    log_joint = build()
    method = make_method(
        log_joint, batch_size=ROWS, estimator=Estimator("singular_value", 3, warm_start=True)
    )
    state = method.init(jax.random.key(0), None)
    after, info = method.step(jax.random.key(1), state, DATA)
    assert "entropy_upper" not in info
    np.testing.assert_allclose(jnp.linalg.norm(after.vectors, axis=1), 1, rtol=1e-5)


def test_starting_from_mean_field():
    """The first draws have its marginals; and the ELBO ends above its, by most of the gap."""
    log_joint = build()
    mean, covariance, log_evidence = exact_posterior()
    deviations = 1 / np.sqrt(np.diag(np.linalg.inv(covariance)))  # the mean-field optimum's
    shape = jax.tree.leaves(log_joint.init(jax.random.key(0)))[0].shape
    tree = lambda flat: {"linear": {"w": jnp.asarray(flat, jnp.float32).reshape(shape)}}  # noqa: E731
    raw = np.log(np.expm1(deviations))
    start = vi.VariationalParams(tree(mean), tree(raw), {"linear": {"w": None}}, {})
    generator = generators.make_generator(MLP(FEATURES), tree(mean))
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-2, 1500))
    method = make_method(
        log_joint, optimizer, ROWS, generator=generator, num_samples=8, init_spread=0.3
    )
    state = method.init(jax.random.key(0), start)
    noise = np.exp(jax.tree.leaves(state.sampler.log_scale)[0][..., 0])
    np.testing.assert_allclose(noise, deviations * math.sqrt(1 - 0.3**2), rtol=1e-5)
    draws = np.asarray(jax.tree.leaves(method.sample(jax.random.key(1), state, 4000))[0])[..., 0]
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=5 * deviations.max() / 60)
    np.testing.assert_allclose(draws.std(axis=0), deviations, rtol=0.2)
    state, info = run(method, state, 1500)
    gap = 0.5 * np.linalg.slogdet(covariance)[1] - np.log(deviations).sum()
    last = float(np.mean(info["elbo"][-300:]))
    assert last > log_evidence - gap / 4
    assert last < log_evidence + 0.2


def test_starts():
    """Around given parameters by a share of their size; or as wide as the prior, around 0."""
    log_joint = build(mlp)
    params = jax.tree.map(lambda leaf: leaf + 2.0, log_joint.init(jax.random.key(0)))
    near = make_method(log_joint, start="network", init_spread=0.05, noise_scale=1e-3)
    draws = near.sample(jax.random.key(2), near.init(jax.random.key(1), params), 500)
    for draw, start in zip(jax.tree.leaves(draws), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(draw.mean(axis=0), start, atol=0.1)
        assert 0.02 < float(jnp.mean(draw.std(axis=0))) < 0.5
    wide = make_method(log_joint, start="prior")
    draws = wide.sample(jax.random.key(2), wide.init(jax.random.key(1), params), 500)
    flat = np.concatenate([leaf.reshape(500, -1) for leaf in jax.tree.leaves(draws)], axis=1)
    assert np.abs(flat.mean(axis=0)).mean() < 0.5
    assert flat.std(axis=0).mean() == pytest.approx(PRIOR_STD, rel=0.3)


def test_point_estimates_are_trained_and_shared_by_all_draws():
    log_joint = build(mlp, stochastic_params="linear_1")
    method = make_method(log_joint, batch_size=ROWS)
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
        ({"start": "here"}, "here"),
        ({"noise_scale": 0.0}, "noise_scale must be positive"),
        ({"init_spread": -1.0}, "init_spread must be positive"),
        ({"annealing_start": 0.0}, "annealing_start must be above 0"),
    ],
)
def test_mistakes_are_sentences(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        implicit_vi.implicit_vi(build(), **settings)


def test_devices_share_the_draws_of_a_step():
    """Two for each of two members: the same result as if each did all draws, for half the work."""
    log_joint, members = build(), 2
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
