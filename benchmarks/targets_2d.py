"""Three densities in the plane by every method that takes an arbitrary log-density.

Banana, two modes and a cross are those of Yin & Zhou 2018 (arXiv 1805.11183), with exact draws.
Each method's draws are compared with these by the sliced Wasserstein distance: W1 between the
projections onto directions, averaged over directions. The first line compares two sets of exact
draws: what chance leaves.

  python benchmarks/targets_2d.py --picture=docs/pictures/targets_2d.png
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tabulate import tabulate

sys.path.insert(0, ".")

from haiku_posteriors.core import hmc, low_rank, mclmc, smc, vi
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.implicit import (
    generators,
    implicit_vi,
    objectives,
    semi_implicit,
    unbiased,
)
from haiku_posteriors.core.implicit.samplers import Start
from haiku_posteriors.core.judging import distances
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils.plots.style import BLUE, GREY, new_figure, save

NUM_DRAWS, NUM_DIRECTIONS, NUM_SAMPLES = 2000, 32, 16
PRIOR_STD = 4.0  # from which SMC starts; other methods do not notice it
DATA = Data(*(np.ones(shape, np.float32) for shape in ((1, 1), (1, 1), 1)), num_rows=1)
COVARIANCES = ([[2.0, 1.8], [1.8, 2.0]], [[2.0, -1.8], [-1.8, 2.0]])


def normal(x: jax.Array, mean: list[float], covariance: list[list[float]]) -> jax.Array:
    """log N(x; mean, covariance), x (2,)."""
    return jax.scipy.stats.multivariate_normal.logpdf(x, jnp.array(mean), jnp.array(covariance))


def banana(x: jax.Array) -> jax.Array:
    """x_1 ~ N(0, 4), x_2 | x_1 ~ N(x_1^2 / 4, 1)."""
    first = jax.scipy.stats.norm.logpdf(x[0], 0.0, 2.0)
    return first + jax.scipy.stats.norm.logpdf(x[1], x[0] ** 2 / 4, 1.0)


def two_modes(x: jax.Array) -> jax.Array:
    """Standard normal around (-2, 0) and (2, 0)."""
    identity = [[1.0, 0.0], [0.0, 1.0]]
    modes = [normal(x, [mean, 0.0], identity) for mean in (-2.0, 2.0)]
    return jnp.logaddexp(*modes) - jnp.log(2.0)


def cross(x: jax.Array) -> jax.Array:
    """Two normals of correlation 0.9 and -0.9."""
    modes = [normal(x, [0.0, 0.0], covariance) for covariance in COVARIANCES]
    return jnp.logaddexp(*modes) - jnp.log(2.0)


def exact_draws(name: str, count: int, seed: int) -> np.ndarray:
    """Independent draws of a target, (count, 2)."""
    random = np.random.default_rng(seed)
    noise, side = random.normal(size=(count, 2)), random.integers(2, size=count)
    if name == "banana":
        first = 2 * noise[:, 0]
        return np.stack([first, first**2 / 4 + noise[:, 1]], axis=1)
    if name == "two modes":
        return noise + np.stack([4.0 * side - 2, np.zeros(count)], axis=1)
    roots = np.linalg.cholesky(np.array(COVARIANCES))[side]
    return np.einsum("nij,nj->ni", roots, noise)


TARGETS = {"banana": banana, "two modes": two_modes, "x": cross}


def log_joint_of(target: jax.Array) -> LogJoint:
    """A log-joint whose posterior is a target: a wide prior, and what is left as likelihood.

    The target is a number, so that one program serves all three.
    """
    prior = make_prior(PRIOR_STD**-2)

    def density(x: jax.Array) -> jax.Array:
        return jax.lax.switch(target, list(TARGETS.values()), x)

    def log_likelihood(outputs: jax.Array, targets: jax.Array, own: dict) -> jax.Array:
        return jax.vmap(lambda x: density(x) - prior.log_density({"x": {"w": x}}))(outputs)

    return LogJoint(
        init=lambda key: {"x": {"w": jax.random.normal(key, (2,))}},
        network=lambda params, inputs: jnp.broadcast_to(params["x"]["w"], (len(inputs), 2)),
        prior=prior,
        likelihood=gaussian()._replace(log_likelihood=log_likelihood),
    )


class Recipe(NamedTuple):
    """How a method comes to its draws.

    Attributes:
      make: log-joint -> method.
      num_steps: before the first draw.
      num_chains: that each give draws, one a step; None where the last state gives them all.
    """

    make: Callable[[LogJoint], Method]
    num_steps: int
    num_chains: int | None = None


def recipes(num_steps: int) -> dict[str, Recipe]:
    """By name; `num_steps` of optimisers."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))
    gaussian_settings: dict[str, Any] = {"sigma_init": 1.0, "num_samples": NUM_SAMPLES}

    def implicit(
        objective: str, estimator: objectives.EntropyEstimator
    ) -> Callable[[LogJoint], Method]:
        def make(log_joint: LogJoint) -> Method:
            description = generators.MLP(3, (50, 50))
            return implicit_vi.implicit_vi(
                log_joint,
                optimizer,
                1,
                generator=generators.make_generator(description, log_joint.random_shapes),
                estimator=estimator,
                num_samples=NUM_SAMPLES,
                start=Start("prior", 0.1, 0.5),
                objective=objectives.Objective(objective),
            )

        return make

    return {
        "mean_field": Recipe(
            lambda target: vi.mean_field_vi(target, optimizer, 1, **gaussian_settings), num_steps
        ),
        "low_rank": Recipe(
            lambda target: low_rank.low_rank_vi(target, optimizer, 1, rank=1, **gaussian_settings),
            num_steps,
        ),
        "linearised": Recipe(implicit("linearised", objectives.Estimator("exact")), num_steps),
        "hierarchical": Recipe(implicit("hierarchical", None), num_steps),
        "sivi": Recipe(implicit("sivi", semi_implicit.Mixture(50)), num_steps),
        "uivi": Recipe(implicit("uivi", unbiased.Unbiased()), num_steps),
        "hmc": Recipe(lambda target: hmc.hmc(target, num_burn_in=300), 300, 4),
        "mclmc": Recipe(lambda target: mclmc.mclmc(target, num_burn_in=300), 300, 4),
        "smc": Recipe(lambda target: smc.smc(target, num_particles=NUM_DRAWS), 30),
    }


