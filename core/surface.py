"""The log-joint on the plane through three sets of parameters.

With w1, w2, w3 the three and <., .> the sum over all parameters,

    a = w2 - w1,    u = a / |a|,    b = (w3 - w1) - <w3 - w1, u> u,    v = b / |b|

u and v are orthonormal. A point (s, t) of the plane is w1 + s |a| u + t |b| v, so that w1 is at
(0, 0), w2 at (1, 0) and w3 at (<w3 - w1, u> / |a|, 1): over w1 only if the two differences are
perpendicular.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

# The third point is this far off the line through the others, relative to its distance, or the
# plane is made of rounding errors.
MIN_RELATIVE_HEIGHT = 1e-5


class Plane(NamedTuple):
    """A plane in the space of parameters.

    Attributes:
      origin: w1.
      first: |a| u, in the form of the parameters.
      second: |b| v.
      lengths: (2,), |a| and |b|: what a unit of each coordinate is in the space of parameters.
      points: (3, 2), where w1, w2 and w3 are.
    """

    origin: Params
    first: Params
    second: Params
    lengths: np.ndarray
    points: np.ndarray


def make_plane(first: Params, second: Params, third: Params) -> Plane:
    """The plane through three sets of parameters, found in float64.

    Raises:
      UserError: they are on one line, or two of them are the same.
    """
    origin, *others = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
        for tree in (first, second, third)
    )
    a, difference = (other - origin for other in others)
    length, distance = np.linalg.norm(a), np.linalg.norm(difference)
    if length == 0:
        raise UserError("The first and the second set of parameters are the same.")
    along = difference @ a / length**2
    b = difference - along * a
    height = np.linalg.norm(b)
    if height <= MIN_RELATIVE_HEIGHT * max(length, distance):
        raise UserError("The three sets of parameters are on one line, and give no plane.")
    points = np.array([[0.0, 0.0], [1.0, 0.0], [along, 1.0]])
    return Plane(first, _like(first, a), _like(first, b), np.array([length, height]), points)


def evaluate_on_plane(
    log_joint: LogJoint, data: Data, plane: Plane, coordinates: np.ndarray, at_once: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tempered log-prior and log-likelihood at (points, 2) coordinates, each (points,).

    One compiled program; `at_once` points pass through the network together, which bounds memory
    and changes no result.
    """

    def terms(point: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = jax.tree.map(
            lambda w, a, b: w + point[0].astype(w.dtype) * a + point[1].astype(w.dtype) * b,
            plane.origin,
            plane.first,
            plane.second,
        )
        return log_joint.terms(params, data)

    points = jnp.asarray(coordinates, float)
    program = jax.jit(lambda points: jax.lax.map(terms, points, batch_size=at_once))
    log_prior, log_likelihood = program(points)
    return np.asarray(log_prior), np.asarray(log_likelihood)


def _like(params: Params, flat: np.ndarray) -> Params:
    leaves = trees.named_leaves(params)
    ends = np.cumsum([np.size(leaf) for leaf in leaves.values()])
    parts = np.split(flat, ends[:-1])
    shaped = {
        name: part.reshape(np.shape(leaf)).astype(leaf.dtype)
        for (name, leaf), part in zip(leaves.items(), parts, strict=True)
    }
    return trees.from_named_leaves(params, shaped)
