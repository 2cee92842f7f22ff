"""Processes that this one starts, and how they end with it."""

import ctypes
import signal
import sys

#: prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Found before a process is forked, between which and its exec little may be done.
_SYSTEM = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent ends, also where that one is killed (Linux: prctl(2))."""
    if _SYSTEM:
        _SYSTEM.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
