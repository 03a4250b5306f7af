"""Every method on the embedded toy regression, judged against HMC: `make demo`.

python demo.py [FOLDER]      the runs are in FOLDER, runs/demo by default; what is there is kept
"""

import os
import pathlib
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from haiku_posteriors.version import __version__

SCRIPTS = pathlib.Path(__file__).resolve().parent
REFERENCE = "hmc"
# Half a minute of training each, and a verdict that says so where it was too short.
BRIEFLY = "--time_limit=0.5"
# The longest first: two run at a time.
METHODS = {
    "hmc": ("run_hmc.py",),
    "implicit": (
        "run_implicit.py",
        BRIEFLY,
        "--num_draws=200",
        "--refine=mclmc",
        "--refine_collapse_output",
    ),
    "sghmc": ("run_sgmcmc.py", BRIEFLY),
    "vi": ("run_vi.py", BRIEFLY, "--vi_ensemble_size=400"),
    "dropout": ("run_vi.py", BRIEFLY, "--method=mc_dropout", "--vi_ensemble_size=400"),
    "ensemble": ("run_sgd.py", BRIEFLY, "--num_members=20"),
}


def start(script: str, *arguments: str, **options: Any) -> subprocess.Popen:
    """Starts a script of this project."""
    return subprocess.Popen([sys.executable, str(SCRIPTS / script), *arguments], **options)


def run(name: str, folder: pathlib.Path, cores: queue.SimpleQueue[int | None]) -> bool:
    """Runs one method, its words in a file beside its folder; returns whether it ended well."""
    started, core = time.monotonic(), cores.get()
    log = folder / f"{name}.log"
    with log.open("w") as file:
        process = start(
            *METHODS[name], f"--dir={folder / name}", stdout=file, stderr=subprocess.STDOUT
        )
        if core is not None:
            # Threads of networks this small mostly wait for one another, and for other runs'.
            os.sched_setaffinity(process.pid, {core})
        code = process.wait()
    cores.put(core)
    end = "done" if code == 0 else f"FAILED with exit code {code}, see {log}"
    print(f"{name}: {end} after {time.monotonic() - started:.0f} s", flush=True)
    return code == 0


def run_all(folder: pathlib.Path) -> bool:
    """Runs all methods, two at a time, then the comparison; returns whether all ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(METHODS)} methods on the toy regression, in {folder} ...", flush=True)
    cores: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    can_choose = hasattr(os, "sched_getaffinity")  # on Linux
    for core in sorted(os.sched_getaffinity(0))[:2] if can_choose else (None, None):
        cores.put(core)
    with ThreadPoolExecutor(cores.qsize()) as pool:
        try:
            ends = list(pool.map(lambda name: run(name, folder, cores), METHODS))
        except KeyboardInterrupt:  # the running ones got it as well, and save themselves
            pool.shutdown(cancel_futures=True)
            print("Stopped; the same command goes on from here.")
            return False
    ended_well = dict(zip(METHODS, ends, strict=True))
    if not ended_well[REFERENCE]:
        return False
    others = [name for name, well in ended_well.items() if well and name != REFERENCE]
    comparison = start(
        "compare_posteriors.py",
        f"--reference={folder / REFERENCE}",
        f"--candidates={','.join(str(folder / name) for name in others)}",
        f"--dir={folder / 'comparison'}",
    )
    return comparison.wait() == 0 and all(ends)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the script."""
    folders = list(sys.argv[1:] if arguments is None else arguments)
    if folders in (["-h"], ["-help"], ["--help"]):
        print((__doc__ or "").strip())
        sys.exit(0)
    if folders == ["--version"]:
        print(f"haiku-posteriors {__version__}")
        sys.exit(0)
    if len(folders) > 1 or any(folder.startswith("-") for folder in folders):
        print("demo.py: takes one argument at most: the folder of the runs.", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if run_all(pathlib.Path(*(folders or ["runs/demo"]))) else 1)


if __name__ == "__main__":
    main()
