"""Predictions of a finished run for new rows; the data it was trained on are not needed.

python predict.py --run=runs/hmc/x --inputs=new.csv --output=predictions.csv
python predict.py --run=runs/hmc/x --inputs=new.csv --output=p.csv --quantiles=0.05,0.5,0.95
"""

import pathlib
import sys
from collections.abc import Sequence

import jax
import numpy as np
from tqdm import tqdm

from haiku_posteriors.core.data import count_rows
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.datasets.forms import SeveralInputs
from haiku_posteriors.utils.datasets.raw import Values
from haiku_posteriors.utils.datasets.tables import Table
from haiku_posteriors.utils.report import loaded_runs, prediction_tables, problem_files
from haiku_posteriors.utils.report.loaded_runs import LoadedRun
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    Flag("run", "path", None, "Folder of the run."),
    Flag(
        "inputs",
        "string",
        None,
        "Rows to predict, in their own units: .csv, .tsv or .parquet with the columns of the "
        "training data, or .npz with an array x.",
    ),
    Flag("output", "path", None, "File to write: .csv, .npz or .parquet."),
    Flag("quantiles", "list", [], "Quantiles of the predictive mixture, such as 0.05,0.5,0.95."),
    Flag("per_draw", "bool", False, "Also write what every draw predicts (.npz alone)."),
    Flag(
        "allow_changed_network",
        "bool",
        False,
        "Predict even if the file of the run's network has changed.",
    ),
)
GROUPS = {"Prediction": FLAGS}


def levels_of(texts: Sequence[str]) -> list[float]:
    """The levels of --quantiles."""
    try:
        levels = [float(text) for text in texts]
    except ValueError:
        raise UserError(f"--quantiles={','.join(texts)} must be numbers between 0 and 1.") from None
    if not all(0 < level < 1 for level in levels):
        raise UserError(f"--quantiles={','.join(texts)} must be numbers between 0 and 1.")
    return levels


def remarks(run: LoadedRun, found: Table | Values) -> list[str]:
    """What to know about the inputs before their predictions are used; a sentence each."""
    sentences = []
    if not run.is_finished:
        sentences.append("The run is not finished: these are predictions of its draws so far.")
    if isinstance(found, Table) and run.form.inputs.columns is not None:
        known = {column.name for column in run.form.inputs.columns}
        other = [name for name in found.columns if name not in known]
        if other:
            sentences.append(
                f"Columns that the run does not know are not used: {', '.join(other)}."
            )
    return sentences


def show_metrics(run: LoadedRun, found: Table | Values) -> None:
    """Metrics, where the table brings the targets as well."""
    names = run.form.target_names
    if not isinstance(found, Table) or not names or not {*names} <= found.columns.keys():
        return
    columns = [found.columns[name] for name in names]
    targets = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    if targets.dtype.kind == "f" and not np.isfinite(targets).all():
        return
    values = run.evaluate(found, targets)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    print(f"The inputs bring the target {', '.join(names)}: {shown}.")


def run(settings: Settings) -> None:
    """Predicts what the flags name."""
    tasks.show_if_asked(settings)
    for name in ("run", "inputs", "output"):
        if not settings.values[name]:
            raise UserError(f"Give --{name}; --help says what it is.")
    output = pathlib.Path(settings.output).expanduser()
    prediction_tables.check_output(output)
    if settings.per_draw and output.suffix != ".npz":
        raise UserError("--per_draw needs an --output that ends in .npz.")
    levels = levels_of(settings.quantiles)
    folder = pathlib.Path(settings.run).expanduser()
    if problem_files.read(folder).problem.use_float64:
        jax.config.update("jax_enable_x64", True)
    loaded = loaded_runs.load_run(folder, allow_changed_network=settings.allow_changed_network)
    form = loaded.form.inputs
    several = isinstance(form, SeveralInputs) and form.columns is None
    found = prediction_tables.read_inputs(pathlib.Path(settings.inputs).expanduser(), several)
    num_rows = count_rows(loaded.to_inputs(found))
    for sentence in remarks(loaded, found):
        print(sentence)
    print(
        f"{num_rows:,} rows, {loaded.num_draws:,} draws, {jax.device_count()} "
        f"{jax.devices()[0].device_kind} device(s).",
        flush=True,
    )
    parts, outputs = [], []
    with tqdm(
        total=loaded.num_passes(num_rows), unit="draw", disable=not sys.stderr.isatty()
    ) as bar:
        for _, block in loaded.predict_blocks(found, bar.update):
            parts.append(prediction_tables.columns_of(block, levels))
            if settings.per_draw:
                outputs.append(block.outputs)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if settings.per_draw:
        columns["predictions"] = np.concatenate(outputs, axis=1)
    prediction_tables.write(output, columns)
    show_metrics(loaded, found)
    print(f"{', '.join(columns)} of {num_rows:,} rows are in {output}.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
