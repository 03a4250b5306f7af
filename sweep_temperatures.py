"""One run of a method at each of several posterior temperatures, and what becomes of elpd and NLL.

python sweep_temperatures.py --script=run_hmc --temperatures=0.1,0.3,1,3 \\
  --flags="--dataset_name=diabetes --likelihood=gaussian"     every run with these flags
"""

import pathlib
from collections.abc import Sequence

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import files, script_utils, subruns, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import temperature_sweep
from haiku_posteriors.utils.settings import Settings

SCRIPTS = pathlib.Path(__file__).resolve().parent
NAMES = ("run_hmc", "run_sgmcmc", "run_vi", "run_implicit")
OWN_FLAGS = ("temperature", "dir")  # of each run: set here
FLAGS = (
    Flag("script", "enum", "run_hmc", "The method's script.", choices=NAMES),
    Flag("temperatures", "list", ["0.1", "0.3", "1", "3"], "Temperatures, separated by commas."),
    Flag("flags", "string", "", "Flags of every run, in quotes."),
    Flag("dir", "path", "runs/temperatures", "Folder of the runs and of the report."),
)
GROUPS = {"Sweep": FLAGS}


def read_temperatures(texts: Sequence[str]) -> list[float]:
    """Positive, different and in order."""
    try:
        found = sorted({float(text) for text in texts})
    except ValueError as error:
        raise UserError(f"temperatures are numbers separated by commas ({error}).") from error
    if not found or not 0 < found[0] <= found[-1] < float("inf"):
        raise UserError(f"temperatures must be positive and finite, not {','.join(texts)}.")
    return found


def run(settings: Settings) -> None:
    """Runs what is not there yet, and writes the report."""
    tasks.show_if_asked(settings)
    directory = pathlib.Path(settings.dir)
    files.refuse_unusable(directory)
    temperatures = read_temperatures(settings.temperatures)
    flags = subruns.split_flags(settings.flags, OWN_FLAGS, "sweep")
    folders = {t: directory / f"temperature_{t:g}" for t in temperatures}
    for temperature, folder in folders.items():
        own = [*flags, f"--temperature={temperature!r}"]
        script = SCRIPTS / f"{settings.script}.py"
        subruns.finish(script, own, folder, f"temperature {temperature:g}")
    temperature_sweep.write(directory, folders)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
