"""What a run says: a progress bar, a table, metrics.jsonl, TensorBoard events."""

import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping

import tensorboardX
from tabulate import tabulate
from tqdm import tqdm

from haiku_posteriors.utils.files import JsonLines

FIRST_SIGN, RAREST_SIGN = 5.0, 60.0  # seconds of silence, where there is no progress bar
PARTS = ("train", "test", "ensemble")  # of which metrics are: groups of TensorBoard's tags


class Ticker:
    """A function for code that runs before the log is open: silent until given a listener."""

    def __init__(self) -> None:
        self.listener: Callable[[int], None] | None = None

    def __call__(self, done: int) -> None:
        """Passes the number on."""
        if self.listener:
            self.listener(done)


def tell(sentence: str) -> None:
    """Prints at once: what waits in a buffer while hours pass tells nobody anything."""
    print(sentence, flush=True)


class Sign:
    """Says that something still goes on: at most every few seconds, and ever more rarely."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` is where it says so."""
        self._say, self._last, self._patience = say, time.monotonic(), FIRST_SIGN

    def __call__(self, sentence: str) -> None:
        """Says the sentence if nothing was said for some time."""
        if time.monotonic() - self._last >= self._patience:
            self._patience = min(2 * self._patience, RAREST_SIGN)
            self._say(sentence)
            self.heard()

    def heard(self) -> None:
        """Something else was said."""
        self._last = time.monotonic()


class RunLog:
    """The voice of one run.

    On a terminal: a progress bar with rate and time left, and the table above it. Elsewhere: plain
    lines. With a folder, each row is also appended to metrics.jsonl and to TensorBoard events.
    """

    def __init__(
        self,
        directory: pathlib.Path | None = None,
        *,
        total: int,
        unit: str = "epoch",
        start: int = 0,
        tabulate_freq: int = 40,
        quiet: bool = False,
    ) -> None:
        """Opens the log; rows later than `start` left by an earlier run are dropped."""
        self._quiet = quiet
        self._tabulate_freq = tabulate_freq
        self._rows_shown = 0
        self._columns: list[str] = []
        self._unit = unit
        self._metrics = JsonLines(directory / "metrics.jsonl" if directory else None, start)
        self._events = None
        if directory:
            self._events = tensorboardX.SummaryWriter(
                str(directory), purge_step=start + 1 if start else None
            )
        self._bar = tqdm(
            total=total,
            initial=start,
            unit=unit,
            dynamic_ncols=True,
            smoothing=0.1,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._total = total
        self._sign = Sign(self.say)

    def advance(self, position: int, **shown: float) -> None:
        """Moves the progress bar."""
        if shown:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()}, refresh=False)
        self._bar.update(position - self._bar.n)
        if self._bar.disable:
            values = "".join(f", {name} {value:.4g}" for name, value in shown.items())
            self._sign(f"{self._unit} {position} of {self._total}{values} ...")

    def within(self, done: int) -> None:
        """Shows how far the current step is, where one takes long."""
        self._bar.set_postfix_str(f"{done} leapfrog steps", refresh=True)
        if self._bar.disable:
            self._sign(f"{done} leapfrog steps ...")

    def row(self, position: int, values: Mapping[str, float], columns: list[str]) -> None:
        """Records all values of one evaluation and shows the given columns of it."""
        self._metrics.append(position, {**values, "time": time.time()})
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(tag(name), value, position)
        self._show(position, values, columns)

    def say(self, message: str) -> None:
        """One line that does not disturb the progress bar."""
        if not self._quiet:
            tqdm.write(message, file=sys.stdout)
            sys.stdout.flush()
            self._sign.heard()

    def warn(self, message: str) -> None:
        """A line that asks for attention."""
        self.say(f"Warning: {message}")

    def flush(self) -> None:
        """Brings TensorBoard's events to disk."""
        if self._events:
            self._events.flush()

    def close(self) -> None:
        """Ends the progress bar and closes the files."""
        self._bar.close()
        if self._events:
            self._events.close()

    def _show(self, position: int, values: Mapping[str, float], columns: list[str]) -> None:
        shown = [name for name in columns if name in values]
        cells = [position, *(_number(values[name]) for name in shown)]
        headers = [self._unit, *shown]
        width = [max(len(header), 9) for header in headers]
        table = tabulate(
            [[f"{cell:>{w}}" for cell, w in zip(cells, width, strict=True)]],
            [f"{header:>{w}}" for header, w in zip(headers, width, strict=True)],
            tablefmt="simple",
            disable_numparse=True,
            preserve_whitespace=True,  # every row is a table of its own: widths must agree
        ).splitlines()
        again = self._rows_shown % self._tabulate_freq == 0 or shown != self._columns
        for line in table if again else table[-1:]:
            self.say(line)
        self._rows_shown += 1
        self._columns = shown


def tag(name: str) -> str:
    """A value's name in TensorBoard, which shows what is before the slash as a group."""
    part, _, rest = name.partition("_")
    if part in PARTS:
        return f"{part}/{rest}"
    return name if "/" in name else f"run/{name}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e5 and math.isfinite(value) else f"{value:.4g}"
