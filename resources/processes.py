"""Makes a child process end when its parent ends."""

import ctypes
import signal
import sys

#: The option of prctl(2) for the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: The C library. It is loaded when this module is imported, because a process that has forked but not yet called
#: exec may do little.
_C_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Make the system send SIGTERM to this process when its parent ends, even if the parent is killed.

    This works only on Linux (prctl(2)).
    """
    if _C_LIBRARY:
        _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
