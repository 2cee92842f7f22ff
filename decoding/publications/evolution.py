"""Schema changes of a published table: whether its replica can be altered in place, and how.

A Relation message comes only when a row changes, and it identifies columns only by name. No message has the
defaults that PostgreSQL fills in, or the values that ALTER TABLE rewrites. So this module compares two states
of the catalog: the former state, with which the replica was written (`Layout`), and the present state.

- PostgreSQL never reuses the number of a column. So equal numbers mean the same column, even if it was renamed.
- A column was altered if xmin, the transaction that wrote its row of pg_attribute, differs.
- A table was rewritten if its file (relfilenode) differs.

Out:

- `find_column_sources`: where each column of the altered replica gets its values from.
- `find_present_names`: the present names of the columns in a Relation message.

Raises SchemaChangedError if a change between both states is ambiguous.

PostgreSQL documentation, ALTER TABLE, notes; ATExecAddColumn() in src/backend/commands/tablecmds.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Attribute, Catalog, Table
from pgsieve.decoding.values.builtin_types import DERIVED_TYPES
from pgsieve.decoding.values.printed_names import NAME_KIND_BY_OID

#: The oids of text and varchar. A column that changes from one to the other keeps the text of its values.
_TEXT_OIDS = {25, 1043}


class SchemaChangedError(PgsieveError):
    """The replica cannot follow a schema change; the table must be copied again."""


@dataclass(frozen=True, slots=True)
class LayoutColumn:
    """A column of a table.

    - `changed_xid` is the transaction that last altered the column.
    - `missing_values` has the column's values in rows that are older than the column; None is NULL. There are several values
      if the leaves of a partitioned table differ.
    - `type_parts` has the parts of the column's type that decide how its values are printed. Each part is one of:

        ("e", oid, label, ...)              an enum with its labels
        ("w", oid, transaction, ...)        the transactions that wrote the labels of an enum
        ("c", oid, "number type", ...)      a composite type with its fields
        ("n", kind of names, digest)        a digest of all names that values of the type can show, such as the names
                                            of all relations for regclass
    """

    number: int
    name: str
    type_oid: int
    type_modifier: int
    changed_xid: int
    missing_values: tuple[str | None, ...] = ()
    type_parts: tuple[tuple[str, ...], ...] = ()


_JSON_NAME_BY_FIELD = {"changed_xid": "changed", "missing_values": "missing", "type_parts": "made"}


def to_json_field(name_and_value: tuple[str, Any]) -> tuple[str, Any]:
    """Return a field of a layout with the name that it has in JSON, and its value."""
    name, value = name_and_value
    return _JSON_NAME_BY_FIELD.get(name, name), value


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a table's definition that its rows depend on.

    `files` has the oid and the file of the table, or the oid and the file of each leaf of a partitioned table.
    `columns_ever` counts the columns, including dropped columns.
    """

    oid: int
    columns: tuple[LayoutColumn, ...]
    columns_ever: int
    files: tuple[tuple[int, int], ...]

    @classmethod
    def from_table(cls, table: Table, catalog: Catalog) -> Layout:
        """Return the layout of a table, by this state of the catalog."""
        tables_with_rows = (
            [catalog.tables[oid] for oid in table.leaves if oid in catalog.tables]
            if table.leaves
            else [table]
        )
        columns = tuple(
            LayoutColumn(
                a.number,
                a.name,
                a.type_oid,
                a.type_modifier,
                a.changed,
                _find_missing_values(a, tables_with_rows),
                _list_type_parts(a.type_oid, catalog),
            )
            for a in table.attributes
        )
        files = tuple(
            sorted((table_with_rows.oid, table_with_rows.file) for table_with_rows in tables_with_rows)
        )
        return cls(table.oid, columns, table.columns_ever, files)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Layout:
        """Return the layout from a JSON document, whose fields have the names of `to_json_field`."""
        columns = (
            LayoutColumn(
                number=column["number"],
                name=column["name"],
                type_oid=column["type_oid"],
                type_modifier=column["type_modifier"],
                changed_xid=column["changed"],
                missing_values=tuple(column["missing"]),
                type_parts=tuple(map(tuple, column.get("made", ()))),
            )
            for column in document["columns"]
        )
        files = tuple((oid, file) for oid, file in document["files"])
        return cls(document["oid"], tuple(columns), document["columns_ever"], files)

    @property
    def is_partitioned(self) -> bool:
        """Whether the table is partitioned, so that its rows are in its leaves."""
        return any(oid != self.oid for oid, _ in self.files)

    def is_rewritten_in(self, later_catalog: Catalog) -> bool:
        """Whether the later catalog shows that the table was dropped, or that its rows are in other files.

        A copy of such a table at an earlier snapshot is wrong: after TRUNCATE, or an ALTER TABLE that rewrites the
        table, that snapshot sees an empty table (PostgreSQL documentation, Concurrency Control: Caveats).
        """
        table = later_catalog.tables.get(self.oid)
        return table is None or Layout.from_table(table, later_catalog).files != self.files

    def find_column_by_number(self, number: int) -> LayoutColumn | None:
        """The column with this number, or None."""
        return next((c for c in self.columns if c.number == number), None)

    def find_column_by_name(self, name: str) -> LayoutColumn | None:
        """The column with this name, or None."""
        return next((c for c in self.columns if c.name == name), None)

    def list_added_columns(self, former: Layout) -> list[LayoutColumn]:
        """The columns that were added after a former layout."""
        return [c for c in self.columns if c.number > former.columns_ever]


