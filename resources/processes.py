"""Child processes of this one, and how they end with it."""

import ctypes
import signal
import sys

#: prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Loaded before a fork: between a fork and its exec little may be done.
_SYSTEM = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent ends, even by SIGKILL (Linux: prctl(2))."""
    if _SYSTEM:
        _SYSTEM.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
