"""The report of runs at several temperatures: a table, a CSV file, and curves.

A posterior sharpened by T < 1 that predicts better than the one at T = 1 is called a cold posterior
(Wenzel et al. 2020, arXiv 2002.02405). Both numbers are of untempered likelihoods: the NLL of the
test rows, and the elpd of the training rows, each left out of the tempered posterior.
"""

import pathlib
from collections.abc import Mapping

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import floors
from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.utils.plots import sweep
from haiku_posteriors.utils.report import pages, run_folders
from haiku_posteriors.utils.report.comparison import elpd_of_run

LABELS = {
    "nll": "NLL, test rows",
    "elpd_loo": "elpd / rows, PSIS-LOO",
    "doubtful_rows": "rows of doubtful Pareto k",
}


def write(directory: pathlib.Path, folders: Mapping[float, pathlib.Path]) -> None:
    """Reads the finished runs by temperature, writes temperatures.csv, .md and .png, and prints."""
    results: dict[str, dict[str, Estimate]] = {}
    for temperature, folder in folders.items():
        run = run_folders.open_run(folder)
        if run.flags.get("temperature") != temperature:
            raise UserError(
                f"{folder} holds a run at temperature {run.flags.get('temperature')}, not "
                f"{temperature:g}; use another --dir."
            )
        numbers = {"nll": floors.quality(run.predictions)["nll"]}
        found = elpd_of_run(run)
        if found:
            rows = len(found[0].by_row)
            numbers["elpd_loo"] = Estimate(found[0].value / rows, found[0].error / rows)
            numbers["doubtful_rows"] = Estimate(float(found[0].num_doubtful))
        results[f"T = {temperature:g}"] = numbers
    pages.write_csv(directory / "temperatures.csv", results)
    pages.write_markdown(directory / "temperatures.md", results, LABELS)
    shown = {key: LABELS[key] for key in ("nll", "elpd_loo")}
    values = dict(zip(folders, results.values(), strict=True))
    sweep.temperature_curves(directory / "temperatures.png", values, shown)
    print(pages.text_table(results, LABELS, "simple"))
    print(f"In {directory}: temperatures.csv, .md and .png.")
