"""What a Spark master in the configuration means for this machine: so many cores, or threads of pgsieve in Spark's place.

In: the text of a master. Out: a number, or None. It imports nothing that is heavy: the configuration is read by every command.
"""

import re
from os import cpu_count

_THREADS = re.compile(r"threads\[([1-9]\d*|\*)\]")
_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")


def threads_of(master: str) -> int | None:
    """How many threads of this process stand in for Spark; None where Spark itself runs what is much."""
    match = _THREADS.fullmatch(master)
    return _number(match[1]) if match else None


def cores_of(master: str) -> int | None:
    """How many cores of this machine a Spark master means; None for one that means other machines or processes."""
    match = _LOCAL.fullmatch(master)
    return _number(match[1] or "1") if match else None


def _number(text: str) -> int:
    return (cpu_count() or 2) if text == "*" else int(text)
