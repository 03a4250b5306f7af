"""Tables of a user's own: what columns become, how rows are split, and every refusal."""

import gzip
import sys

import numpy as np
import pytest
import sklearn.datasets
from data_checks import original, refused

from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.datasets import forms, tables
from haiku_posteriors.utils.datasets.own_tables import TableOptions

ROWS = 40
RNG = np.random.default_rng(0)
COLUMNS = {
    "age": RNG.uniform(20, 70, ROWS).round(2),
    "colour": np.resize(["red", "green", "blue"], ROWS),
    "rooms": np.arange(ROWS) % 4,
    "price": RNG.normal(100, 20, ROWS).round(3),
    "kind": np.resize(["dear", "cheap", "Cheap thing"], ROWS),
    "part": np.resize(["train", "Train", "test", "train"], ROWS),
}
PRICE = TableOptions(target=("price",), ignore=("kind", "part"))


def write_text(path, columns=COLUMNS, delimiter=",", opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(delimiter.join(columns) + "\n")
        for row in zip(*columns.values(), strict=True):
            file.write(delimiter.join(map(str, row)) + "\n")
    return str(path)


def write_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({k: v.tolist() for k, v in COLUMNS.items()}), path)
    return str(path)


def write_npz(path):
    np.savez(path, **COLUMNS)
    return str(path)


