"""Tells whether delta-rs and this process meet the requirements that a Delta table has of its readers and writers.

In: a table that delta-rs has open, with its protocol, its properties and its columns.
Out: booleans.

Raises the errors of delta-rs.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Requirements for Writers, Requirements for Readers)
"""

from collections.abc import Collection, Mapping

import pyarrow as pa
from deltalake import DeltaTable, Schema

from pgsieve.resources.lake.delta.deletion_vectors import (
    FEATURES_BY_WRITER_VERSION,
    VECTORS_PROPERTY,
    find_vectors_setting,
    has_deleted_rows,
)
from pgsieve.resources.lake.delta.feed_property import FEED_PROPERTY, find_reserved_columns, has_feed
from pgsieve.resources.lake.delta.tables import make_arrow_schema

COLUMN_MAPPING = "delta.columnMapping.mode"
#: Tables often list these table features without using them. Then a writer that only adds and removes files need not do
#: anything for them. `can_change_rows` finds out whether a table uses constraints, generated columns or a change data
#: feed. If a table is append-only, delta-rs itself refuses to remove files.
_REWRITABLE_FEATURES = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "invariants",
    "timestampNtz",
}
#: The features of writers and readers that delta-rs supports.
_SUPPORTED_FEATURES = _REWRITABLE_FEATURES | {"v2Checkpoint", "variantType"}
APPEND_ONLY = "delta.appendOnly"
#: Properties with boolean values. Spark accepts these values in upper and lower case, but delta-rs and this
#: process accept them only in lower case.
_BOOLEAN_PROPERTIES = (APPEND_ONLY, FEED_PROPERTY, VECTORS_PROPERTY)
#: A property is a CHECK constraint of the table if its name begins with this.
_CONSTRAINT_PREFIX = "delta.constraints."
#: The values of a column are restricted or generated if a key of its metadata begins with one of these.
_CONSTRAINT_METADATA = (
    "delta.generationExpression",
    "delta.identity.",
    "delta.invariants",
    "CURRENT_DEFAULT",
)


def is_unmapped(table: DeltaTable) -> bool:
    """True if the columns of a table have the same names in its files."""
    return bool(table.metadata().configuration.get(COLUMN_MAPPING, "none") == "none")


def can_translate_names(table: DeltaTable) -> bool:
    """True if this process can translate the names of a table's columns to those in its files.

    This is so if Delta does not map the names. It is also so if Delta maps them by name, and no column has fields:
    Delta would map the names of fields, too.
    """
    mode = table.metadata().configuration.get(COLUMN_MAPPING, "none")
    return mode == "none" or (
        mode == "name"
        and not any(map(_has_fields_inside, (field.type for field in make_arrow_schema(table))))
    )


def _has_fields_inside(data_type: pa.DataType) -> bool:
    """True if values of a type have fields with names, at any depth."""
    if pa.types.is_struct(data_type) or pa.types.is_map(data_type):
        return True
    return bool(pa.types.is_list(data_type) or pa.types.is_large_list(data_type)) and _has_fields_inside(
        data_type.value_type
    )


def can_read(table: DeltaTable) -> bool:
    """True if delta-rs supports all features that a table requires of its readers."""
    return set(table.protocol().reader_features or ()) <= _SUPPORTED_FEATURES


def can_write(table: DeltaTable) -> bool:
    """True if delta-rs supports all features that a table requires of its writers, and reads its properties correctly.

    delta-rs does not support identity columns, which writer version 6 requires.
    """
    protocol, configuration = table.protocol(), table.metadata().configuration
    return (
        protocol.min_writer_version != 6
        and set(protocol.writer_features or ()) <= _SUPPORTED_FEATURES
        and all(configuration.get(name, "false") in {"true", "false"} for name in _BOOLEAN_PROPERTIES)
    )


def is_plain(table: DeltaTable) -> bool:
    """True if the rows of a table are exactly the rows of its Parquet files, with the same names of columns.

    Such a table has no column mapping, no rows that are marked as deleted, and no partitions.
    """
    return is_unmapped(table) and has_plain_rows(table)


def has_plain_rows(table: DeltaTable) -> bool:
    """True if the rows of a table are exactly the rows of its files, once the names of columns are translated."""
    if table.metadata().partition_columns:  # The files do not contain these columns.
        return False
    return can_translate_names(table) and can_read(table) and not has_deleted_rows(table)


def is_append_only(properties: Mapping[str, str]) -> bool:
    """True if a table with these properties allows no deletion of rows."""
    return properties.get(APPEND_ONLY, "false").lower() == "true"


def find_constraints(properties: Mapping[str, str]) -> list[str]:
    """The names of the CHECK constraints that these properties of a table contain."""
    return [
        name.removeprefix(_CONSTRAINT_PREFIX) for name in properties if name.startswith(_CONSTRAINT_PREFIX)
    ]


def can_add_files(table: DeltaTable, schema: pa.Schema, *, overwrite: bool) -> bool:
    """True if files with this schema may be added to a table.

    The table must have no partitions and no constraints on rows, and this process must be able to translate its names of
    columns (`can_translate_names`).

    The table must have all these columns. If it has other columns, they are NULL in the new rows. For an
    overwrite, the schema must have exactly the columns of the table, in the same order.
    """
    if not (_accepts_any_row(table) and can_translate_names(table)):
        return False
    if overwrite:
        return has_same_columns(table, schema)
    return _has_fields(pa.struct(make_arrow_schema(table)), _stored_type(schema))


