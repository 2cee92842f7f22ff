"""Projects the rows of a replica to the columns of its altered table.

In: Arrow batches of rows
Out: the same rows with other columns
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.decoding.changes.columns import repeat_value
from pgsieve.decoding.publications.evolution import ColumnSource


@dataclass(frozen=True)
class Projection:
    """How each new column gets its values: from a former column, or one value for all rows.

    `value_by_column` maps the columns that get one value to an array with this value.
    """

    sources: Sequence[ColumnSource]
    schema: pa.Schema
    value_by_column: Mapping[str, pa.Array]

    @property
    def former_columns(self) -> list[str]:
        """The names of the former columns that have to be read."""
        return [source.former_column for source in self.sources if source.former_column is not None]

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same rows with the new columns."""
        columns = [
            repeat_value(self.value_by_column[source.column], batch.num_rows)
            if source.former_column is None
            else batch.column(source.former_column).cast(field.type)
            for source, field in zip(self.sources, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