WRITERS = {
    "a.csv": write_text,
    "semicolons.csv": lambda path: write_text(path, delimiter=";"),
    "a.tsv": lambda path: write_text(path, delimiter="\t"),
    "a.csv.gz": lambda path: write_text(path, opener=gzip.open),
    "a.parquet": write_parquet,
    "a.npz": write_npz,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_data(tmp_path, name):
    data = data_utils.load(WRITERS[name](tmp_path / name), table=PRICE)
    expected = data_utils.load(write_text(tmp_path / "reference.csv"), table=PRICE)
    assert data_utils.fingerprint(data) == data_utils.fingerprint(expected)
    assert data.form.inputs.columns == expected.form.inputs.columns


def test_columns_become_numbers_and_categories(tmp_path):
    data = data_utils.load(
        write_text(tmp_path / "a.csv"), table=PRICE._replace(split="part", ignore=("kind",))
    )
    assert data.task == "regression" and data.x_train.shape == (30, 5)
    assert data.form.inputs.columns == (
        forms.Column("age"),
        forms.Column("colour", ("blue", "green", "red")),
        forms.Column("rooms"),
    )
    test = np.arange(ROWS) % 4 == 2
    np.testing.assert_allclose(original(data)[1][:, 0], COLUMNS["price"][test], rtol=1e-6)
    hot = COLUMNS["colour"][test][:, None] == np.array(["blue", "green", "red"])
    np.testing.assert_array_equal(data.x_test[:, 1:4], hot)  # not scaled
    age = COLUMNS["age"]
    expected = (age[test] - age[~test].mean()) / age[~test].std()
    np.testing.assert_allclose(data.x_test[:, 0], expected, rtol=1e-5)
    as_categories = PRICE._replace(categorical=("rooms",))
    data = data_utils.load(write_text(tmp_path / "a.csv"), table=as_categories)
    assert data.form.inputs.columns[-1] == forms.Column("rooms", ("0", "1", "2", "3"))


def test_the_split_is_a_part_of_the_rows_by_its_seed(tmp_path):
    path = write_text(tmp_path / "a.csv")
    tests = []
    for split, seed in ((None, None), ("0.1", 0), ("0.1", 1), ("0.25", 0)):
        train, test = original(
            data_utils.load(path, table=PRICE._replace(split=split, split_seed=seed))
        )
        assert len(train) + len(test) == ROWS
        together = np.concatenate([train, test])[:, 0]
        np.testing.assert_allclose(np.sort(together), np.sort(COLUMNS["price"]), rtol=1e-5)
        tests.append(test)
    assert [len(test) for test in tests] == [4, 4, 4, 10]
    np.testing.assert_array_equal(tests[0], tests[1])
    assert not np.array_equal(tests[1], tests[2])


def test_text_is_a_class_and_numbers_with_few_values_ask(tmp_path):
    path = write_text(tmp_path / "a.csv")
    data = data_utils.load(path, table=TableOptions(target=("kind",)))
    assert data.task == "classification" and data.form.classes == ("Cheap thing", "cheap", "dear")
    assert data.y_train.dtype == np.int32
    rooms = TableOptions(target=("rooms",))
    with refused("'rooms'", "4 different whole numbers", "--task=classification or"):
        data_utils.load(path, table=rooms)
    assert data_utils.load(path, table=rooms, task="regression").num_classes == 0
    data = data_utils.load(path, table=rooms, task="classification")
    assert data.form.classes == ("0", "1", "2", "3")
    several = data_utils.load(path, table=TableOptions(target=("age", "price")))
    assert several.y_train.shape[1] == 2 and several.form.target_names == ("age", "price")


def test_classes_that_are_numbers_keep_their_order(tmp_path):
    columns = {"x": COLUMNS["age"], "y": np.resize([10, 9, 100], ROWS)}
    path = write_text(tmp_path / "a.csv", columns)
    data = data_utils.load(path, table=TableOptions(target=("y",)), task="classification")
    assert data.form.classes == ("9", "10", "100")


def change(name, row, value):
    changed = COLUMNS[name].astype(object)
    changed[row] = value
    return {**COLUMNS, name: changed}


@pytest.mark.parametrize(
    ("columns", "options", "fragments"),
    [
        (COLUMNS, TableOptions(), ("--target", "age, colour, rooms")),
        (COLUMNS, TableOptions(("prize",)), ("no column 'prize'", "price")),
        (COLUMNS, PRICE._replace(ignore=("x",)), ("no column 'x'",)),
        (COLUMNS, PRICE._replace(split="fold"), ("no column 'fold'",)),
        (COLUMNS, PRICE._replace(split="kind"), ("'kind'", "train and test", "'cheap'")),
        (COLUMNS, PRICE._replace(split="part", split_seed=1), ("split_seed",)),
        (COLUMNS, PRICE._replace(split="0"), ("40 rows", "--split=0 ", "to train and to test on")),
        (COLUMNS, PRICE._replace(split="1.5"), ("--split=1.5",)),
        (COLUMNS, PRICE._replace(split="nan"), ("--split=nan",)),
        (COLUMNS, PRICE._replace(inputs="tokens"), ("--inputs is for .npz",)),
        (COLUMNS, TableOptions(tuple(COLUMNS)), ("no column left",)),
        (change("age", [2, 4], "NA"), PRICE, ("column 'age' in rows 3, 5", "Fill them")),
        (change("colour", 7, ""), PRICE, ("column 'colour' in row 8",)),
        (change("age", range(20), "?"), PRICE, ("1, 2, 3, 4, 5, 6, 7, 8 and 12 more",)),
        (change("age", 0, "inf"), PRICE, ("infinite", "column 'age' in row 1")),
        (change("price", 9, "nan"), PRICE, ("column 'price' in row 10",)),
        (change("price", 9, "much"), PRICE._replace(target=("age", "price")), ("row 10", "'much'")),
        (
            {**COLUMNS, "kind": np.full(ROWS, "a")},
            TableOptions(("kind",)),
            ("one class only, 'a'",),
        ),
    ],
)
def test_wrong_tables_are_refused(tmp_path, columns, options, fragments):
    with refused(*fragments):
        data_utils.load(write_text(tmp_path / "a.csv", columns), table=options)


def test_too_many_categories_are_no_categories(tmp_path):
    rows = tables.MAX_CATEGORIES + 1
    columns = {"name": [f"n{i}" for i in range(rows)], "y": np.arange(rows) / 3}
    with refused("'name'", "101 different texts", "--ignore=name"):
        data_utils.load(write_text(tmp_path / "a.csv", columns), table=TableOptions(target=("y",)))


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"", ("column names",)),
        (b"a,b\n", ("at least one row",)),
        (b"1,2\n3,4\n", ("numbers in its first line",)),
        (b"a,a\n3,4\n", ("different name for every column", "a.")),
        (b"a,\n3,4\n", ("an empty name",)),
        (b"a,b\n1,2\n3\n4,5,6\n", ("2 columns", "1 values in rows 2, 3")),
        (b"a,b\n\xff\xfe,3\n", ("cannot be read",)),
    ],
)
def test_files_that_are_no_tables(tmp_path, content, fragments):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with refused("a.csv", *fragments):
        data_utils.load(str(path), table=PRICE)


