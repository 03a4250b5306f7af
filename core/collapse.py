"""Chains with the Gaussian output layer integrated out exactly, and redrawn at every draw.

With F (rows, units + 1) the features in front of the last layer of a network with one Gaussian
noise, y = F u + e, e ~ N(0, t^2), u_j ~ N(0, s_j^2), the other parameters v (t among them) have

    log p(v, D) = log p(v) + log int N(y; F u, t^2) N(u; 0, S) du
                = log p(v) - N log t - sum_j log |R_jj| - min_u |c - B u|^2 / 2 + constant

    B = [F / t; S^(-1/2)] = Q R,        c = [y / t; 0],        u | v, D ~ N(R^-1 Q'c, (R'R)^-1).

HMC or MCLMC moves v on that density, and u is drawn given v: draws of (v, u) have the target
p_T(w | D), as those of `core.hmc` or `core.mclmc`. It pays where the noise is small, since the
stiffest directions are gone: a factorisation in place of many leapfrog steps. In place of the
normal equations stands a QR factorisation, because B'B has the squared condition number, 1e8 and
more where noise is small.
A temperature T makes N(y; F u, t^2)^(1/T), Gaussian with T t^2 in place of t^2, and T s^2.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import likelihoods
from haiku_posteriors.core.data import Data, Inputs, take_rows
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, State, repeat
from haiku_posteriors.core.networks.interception import Layer, intercept_layers
from haiku_posteriors.core.trees import Params


class CollapsedState(NamedTuple):
    """One chain.

    Attributes:
      sampler: the state of the method that moves the other parameters.
      output: the last layer, drawn given them.
    """

    sampler: State
    output: Params

    @property
    def step_size(self) -> jax.Array:
        """Of the next transition."""
        return self.sampler.step_size


class OutputLayer(NamedTuple):
    """What is linear about the outputs, given the other parameters.

    Attributes:
      factor: R, (units, units), upper triangular.
      mean: of u for each target, (units, targets).
      misfit: min_u |c - B u|^2, a scalar, over all targets.
      log_det: sum_j log |R_jj|.
    """

    factor: jax.Array
    mean: jax.Array
    misfit: jax.Array
    log_det: jax.Array


@dataclasses.dataclass(frozen=True)
class CollapsedLogJoint(LogJoint):
    """log p_T(v, D), a `LogJoint` without the parameters of the last layer.

    Attributes:
      module: the name of the last layer.
      has_bias: whether it has one.
    """

    module: str = ""
    has_bias: bool = True

    def terms(self, params: Params, data: Data) -> tuple[jax.Array, jax.Array]:
        """log p(v) / T, and the logarithm of the integral."""
        own = params.get(likelihoods.PARAMETER_GROUP, {})
        layer = self.solve(params, data)
        # The integrand is N(y; F u, T t^2) but for a factor that depends on t.
        num_values = jnp.sum(data.weights) * data.targets.shape[1]
        noise = jnp.log(self._noise_std(own)).astype(num_values.dtype)
        marginal = -layer.log_det * data.targets.shape[1] - layer.misfit / 2
        marginal -= num_values * noise / self.temperature
        return self.log_prior(params) / self.temperature, marginal

    def difference(self, new: Params, old: Params, data: Data) -> jax.Array:
        """log p_T(new, D) - log p_T(old, D); of the order of the rows, and so exact enough."""
        (prior, marginal), (old_prior, old_marginal) = (
            self.terms(params, data) for params in (new, old)
        )
        return (prior - old_prior) + (marginal - old_marginal)

    def solve(self, params: Params, data: Data) -> OutputLayer:
        """The least squares problem of the last layer; weights of rows are 1, or 0 for padding."""
        own = params.get(likelihoods.PARAMETER_GROUP, {})
        features = self._features(params, data.inputs)
        scales = np.full(features.shape[1], self.prior.scale(f"{self.module}/w"))
        if self.has_bias:
            scales[-1] = self.prior.scale(f"{self.module}/b")
        scales *= math.sqrt(self.temperature)
        noise = math.sqrt(self.temperature) * self._noise_std(own).astype(features.dtype)
        rows = jnp.sqrt(data.weights)[:, None] / noise
        below = jnp.diag(jnp.asarray(1 / scales, features.dtype))
        matrix = jnp.concatenate([rows * features, below])
        right = jnp.concatenate(
            [rows * data.targets, jnp.zeros((len(scales), data.targets.shape[1]), features.dtype)]
        )
        basis, factor = jnp.linalg.qr(jax.lax.stop_gradient(matrix))
        mean = jax.scipy.linalg.solve_triangular(factor, basis.T @ jax.lax.stop_gradient(right))
        # At the minimum the derivative by the mean is 0: it may be held fixed.
        misfit = jnp.sum((right - matrix @ mean) ** 2)
        return OutputLayer(factor, mean, misfit, _log_det(matrix, basis, factor))

    def redraw(self, rng_key: jax.Array, params: Params, data: Data) -> Params:
        """The last layer given the other parameters, exactly, as Haiku has it."""
        layer = self.solve(params, data)
        normal = jax.random.normal(rng_key, layer.mean.shape, layer.mean.dtype)
        drawn = layer.mean + jax.scipy.linalg.solve_triangular(layer.factor, normal)
        return {"w": drawn[:-1], "b": drawn[-1]} if self.has_bias else {"w": drawn}

    def _noise_std(self, own: Params) -> jax.Array:
        assert self.likelihood.noise_std is not None
        return self.likelihood.noise_std(own)

    def _features(self, params: Params, inputs: Inputs) -> jax.Array:
        """The inputs of the last layer, and a column of ones for its bias."""
        found: dict[str, jax.Array] = {}

        def intercept(module: Any, layer: Layer, inputs: jax.Array) -> jax.Array:
            if module.module_name != self.module:
                return layer(inputs)
            found["features"] = inputs
            return jnp.zeros((len(inputs), module.output_size), inputs.dtype)

        with intercept_layers((hk.Linear,), intercept):
            self.network(params, inputs)
        features = found["features"]
        ones = jnp.ones((len(features), int(self.has_bias)), features.dtype)
        return jnp.concatenate([features, ones], axis=1)


@jax.custom_vjp
def _log_det(matrix: jax.Array, basis: jax.Array, factor: jax.Array) -> jax.Array:
    """sum_j log |R_jj| of B = Q R; its derivative by B is Q R^-T."""
    return jnp.sum(jnp.log(jnp.abs(jnp.diag(factor))))


def _log_det_forward(
    matrix: jax.Array, basis: jax.Array, factor: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _log_det(matrix, basis, factor), (basis, factor)


def _log_det_backward(
    saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    basis, factor = saved
    identity = jnp.eye(len(factor), dtype=factor.dtype)
    inverse = jax.scipy.linalg.solve_triangular(factor, identity)
    return cotangent * basis @ inverse.T, None, None


_log_det.defvjp(_log_det_forward, _log_det_backward)


def collapse(log_joint: LogJoint, example_inputs: Inputs) -> CollapsedLogJoint:
    """The log-joint without its last layer; refused where that is not linear and Gaussian.

    Args:
      log_joint: with one Gaussian noise, a Gaussian prior, and all parameters random.
      example_inputs: at least two rows, on which the network is tried.
    """
    if log_joint.likelihood.noise_std is None or log_joint.prior.family != "gaussian":
        raise UserError("collapse_output needs a Gaussian likelihood of one noise and prior.")
    if log_joint.stochastic_params or log_joint.num_microbatches > 1:
        raise UserError("collapse_output takes neither stochastic_params nor microbatches.")
    called: list[str] = []

    def intercept(module: Any, layer: Layer, inputs: jax.Array) -> jax.Array:
        called.append(module.module_name)
        return layer(inputs)

    params = log_joint.init(jax.random.key(0))
    examples = jax.tree.map(jnp.asarray, take_rows(example_inputs, slice(2)))
    with intercept_layers((hk.Linear,), intercept):
        outputs = log_joint.network(params, examples)
    module = called[-1] if called else ""
    own = params.get(module, {})
    fields = {field.name: getattr(log_joint, field.name) for field in dataclasses.fields(log_joint)}
    collapsed = CollapsedLogJoint(
        **fields
        | {"init": lambda rng_key: _without(log_joint.init(rng_key), module)}
        | {"module": module, "has_bias": "b" in own}
    )
    if called.count(module) == 1:
        weights = jnp.concatenate([own["w"], *([own["b"][None]] if "b" in own else [])])
        expected = collapsed._features(params, examples) @ weights
        if jnp.allclose(expected, outputs, rtol=1e-3, atol=1e-4):
            return collapsed
    raise UserError("collapse_output needs a network that ends with an hk.Linear, called once.")


def collapsed(
    build: Callable[..., Method], log_joint: LogJoint, example_inputs: Inputs, **settings: Any
) -> Method:
    """A method on all parameters but the last layer's, which are drawn given them at every step.

    Args:
      build: `core.hmc.hmc` or `core.mclmc.mclmc`.
      log_joint, example_inputs: see `collapse`.
      **settings: of `build`.

    Returns:
      The method; `info` is the built one's, with the collapsed log-joint.
    """
    target = collapse(log_joint, example_inputs)
    inner = build(target, **settings)

    def init(rng_key: jax.Array, params: Params | None) -> CollapsedState:
        given = log_joint.init(jax.random.fold_in(rng_key, 1)) if params is None else params
        others = None if params is None else _without(params, target.module)
        return CollapsedState(
            inner.init(jax.random.fold_in(rng_key, 0), others), given[target.module]
        )

    def step(rng_key: jax.Array, state: CollapsedState, data: Data) -> tuple[CollapsedState, Info]:
        moved, info = inner.step(jax.random.fold_in(rng_key, 0), state.sampler, data)
        output = target.redraw(jax.random.fold_in(rng_key, 1), moved.position.params, data)
        return CollapsedState(moved, output), info

    def sample(rng_key: jax.Array, state: CollapsedState, num_draws: int) -> Params:
        return repeat({**state.sampler.position.params, target.module: state.output}, num_draws)

    def pool(states: CollapsedState) -> CollapsedState:
        assert inner.pool is not None
        return states._replace(sampler=inner.pool(states.sampler))

    return Method(init, step, sample, pool if inner.pool else None)


def _without(params: Params, module: str) -> Params:
    return {name: group for name, group in params.items() if name != module}
