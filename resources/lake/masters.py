"""Reads a Spark master: the number of cores that it uses on this machine, or of threads that replace Spark.

In: the text of a master. Out: a number, or None. This module has no slow imports, as every command reads the
configuration.
"""

import re
from os import cpu_count

_THREADS = re.compile(r"threads\[([1-9]\d*|\*)\]")
_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")


def threads_of(master: str) -> int | None:
    """How many threads of this process replace Spark; None if Spark itself runs large work."""
    match = _THREADS.fullmatch(master)
    return _number(match[1]) if match else None


def cores_of(master: str) -> int | None:
    """How many cores of this machine a Spark master uses; None for a master on other machines or in other processes."""
    match = _LOCAL.fullmatch(master)
    return _number(match[1] or "1") if match else None


def _number(text: str) -> int:
    return (cpu_count() or 2) if text == "*" else int(text)
