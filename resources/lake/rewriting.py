"""A change of all rows of a table, for `Lake.rewrite`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class RowChange:
    """The columns to read, the function `of` that changes each batch, and the schema of the result.

    `ddl` is the same schema in Spark's types.
    """

    columns: Sequence[str]
    of: Callable[[pa.RecordBatch], pa.RecordBatch]
    schema: pa.Schema
    ddl: str
