"""Translates the names of a Delta table's columns to their names in its files, if the table has column mapping.

In: the schema of a table, with the table's names.
Out: the schema of its files.

A `Store` translates names when it reads files of the table, and `write_files` when it writes them, so nothing else needs
to know the names in files. Raises nothing.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Column Mapping)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

#: The key in the metadata of Arrow's fields that gives a column its number in Parquet files.
_FIELD_ID = b"PARQUET:field_id"


class StoredColumn(NamedTuple):
    """The name and the number of a column in files."""

    name: str
    number: int


@dataclass(frozen=True)
class ColumnNames:
    """The columns of the table in a folder: `columns` maps their names in the table to those in its files.

    `prefix` is how the paths of the table's files begin.
    """

    prefix: str
    columns: Mapping[str, StoredColumn]

    def covers(self, path: str) -> bool:
        """True if a path is that of a file of the table."""
        return path.startswith(self.prefix)

    def stored_name(self, column: str) -> str:
        """The name of a column in files. A column that the table lacks keeps its name."""
        stored = self.columns.get(column)
        return column if stored is None else stored.name

    def stored_schema(self, schema: pa.Schema) -> pa.Schema:
        """The schema of files with these columns of the table."""
        return pa.schema([self._stored_field(field) for field in schema])

    def _stored_field(self, field: pa.Field) -> pa.Field:
        stored = self.columns.get(field.name)
        if stored is None:
            return field
        return field.with_name(stored.name).with_metadata({_FIELD_ID: str(stored.number).encode()})