def _find_missing_values(attribute: Attribute, tables_with_rows: Sequence[Table]) -> tuple[str | None, ...]:
    values = {
        column.missing
        for table in tables_with_rows
        for column in table.attributes
        if column.name == attribute.name
    }
    return tuple(sorted(values, key=lambda value: (value is not None, value or "")))


def _list_type_parts(type_oid: int, catalog: Catalog) -> tuple[tuple[str, ...], ...]:
    """Return the value of `LayoutColumn.type_parts` for a type.

    ALTER TYPE, or a new name of an object, can change these parts and so the text of stored values, without rewriting a
    row.
    """
    parts, label_transactions, names = dict[int, tuple[str, ...]](), dict[int, tuple[str, ...]](), set[str]()
    part_oids, pending_oids = set[int](), [type_oid]
    while pending_oids:
        oid = pending_oids.pop()
        if oid in part_oids:
            continue
        part_oids.add(oid)
        if oid in NAME_KIND_BY_OID:
            names.add(NAME_KIND_BY_OID[oid])
        if (derived_type := catalog.types.get(oid) or DERIVED_TYPES.get(oid)) is None:
            continue
        pending_oids += [derived_type.underlying_oid, *(field for _, field in derived_type.fields)]
        if derived_type.kind == "e":
            parts[oid] = ("e", str(oid), *derived_type.labels)
            label_transactions[oid] = ("w", str(oid), *map(str, derived_type.label_xids))
        elif derived_type.kind == "c":
            parts[oid] = ("c", str(oid), *(f"{number} {field}" for number, field in derived_type.fields))
    printed_names = (("n", kind, catalog.names.get(kind, "")) for kind in sorted(names))
    return (
        *(parts[oid] for oid in sorted(parts)),
        *(label_transactions[oid] for oid in sorted(label_transactions)),
        *printed_names,
    )


@dataclass(frozen=True, slots=True)
class ColumnSource:
    """After a table was altered: where the rows in its replica get the values of one column from.

    The values come from the replica's column `former_column`. If `former_column` is None, the column is new, and all
    rows get the same `value` (None is NULL).
    """

    column: str
    former_column: str | None
    value: str | None = None


def find_column_sources(
    former: Layout,
    present: Layout,
    former_columns: Mapping[str, str],
    present_columns: Mapping[str, str],
    *,
    has_column_list: bool,
) -> tuple[ColumnSource, ...]:
    """Return the source of each present column, for the rows that the replica already has.

    `former_columns` and `present_columns` map the names of the published columns to their Spark types.
    `has_column_list` says that a publication has a column list. In that case the slot's messages may lack the values of
    an added column. Raises SchemaChangedError if the replica cannot be altered in place.
    """
    refuse_ambiguity(former, present)
    return tuple(
        _find_column_source(
            former, present, name, former_columns, spark_type, has_column_list=has_column_list
        )
        for name, spark_type in present_columns.items()
    )


def refuse_ambiguity(former: Layout, present: Layout) -> None:
    """Raise SchemaChangedError if several columns may have had the same name at some time between both states.

    A message of that time has only the column's name, which may mean any of these columns. For example, if column `a`
    was dropped and column `b` of the same type was added, `a` may have been renamed to `b` for a time before it was
    dropped. So a message with the name `b` may be about either column.
    """
    if former.oid != present.oid:
        raise SchemaChangedError("it was dropped and created again")
    added_columns = present.list_added_columns(former)
    if len(added_columns) != present.columns_ever - former.columns_ever:
        raise SchemaChangedError("a column was added and dropped again")
    names = {c.name for c in former.columns}
    for column in present.columns:
        former_column = former.find_column_by_number(column.number)
        if column.name in names and (former_column is None or former_column.name != column.name):
            raise SchemaChangedError(f'column "{column.name}" is another one than before')
    dropped_types = {c.type_oid for c in former.columns if present.find_column_by_number(c.number) is None}
    if any(c.type_oid in dropped_types for c in added_columns):
        raise SchemaChangedError("a column was dropped and one of the same type added")


