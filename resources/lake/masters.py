"""Reads the address of a Spark master: how many cores of this machine it uses, or how many threads replace Spark.

In: the text of a master, for example `local[4]` or `threads[4]`.
Out: a number, or None.

Every command reads the configuration and therefore imports this module, so it has no slow imports.
"""

import re
from os import cpu_count

_THREADS_MASTER = re.compile(r"threads\[([1-9]\d*|\*)\]")
_LOCAL_MASTER = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")


def parse_thread_count(master: str) -> int | None:
    """The number of threads of this process that replace Spark; None if Spark runs large work."""
    match = _THREADS_MASTER.fullmatch(master)
    return _parse_count(match[1]) if match else None


def parse_core_count(master: str) -> int | None:
    """The number of cores of this machine that a Spark master uses; None if Spark runs on other machines or as a server."""
    match = _LOCAL_MASTER.fullmatch(master)
    return _parse_count(match[1] or "1") if match else None


def _parse_count(text: str) -> int:
    return (cpu_count() or 2) if text == "*" else int(text)
