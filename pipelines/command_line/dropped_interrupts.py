"""Repeats an interrupt (Ctrl-C or SIGTERM) that Python has dropped.

In: an exception that Python cannot raise, because a finalizer or the callback of a weak reference was running
Out: the same interrupt a moment later, where Python can raise it

A signal handler runs between any two instructions of the main thread, also within such a callback. py4j has a callback
for each object of the JVM. Python only prints an exception that a callback raises (`sys.unraisablehook`), so the command
would go on.
"""

import signal
import sys
from contextlib import suppress
from threading import Timer, main_thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

#: The callback has ended by then.
_DELAY_SECONDS = 0.02


def repeat_dropped_interrupts() -> None:
    """From now on, repeat each interrupt that Python drops. Other exceptions are still printed."""
    print_exception = sys.unraisablehook

    def repeat_interrupt(unraisable: "UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, Exception | GeneratorExit | SystemExit | None):
            print_exception(unraisable)
            return
        # An interrupt: KeyboardInterrupt, or within a step Dagster's error for it.
        timer = Timer(_DELAY_SECONDS, _interrupt_main_thread)
        timer.daemon = True
        with suppress(RuntimeError):  # The process is ending, and can start no thread.
            timer.start()

    sys.unraisablehook = repeat_interrupt


def _interrupt_main_thread() -> None:
    """Send a real signal, because it also ends a wait of the main thread."""
    if (thread_id := main_thread().ident) is not None:
        signal.pthread_kill(thread_id, signal.SIGINT)
