"""Whether delta-rs and this process meet a Delta table's requirements of readers and writers.

In: an open table of delta-rs, with its protocol, properties and columns. Out: booleans. Raises delta-rs's errors.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Requirements for Writers, Requirements for Readers)
"""

from collections.abc import Collection, Mapping

import pyarrow as pa
from deltalake import DeltaTable, Schema

from pgsieve.resources.lake.delta.deletion_vectors import PROPERTY
from pgsieve.resources.lake.delta.tables import arrow_schema

COLUMN_MAPPING = "delta.columnMapping.mode"
#: The features that demand nothing of a writer which only adds and removes files.
_REWRITABLE = {"appendOnly", "deletionVectors", "invariants", "timestampNtz"}
#: The features of writers and readers that delta-rs supports.
_SUPPORTED = _REWRITABLE | {
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "generatedColumns",
    "v2Checkpoint",
    "variantType",
}
APPEND_ONLY = "delta.appendOnly"
#: Boolean properties. Spark ignores the case of their values; delta-rs and this process accept only lower case.
_BOOLEAN_PROPERTIES = (APPEND_ONLY, "delta.enableChangeDataFeed", PROPERTY)
#: The prefixes of constraints on rows: CHECK constraints in the table's properties, and others in a column's
#: metadata.
_CONSTRAINT_PREFIX = "delta.constraints."
_CONSTRAINT_METADATA = (
    "delta.generationExpression",
    "delta.identity.",
    "delta.invariants",
    "CURRENT_DEFAULT",
)


def is_unmapped(table: DeltaTable) -> bool:
    """Whether the columns of a table have the same names in its files."""
    return bool(table.metadata().configuration.get(COLUMN_MAPPING, "none") == "none")


def can_read(table: DeltaTable) -> bool:
    """Whether delta-rs supports all features that a table requires of its readers."""
    return set(table.protocol().reader_features or ()) <= _SUPPORTED


def can_write(table: DeltaTable) -> bool:
    """Whether delta-rs supports all features that a table requires of its writers.

    It does not support identity columns, which writer version 6 requires.
    """
    protocol, configuration = table.protocol(), table.metadata().configuration
    return (
        protocol.min_writer_version != 6
        and set(protocol.writer_features or ()) <= _SUPPORTED
        and all(configuration.get(name, "false") in {"true", "false"} for name in _BOOLEAN_PROPERTIES)
    )


def is_plain(table: DeltaTable) -> bool:
    """Whether a table's rows are exactly the rows of its Parquet files: no mapped columns, marked rows or partitions."""
    if table.metadata().partition_columns:  # The files lack these columns.
        return False
    return (
        is_unmapped(table) and can_read(table) and not pa.table(table.deletion_vectors().read_all()).num_rows
    )


def is_append_only(properties: Mapping[str, str]) -> bool:
    """Whether a table with these properties allows no deletes."""
    return properties.get(APPEND_ONLY, "false").lower() == "true"


def constraints_in(properties: Mapping[str, str]) -> list[str]:
    """The names of the CHECK constraints among the properties of a table."""
    return [
        name.removeprefix(_CONSTRAINT_PREFIX) for name in properties if name.startswith(_CONSTRAINT_PREFIX)
    ]


def allows_files(table: DeltaTable, schema: pa.Schema, *, overwrite: bool) -> bool:
    """Whether files of this schema may be added to a table, which has neither partitions nor constraints on rows.

    The table must have these columns. Its other columns are NULL in the new rows; an overwrite must have all
    columns.
    """
    if not _accepts_any_row(table):
        return False
    present = pa.struct(arrow_schema(table))
    given = pa.struct(pa.schema(Schema.from_arrow(schema).to_arrow()))
    return bool(present == given) if overwrite else is_unmapped(table) and _has_fields(present, given)


def allows_row_changes(table: DeltaTable, columns: Collection[str]) -> bool:
    """Whether a writer that adds and removes files may change rows of a table.

    The table must have exactly these columns, no change data feed, and no constraint.
    """
    return (
        can_write(table)
        and {field.name for field in table.schema().fields} == set(columns)
        and _accepts_any_row(table)
        and set(table.protocol().writer_features or ()) <= _REWRITABLE
        and table.metadata().configuration.get("delta.enableChangeDataFeed", "false") != "true"
    )


def allows_marks(table: DeltaTable) -> bool:
    """Whether a table has deletion vectors enabled, or they can be enabled.

    Tables of writer versions 3 to 6 are excluded, as `deletion_vectors.enable` does not list their features.
    """
    configuration = table.metadata().configuration
    return (
        is_unmapped(table)
        and table.protocol().min_writer_version in {1, 2, 7}
        and not is_append_only(configuration)
        and configuration.get(PROPERTY) != "false"
    )


def _accepts_any_row(table: DeltaTable) -> bool:
    """Whether a table has no partitions, no constraints and no computed values, so that any row can be written.

    The features do not show this, as writer versions 3 to 6 list none (Delta protocol, Writer Version
    Requirements).
    """
    metadata, fields = table.metadata(), table.schema().fields
    return not (
        metadata.partition_columns
        or constraints_in(metadata.configuration)
        or any(not field.nullable for field in fields)
        or any(name.startswith(_CONSTRAINT_METADATA) for field in fields for name in field.metadata or {})
    )


def _has_fields(present: pa.DataType, given: pa.DataType) -> bool:
    """Whether a type has all fields of another type. Fields of structs may be in any order."""
    if not (pa.types.is_struct(present) and pa.types.is_struct(given)):
        return bool(present == given)
    return all(
        present.get_field_index(f.name) >= 0 and _has_fields(present.field(f.name).type, f.type)
        for f in given
    )