def can_replace_rows(table: DeltaTable, schema: pa.Schema) -> bool:
    """True if files with this schema may replace all rows of a table, which then has the columns of the schema.

    The table must have no partitions and no constraints on rows. If Delta maps the names of columns, the schema must have
    exactly the table's columns in the same order, because this process does not give new columns their names in files.
    """
    if not is_unmapped(table):
        return can_add_files(table, schema, overwrite=True)
    return _accepts_any_row(table)


def has_same_columns(table: DeltaTable, schema: pa.Schema) -> bool:
    """True if a table has exactly the columns of a schema, in the same order."""
    return bool(pa.struct(make_arrow_schema(table)) == _stored_type(schema))


def has_permuted_columns(table: DeltaTable, schema: pa.Schema) -> bool:
    """True if a table has exactly the columns of a schema, but they or the fields of a struct are in another order."""
    table_type, file_type = pa.struct(make_arrow_schema(table)), _stored_type(schema)
    return (
        table_type != file_type and _has_fields(table_type, file_type) and _has_fields(file_type, table_type)
    )


def lacks_local_timestamps(table: DeltaTable, schema: pa.Schema) -> bool:
    """True if a schema has timestamps without a time zone, and the protocol of a table lacks their feature."""
    return "timestampNtz" not in (table.protocol().writer_features or ()) and _has_local_timestamps(
        _stored_type(schema)
    )


def _has_local_timestamps(data_type: pa.DataType) -> bool:
    if pa.types.is_timestamp(data_type):
        return data_type.tz is None
    return any(_has_local_timestamps(data_type.field(index).type) for index in range(data_type.num_fields))


def lacks_columns(table: DeltaTable, schema: pa.Schema) -> bool:
    """True if a table lacks some columns of a schema, and nothing else has to be changed to have them all.

    A missing field of a struct counts as a missing column. All other columns and fields have the types of the schema.
    """
    table_type, file_type = pa.struct(make_arrow_schema(table)), _stored_type(schema)
    return not _has_fields(table_type, file_type) and _has_fields(
        _add_fields(table_type, file_type), file_type
    )


def has_change_feed(table: DeltaTable) -> bool:
    """True if a table has a change data feed: a commit that removes rows has to say which rows it adds and removes."""
    return has_feed(table.metadata().configuration)


def can_change_rows(table: DeltaTable, columns: Collection[str], *, writes_feed: bool = False) -> bool:
    """True if a writer that only adds and removes files may change rows of a table.

    The table must have exactly these columns and no constraint. It must not have a change data feed, unless the writer
    also writes that (`writes_feed`). A table with a feed must have no column that is named like one of the feed.
    """
    return (
        can_write(table)
        and {field.name for field in table.schema().fields} == set(columns)
        and _accepts_any_row(table)
        and set(table.protocol().writer_features or ()) <= _REWRITABLE_FEATURES
        and (not has_change_feed(table) or (writes_feed and not find_reserved_columns(columns)))
    )


def can_have_vectors(table: DeltaTable) -> bool:
    """True if a table has deletion vectors enabled, or if they can be enabled.

    A table with deletion vectors must list all features that it uses. False for writer versions that imply features which
    `deletion_vectors.enable_vectors` does not know.
    """
    configuration = table.metadata().configuration
    return (
        can_translate_names(table)
        and table.protocol().min_writer_version in {*FEATURES_BY_WRITER_VERSION, 7}
        and not is_append_only(configuration)
        and find_vectors_setting(configuration) is not False
    )


def _accepts_any_row(table: DeltaTable) -> bool:
    """True if a table has no partitions, no constraints and no computed values, so that it accepts every row.

    The list of features does not show this, because the writer versions 3 to 6 have no such list (Delta protocol,
    Writer Version Requirements).
    """
    metadata, fields = table.metadata(), table.schema().fields
    return not (
        metadata.partition_columns
        or find_constraints(metadata.configuration)
        or any(not field.nullable for field in fields)
        or any(name.startswith(_CONSTRAINT_METADATA) for field in fields for name in field.metadata or {})
    )


def _stored_type(schema: pa.Schema) -> pa.DataType:
    """The columns of a schema as a struct, with the types that a Delta table gives them."""
    return pa.struct(pa.schema(Schema.from_arrow(schema).to_arrow()))


def _add_fields(table_type: pa.DataType, file_type: pa.DataType) -> pa.DataType:
    """The type `table_type` with those fields of `file_type` that it lacks, also within structs."""
    if not (pa.types.is_struct(table_type) and pa.types.is_struct(file_type)):
        return table_type
    fields = {field.name: field.type for field in table_type}
    for field in file_type:
        fields[field.name] = _add_fields(fields.get(field.name, field.type), field.type)
    return pa.struct(list(fields.items()))


def _has_fields(table_type: pa.DataType, file_type: pa.DataType) -> bool:
    """True if the type `table_type` has all fields of the type `file_type`. The fields of a struct may be in any order."""
    if not (pa.types.is_struct(table_type) and pa.types.is_struct(file_type)):
        return bool(table_type == file_type)
    return all(
        table_type.get_field_index(f.name) >= 0 and _has_fields(table_type.field(f.name).type, f.type)
        for f in file_type
    )