def compile_recipe(recipe: Recipe) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(rng_key, target) -> draws (NUM_DRAWS, 2), compiled."""
    count = recipe.num_chains or 1

    @jax.jit
    def run(key: jax.Array, target: jax.Array) -> jax.Array:
        method = recipe.make(log_joint_of(target))
        keys = jax.vmap(lambda chain: jax.random.fold_in(key, chain))(jnp.arange(count))

        def step(states: Any, number: jax.Array) -> Any:
            own = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
            states, _ = jax.vmap(method.step, (0, 0, None))(own, states, DATA)
            return method.pool(states) if method.pool else states

        states = jax.vmap(lambda key: method.init(key, None))(keys)
        states = jax.lax.fori_loop(
            1, 1 + recipe.num_steps, lambda number, states: step(states, number), states
        )
        if recipe.num_chains is None:
            last = jax.tree.map(lambda leaf: leaf[0], states)
            return method.sample(jax.random.fold_in(key, 0), last, NUM_DRAWS)["x"]["w"]

        def collect(states: Any, number: jax.Array) -> tuple[Any, jax.Array]:
            states = step(states, number)
            drawn = jax.vmap(lambda state: method.sample(key, state, 1))(states)
            return states, drawn["x"]["w"][:, 0]

        numbers = 1 + recipe.num_steps + jnp.arange(NUM_DRAWS // count)
        return jax.lax.scan(collect, states, numbers)[1].reshape(-1, 2)

    return run.lower(jax.random.key(0), jnp.asarray(0)).compile()


def sliced_wasserstein(first: np.ndarray, second: np.ndarray) -> float:
    """Of two sets of as many draws, (draws, 2)."""
    angles = np.pi * (np.arange(NUM_DIRECTIONS) + 0.5) / NUM_DIRECTIONS
    directions = np.stack([np.cos(angles), np.sin(angles)])
    return float(np.mean(distances.wasserstein(first @ directions, second @ directions)))


def draw_picture(path: pathlib.Path, found: dict[str, dict[str, np.ndarray]]) -> None:
    """A line a target, a panel a method: contours of the density, and draws."""
    names = list(next(iter(found.values())))
    figure = new_figure(1.7 * len(names), 1.9 * len(found))
    axes = figure.subplots(len(found), len(names), squeeze=False)
    side = np.linspace(-6, 6, 121)
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    for line, (target, by_method) in zip(axes, found.items(), strict=True):
        shift = np.array([0.0, 3.0 if target == "banana" else 0.0])
        values = jax.vmap(jax.vmap(TARGETS[target]))(jnp.asarray(grid + shift, jnp.float32))
        density = np.exp(np.asarray(values, float))
        for axis, name in zip(line, names, strict=True):
            axis.scatter(*by_method[name][:1000].T, s=1, color=BLUE, alpha=0.5, linewidths=0)
            levels = density.max() * np.array([0.01, 0.1, 0.4, 0.8])
            axis.contour(
                side + shift[0], side + shift[1], density, levels, colors=GREY, linewidths=0.6
            )
            axis.set(
                xlim=(-6, 6), ylim=(-6 + shift[1], 6 + shift[1]), xticks=[], yticks=[], aspect=1
            )
        line[0].set_ylabel(target)
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, fontsize=9)
    save(figure, path)


def main() -> None:
    """The table, and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_steps", type=int, default=5000, help="of optimisers")
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = arguments.seed + 1
    references = {name: exact_draws(name, NUM_DRAWS, arguments.seed) for name in TARGETS}
    found = {name: {"exact": exact_draws(name, NUM_DRAWS, chance)} for name in TARGETS}
    rows = [["exact draws"]]
    for name in TARGETS:
        rows[0] += [f"{sliced_wasserstein(found[name]['exact'], references[name]):.3f}", ""]
    for method, recipe in recipes(arguments.num_steps).items():
        program, row = compile_recipe(recipe), [method]
        for number, name in enumerate(TARGETS):
            start = time.process_time()
            draws = program(jax.random.key(arguments.seed), jnp.asarray(number))
            found[name][method] = np.asarray(draws, float)
            seconds = time.process_time() - start
            distance = sliced_wasserstein(found[name][method], references[name])
            row += [f"{distance:.3f}", f"{seconds:.2f}"]
        rows.append(row)
        print(*row, flush=True)
    header = ["", *(part for name in TARGETS for part in (name, "seconds"))]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))
    if arguments.picture:
        draw_picture(arguments.picture, found)


if __name__ == "__main__":
    main()
