"""Networks of several inputs: dicts and tuples of arrays, from tables, archives and estimators.

The answer is known throughout: a network that joins its inputs is the network of the joined input.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_posteriors
import predict
import run_sgd
from haiku_posteriors.core.data import make_data, take
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.sklearn import PosteriorRegressor
from haiku_posteriors.utils import cmd_args_utils, data_utils, files, tasks

pytestmark = pytest.mark.usefixtures("first_device_only")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(23, 5)).astype(np.float32)
Y = (X[:, :1] + 0.1 * RNG.normal(size=(23, 1))).astype(np.float32)
NETWORK = """
import haiku as hk
import jax.numpy as jnp

def by_name(body, place, num_outputs):
    return hk.Linear(num_outputs)(jnp.concatenate([body, place], axis=1))

def by_dict(inputs, num_outputs):
    return by_name(inputs["body"], inputs["place"], num_outputs)

def of_kinds(inputs):
    photo, words = inputs["photo"].mean(axis=(1, 2, 3)), hk.Embed(9, 2)(inputs["words"])
    joined = [photo[:, None], words.reshape(len(photo), -1), inputs["body"]]
    return hk.Linear(1)(jnp.concatenate(joined, axis=1))
"""


def joined(x):
    return hk.Linear(1)(hk.Linear(3)(x))


def of_dict(inputs):
    return joined(jnp.concatenate([inputs["body"], inputs["place"]], axis=1))


def of_tuple(inputs):
    return joined(jnp.concatenate(inputs, axis=1))


CASES = {
    "dict": (of_dict, {"body": X[:, :2], "place": X[:, 2:]}),
    "tuple": (of_tuple, (X[:, :2], X[:, 2:])),
}


@pytest.mark.parametrize(("kind", "num_microbatches"), [("dict", 1), ("dict", 3), ("tuple", 1)])
def test_the_log_joint_is_that_of_the_joined_input(kind, num_microbatches):
    def make(network, inputs):
        settings = {"num_microbatches": num_microbatches}
        return make_log_joint(network, inputs, make_prior(1.0), gaussian(0.3), **settings)

    network, inputs = CASES[kind]
    several, whole = make(network, inputs), make(joined, X)
    params = whole.init(jax.random.key(0))
    index, weights = np.array([4, 1, 7, 1]), jnp.array([2.0, 1.0, 0.0, 3.0])
    for choose in (lambda data: data, lambda data: take(data, index, weights)):
        ours, theirs = choose(make_data(inputs, Y, 4)), choose(make_data(X, Y, 4))
        found = jax.jit(jax.value_and_grad(several))(params, ours)
        expected = jax.jit(jax.value_and_grad(whole))(params, theirs)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3)
        jax.tree.map(close, found, expected)
    for estimator in ("local", "flipout"):
        covered = noisy_layers.covered_parameters(several, inputs, estimator)
        assert covered == noisy_layers.covered_parameters(whole, X, estimator)
        assert len(covered[0]) == 4


def test_inputs_must_have_equally_many_rows():
    with pytest.raises(UserError, match="equally many rows, not 22, 23"):
        make_data((X, X[1:]), Y)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("several")
    colour = np.resize(["red", "blue"], 23)
    part = np.where(np.arange(23) < 5, "test", "train")
    rows = zip(*X[:, :3].T, colour, part, Y[:, 0], strict=True)
    lines = ["age,weight,north,colour,part,price", *(",".join(map(str, row)) for row in rows)]
    (path / "all.csv").write_text("\n".join(lines))
    (path / "new.csv").write_text("\n".join(lines[:6]))
    (path / "net.py").write_text(NETWORK)
    photo = RNG.integers(0, 256, (23, 4, 4)).astype(np.uint8)
    arrays = {"photo": photo, "words": RNG.integers(0, 9, (23, 3)), "body": X}
    split = {f"x_train_{name}": array[5:] for name, array in arrays.items()}
    split |= {f"x_test_{name}": array[:5] for name, array in arrays.items()}
    np.savez(path / "kinds.npz", **split, y_train=Y[5:], y_test=Y[:5])
    np.savez(path / "new.npz", **{f"x_{name}": array[:5] for name, array in arrays.items()})
    np.savez(path / "whole.npz", x_body=X[:, :2], x_place=X[:, 2:], y=Y)
    return path


def run_and_predict(folder, name, flags, new):
    """A short run; predict.py on its test rows gives its own predictions to the bit."""
    short = "--num_epochs=3 --eval_freq=3 --save_freq=3 --num_members=2 --likelihood=gaussian"
    arguments = [*short.split(), *flags, f"--dir={folder / name}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.pictures, "draw_run", lambda *_: [])
        run_sgd.run(cmd_args_utils.parse(run_sgd.GROUPS, arguments))
    output = folder / f"{name}_predicted.npz"
    flags = [f"--run={folder / name}", f"--inputs={folder / new}", f"--output={output}"]
    predict.run(cmd_args_utils.parse(predict.GROUPS, [*flags, "--per_draw"]))
    own = files.read_arrays(folder / name / "predictions.npz")["test_predictions"]
    np.testing.assert_array_equal(files.read_arrays(output)["predictions"], own)
    return haiku_posteriors.load_run(folder / name), own


TABLE = ("--target=price", "--split=part")
GROUPS = ("--input_group=body=age,weight", "--input_group=place=north,colour")


def test_groups_of_columns(folder):
    table = [f"--dataset_name={folder}/all.csv", *TABLE, *GROUPS]
    named, _ = run_and_predict(
        folder, "named", [*table, f"--model_name={folder}/net.py:by_name"], "new.csv"
    )
    flags = [*table, "--likelihood=gaussian", f"--model_name={folder}/net.py:by_dict"]
    other = tasks.load_task("sgd", cmd_args_utils.parse(run_sgd.GROUPS, flags))
    params = other.log_joint.init(jax.random.key(0))
    outputs = (
        one.network(params, other.dataset.x_test) for one in (other.log_joint, named.log_joint)
    )
    np.testing.assert_array_equal(*outputs)
    data = data_utils.load(
        f"{folder}/all.csv",
        table=haiku_posteriors.TableOptions(
            target="price",
            split="part",
            input_groups={"body": ["age"], "place": ["colour"]},
            ignore=("weight", "north"),
        ),
    )
    assert {name: part.shape for name, part in data.x_train.items()} == {
        "body": (18, 1),
        "place": (18, 2),
    }
    np.testing.assert_allclose(data.x_train["body"].std(), 1, rtol=1e-5)
    assert np.isin(data.x_train["place"], (0, 1)).all()
    rows = {"age": [0.1], "weight": [1.0], "north": [2.0], "colour": ["red"]}
    assert named.predict(rows).mean.shape == (1, 1)
    with pytest.raises(UserError, match="lacks the column colour"):
        named.predict({name: value for name, value in rows.items() if name != "colour"})
    with pytest.raises(UserError, match="give a dict of arrays"):
        named.predict(X)


def test_arrays_of_several_kinds(folder):
    flags = [f"--dataset_name={folder}/kinds.npz", f"--model_name={folder}/net.py:of_kinds"]
    run, own = run_and_predict(folder, "kinds", [*flags, "--inputs=words=tokens"], "new.npz")
    arrays = {k.removeprefix("x_"): v for k, v in files.read_arrays(folder / "new.npz").items()}
    np.testing.assert_array_equal(run.predict(arrays).outputs, own)
    assert [form.kind for form in run.form.inputs.forms] == ["images", "tokens", "features"]
    with pytest.raises(UserError, match="but the run was trained on photo, words, body"):
        run.predict({"photo": arrays["photo"], "words": arrays["words"]})
    with pytest.raises(UserError, match=r"The inputs, body, have shape \(5, 4\)"):
        run.predict(arrays | {"body": X[:5, :4]})
    with pytest.raises(UserError, match="must have equally many rows"):
        run.predict(arrays | {"body": X[:4]})
    with pytest.raises(UserError, match="which no table holds"):
        predict.run(
            cmd_args_utils.parse(
                predict.GROUPS,
                [f"--run={folder}/kinds", f"--inputs={folder}/new.csv", f"--output={folder}/o.csv"],
            )
        )


def test_a_tuple_of_arrays_from_python():
    parts = (X[:, :2], X[:, 2:])
    data = data_utils.from_arrays(parts, Y, tuple(part[:5] for part in parts), Y[:5])
    whole = data_utils.from_arrays(X, Y, X[:5], Y[:5])
    np.testing.assert_array_equal(np.concatenate(data.x_train, axis=1), whole.x_train)
    assert data.form.inputs.is_tuple and data.form.inputs.names == ("0", "1")


def by_name(body, place):
    return joined(jnp.concatenate([body, place], axis=1))


def test_an_estimator_of_several_inputs(tmp_path):
    settings = {"method": "map", "num_steps": 20, "step_size": 0.05, "noise_std": 0.3}
    groups = {"body": [0, 1], "place": [2, 3, 4]}
    model = PosteriorRegressor(network=by_name, input_groups=groups, **settings).fit(X, Y[:, 0])
    whole = PosteriorRegressor(network=joined, **settings).fit(X, Y[:, 0])
    np.testing.assert_allclose(model.predict(X), whole.predict(X), rtol=1e-4, atol=1e-5)
    assert model.score(X, Y[:, 0]) == pytest.approx(whole.score(X, Y[:, 0]), abs=1e-4)
    model.save(tmp_path / "model")
    loaded = haiku_posteriors.sklearn.load(tmp_path / "model", network=by_name)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    run = haiku_posteriors.load_run(tmp_path / "model", network=by_name)
    assert run.predict({"body": X[:3, :2], "place": X[:3, 2:]}).mean.shape == (3, 1)
    with pytest.raises(UserError, match="columns of X, 0, 1, 2, 3, 4; 9 is"):
        PosteriorRegressor(network=by_name, input_groups={"place": [9]}, **settings).fit(X, Y[:, 0])
    with pytest.raises(UserError, match="need a network of your own"):
        PosteriorRegressor(input_groups=groups, **settings).fit(X, Y[:, 0])


MISTAKES = {
    "all.csv --target=price --input_group=body": "is not of the form NAME=COLUMN,COLUMN",
    "all.csv --target=price --input_group=body=ages": "has no column 'ages'",
    "all.csv --target=price --input_group=body=age": "column 'colour' is in no input_group",
    "all.csv --target=price --input_group=body=price": "column 'age' is in no input_group",
    "all.csv --target=price --ignore=age,weight,north,part --input_group=c=colour": "of your own",
    "whole.npz": "Several inputs need a network of your own",
    "whole.npz --input_group=body=age": "is read by columns, with input_groups",
    "whole.npz --inputs=body": "say what one of them is by --inputs=body=tokens",
    "whole.npz --inputs=feet=tokens": "has the inputs body, place",
    "whole.npz --inputs=body=token": "Did you mean 'tokens'",
    "whole.npz --inputs=body=tokens": "input body, has inputs that cannot be tokens",
    "kinds.npz --model_name=net.py:of_kinds --likelihood=gaussian": "shape body (rows, 5) and",
    "kinds.npz --model_name=net.py:by_name": "called with the inputs (photo, words, body) alone",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_sentences(flags, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as error:
        tasks.load_task(
            "sgd", cmd_args_utils.parse(run_sgd.GROUPS, f"--dataset_name={flags}".split())
        )
    assert MISTAKES[flags] in str(error.value)
