"""Data that arrive in parts: the posterior of one part is the prior of the next.

python stream.py --num_parts=5 --flags="--dataset_name=digits --model_name=mlp_20_20"
python stream.py --script=run_hmc --num_parts=3            moments of the draws, told as such
"""

import pathlib
from collections.abc import Sequence

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import files, script_utils, subruns, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import streams
from haiku_posteriors.utils.settings import Settings

SCRIPTS = pathlib.Path(__file__).resolve().parent
NAMES = ("run_vi", "run_hmc", "run_mclmc", "run_smc", "run_sgmcmc", "run_implicit")
OWN_FLAGS = ("train_part", "prior_from", "init_checkpoint", "dir")  # of each run: set here
# Posteriors without a spread, and methods whose mathematics needs a prior of its own or of mean 0:
# the second part would refuse them, after all of the first.
UNUSABLE = {
    "method": ("map", "gaussian_dropout"),
    "vi_family": ("layerwise",),
    "kl": ("forward",),
    "learn_prior_scale": ("one", "module", "leaf"),
}
FLAGS = (
    Flag("script", "enum", "run_vi", "The method's script.", choices=NAMES),
    Flag("num_parts", "integer", 5, "Parts of the training rows.", lower_bound=2),
    Flag("flags", "string", "", "Flags of every run, in quotes."),
    Flag(
        "compare",
        "bool",
        True,
        "Also run on all parts so far at once, and part by part from the last parameters with the "
        "first prior (naive).",
    ),
    Flag("dir", "path", "runs/stream", "Folder of the runs and of the report."),
)
GROUPS = {"Stream": FLAGS}


def run(settings: Settings) -> None:
    """Runs what is not there yet, part by part, and writes the report."""
    tasks.show_if_asked(settings)
    directory, count = pathlib.Path(settings.dir), settings.num_parts
    files.refuse_unusable(directory)
    flags = subruns.split_flags(settings.flags, OWN_FLAGS, "stream")
    for name, values in UNUSABLE.items():
        for value in values:
            if f"--{name}={value}" in flags:
                raise UserError(f"--{name}={value} takes no earlier posterior as its prior.")
    script = SCRIPTS / f"{settings.script}.py"
    folders: dict[str, list[pathlib.Path]] = {"online": []}
    if settings.compare:
        folders |= {"batch": [], "naive": []}
    for part in range(1, count + 1):
        for kind, done in folders.items():
            if part == 1 and kind != "online":  # the first part is the same for all
                done.append(directory / "online_1")
                continue
            rows = f"1-{part}" if kind == "batch" else str(part)
            own, shared = [f"--train_part={rows}/{count}"], flags
            if kind == "online" and part > 1:  # the flags' prior is that of the first part
                own.append(f"--prior_from={done[-1]}")
                shared = subruns.without(flags, tasks.PRIOR_FLAGS)
            elif kind == "naive":
                own.append(f"--init_checkpoint={done[-1]}")
            done.append(directory / f"{kind}_{part}")
            subruns.finish(script, [*shared, *own], done[-1], f"{kind}, part {part} of {count}")
            if kind == "online":
                streams.warn(done[-1], part, count)
    streams.write(directory, folders)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
