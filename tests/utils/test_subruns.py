"""Programs that a script starts: their flags, and what happens to them when it is to stop."""

import signal
import sys
import threading

import pytest

from haiku_posteriors.utils import subruns
from haiku_posteriors.utils.signals import Interrupted

# Takes longer to save its state than Python's own subprocess.run would wait for it.
SAVES = """
import pathlib, signal, sys, time

def save(number, frame):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(128 + number)

signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).with_suffix(".began").touch()
time.sleep(60)
"""


def test_exit_codes():
    assert subruns.run([sys.executable, "-c", "raise SystemExit(3)"]) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_asks_to_stop_is_passed_on_and_waited_for(number, tmp_path):
    saved = tmp_path / "state"

    def ask():
        while not saved.with_suffix(".began").exists():
            ended.wait(0.05)
        signal.pthread_kill(threading.main_thread().ident, number)

    ended = threading.Event()
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    with pytest.raises(Interrupted, match=number.name):
        subruns.run([sys.executable, "-c", SAVES, str(saved)])
    asking.join()
    assert saved.read_text() == number.name


def test_flags_are_left_out_in_both_forms():
    flags = ["--a=1", "--b", "2", "-c=3", "--d"]
    assert subruns.without(flags, ("b", "c")) == ["--a=1", "--d"]
    assert subruns.without(flags, ("a", "d")) == ["--b", "2", "-c=3"]
