"""Projects a replica's rows to the columns of its altered table: Arrow batches in, the same rows with other columns out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.decoding.changes.columns import repeat_value
from pgsieve.decoding.publications.evolution import ColumnSource


@dataclass(frozen=True)
class Projection:
    """The source of each new column: a former column, or one value for all rows (`values`, arrays of one element)."""

    sources: Sequence[ColumnSource]
    schema: pa.Schema
    values: Mapping[str, pa.Array]

    @property
    def read(self) -> list[str]:
        """The names of the former columns that have to be read."""
        return [s.former for s in self.sources if s.former is not None]

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same rows with the new columns."""
        columns = [
            repeat_value(self.values[s.column], batch.num_rows)
            if s.former is None
            else batch.column(s.former).cast(field.type)
            for s, field in zip(self.sources, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