def _find_column_source(
    former: Layout,
    present: Layout,
    name: str,
    former_columns: Mapping[str, str],
    spark_type: str,
    *,
    has_column_list: bool,
) -> ColumnSource:
    column = present.find_column_by_name(name)
    assert column is not None
    former_column = former.find_column_by_number(column.number)
    if former_column is None:
        if has_column_list:
            raise SchemaChangedError(f'column "{name}" was added, and a publication has a column list')
        return ColumnSource(name, None, find_missing_value(column, former, present))
    if former_column.name not in former_columns:
        raise SchemaChangedError(f'column "{name}" is published now')
    if former_columns[former_column.name] != spark_type or not _has_same_text(
        former_column.type_oid, column.type_oid
    ):
        raise SchemaChangedError(f'column "{name}" has another type')
    if _is_altered(former_column.type_parts, column.type_parts):
        raise SchemaChangedError(
            f'the type of column "{name}", or a name that its values can show, was altered'
        )
    if column.changed_xid != former_column.changed_xid and _has_other_files(former, present):
        raise SchemaChangedError(f'column "{name}" was altered and the table rewritten')
    return ColumnSource(name, former_column.name)


def find_missing_value(column: LayoutColumn, former: Layout, present: Layout) -> str | None:
    """The value of an added column in the rows that are older than the column.

    Raises SchemaChangedError if this value is unknown: because the partitions have different values, or because
    the table was rewritten.
    """
    if len(column.missing_values) > 1:
        raise SchemaChangedError(
            f'column "{column.name}" was added with different defaults in the partitions'
        )
    value = column.missing_values[0] if column.missing_values else None
    if value is None and _has_other_files(former, present):
        raise SchemaChangedError(f'column "{column.name}" was added and the table rewritten')
    return value


def _has_same_text(former_oid: int, present_oid: int) -> bool:
    return former_oid == present_oid or {former_oid, present_oid} <= _TEXT_OIDS


def _is_altered(former: tuple[tuple[str, ...], ...], present: tuple[tuple[str, ...], ...]) -> bool:
    """Whether a type was altered so that the text of stored values can differ (`LayoutColumn.type_parts`).

    New labels at the end of an enum do not change the text. An earlier version of pgsieve may have recorded `former`
    without some parts. If the part for printed names is missing, the type counts as altered, because these names may
    have changed since. Any other missing part counts as not altered.
    """
    former_parts = {part[:2]: part for part in former}
    return any(
        (part[: len(former_part)] if part[0] in {"e", "w"} else part) != former_part
        if (former_part := former_parts.get(part[:2])) is not None
        else part[0] == "n"
        for part in present
    )


def _has_other_files(former: Layout, present: Layout) -> bool:
    """Whether the table has another file. In a partitioned table, whether a leaf that still exists has another file."""
    files = dict(present.files)
    return any(files.get(oid, file) != file for oid, file in former.files)


def find_present_names(
    columns: Iterable[tuple[str, int]], relation_id: int, former: Layout, present: Layout
) -> tuple[str, ...]:
    """Return the present names of the columns of a Relation message that was sent between both states.

    `columns` has the name and the type oid of each column in the message. A column that was dropped since keeps
    its name. Raises SchemaChangedError if a name is ambiguous, or if neither state has a column of this name.
    """
    names, numbers = [], []
    for name, type_oid in columns:
        column = present.find_column_by_name(name) or former.find_column_by_name(name)
        if column is None:
            raise SchemaChangedError(f'column "{name}" had this name only between two schema changes')
        present_column, former_column = (
            present.find_column_by_number(column.number),
            former.find_column_by_number(column.number),
        )
        if type_oid not in {c.type_oid for c in (present_column, former_column) if c}:
            raise SchemaChangedError(f'column "{name}" had this type only between two schema changes')
        names.append(present_column.name if present_column else name)
        numbers.append(column.number)
    if relation_id != present.oid:
        # The message comes from a leaf. Its columns may be numbered differently from the root's, so the check of the
        # order below would prove nothing. So the names are certain only if no column was altered.
        for column in present.columns:
            former_column = former.find_column_by_number(column.number)
            if former_column is not None and former_column.changed_xid != column.changed_xid:
                raise SchemaChangedError(f'column "{column.name}" was altered')
    # A message lists the columns by ascending number. If the numbers found by name do not ascend, names were exchanged.
    elif any(low >= high for low, high in pairwise(numbers)):
        raise SchemaChangedError("columns exchanged their names")
    return tuple(names)
