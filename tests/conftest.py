"""Test-wide settings: forced host devices, strict promotion, a shared compilation cache."""

import os
import pathlib
from collections.abc import Iterator

# Both must be set before JAX starts. Four host devices stand in for four accelerators; with fewer
# cores than devices, collectives deadlock unless NPROC tells XLA's thread pool to be larger.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get(
        "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path.home() / ".cache/haiku-posteriors/xla")
    ),
)

# Resumed and repeated runs compile the same small programs again and again.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_configure(config: pytest.Config) -> None:
    """Programs of the fast suite run for moments and mostly wait for the compiler.

    Without most optimisations and without the emitters of fused loops, compilation takes less than
    half the time. The slow tests run long, and on programs as users have them. Scripts that a test
    starts read the variables.
    """
    if config.option.markexpr == "not slow":
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        # A flag that XLA does not know ends the process: only for the release it was tried on.
        if jax.__version_info__[:2] == (0, 10):
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


SHARED_DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Folder of real data sets; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data sets are not beside the project ({SHARED_DATA} is absent)")
    return SHARED_DATA


# The longest first: at the end they would leave a worker alone.
LONG_FILES = (
    "test_scripts.py",
    "test_contract.py",
    "test_sklearn.py",
    "test_train_utils.py",
    "test_sgmcmc.py",
    "test_implicit_vi.py",
    "test_jacobian.py",
    "test_predict.py",
    "test_mistakes.py",
    "test_readme.py",
)


@pytest.fixture
def first_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one device: programs for several take longer to compile."""
    first = jax.devices()[:1]
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *_, **__: first)


@pytest.fixture(scope="module")
def module_on_first_device() -> Iterator[None]:
    """The same for all of a file, fixtures of its own included, that name this one first."""
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda *_, **__: first)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file, stably."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
