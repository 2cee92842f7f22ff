"""A change of all rows of a table, as `Lake.rewrite` makes it: what is read, a function of batches, what is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class RowChange:
    """Reads `columns`; `of` makes of each batch one with the columns of `schema`, which are `ddl` in Spark's types."""

    columns: Sequence[str]
    of: Callable[[pa.RecordBatch], pa.RecordBatch]
    schema: pa.Schema
    ddl: str
