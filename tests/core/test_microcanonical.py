"""Microcanonical dynamics: the flow, its Jacobian, reversibility, order, and float32."""

import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from scenarios import NO_DATA, gumbel, target_of_density, target_of_prior
from scipy.stats import special_ortho_group

from haiku_posteriors.core import hamiltonian, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.microcanonical import kick, random_velocity, trajectory
from haiku_posteriors.core.priors import make_prior

NO_DATA_64 = Data(*(np.zeros(shape) for shape in ((1, 1), (1, 1), 1)), num_rows=1)
DIMENSIONS = 5


@pytest.fixture
def double():
    """Float64, in which rounding leaves room to see everything else."""
    with jax.enable_x64(True):
        yield


def velocity_of(direction):
    direction = np.asarray(direction)
    return direction * math.sqrt(direction.size) / np.linalg.norm(direction)


def random_pair(cosine=None, num_dimensions=DIMENSIONS):
    """A unit gradient and a velocity, at a given cosine or at any."""
    rng = np.random.default_rng(0)
    gradient, other = special_ortho_group.rvs(num_dimensions, random_state=rng)[:2]
    if cosine is None:
        return gradient, velocity_of(rng.normal(size=num_dimensions))
    return gradient, velocity_of(cosine * gradient + math.sqrt(1 - cosine**2) * other)


@pytest.mark.parametrize("size", [1e-6, 0.3, 4.0])
def test_a_kick_is_the_flow_of_the_equation_of_motion(double, size):
    """Against a numerical solution; the kinetic change is the integral of gradient'v D / (D-1)...

    ... because the divergence of the flow on the sphere is -(D - 1) c |gradient| sqrt(D) / (D - 1).
    """
    gradient, velocity = random_pair()
    gradient, dimensions = size * gradient, DIMENSIONS

    def derivative(_, y):
        v = y[:-1]
        force = gradient - v * (v @ gradient) / dimensions
        return [*(dimensions / (dimensions - 1) * force), v @ gradient]

    solution = scipy.integrate.solve_ivp(
        derivative, (0, 1.3), [*velocity, 0.0], rtol=1e-12, atol=1e-14
    ).y[:, -1]
    turned, change = kick(velocity, gradient, jnp.array([0.4, 0.9]))
    np.testing.assert_allclose(turned, solution[:-1], rtol=1e-8)
    np.testing.assert_allclose(jnp.sum(change), solution[-1], rtol=1e-8)


def test_the_change_of_energy_is_the_jacobian_of_the_trajectory(double):
    """log |det| of (position, direction) -> the same, by finite differences on the sphere.

    Volumes on the sphere are measured in orthonormal bases of its tangent spaces at both ends.
    """
    log_joint = target_of_density(gumbel, 3)
    scales = np.array([0.5, 1.0, 2.0])

    def flow(w, v):
        path = trajectory(
            jax.random.key(0),
            log_joint,
            hamiltonian.start(log_joint, {"x": {"w": w}}),
            {"x": {"w": v}},
            NO_DATA_64,
            step_size=jnp.array(0.3),
            inverse_mass={"x": {"w": scales**2}},
            num_steps=jnp.array(4),
        )
        return path.position.params["x"]["w"], path.velocity["x"]["w"], path.kinetic_change

    def tangents(v):
        return np.linalg.svd(np.asarray(v)[None])[2][1:]

    position, velocity = np.array([0.3, -0.5, 1.0]), velocity_of([0.2, 1.0, -0.4])
    run = jax.jit(flow)
    _, end_velocity, change = run(position, velocity)
    start_basis, end_basis = tangents(velocity), tangents(end_velocity)

    def chart(z):
        moved = velocity + z[3:] @ start_basis  # the length's change is of second order
        w, v, _ = run(position + z[:3], velocity_of(moved))
        return np.concatenate([w, end_basis @ v])

    step = 1e-5
    columns = [(chart(step * e) - chart(-step * e)) / (2 * step) for e in np.eye(5)]
    sign, log_determinant = np.linalg.slogdet(np.array(columns).T)
    assert abs(float(change)) > 0.1 and sign == 1
    assert log_determinant == pytest.approx(-float(change), abs=1e-7)


def network_start():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(20, 2))

    log_joint = make_log_joint(
        lambda x: hk.nets.MLP([4, 1], activation=jnp.tanh)(x),
        inputs,
        make_prior(1.0),
        gaussian(0.3),
    )
    data = Data(inputs, np.sin(2 * inputs[:, :1]), np.ones(20), num_rows=20)
    params = log_joint.init(jax.random.key(0))
    mass = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.7), params)
    return log_joint, data, params, mass


