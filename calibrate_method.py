"""Simulation-based calibration: is a method's posterior right on average over the prior?

python calibrate_method.py                               HMC on 500 data sets of a small network
python calibrate_method.py --method=hmc,smc,mean_field_vi,sgmcmc,implicit
python calibrate_method.py --temperature=1.3             what a wrong posterior looks like
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from tabulate import tabulate
from tqdm import tqdm

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import calibration_ranks
from haiku_posteriors.core.judging.calibration_ranks import Deviation, Envelope
from haiku_posteriors.utils import calibration, files, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.plots import ranks as rank_plots
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    Flag("method", "list", ["hmc"], f"Methods, of {', '.join(calibration.RECIPES)}."),
    Flag("num_data_sets", "integer", 500, "Data sets from the prior.", lower_bound=20),
    Flag("num_draws", "integer", 31, "Posterior draws for each of them.", lower_bound=3),
    Flag("num_rows", "integer", 15, "Rows of a data set.", lower_bound=1),
    Flag("num_hidden", "integer", 3, "Hidden units of the network.", lower_bound=1),
    Flag("num_steps", "integer", None, "Steps before the first draw.", "by method", lower_bound=1),
    Flag("thinning", "integer", None, "Steps between draws.", "by method", lower_bound=1),
    Flag("temperature", "float", 1.0, "Of the method's posterior; not 1 is wrong on purpose."),
    Flag("false_alarm_rate", "float", 0.001, "Of a verdict, over all quantities of a method."),
    Flag("seed", "integer", 0, "Random seed."),
    Flag("dir", "path", "runs/calibration", "Folder of the tables and pictures."),
)
GROUPS = {"Calibration": FLAGS}


def run(settings: Settings) -> None:
    """Calibrates the methods one after another."""
    tasks.show_if_asked(settings)
    if not settings.method:
        raise UserError(f"Give a method, of {', '.join(calibration.RECIPES)}.")
    for method in settings.method:
        calibration.find_recipe(method)
    for method in settings.method:
        calibrate(method, settings, pathlib.Path(settings.dir))


def calibrate(method: str, settings: Settings, directory: pathlib.Path) -> None:
    """Simulates, ranks and judges; leaves a picture and a JSON file."""
    recipe = calibration.find_recipe(method)
    problem = calibration.make_problem(settings.num_rows, settings.num_hidden, settings.temperature)
    portions = calibration.simulate(
        problem,
        recipe.make(problem, settings.num_rows),
        num_rows=settings.num_rows,
        num_data_sets=settings.num_data_sets,
        num_draws=settings.num_draws,
        num_steps=settings.num_steps or recipe.num_steps,
        thinning=recipe.thinning and (settings.thinning or recipe.thinning),
        seed=settings.seed,
    )
    collected = []
    with tqdm(total=settings.num_data_sets, unit="data set", disable=None) as bar:
        for portion in portions:
            collected.append(portion)
            bar.update(len(portion[0]))
    true_values, draws = (np.concatenate(parts) for parts in zip(*collected, strict=True))
    finite = np.isfinite(draws).all(axis=(1, 2))
    if not finite.any():
        raise UserError(f"{method} gave no finite draws on any data set: change its recipe.")
    rng = np.random.default_rng(settings.seed)
    ranks = calibration_ranks.ranks(rng, true_values[finite], draws[finite])
    envelope = Envelope(len(ranks), settings.num_draws)
    names = calibration.quantity_names()
    deviations = [calibration_ranks.deviation(column, envelope) for column in ranks.T]
    correlations = calibration_ranks.lag_one_correlations(draws[finite])
    overall = calibration_ranks.overall_p_value(deviations)
    picture = directory / f"ranks_{method}.png"
    title = f"{method}: {len(ranks)} data sets, {settings.num_draws} draws"
    rank_plots.rank_panels(picture, dict(zip(names, ranks.T, strict=True)), envelope, title)
    content = {
        "method": method,
        "claims_to_be_exact": recipe.is_exact,
        "temperature": settings.temperature,
        "num_draws": settings.num_draws,
        "p_value": overall,
        "num_not_finite": int(np.sum(~finite)),
        "quantities": {
            name: d._asdict() | {"lag_one_correlation": float(c)}
            for name, d, c in zip(names, deviations, correlations, strict=True)
        },
        "ranks": {name: column.tolist() for name, column in zip(names, ranks.T, strict=True)},
    }
    files.write_json(directory / f"calibration_{method}.json", content)
    print(f"{title}, {settings.num_rows} rows, {trees.size(problem.shapes)} parameters")
    print(table(names, deviations, correlations))
    if not finite.all():
        print(f"{np.sum(~finite)} data sets gave draws that are not finite and are left out.")
    if overall < settings.false_alarm_rate:
        print(f"Verdict: NOT uniform (p = {overall:.2g}, limit {settings.false_alarm_rate:g}).")
    else:
        print(f"Verdict: no deviation found (p = {overall:.2g}).")
    print(f"The picture is {picture}.")


def table(names: Sequence[str], deviations: Sequence[Deviation], correlations: np.ndarray) -> str:
    """One line for each quantity."""
    rows = [
        [
            name,
            f"{d.shift:+.3f} ({d.shift_error:.3f})",
            f"{d.spread:.2f}",
            f"{d.largest_difference:.3f}",
            f"{d.chi_square_p:.2g}",
            f"{d.envelope_p:.2g}",
            f"{correlation:+.2f}",
        ]
        for name, d, correlation in zip(names, deviations, correlations, strict=True)
    ]
    headers = ["", "shift (error)", "spread", "largest difference", "p, histogram", "p, envelope"]
    return tabulate(rows, [*headers, "lag-1 correlation"], disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
