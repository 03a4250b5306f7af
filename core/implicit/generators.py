"""Neural samplers over weights: functions g from z in R^d to a pytree of D weights.

A generator is described by one of two records and made for given parameter shapes:

    MLP      z -> hidden layers (ELU) -> all weights at once, and a linear path beside them;
             about (d + width) D parameters, hence for networks of a few thousand weights.
    Matrix   z as an a x b matrix -> a trunk of matrix-multiplication layers (ELU), shared by all
             weights, which is what correlates them across layers -> one such head per group of
             weights (arXiv 2310.06643, section 4). About D parameters plus some rows and columns.

The groups are the modules of the network: a layer's weights and biases side by side are a matrix of
(fan-in + 1) x fan-out, which a head of low rank suits. The last layer's bias of a generator is its
centre: at the start, g(z) scatters around given parameters by given standard deviations.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.trees import Params

Shape = tuple[int, int]
Initializer = Callable[[Sequence[int], Any], jax.Array]
MLP_LIMIT, MAX_LATENT = 3000, 50  # weights up to which `automatic` takes an MLP, and its latents


class Generator(NamedTuple):
    """g as pure functions.

    Attributes:
      latent_size: d.
      num_weights: D.
      init: (rng_key, center, spread) -> the generator's parameters, such that g(z) has about the
        mean `center` and the standard deviations `spread` (a tree of numbers like `center`).
      apply: (the generator's parameters, z of shape (d,)) -> weights, in the structure of `center`.
      readout: (the generator's parameters) -> their `Readout`; None where g has no such form.
    """

    latent_size: int
    num_weights: int
    init: Callable[[jax.Array, Params, Params], Params]
    apply: Callable[[Params, jax.Array], Params]
    readout: Callable[[Params], "Readout"] | None = None


class Readout(NamedTuple):
    """g(z) = features(z) @ matrix + offset, all weights as one array, in `ravel_pytree`'s order.

    A Jacobian dg/dz = matrix^T dfeatures/dz need not be built for D weights: J^T J is made of
    matrix @ matrix^T, which all draws share (`core.implicit.whitening`).

    Attributes:
      features: z (d,) -> (F,).
      matrix: (F, D).
      offset: (D,).
    """

    features: Callable[[jax.Array], jax.Array]
    matrix: jax.Array
    offset: jax.Array


@dataclasses.dataclass(frozen=True)
class MLP:
    """A multilayer perceptron.

    Attributes:
      latent_size: d.
      hidden_sizes: widths of the hidden layers; without any, g is linear.
      linear_path: whether z also enters the output directly, so that the family contains the
        Gaussians of a rank-d covariance plus the noise's diagonal.
    """

    latent_size: int
    hidden_sizes: tuple[int, ...] = ()
    linear_path: bool = True


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix-multiplication generator.

    Attributes:
      latent_shape: (a, b), d = a b.
      trunk: shapes of the shared layers' outputs. Where one has fewer than d entries, J has no
        more than that rank.
      head: shapes of the hidden layers' outputs in every head.
    """

    latent_shape: Shape
    trunk: tuple[Shape, ...]
    head: tuple[Shape, ...] = ()


class Normals:
    """Normal values for initialisers, piece by piece from one array.

    A separate draw per initialiser would add half a second each to compilation, and the generator
    of a deep network has a hundred.
    """

    def __init__(self, values: jax.Array | None) -> None:
        """From standard normal values, at least as many as will be asked for; or zeros."""
        self._values, self._used = values, 0

    def scaled(self, scale: jax.Array | float) -> Initializer:
        """An initialiser: the next values, times `scale`."""

        def initializer(shape: Sequence[int], dtype: jnp.dtype) -> jax.Array:
            if self._values is None:
                return jnp.zeros(shape, dtype)
            start, self._used = self._used, self._used + math.prod(shape)
            piece = self._values[start : self._used].reshape(shape)
            return piece.astype(dtype) * jnp.asarray(scale, dtype)

        return initializer


class MatrixLayer(hk.Module):
    """X (m, n) -> (L X + B) R + C of shape (p, q), with p m + p n + n q + p q parameters."""

    def __init__(
        self,
        shape: Shape,
        normals: Normals,
        spread: jax.Array | float = 1.0,
        center: jax.Array | None = None,
        name: str | None = None,
    ) -> None:
        """The layer of output `shape`, which starts with mean `center` and deviations `spread`."""
        super().__init__(name=name)
        self.shape, self.normals, self.spread, self.center = shape, normals, spread, center

    def __call__(self, matrix: jax.Array) -> jax.Array:
        """The output for a matrix of entries of order 1."""
        (m, n), (p, q), dtype = matrix.shape, self.shape, matrix.dtype

        center = jnp.zeros if self.center is None else _constant(self.center)
        left = hk.get_parameter("left", (p, m), dtype, self.normals.scaled(m**-0.5))
        inner = hk.get_parameter("inner", (p, n), dtype, jnp.zeros)
        right = hk.get_parameter("right", (n, q), dtype, self.normals.scaled(self.spread * n**-0.5))
        outer = hk.get_parameter("outer", (p, q), dtype, center)
        return (left @ matrix + inner) @ right + outer


def make_generator(description: MLP | Matrix, shapes: Params) -> Generator:
    """The generator that a record describes, for weights of these shapes (arrays or shapes)."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)
    dtype = jax.tree.leaves(shapes)[0].dtype
    if isinstance(description, MLP):
        latent_size = description.latent_size
    else:
        latent_size = math.prod(description.latent_shape)
    sizes = jax.tree.leaves(dataclasses.asdict(description))
    if any(size < 1 for size in sizes if size is not False):
        raise UserError(f"Sizes in a generator must be at least 1, unlike in {description}.")

    def network(
        z: jax.Array, center: Params, spread: Params, values: jax.Array | None = None
    ) -> Params:
        if isinstance(description, MLP):
            return _mlp(description, z, center, spread, Normals(values))
        return _matrix(description, z, center, spread, Normals(values))

    transformed = hk.transform(network)

    def init(rng_key: jax.Array, center: Params, spread: Params) -> Params:
        arguments = (jnp.zeros(latent_size, dtype), center, spread)
        made = jax.eval_shape(transformed.init, None, *arguments)
        values = jax.random.normal(rng_key, (trees.size(made),), dtype)
        return transformed.init(None, *arguments, values)

    def apply(params: Params, z: jax.Array) -> Params:
        # Initialisers alone use the values of centre and spread; the shapes matter.
        center = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        spread = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), shapes)
        return transformed.apply(params, None, z, center, spread)

    def readout(params: Params) -> Readout:
        assert isinstance(description, MLP)
        return _mlp_readout(description, params)

    return Generator(
        latent_size,
        trees.size(shapes),
        init,
        apply,
        readout if isinstance(description, MLP) else None,
    )


def automatic(shapes: Params, max_parameters: int | None = None) -> MLP | Matrix:
    """A description that suits any network.

    Args:
      shapes: of the random weights.
      max_parameters: of the generator; by default 4 million, and four times the weights if that
        is more.

    Returns:
      An MLP with d = min(D, 50) up to MLP_LIMIT weights; else a matrix-multiplication generator
      with the largest square latent, of side 95 at most, that the budget allows.
    """
    weights = trees.size(shapes)
    budget = max(4_000_000, 4 * weights) if max_parameters is None else max_parameters
    if weights <= MLP_LIMIT:
        latent = min(weights, MAX_LATENT)
        candidates: list[MLP | Matrix] = [MLP(latent)]
        candidates += [MLP(latent, (width,)) for width in (8, 16, 32)]
    else:
        candidates = [Matrix((n, n), ((n, n), (n, n))) for n in range(2, 96)]

    def count(description: MLP | Matrix) -> int:
        return num_parameters(make_generator(description, shapes), shapes)

    allowed = bisect.bisect_right(candidates, budget, key=count)
    if allowed == 0:
        raise UserError(
            f"No generator of at most {budget:,} parameters makes {weights:,} weights; "
            "the smallest generators have a few more than the weights themselves."
        )
    return candidates[allowed - 1]


def num_parameters(generator: Generator, shapes: Params) -> int:
    """How many parameters the generator has."""
    spread = jax.tree.map(lambda leaf: jnp.ones((), leaf.dtype), shapes)
    made = jax.eval_shape(generator.init, jax.random.key(0), shapes, spread)
    return trees.size(made)


def _mlp(
    description: MLP, z: jax.Array, center: Params, spread: Params, normals: Normals
) -> Params:
    leaves, structure = jax.tree.flatten(center)
    flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
    spreads = jax.tree.map(lambda s, w: jnp.full(w.size, s, w.dtype), spread, center)
    hidden, *direct = _mlp_features(description, z, normals)
    # Half of the variance comes by each path.
    scale = jnp.concatenate(jax.tree.leaves(spreads)) / math.sqrt(1 + len(direct))
    output = hk.Linear(
        flat.size, w_init=normals.scaled(scale), b_init=_constant(flat), name="output"
    )
    weights = output(hidden)
    for features in direct:
        path = hk.Linear(
            flat.size, with_bias=False, w_init=normals.scaled(scale), name="linear_path"
        )
        weights += path(features)
    ends = [sum(leaf.size for leaf in leaves[: i + 1]) for i in range(len(leaves) - 1)]
    parts = jnp.split(weights, ends)
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _mlp_features(description: MLP, z: jax.Array, normals: Normals) -> list[jax.Array]:
    """What enters the output layer: the last hidden layer and, if it has its own path, z.

    Divided by the root of their number, with weights larger by it: the steps of an optimizer, of
    one size for all weights, then change g(z) no more in a wide layer than in a narrow one.
    """
    hidden = z
    for index, width in enumerate(description.hidden_sizes):
        w_init = normals.scaled(hidden.size**-0.5)
        hidden = _elu(hk.Linear(width, w_init=w_init, name=f"hidden_{index}")(hidden))
    direct = [z] if description.linear_path and description.hidden_sizes else []
    return [features * features.size**-0.5 for features in (hidden, *direct)]


def _mlp_readout(description: MLP, params: Params) -> Readout:
    """The output layer of `_mlp`, and what enters it."""
    entering = hk.transform(lambda z: jnp.concatenate(_mlp_features(description, z, Normals(None))))
    matrices = [params[name]["w"] for name in ("output", "linear_path") if name in params]
    return Readout(
        lambda z: entering.apply(params, None, z), jnp.concatenate(matrices), params["output"]["b"]
    )


def _matrix(
    description: Matrix, z: jax.Array, center: Params, spread: Params, normals: Normals
) -> Params:
    trunk = z.reshape(description.latent_shape)
    for index, shape in enumerate(description.trunk):
        trunk = _elu(MatrixLayer(shape, normals, name=f"trunk_{index}")(trunk))
    spreads, weights = trees.named_leaves(spread), {}
    for head, group in groups(center).items():
        hidden = trunk
        for index, shape in enumerate(description.head):
            hidden = _elu(MatrixLayer(shape, normals, name=f"{head}_{index}")(hidden))
        columns = (1, *next(iter(group.values())).shape)[-1]
        rows = {name: leaf.reshape(-1, columns) for name, leaf in group.items()}
        middle = jnp.concatenate(list(rows.values()))
        # One number per group: a head's columns share their rows.
        scale = jnp.sqrt(jnp.mean(jnp.square(jnp.stack([spreads[name] for name in group]))))
        shape = (len(middle), columns)
        layer = MatrixLayer(shape, normals, scale, middle, name=f"{head}_output")
        made = layer(hidden)
        start = 0
        for name, leaf in group.items():
            weights[name] = made[start : start + len(rows[name])].reshape(leaf.shape)
            start += len(rows[name])
    return trees.from_named_leaves(center, weights)


def groups(params: Params) -> dict[str, dict[str, jax.Array]]:
    """Leaves by module and length of the last axis, under names that Haiku takes for modules."""
    found: dict[tuple[str, int], dict[str, jax.Array]] = {}
    for name, leaf in trees.named_leaves(params).items():
        columns = leaf.shape[-1] if leaf.shape else 1
        found.setdefault((trees.module_name(name), columns), {})[name] = leaf
    return {f"head_{index}": group for index, group in enumerate(found.values())}


def _elu(values: jax.Array) -> jax.Array:
    """ELU, scaled so that standard normal values keep their mean square of 1."""
    return jax.nn.elu(values) * 1.2459


def _constant(values: jax.Array) -> Initializer:
    return lambda shape, dtype: jnp.asarray(values, dtype).reshape(shape)
