"""A change of all rows of a table for `Lake.rewrite`: the columns that are read, a function of batches, the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class RowChange:
    """Reads `columns`, and changes each batch by `of`.

    The result has the columns of `schema`, `ddl` in Spark's types.
    """

    columns: Sequence[str]
    of: Callable[[pa.RecordBatch], pa.RecordBatch]
    schema: pa.Schema
    ddl: str
