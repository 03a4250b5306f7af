"""Time and memory of a step of implicit VI, by estimator, latent size, weights and K.

python benchmarks/implicit_step.py                 time of steps, beside the ideal's
python benchmarks/implicit_step.py --tightness     bounds against cost, on spectra and a generator
python benchmarks/implicit_step.py --wide_resnet   three steps of WRN-16-4 each, and the peak memory

The ideal: what cannot be saved. K products with B and K with B^T, the products of the estimator's
gradient, and the gradient of the log-joint, each timed alone in one compiled loop. Contenders take
turns, and the ratio is that of the medians.
"""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from haiku_posteriors.core import likelihoods, priors, trees
from haiku_posteriors.core.data import Data, make_data
from haiku_posteriors.core.implicit import generators, implicit_vi, jacobian
from haiku_posteriors.core.implicit.objectives import Estimator
from haiku_posteriors.core.implicit.samplers import Sampler
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.utils import models

ROUNDS = 21
CASES = (  # network, inputs, classes, rows, latent description, K
    ("mlp_20_20", (64,), 10, 100, generators.MLP(50, (128,)), 20),
    ("mlp_20_20", (64,), 10, 100, generators.MLP(400, (128,)), 20),
    ("mlp_400_400", (28, 28, 1), 10, 100, generators.Matrix((20, 20), ((20, 20),) * 2), 20),
    ("mlp_400_400", (28, 28, 1), 10, 100, generators.Matrix((40, 40), ((40, 40),) * 2), 10),
    ("mlp_400_400", (28, 28, 1), 10, 100, generators.Matrix((40, 40), ((40, 40),) * 2), 20),
)


def problem(name: str, inputs: tuple, classes: int, rows: int) -> tuple[LogJoint, Data]:
    """A network on random data."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, *inputs)).astype(np.float32)
    y = random.integers(classes, size=rows).astype(np.int32)
    log_joint = make_log_joint(
        models.get_network(name, classes),
        x,
        priors.make_prior(10.0),
        likelihoods.categorical(classes),
    )
    return log_joint, jax.tree.map(jnp.asarray, make_data(x, y))


def medians(contenders: list[Callable[[], object]]) -> list[float]:
    """Seconds of each, taken in turns."""
    for contender in contenders:
        jax.block_until_ready(contender())
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(ROUNDS):
        for contender, own in zip(contenders, times, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(contender())
            own.append(time.perf_counter() - started)
    return [float(np.median(own)) for own in times]


def ideal(
    log_joint: LogJoint,
    generator: generators.Generator,
    sampler: Sampler,
    data: Data,
    num_products: int,
) -> Callable[[], object]:
    """Products, one reverse pass through two of them, and the log-joint's gradient, once each."""

    @jax.jit
    def run(sampler: Sampler, data: Data, z: jax.Array) -> tuple:
        def whitened(weights: Sampler, z: jax.Array) -> jax.Array:
            made = generator.apply(weights.generator, z)
            scaled = jax.tree.map(lambda w, s: w / jnp.exp(s), made, weights.log_scale)
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(scaled)])

        _, push = jax.linearize(lambda z: whitened(sampler, z), z)
        pull = jax.linear_transpose(push, z)

        def body(_: int, v: jax.Array) -> jax.Array:
            v = pull(push(v))[0]
            return v / jnp.linalg.norm(v)

        v = jax.lax.fori_loop(0, num_products, body, z)

        def objective(sampler: Sampler) -> jax.Array:
            image = jax.jvp(lambda z: whitened(sampler, z), (z,), (v,))[1]
            return log_joint(generator.apply(sampler.generator, z), data) + jnp.sum(image**2)

        return v, jax.grad(objective)(sampler)

    z = jax.random.normal(jax.random.key(3), (generator.latent_size,))
    return lambda: run(sampler, data, z)


def step_times() -> None:
    """The table of steps with one draw of z."""
    rows = []
    for name, inputs, classes, num_rows, description, num_steps in CASES:
        log_joint, data = problem(name, inputs, classes, num_rows)
        shapes = log_joint.shapes
        generator = generators.make_generator(description, shapes)
        small = generator.latent_size <= 128
        names = [*(["exact"] if small else []), "lanczos", "singular_value"]
        contenders, state = [], None
        for estimator in names:
            method = implicit_vi.implicit_vi(
                log_joint,
                optax.sgd(1e-6),
                num_rows,
                generator=generator,
                estimator=Estimator(estimator, num_steps),
                num_samples=1,
            )
            state = method.init(jax.random.key(0), None)
            contenders.append(partial(jax.jit(method.step), jax.random.key(1), state, data))
        assert state is not None
        contenders.append(ideal(log_joint, generator, state.sampler, data, num_steps))
        *found, best = medians(contenders)
        for estimator, seconds in zip(names, found, strict=True):
            # `exact` does two passes of d products each in place of the K: no ideal of its own.
            exact = estimator == "exact"
            sizes = [generator.latent_size, generator.num_weights, "" if exact else num_steps]
            compared = ["", ""] if exact else [1e3 * best, seconds / best]
            rows.append([estimator, *sizes, 1e3 * seconds, *compared])
    header = ["estimator", "d", "D", "K", "step, ms", "ideal of K, ms", "step / ideal"]
    print(tabulate(rows, header, tablefmt="github", floatfmt=".3g", intfmt=","))