def test_other_refusals(tmp_path, monkeypatch):
    with refused("no file", "absent.csv"):
        data_utils.load("absent.csv", tmp_path)
    with refused("target is for tables", "'diabetes'"):
        data_utils.load("diabetes", table=PRICE)
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    if "pyarrow" in sys.modules or pytest.importorskip("pyarrow"):
        with refused("b.parquet", "cannot be read"):
            data_utils.load("b.parquet", tmp_path, table=PRICE)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused("b.parquet", "needs the package pyarrow", ".csv"):
        data_utils.load("b.parquet", tmp_path, table=PRICE)


def test_arrays_without_a_split(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=RNG.normal(size=(ROWS, 3)), y=RNG.normal(size=ROWS))
    data = data_utils.load(str(path), table=TableOptions(split="0.2"))
    assert data.x_train.shape == (32, 3) and data.x_test.shape == (8, 3)
    with refused("--split must be a number"):
        data_utils.load(str(path), table=TableOptions(split="fold"))
    with refused("ignore", "--target"):
        data_utils.load(str(path), table=TableOptions(ignore=("x",)))
    np.savez(path, x=RNG.normal(size=(ROWS, 3)), y=np.zeros(2))
    with refused("x and y of shapes (40, 3) and (2,)"):
        data_utils.load(str(path))
    np.savez(path, **{f"{a}_{b}": np.ones(3) for a in "xy" for b in ("train", "test")})
    with refused("split already"):
        data_utils.load(str(path), table=TableOptions(split="0.2"))


def test_openml_by_number(monkeypatch):
    """Nominal columns arrive as positions in their list of values, with NaN for a missing one."""
    codes = np.column_stack([COLUMNS["age"], np.arange(ROWS) % 2])

    def fetch(data_id, **options):
        assert data_id == 31 and not options["as_frame"]
        return sklearn.utils.Bunch(
            data=codes,
            target=np.resize(["good", "bad"], ROWS).astype(object),
            categories={"b": ["yes", "no"]},
            feature_names=["a", "b"],
            target_names=["class"],
        )

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    data = data_utils.load("openml:31")
    assert data.form.classes == ("bad", "good") and data.form.target_names == ("class",)
    assert data.form.inputs.columns == (forms.Column("a"), forms.Column("b", ("no", "yes")))
    other = data_utils.load("openml:31", table=TableOptions(target=("a",), ignore=("class",)))
    assert other.task == "regression" and other.x_train.shape == (36, 2)
    codes[3, 1] = np.nan
    with refused("OpenML's data set 31", "column 'b' in row 4"):
        data_utils.load("openml:31")
    with refused("numbers", "'openml:31'", "'iris'"):
        data_utils.load("openml:iris")

    def unreachable(**options):
        raise OSError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", unreachable)
    with refused("OpenML did not give data set 31", "no network"):
        data_utils.load("openml:31")


@pytest.mark.parametrize("name", ["diabetes", "breast_cancer", "digits", "toy_regression"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_form_survives_json_to_the_bit(name, dtype):
    import json

    data = data_utils.load(name, float_dtype=dtype)
    form = forms.from_json(json.loads(json.dumps(forms.to_json(data.form))))
    assert form.class_names == data.form.class_names and form.inputs.columns == (
        data.form.inputs.columns
    )
    raw = data_utils._read(name, None, None, TableOptions())
    inputs = form.inputs.to_inputs(form.inputs.check_values(raw.x_test))
    assert inputs.dtype == data.x_test.dtype
    np.testing.assert_array_equal(inputs, data.x_test)
    np.testing.assert_array_equal(form.target_mean, data.target_mean)
