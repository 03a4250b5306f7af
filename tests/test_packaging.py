"""The project installs, starts and imports in every way that the README promises."""

import ast
import importlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata

import program
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import haiku_posteriors

ROOT = program.ROOT
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
# A path from outside would make an installation look better than it is.
VARIABLES = {k: v for k, v in program.ENVIRONMENT.items() if k != "PYTHONPATH"}
SHORT_RUN = ("--num_iterations=4", "--num_burn_in_iterations=2", "--num_chains=2")


def requirements(name):
    """The requirements of a file, without comments and references to other files."""
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


def test_requirements_files_and_pyproject_agree():
    extras = PROJECT["optional-dependencies"]
    assert extras.keys() == {"datasets", "dev"}
    needed = PROJECT["dependencies"] + extras["datasets"]
    assert sorted(needed) == sorted(requirements("requirements.txt"))
    assert sorted(extras["dev"]) == sorted(requirements("requirements-dev.txt"))


def test_lowest_versions_are_the_lower_bounds():
    def lowest(line):
        requirement = Requirement(line)
        (bound,) = (s.version for s in requirement.specifier if s.operator == ">=")
        return f"{requirement.name}=={bound}"

    expected = [lowest(line) for line in requirements("requirements.txt")]
    assert requirements("requirements-lowest.txt") == expected


