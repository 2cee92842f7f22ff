"""What a Delta table asks of those who read its files as they are, or write to it: its protocol, properties and columns.

In: a table as delta-rs has it open. Out: whether one who does no more than that may read or write it. Raises what delta-rs does.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Requirements for Writers, Requirements for Readers)
"""

from collections.abc import Collection, Mapping

import pyarrow as pa
from deltalake import DeltaTable, Schema

from pgsieve.resources.lake.delta.deletion_vectors import PROPERTY
from pgsieve.resources.lake.delta.tables import arrow_schema

COLUMN_MAPPING = "delta.columnMapping.mode"
#: What tables may ask of their writers that one who replaces whole files complies with.
_REWRITABLE = {"appendOnly", "deletionVectors", "invariants", "timestampNtz"}
#: What tables may ask of their writers and readers that delta-rs does, too.
_WRITTEN = _REWRITABLE | {
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "generatedColumns",
    "v2Checkpoint",
    "variantType",
}
APPEND_ONLY = "delta.appendOnly"
#: What asks for something by "true", which Spark reads in any letters, and delta-rs and this process only in small ones.
_SWITCHES = (APPEND_ONLY, "delta.enableChangeDataFeed", PROPERTY)
#: What a table asks of each row: CHECK constraints among its properties, and by a column's metadata.
_CONSTRAINT = "delta.constraints."
_OF_ROWS = ("delta.generationExpression", "delta.identity.", "delta.invariants", "CURRENT_DEFAULT")


def is_unmapped(table: DeltaTable) -> bool:
    """Whether the columns of a table have their own names in its files."""
    return bool(table.metadata().configuration.get(COLUMN_MAPPING, "none") == "none")


def is_read(table: DeltaTable) -> bool:
    """Whether delta-rs does what a table asks of its readers."""
    return set(table.protocol().reader_features or ()) <= _WRITTEN


def is_written(table: DeltaTable) -> bool:
    """Whether delta-rs does what a table asks of its writers; version 6 of their protocol has identity columns, which it does not."""
    protocol, configuration = table.protocol(), table.metadata().configuration
    return (
        protocol.min_writer_version != 6
        and set(protocol.writer_features or ()) <= _WRITTEN
        and all(configuration.get(name, "false") in {"true", "false"} for name in _SWITCHES)
    )


def is_plain(table: DeltaTable) -> bool:
    """Whether the rows of a table are those of its Parquet files: no mapped columns, deleted rows or partitions."""
    if table.metadata().partition_columns:  # Files lack these columns.
        return False
    return (
        is_unmapped(table) and is_read(table) and not pa.table(table.deletion_vectors().read_all()).num_rows
    )


def is_append_only(properties: Mapping[str, str]) -> bool:
    """Whether a table with these properties lets no row go."""
    return properties.get(APPEND_ONLY, "false").lower() == "true"


def constraints_in(properties: Mapping[str, str]) -> list[str]:
    """The names of the CHECK constraints among the properties of a table."""
    return [name.removeprefix(_CONSTRAINT) for name in properties if name.startswith(_CONSTRAINT)]


def takes_files(table: DeltaTable, schema: pa.Schema, *, overwrite: bool) -> bool:
    """Whether files of this schema can be added to a table: it has these columns.

    Others, which the files lack, are NULL in their rows; an overwrite is to leave no others. A table that is partitioned, or
    asks something of each row, takes none.
    """
    if not _takes_any_row(table):
        return False
    held = pa.struct(arrow_schema(table))
    given = pa.struct(pa.schema(Schema.from_arrow(schema).to_arrow()))
    return bool(held == given) if overwrite else is_unmapped(table) and _has_fields(held, given)


def takes_changes(table: DeltaTable, columns: Collection[str]) -> bool:
    """Whether who takes rows out of a table of these columns and adds others owes nothing else: no feed of changes, no rule."""
    return (
        is_written(table)
        and {field.name for field in table.schema().fields} == set(columns)
        and _takes_any_row(table)
        and set(table.protocol().writer_features or ()) <= _REWRITABLE
        and table.metadata().configuration.get("delta.enableChangeDataFeed", "false") != "true"
    )


def takes_marks(table: DeltaTable) -> bool:
    """Whether rows of a table may be marked in deletion vectors, or its writers may be let do so.

    Writers of versions 3 to 6 would owe what no list of features tells.
    """
    configuration = table.metadata().configuration
    return (
        is_unmapped(table)
        and table.protocol().min_writer_version in {1, 2, 7}
        and not is_append_only(configuration)
        and configuration.get(PROPERTY) != "false"
    )


def _takes_any_row(table: DeltaTable) -> bool:
    """Whether who writes files of a table needs to look at no row: it has no partitions, constraints or computed values.

    Writer versions 3 to 6 list no features that would tell (Delta's protocol, Writer Version Requirements).
    """
    metadata, fields = table.metadata(), table.schema().fields
    return not (
        metadata.partition_columns
        or constraints_in(metadata.configuration)
        or any(not field.nullable for field in fields)
        or any(name.startswith(_OF_ROWS) for field in fields for name in field.metadata or {})
    )


def _has_fields(held: pa.DataType, given: pa.DataType) -> bool:
    """Whether a type has all that another one has, structs field by field in any order."""
    if not (pa.types.is_struct(held) and pa.types.is_struct(given)):
        return bool(held == given)
    return all(
        held.get_field_index(f.name) >= 0 and _has_fields(held.field(f.name).type, f.type) for f in given
    )
