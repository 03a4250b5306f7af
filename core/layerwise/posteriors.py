"""The layerwise posterior (Ober & Aitchison 2021, arXiv 2005.08140): its draws and its density.

Inducing inputs U pass through the network together with a draw of its weights, layer by layer:

    F_l = features of U after the drawn layers 1 .. l - 1
    q(w) = prod_l prod_units N(w_lu; mean and precision of a regression of v_lu on F_l)

(`core.layerwise.regressions`; v and the precisions are learned). So a layer's weights answer to the
weights drawn before it, and what the network does at U is what the pseudo-outputs v ask for,
whatever the first layers are. Given F_l everything is Gaussian: log q(w) is a sum over layers,
exact, and so is its entropy in expectation over draws of the earlier layers. Weights that are no
regression (`layers.find_layers`), and a likelihood's own parameters, are drawn first, from
independent Gaussians.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.data import Inputs, count_rows
from haiku_posteriors.core.layerwise import layers, regressions
from haiku_posteriors.core.layerwise.layers import Call, Shape, Shapes
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

INDUCING = ("rows", "minibatch")
PRECISIONS = ("unit", "factored", "shared")
NUM_PROBES = 16  # of the Gauss-Newton diagonal at the start
LEAST_PRECISION = 1.0  # there: activations bend on a scale of 1
LOG_2_PI = math.log(2 * math.pi)


class Pseudo(NamedTuple):
    """What a layer is drawn towards.

    Attributes:
      outputs: v, (rows, units); None where a learned network gives them.
      log_precisions: terms of log l, whose shapes broadcast to (rows, units): by row and unit, by
        row and by unit, or by row; without rows where inducing inputs change.
    """

    outputs: jax.Array | None
    log_precisions: dict[str, jax.Array]


class Layerwise(NamedTuple):
    """All that is optimised.

    Attributes:
      inducing_inputs: U, (rows, ...).
      pseudo: by module.
      network: the weights of the network whose outputs at U are v, `None` for other parameters; of
        no use, and `None`, where v are parameters themselves.
      rest: of the parameters that are no regression: mean-field, and point estimates.
    """

    inducing_inputs: Inputs
    pseudo: dict[str, Pseudo]
    network: Params
    rest: vi.VariationalParams


class Draw(NamedTuple):
    """A draw, with what is known in closed form given its features.

    Attributes:
      params: w, all parameters.
      log_prior: E[log p(w)] / T, layer by layer over the layer's own weights.
      entropy: likewise.
      log_volume: log N(noise; 0, I) - log q(w) at this draw.
    """

    params: Params
    log_prior: jax.Array
    entropy: jax.Array
    log_volume: jax.Array


def initial(
    rng_key: jax.Array,
    log_joint: LogJoint,
    shapes: Shapes,
    params: Params,
    inducing_inputs: Inputs,
    *,
    inducing: str = "rows",
    precision: str = "unit",
    rows_per_input: float = 1.0,
    sigma_init: float = 1e-2,
) -> Layerwise:
    """q around `params`: v their outputs, precisions the Gauss-Newton diagonal for all data.

    Args:
      rng_key: of the probes of that diagonal.
      log_joint: the model.
      shapes: see `layers.find_layers`.
      params: all parameters.
      inducing_inputs: U.
      inducing: one of INDUCING.
      precision: one of PRECISIONS.
      rows_per_input: N / M, how many rows of the data an inducing input stands for.
      sigma_init: standard deviation of the rest.
    """
    rest = vi.initial_variational(log_joint, outside(shapes, params), sigma_init)
    outputs = layer_outputs(log_joint, shapes, params, inducing_inputs)
    diagonal = gauss_newton_diagonal(rng_key, log_joint, shapes, params, inducing_inputs)
    pseudo = {}
    for name, shape in shapes.items():
        v = shape.chosen(outputs[name])
        repeats = count_rows(inducing_inputs) * rows_per_input / v.shape[0]
        precisions = jnp.maximum(repeats * diagonal[name] / log_joint.temperature, LEAST_PRECISION)
        terms = _split_precisions(jnp.log(precisions), inducing, precision)
        pseudo[name] = Pseudo(v if inducing == "rows" else None, terms)
    if inducing == "minibatch":
        network = inside(shapes, params)
    else:
        network = jax.tree.map(lambda leaf: None, params)
    return Layerwise(inducing_inputs, pseudo, network, rest)


def _split_precisions(logs: jax.Array, inducing: str, precision: str) -> dict[str, jax.Array]:
    if inducing == "minibatch":
        by_unit = jnp.mean(logs, axis=0, keepdims=True)
        return (
            {"all": jnp.mean(by_unit, keepdims=True)}
            if precision == "shared"
            else {"units": by_unit}
        )
    if precision == "unit":
        return {"rows_and_units": logs}
    by_row = jnp.mean(logs, axis=1, keepdims=True)
    if precision == "shared":
        return {"rows": by_row}
    return {"rows": by_row, "units": jnp.mean(logs - by_row, axis=0, keepdims=True)}


def inside(shapes: Shapes, params: Params) -> Params:
    """The parameters of the layers that are regressions, `None` for the others."""
    return trees.map_with_name(
        lambda name, leaf: leaf if trees.module_name(name) in shapes else None, params
    )


def outside(shapes: Shapes, params: Params) -> Params:
    """The others."""
    return trees.map_with_name(
        lambda name, leaf: None if trees.module_name(name) in shapes else leaf, params
    )


def layer_outputs(
    log_joint: LogJoint, shapes: Shapes, params: Params, inputs: Inputs
) -> dict[str, jax.Array]:
    """What each layer puts out for the inputs at all positions, (inputs, ..., units), by module."""
    found: dict[str, jax.Array] = {}

    def visit(shape: Shape, features: jax.Array, call: Call) -> jax.Array:
        found[shape.module] = call(params[shape.module])
        return found[shape.module]

    layers.walk(log_joint.network, params, inputs, shapes, visit)
    return found


def gauss_newton_diagonal(
    rng_key: jax.Array, log_joint: LogJoint, shapes: Shapes, params: Params, inputs: Inputs
) -> dict[str, jax.Array]:
    """sum_k (d f_k / d a)^2 c_k for every layer's outputs a, (rows, units), by module.

    c is the likelihood's curvature about the network's outputs f. By random signs e:
    E[(J' (sqrt(c) e))^2] is the diagonal of J' diag(c) J.
    """
    likelihood, own = log_joint.likelihood, params.get(PARAMETER_GROUP, {})

    def outputs(added: dict[str, jax.Array]) -> jax.Array:
        def visit(shape: Shape, features: jax.Array, call: Call) -> jax.Array:
            return call(params[shape.module]) + added[shape.module]

        return layers.walk(log_joint.network, params, inputs, shapes, visit)

    zeros = jax.tree.map(jnp.zeros_like, layer_outputs(log_joint, shapes, params, inputs))
    f, pull = jax.vjp(outputs, zeros)
    root = jnp.sqrt(likelihood.curvature(f, own))

    def squares(key: jax.Array) -> dict[str, jax.Array]:
        (gradient,) = pull(root * jax.random.rademacher(key, f.shape, f.dtype))
        return {name: shapes[name].chosen(jnp.square(leaf)) for name, leaf in gradient.items()}

    probes = jax.lax.map(squares, jax.random.split(rng_key, NUM_PROBES))
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), probes)


def noise_like(shapes: Shapes, q: Layerwise) -> Params:
    """Shapes of the noise of a draw: by module, and of the rest."""
    dtype = jax.tree.leaves(q.pseudo)[0].dtype
    by_module = {
        name: {
            part: jax.ShapeDtypeStruct(size, dtype)
            for part, size in regressions.noise_shapes(
                shape.num_rows, shape.num_weights, shape.num_units
            ).items()
        }
        for name, shape in shapes.items()
    }
    return {"layers": by_module, "rest": q.rest.mean}


def draw(log_joint: LogJoint, shapes: Shapes, q: Layerwise, noise: Params) -> Draw:
    """w ~ q, from standard normal noise in the shapes of `noise_like`."""
    scale = jax.tree.map(jax.nn.softplus, q.rest.raw_scale)
    drawn = jax.tree.map(lambda m, s, e: m + s * e, q.rest.mean, scale, noise["rest"])
    temperature = log_joint.temperature
    terms = [
        (
            log_joint.expected_log_prior(q.rest.mean, scale, drawn) / temperature,
            vi.entropy(scale),
            trees.total(jax.tree.map(jnp.log, scale)),
        )
    ]
    outputs = _pseudo_outputs(log_joint, shapes, q)
    found = {}

    def visit(shape: Shape, features: jax.Array, call: Call) -> jax.Array:
        regression = _regression(features, outputs[shape.module], q.pseudo[shape.module])
        own_noise = noise["layers"][shape.module]
        standardised = regression.draw(own_noise)
        found[shape.module] = shape.to_parameters(standardised)
        size = shape.num_weights * shape.num_units
        volume = shape.num_units * float(np.sum(np.log(shape.scales)))
        # log p(w) / T = -|x|^2 / 2 - (volume - D log sqrt(T) + D / 2 log 2 pi) / T
        constant = volume + size * (LOG_2_PI - math.log(temperature)) / 2
        log_prior = -regression.second_moment / 2 - constant / temperature
        entropy = volume + (size * (1 + LOG_2_PI) - regression.log_det) / 2
        log_volume = volume + regression.log_volume(own_noise, standardised)
        terms.append((log_prior, entropy, log_volume))
        return call(found[shape.module])

    # Zeros in place of what is not drawn yet: Haiku asks for every parameter.
    later = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), inside(shapes, log_joint.shapes)
    )
    base = trees.merge(trees.merge(drawn, q.rest.point), later)
    layers.walk(log_joint.network, base, q.inducing_inputs, shapes, visit)
    sums = (sum(part[1:], part[0]) for part in zip(*terms, strict=True))
    return Draw({**base, **found}, *sums)


def log_density(log_joint: LogJoint, shapes: Shapes, q: Layerwise, params: Params) -> jax.Array:
    """log q(w), exact, a scalar; of the random parameters alone."""
    outputs = _pseudo_outputs(log_joint, shapes, q)
    scale = jax.tree.map(jax.nn.softplus, q.rest.raw_scale)
    random = log_joint.partition(outside(shapes, params))[0]
    terms = jax.tree.leaves(
        jax.tree.map(lambda w, m, s: jnp.sum(vi.log_normal(w, m, s)), random, q.rest.mean, scale)
    )

    def visit(shape: Shape, features: jax.Array, call: Call) -> jax.Array:
        own = params[shape.module]
        regression = _regression(features, outputs[shape.module], q.pseudo[shape.module])
        volume = shape.num_units * float(np.sum(np.log(shape.scales)))
        terms.append(regression.log_density(shape.to_standardised(own)) - volume)
        return call(own)

    layers.walk(log_joint.network, params, q.inducing_inputs, shapes, visit)
    return jnp.sum(jnp.stack(terms))


def _pseudo_outputs(log_joint: LogJoint, shapes: Shapes, q: Layerwise) -> dict[str, jax.Array]:
    given = {name: pseudo.outputs for name, pseudo in q.pseudo.items()}
    if all(v is not None for v in given.values()):
        return given  # type: ignore[return-value]
    rest = trees.merge(q.rest.mean, q.rest.point)
    outputs = layer_outputs(log_joint, shapes, trees.merge(q.network, rest), q.inducing_inputs)
    return {name: shapes[name].chosen(values) for name, values in outputs.items()}


def _regression(features: jax.Array, outputs: jax.Array, pseudo: Pseudo) -> regressions.Regression:
    terms = list(pseudo.log_precisions.values())
    logs = sum(terms[1:], terms[0])
    return regressions.regress(
        features, outputs, jnp.broadcast_to(logs, (features.shape[0], logs.shape[1]))
    )
