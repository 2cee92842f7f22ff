"""Reads the address of a Spark master: how many cores of this machine it uses, or how many threads replace Spark.

In: the text of a master, for example `local[4]` or `threads[4]`.
Out: a number, or None.

Every command reads the configuration and therefore imports this module, so it has no slow imports.
"""

import re
from os import cpu_count

_THREADS = re.compile(r"threads\[([1-9]\d*|\*)\]")
_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")


def threads_of(master: str) -> int | None:
    """The number of threads of this process that replace Spark; None if Spark runs large work."""
    match = _THREADS.fullmatch(master)
    return _number(match[1]) if match else None


def cores_of(master: str) -> int | None:
    """The number of cores of this machine that a Spark master uses; None if Spark runs on other machines or as a server."""
    match = _LOCAL.fullmatch(master)
    return _number(match[1] or "1") if match else None


def _number(text: str) -> int:
    return (cpu_count() or 2) if text == "*" else int(text)