def test_version_is_the_newest_of_the_changelog():
    headings = re.findall(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == haiku_posteriors.__version__
    assert headings == sorted(headings, key=Version, reverse=True)


@pytest.mark.parametrize("name", ["core", "utils"])
def test_the_rooms_are_no_import_names(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"Import haiku_posteriors.{name}; {name} alone is not"):
        importlib.import_module(name)
    with pytest.raises(ImportError, match="is not an import name"):
        importlib.import_module(f"{name}.data" if name == "core" else f"{name}.models")
    assert not [module for module in sys.modules if module.split(".")[0] == name]


def test_no_file_is_loaded_under_two_names():
    code = """
import collections, importlib, pathlib, pkgutil, sys
import haiku_posteriors
for module in pkgutil.walk_packages(haiku_posteriors.__path__, "haiku_posteriors."):
    if not module.name.startswith("haiku_posteriors.scripts."):  # programs: one in a process
        importlib.import_module(module.name)
rooms = [pathlib.Path(sys.argv[1]) / room for room in ("core", "utils", "haiku_posteriors")]
files = [pathlib.Path(m.__file__).resolve() for m in list(sys.modules.values())
         if getattr(m, "__file__", None)]
ours = collections.Counter(path for path in files if {*rooms} & {*path.parents})
assert len(ours) > 60, ours
assert set(ours.values()) == {1}, ours
"""
    subprocess.run([sys.executable, "-c", code, ROOT], cwd=ROOT, check=True)


def test_every_script_is_linked_and_has_an_entry_point():
    expected = {f"haiku_posteriors.scripts.{script.removesuffix('.py')}:main" for script in SCRIPTS}
    assert {*PROJECT["scripts"].values()} == expected
    for script in SCRIPTS:
        link = ROOT / "haiku_posteriors" / "scripts" / script
        assert link.is_symlink() and link.resolve() == ROOT / script
        functions = [
            node
            for node in ast.parse(link.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == "main"
        ]
        assert len(functions) == 1, script
        arguments = functions[0].args
        assert len(arguments.args) == len(arguments.defaults), (
            f"{script}: main must run without arguments"
        )


def test_importing_the_package_imports_nothing_else():
    code = "import sys, haiku_posteriors; sys.exit(bool({'jax', 'numpy', 'absl'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_public_names_are_told_alike_to_python_and_to_type_checkers():
    (block,) = (
        node
        for node in ast.parse((ROOT / "haiku_posteriors" / "__init__.py").read_text()).body
        if isinstance(node, ast.If)
    )
    seen = {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in block.body
        for alias in statement.names
    }
    assert seen.keys() | {"__version__"} == {*haiku_posteriors.__all__}
    for name, (module, original) in seen.items():
        value = getattr(haiku_posteriors, name)
        assert value is getattr(importlib.import_module(module), original)
        assert name in vars(haiku_posteriors)  # found without __getattr__ from now on
    assert {*dir(haiku_posteriors)} >= {*haiku_posteriors.__all__}
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        haiku_posteriors.no_such_name  # noqa: B018


class Environment:
    """A virtual environment outside the checkout that borrows the dependencies of this one."""

    def __init__(self, folder):
        venv.create(folder / "environment", with_pip=False)
        self.folder = (folder / "environment").resolve()
        self.bin = self.folder / "bin"
        self.empty = folder / "empty"  # where programs start: nothing of ours is there
        self.empty.mkdir()
        (site_packages,) = self.folder.glob("lib/python*/site-packages")
        # A folder named in a .pth file comes last, and its own .pth files are not read: an
        # installation of this project that the borrowed environment may have is not seen.
        (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))

    def pip_install(self, *arguments):
        command = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install"]
        options = ["--no-deps", "--quiet", "--disable-pip-version-check", *build_options()]
        subprocess.run([*command, *options, *arguments], cwd=self.empty, check=True)

    def run(self, command, *arguments):
        """Exit code, standard output and standard error."""
        done = subprocess.run(
            [self.bin / command, *arguments],
            cwd=self.empty,
            env=VARIABLES | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout, done.stderr

    def succeed(self, command, *arguments):
        code, out, err = self.run(command, *arguments)
        assert code == 0, err
        assert "Traceback" not in err
        return out


def build_options():
    """Without isolation where this environment can build: nothing has to be fetched then."""
    (build_requirement,) = map(Requirement, PYPROJECT["build-system"]["requires"])
    try:
        present = metadata.version(build_requirement.name) in build_requirement.specifier
    except metadata.PackageNotFoundError:
        present = False
    return ["--no-build-isolation"] if present else []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what a build reads, so that the checkout itself stays clean."""
    folder = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("haiku_posteriors", "core", "utils"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", *SCRIPTS):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory):
    """An environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", *build_options()]
    subprocess.run([*command, "--wheel-dir", folder, checkout], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    environment = Environment(folder)
    environment.pip_install(wheel)
    return environment


def modules(folder):
    return {path.relative_to(folder) for path in folder.rglob("*.py")}


def check_location(environment, expected):
    code = "import haiku_posteriors; print(haiku_posteriors.__file__)"
    file = pathlib.Path(environment.succeed("python", "-c", code).strip())
    assert expected in file.resolve().parents
    code = "import importlib.metadata as m; print(m.version('haiku-posteriors'))"
    version = environment.succeed("python", "-c", code).strip()
    assert version == haiku_posteriors.__version__


def check_example(environment):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "rmse" in environment.succeed("python", "-c", example)


def check_hmc(environment):
    environment.succeed("haiku-posteriors-hmc", *SHORT_RUN, "--dir=run")
    summary = json.loads((environment.empty / "run" / "summary.json").read_text())
    assert summary["num_chains"] == 2 and summary["num_draws"] == 4


@pytest.mark.slow
def test_wheel_has_all_modules_under_one_name(installed):
    (site_packages,) = installed.folder.glob("lib/python*/site-packages")
    package = site_packages / "haiku_posteriors"
    assert (package / "py.typed").is_file()
    for room in ("core", "utils"):
        assert modules(package / room) == modules(ROOT / room)
        assert not (site_packages / room).exists()
    assert modules(package / "scripts") == {pathlib.Path(p) for p in [*SCRIPTS, "__init__.py"]}
    check_location(installed, installed.folder)


@pytest.mark.slow
def test_wheel_runs_the_example_of_the_readme(installed):
    check_example(installed)


@pytest.mark.slow
def test_wheel_runs_hmc(installed):
    check_hmc(installed)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(PROJECT["scripts"].keys() - {"haiku-posteriors-demo"}))
def test_commands_of_the_wheel_start_and_refuse_a_wrong_flag(installed, command):
    code, _, err = installed.run(command, "--no_such_flag=1")
    assert code == 2, err
    assert err.startswith(command) and "no_such_flag" in err and "Traceback" not in err


@pytest.mark.slow
def test_editable_installation(checkout, tmp_path):
    environment = Environment(tmp_path)
    environment.pip_install("--editable", checkout)
    check_location(environment, checkout)
    check_example(environment)
    check_hmc(environment)
    code, _, err = environment.run("python", "-c", "import core")
    assert code != 0 and "No module named 'core'" in err


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "haiku_posteriors/scripts"])
def test_bare_checkout_from_another_working_directory(checkout, tmp_path, folder):
    done = subprocess.run(
        [sys.executable, checkout / folder / "run_sgd.py", "--num_epochs=2", "--dir=run"],
        cwd=tmp_path,
        env=VARIABLES | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
