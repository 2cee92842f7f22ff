"""Lets a child process end with its parent."""

import ctypes
import signal
import sys

#: prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Loaded at import, because little is allowed between a fork and its exec.
_SYSTEM = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Make the system send SIGTERM to this process when its parent ends, even by SIGKILL (only Linux: prctl(2))."""
    if _SYSTEM:
        _SYSTEM.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
