"""An interrupt that arrives while Python runs a finalizer ends the command all the same."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import signal, time, weakref
from pgsieve.pipelines.command_line.dropped_interrupts import repeat_dropped_interrupts

class Referent:
    pass

def interrupted(_):
    signal.raise_signal(signal.SIGINT)

def failing(_):
    raise ValueError("a fault")

repeat_dropped_interrupts()
for callback in (failing, interrupted):
    referent = Referent()
    reference = weakref.ref(referent, callback)
    del referent
try:
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_within_a_callback_is_raised_after_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=25
    )
    assert done.stdout == "interrupted\n"
    assert "ValueError: a fault" in done.stderr
    assert "KeyboardInterrupt" not in done.stderr
