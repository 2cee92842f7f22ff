"""Settings of this process in the operating system and in the C library.

In: nothing. Out: the settings. Raises nothing. Where a system lacks a setting, nothing happens.
"""

import ctypes
import signal
import sys

#: The option of prctl(2) for the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: The C library. It is loaded when this module is imported, because a process that has forked but not yet called
#: exec may do little.
_C_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
#: The parameters of mallopt(3) and their values in bytes. They are the largest that glibc itself arrives at.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 * 1024 * 1024, 32 * 1024 * 1024


def end_with_parent() -> None:
    """Make the system send SIGTERM to this process when its parent ends, even if the parent is killed.

    This works only on Linux (prctl(2)).
    """
    if _C_LIBRARY:
        _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def keep_freed_arrays() -> None:
    """Make glibc keep up to 64 MB of freed memory for the next arrays of NumPy.

    The arrays of a batch have some megabytes each. By default glibc returns most of them to the system at once, and the
    next array causes page faults again. With other C libraries nothing happens.
    """
    set_option = getattr(_C_LIBRARY, "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        set_option(_M_TRIM_THRESHOLD, _TRIM_BYTES)
