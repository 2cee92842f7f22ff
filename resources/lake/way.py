"""Who reads and writes a table's rows: this process, the executors as files, or Spark.

`Lake.way` decides it, and is the only place that does: nothing else combines where a lake is, how much there is, and what
delta-rs and Arrow cannot do.
"""

from collections.abc import Iterable
from enum import Enum, auto

#: Types of which Arrow tells values apart that PostgreSQL and Spark do not (0.0 and -0.0), or that are keys of Spark's only.
_INEXACT = ("float", "double", "array<")


class Way(Enum):
    """How rows come into a table."""

    #: They pass through this process, which writes them by delta-rs: few rows.
    IN_PROCESS = auto()
    #: The executors write Parquet files, which this process commits: many rows, and no Spark expression has to see them.
    FILES = auto()
    #: Spark writes them.
    SPARK = auto()


def is_exact(types: Iterable[str]) -> bool:
    """Whether values of these Spark types are equal in Arrow just where they are in PostgreSQL."""
    return not any(each.startswith(_INEXACT) for each in types)