def tightness() -> None:
    """The bounds of 1/2 logdet(I + B^T B), mean over draws, and the products they cost."""
    random = np.random.default_rng(0)

    def with_spectrum(values: np.ndarray) -> Callable[[jax.Array], jax.Array]:
        left = np.linalg.qr(random.normal(size=(3 * len(values), len(values))))[0]
        right = np.linalg.qr(random.normal(size=(len(values), len(values))))[0]
        matrix = jnp.asarray((left * values) @ right, jnp.float32)
        return lambda z: matrix @ z

    log_joint, _ = problem("mlp_20_20", (64,), 10, 10)
    center = log_joint.init(jax.random.key(0))
    generator = generators.make_generator(generators.MLP(100, (128,)), center)
    spread = jax.tree.map(lambda leaf: jnp.array(0.1), center)
    weights = generator.init(jax.random.key(1), center, spread)
    cases = {
        "log-spaced 1..1e-3": (with_spectrum(np.logspace(0, -3, 100)), 100, 1e-2),
        "all equal to 1": (with_spectrum(np.ones(100)), 100, 1e-2),
        "MLP generator": (lambda z: generator.apply(weights, z), 100, 1e-2),
    }
    rows = []
    for name, (function, size, scale) in cases.items():
        z = jax.random.normal(jax.random.key(2), (size,))
        value = jax.jit(partial(jacobian.exact, function, z, scale))().value
        rows.append([name, "exact", 2 * size, value, value, ""])
        for steps in (5, 10, 20, 40):
            probes = jacobian.sign_probes(jax.random.key(3), 100, z)
            estimate = partial(jacobian.lanczos, function, z, scale, probes, num_steps=steps)
            found = jax.jit(estimate)()
            rows.append([name, "lanczos", steps, found.lower, found.upper, found.residual])
        for steps in (5, 20, 80):
            start = jax.random.normal(jax.random.key(4), (size,))
            bound = partial(jacobian.singular_value, function, z, scale, start)
            found, _ = jax.jit(partial(bound, num_steps=steps))()
            rows.append([name, "singular_value", steps, found.value, "", found.residual])
    header = ["B", "estimator", "products", "lower", "upper", "residual"]
    print(tabulate(rows, header, tablefmt="github", floatfmt=".4g"))


def wide_resnet() -> None:
    """WRN-16-4 with d = 9025: time of steps by estimator, and the process's peak memory."""
    log_joint, data = problem("wide_resnet_16_4", (32, 32, 3), 10, 64)
    shapes = log_joint.shapes
    description = generators.Matrix((95, 95), ((95, 95), (95, 95)))
    generator = generators.make_generator(description, shapes)
    print(
        f"{generators.num_parameters(generator, shapes):,} parameters for "
        f"{trees.size(shapes):,} weights, d = {generator.latent_size:,}, 64 rows a step."
    )
    for name in ("lanczos", "singular_value"):
        method = implicit_vi.implicit_vi(
            log_joint,
            optax.adam(1e-4),
            64,
            generator=generator,
            estimator=Estimator(name, 10, warm_start=True),
            num_samples=1,
        )
        state = jax.jit(method.init)(jax.random.key(0), None)
        step = jax.jit(method.step, donate_argnums=1)
        for number in range(4):
            started = time.perf_counter()
            state, info = jax.block_until_ready(step(jax.random.key(number), state, data))
            found = {key: float(value[0]) for key, value in info.items()}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(
                f"{name} step {number}: {time.perf_counter() - started:.1f} s"
                f"{' with compilation' if number == 0 else ''}, "
                f"linearised estimate {found['linearised_estimate']:.6g}, "
                f"entropy {found['entropy']:.6g}, smallest singular value "
                f"{found['smallest_singular_value']:.3g}, residual {found['residual']:.3g}; "
                f"peak memory {peak:.2f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    {"--tightness": tightness, "--wide_resnet": wide_resnet}.get(
        " ".join(sys.argv[1:]), step_times
    )()
