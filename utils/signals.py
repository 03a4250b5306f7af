"""Ctrl-C, SIGTERM and SIGHUP as a request that the loop answers when it can."""

import contextlib
import math
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar

GRACE_SECONDS = 2.0  # how long a running computation may take to end after a request to stop


class Interrupted(Exception):
    """The user or the cluster asked the run to stop.

    Attributes:
      signal_number: by which signal.
      directory: where the run's last state is saved; None if nowhere.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number
        self.directory: pathlib.Path | None = None


def run_stage(directory: pathlib.Path | None, function: Callable[[], Any]) -> Any:
    """The result of a stage beside a run's loop, which a signal ends as it ends the loop.

    A loop inside it ends by itself, after its checkpoint; what has none of its own is given up.
    `directory` is the run's, with which the same command goes on.
    """
    with part_of(directory), Interruption() as interruption:
        result = interruption.wait_for(function)
        interruption.check()
    return result


@contextlib.contextmanager
def part_of(directory: pathlib.Path | None) -> Iterator[None]:
    """Around a loop with a folder of its own inside a run's: what goes on is the run."""
    try:
        yield
    except Interrupted as request:
        request.directory = directory
        raise


class Interruption:
    """While open, SIGINT, SIGTERM and SIGHUP are noted; `check` and `wait_for` raise Interrupted.

    Outside the main thread, where Python does not deliver signals, it heeds those that the main
    thread's notes, which waits until it has closed. Under nohup, which has the end of the terminal
    ignored, it stays so.
    """

    _of_main_thread: "ClassVar[Interruption | None]" = None

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """`grace_seconds` are how long a running computation may take to end after a request."""
        self._grace_seconds = grace_seconds
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._outer: Interruption | None = None
        self._num_inside = 0  # open ones of other threads that heed this one

    def __enter__(self) -> "Interruption":
        self._outer = Interruption._of_main_thread
        if threading.current_thread() is not threading.main_thread():
            if self._outer:
                self._outer._num_inside += 1
            return self
        Interruption._of_main_thread = self
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous:
            Interruption._of_main_thread = self._outer
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        elif self._outer:
            self._outer._num_inside -= 1

    @property
    def received(self) -> int:
        """The number of the signal that came, or 0."""
        if not self._previous and self._outer:
            return self._outer.received
        return self._received or 0

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self.received:
            raise Interrupted(self.received)

    def wait_for(self, function: Callable[[], Any]) -> Any:
        """The function's result; after a signal it is waited for the grace and no longer.

        The function runs in a thread of its own: Python runs signal handlers in the main thread
        between its own instructions only, so that a main thread inside JAX would hold them back
        until the computation has ended. A computation that is given up goes on in its thread.
        """
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                outcome["result"] = function()
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        deadline = math.inf
        while thread.is_alive():
            thread.join(timeout=0.1)
            if self.received and not self._num_inside:
                deadline = min(deadline, time.monotonic() + self._grace_seconds)
                if time.monotonic() > deadline:
                    self.check()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt  # asked twice: leave at once, the last checkpoint stands
        self._received = number
