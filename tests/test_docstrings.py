"""The examples in the docstrings of `make_log_joint` and of every method run as they stand."""

import doctest
import inspect

import pytest

from haiku_posteriors.core import METHODS, log_joint


@pytest.fixture(scope="module")
def problem():
    """The names that the example of `make_log_joint` defines; the methods' examples use them."""
    names = {}
    run_examples(log_joint.make_log_joint, names)
    return names


def run_examples(function, names):
    """Runs the docstring in the module's own names and `names`, which it may add to."""
    module = inspect.getmodule(function)
    docstring = inspect.getdoc(function)
    test = doctest.DocTestParser().get_doctest(
        docstring, vars(module) | names, function.__name__, module.__file__, None
    )
    assert test.examples, "every method has an example"
    messages = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=messages.append, clear_globs=False)
    assert result.failed == 0, "".join(messages)
    names.update({name: test.globs[name] for name in ("log_joint", "data")})


# The contract compiles every method in the fast suite.
NAMES = [name if name == "sgd" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


@pytest.mark.parametrize("name", NAMES)
def test_example(problem, name):
    method = METHODS[name]
    # A method that is another with a setting given has that one's example.
    run_examples(getattr(method, "func", method), dict(problem))