def test_trajectories_are_reversible_and_energy_errors_of_second_order(double):
    log_joint, data, params, mass = network_start()
    velocity = random_velocity(jax.random.key(1), params)

    @jax.jit
    def run(position, velocity, step_size, num_steps):
        path = trajectory(
            jax.random.key(0),
            log_joint,
            position,
            velocity,
            data,
            step_size=step_size,
            inverse_mass=mass,
            num_steps=num_steps,
        )
        change = log_joint.difference(path.position.params, position.params, data)
        return path, path.kinetic_change - change

    start = hamiltonian.start(log_joint, params)
    there, error = run(start, velocity, 0.02, 40)
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), there.position.params, params)
    assert min(jax.tree.leaves(moved)) > 0.1
    # The way back begins with the gradient that was known at the end of the way there.
    assert there.position.is_gradient_known and not start.is_gradient_known
    back, back_error = run(there.position, jax.tree.map(jnp.negative, there.velocity), 0.02, 40)
    for a, b in zip(jax.tree.leaves(back.position.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
    for a, b in zip(jax.tree.leaves(back.velocity), jax.tree.leaves(velocity), strict=True):
        np.testing.assert_allclose(-a, b, atol=1e-9)
    assert float(back_error) == pytest.approx(-float(error), abs=1e-9)

    errors = np.array([run(start, velocity, 0.02 / 2**i, 17 * 2**i)[1] for i in range(4)])
    assert abs(errors[0]) > 1e-3
    np.testing.assert_allclose(errors[:-1] / errors[1:], 4, rtol=0.1)


@pytest.mark.parametrize("cosine", [-1.0, -0.5, 0.0, 0.9, 1.0])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 0.1, 1.0, 10.0, 1e3, 1e20])
def test_kicks_of_any_size_in_float32(size, cosine):
    """Finite, of the right length, and what longer arithmetic says."""
    gradient, velocity = random_pair(cosine)
    single = (jnp.asarray(a, jnp.float32) for a in (velocity, size * gradient))
    turned, (change,) = kick(*single, jnp.ones(1, jnp.float32))
    assert np.linalg.norm(turned) == pytest.approx(math.sqrt(DIMENSIONS), rel=1e-6)
    angle = np.longdouble(size * math.sqrt(DIMENSIONS) / (DIMENSIONS - 1))
    if cosine == -1 and angle > 1:
        assert np.isfinite(change)  # the direction's rounding is blown up by exp(2 angle)
        return
    size = (1 + cosine + (1 - cosine) * np.exp(-2 * angle)) / 2  # (cosh d + c sinh d) exp(-d)
    expected = (DIMENSIONS - 1) * (angle + np.log1p((1 - cosine) / 2 * np.expm1(-2 * angle)))
    np.testing.assert_allclose(change, expected, rtol=1e-5, atol=2e-6 * angle)
    expected = (1 + cosine - (1 - cosine) * np.exp(-2 * angle)) / (2 * size)
    assert turned @ gradient / math.sqrt(DIMENSIONS) == pytest.approx(float(expected), abs=1e-5)


def test_float32_resolves_the_change_of_energy_of_a_million_parameters():
    """Single kinetic changes are in the thousands, and their sum must be right to a part of 1."""

    def energy_error(dtype):
        normal = np.random.default_rng(0).normal(size=(2, 1_000_000)).astype(np.float32)
        start, direction = normal.astype(dtype)
        log_joint = target_of_prior(make_prior(1.0), {"x": {"w": jnp.array(start)}})
        params = log_joint.init(None)
        data = jax.tree.map(lambda leaf: leaf.astype(dtype), NO_DATA)
        path = jax.jit(trajectory, static_argnums=1)(
            jax.random.key(0),
            log_joint,
            hamiltonian.start(log_joint, params),
            {"x": {"w": velocity_of(direction).astype(dtype)}},
            data,
            step_size=jnp.array(0.3, dtype),
            inverse_mass={"x": {"w": jnp.ones((), dtype)}},
            num_steps=jnp.array(5),
        )
        return float(path.kinetic_change - log_joint.difference(path.position.params, params, data))

    single = energy_error(np.float32)
    with jax.enable_x64(True):
        double = energy_error(np.float64)
    assert abs(double) > 1 and single == pytest.approx(double, abs=0.1)


def test_noise_forgets_a_direction_in_its_length():
    """Where nothing pulls, the mean cosine after a time t is exp(-t / L) up to 1 / D; later 0.

    At 5 standard errors; the cosine of a uniform direction has variance 1 / D.
    """
    dimensions, num_chains, length = 400, 200, 1.0
    log_joint = target_of_density(lambda w: 0 * w, dimensions)
    start = hamiltonian.start(log_joint, log_joint.init(None))
    keys = jax.random.split(jax.random.key(0), num_chains)

    @jax.jit
    def cosines(num_steps):
        def run(key):
            first = random_velocity(jax.random.fold_in(key, 0), start.params)
            path = trajectory(
                jax.random.fold_in(key, 1),
                log_joint,
                start,
                first,
                NO_DATA,
                step_size=jnp.float32(0.1),
                inverse_mass={"x": {"w": jnp.ones((), jnp.float32)}},
                num_steps=num_steps,
                decoherence_length=length,
            )
            products = jax.tree.map(jnp.multiply, first, path.velocity)
            return trees.total(products) / dimensions, path.squared_errors

        return jax.vmap(run)(keys)

    error = 5 / math.sqrt(dimensions * num_chains)
    early, squares = cosines(10)
    assert np.mean(early) == pytest.approx(math.exp(-1), abs=error + 2 / dimensions)
    assert np.all(squares == 0)  # noise changes no energy
    late = np.asarray(cosines(100)[0])
    assert np.mean(late) == pytest.approx(0, abs=error)
    assert np.var(late) * dimensions == pytest.approx(1, abs=5 * math.sqrt(2 / num_chains))
