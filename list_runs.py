"""All runs below a folder: state, method, data, network, test metrics, verdict.

python list_runs.py                 those in runs/
python list_runs.py path/to/runs    those below another folder
"""

import pathlib
import sys
from collections.abc import Sequence

from tabulate import tabulate

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import run_page
from haiku_posteriors.utils.settings import Settings

FLAGS = (Flag("dir", "path", "runs", "Folder to look in; may be given without --dir."),)
GROUPS = {"Runs": FLAGS}
HEADERS = ("run", "state", "method", "data", "network", "test", "verdict")


def run(settings: Settings) -> None:
    """Lists what there is."""
    tasks.show_if_asked(settings)
    root = pathlib.Path(settings.dir).expanduser()
    found = run_page.find_runs(root)
    if not found:
        raise UserError(f"There are no runs below {root}.")
    rows = [[str(path), *run_page.list_line(path)] for path in found]
    print(tabulate(rows, HEADERS, disable_numparse=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) == 1 and not given[0].startswith("-"):
        given = [f"--dir={given[0]}"]
    script_utils.run_script(run, GROUPS, __doc__, given)


if __name__ == "__main__":
    main()
