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


class Ticker:
    """A function for code that runs before the log is open: silent until given a listener."""

    def __init__(self) -> None:
        self.listener: Callable[[int], None] | None = None

    def __call__(self, done: int) -> None:
        """Passes the number on."""
        if self.listener:
            self.listener(done)


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

    def advance(self, position: int, **shown: float) -> None:
        """Moves the progress bar."""
        if shown:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()}, refresh=False)
        self._bar.update(position - self._bar.n)

    def within(self, done: int) -> None:
        """Shows how far the current step is, where one takes long."""
        self._bar.set_postfix_str(f"{done} leapfrog steps", refresh=True)

    def row(self, position: int, values: Mapping[str, float], columns: list[str]) -> None:
        """Records all values of one evaluation and shows the given columns of it."""
        self._metrics.append(position, {**values, "time": time.time()})
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, position)
        self._show(position, values, columns)

    def say(self, message: str) -> None:
        """One line that does not disturb the progress bar."""
        if not self._quiet:
            tqdm.write(message, file=sys.stdout)
            sys.stdout.flush()

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


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e5 and math.isfinite(value) else f"{value:.4g}"
