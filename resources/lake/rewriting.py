"""Defines a change of all rows of a table, for `Lake.rewrite`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class RowChange:
    """A change of all rows of a table.

    - `columns`: the columns to read
    - `change_batch`: the function that changes each batch
    - `schema`: the schema of the result
    - `ddl`: the same schema in Spark's types
    """

    columns: Sequence[str]
    change_batch: Callable[[pa.RecordBatch], pa.RecordBatch]
    schema: pa.Schema
    ddl: str
