"""Schema changes of a published table: whether its replica can follow in place, and how.

The stream describes a table only when a row changes, and by names only. Defaults that PostgreSQL fills in
and values that ALTER TABLE rewrites are in no message. So two states of the catalog are compared: the one
that the replica follows (`Layout`) and the present one. A column is identified by its number, which is never
reused; an altered column by the transaction in its row of pg_attribute; a rewritten table by its file. Out:
the source of each column's values (`sources`), and the present names of the columns in a Relation message
from the time between (`present_names`). Raises SchemaChangedError where rows may have changed in a way that
neither state shows.

PostgreSQL documentation, ALTER TABLE, notes; ATExecAddColumn() in src/backend/commands/tablecmds.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Attribute, Catalog, Table
from pgsieve.decoding.values.builtin_types import MADE
from pgsieve.decoding.values.printed_names import NAMES_OF

#: text and varchar have the same bytes and the same text.
_TEXTS = {25, 1043}


class SchemaChangedError(PgsieveError):
    """The table changed in a way that only another copy can follow."""


@dataclass(frozen=True, slots=True)
class LayoutColumn:
    """A column of a table: its number, name and type, and the transaction that altered it.

    `missing` has the missing value, or the different ones of a partitioned table's leaves; None is NULL.
    `made` describes the parts of a user's type: for each enum or composite its kind and oid, then the labels
    or fields that its values print, with the transactions that wrote the labels; and for printed names their
    kind, then a digest.
    """

    number: int
    name: str
    type_oid: int
    type_modifier: int
    changed: int
    missing: tuple[str | None, ...] = ()
    made: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a table's definition that its rows depend on: columns, and files (or its leaves')."""

    oid: int
    columns: tuple[LayoutColumn, ...]
    columns_ever: int
    files: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, table: Table, catalog: Catalog) -> Layout:
        """The present layout of a table."""
        parts = (
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
                _missing(a, parts),
                _made(a.type_oid, catalog),
            )
            for a in table.attributes
        )
        files = tuple(sorted((part.oid, part.file) for part in parts))
        return cls(table.oid, columns, table.columns_ever, files)

    @property
    def is_of_leaves(self) -> bool:
        """Whether the rows are in partitions."""
        return any(oid != self.oid for oid, _ in self.files)

    def is_rewritten(self, after: Catalog) -> bool:
        """Whether a later state of the catalog has other files for the table.

        After TRUNCATE, and after an ALTER TABLE that rewrites rows, an older snapshot finds no row (section
        13.6).
        """
        table = after.tables.get(self.oid)
        return table is None or Layout.of(table, after).files != self.files

    def numbered(self, number: int) -> LayoutColumn | None:
        """The column with this number."""
        return next((c for c in self.columns if c.number == number), None)

    def named(self, name: str) -> LayoutColumn | None:
        """The column with this name."""
        return next((c for c in self.columns if c.name == name), None)

    def added_since(self, former: Layout) -> list[LayoutColumn]:
        """The columns that a former layout did not have yet."""
        return [c for c in self.columns if c.number > former.columns_ever]


def _missing(attribute: Attribute, parts: Sequence[Table]) -> tuple[str | None, ...]:
    values = {a.missing for part in parts for a in part.attributes if a.name == attribute.name}
    return tuple(sorted(values, key=lambda value: (value is not None, value or "")))


def _made(type_oid: int, catalog: Catalog) -> tuple[tuple[str, ...], ...]:
    """The parts of a type whose alteration makes its values print differently without rewriting them."""
    made, written, names = dict[int, tuple[str, ...]](), dict[int, tuple[str, ...]](), set[str]()
    reached, rest = set[int](), [type_oid]
    while rest:
        oid = rest.pop()
        if oid in reached:
            continue
        reached.add(oid)
        if oid in NAMES_OF:
            names.add(NAMES_OF[oid])
        if (type_ := catalog.types.get(oid) or MADE.get(oid)) is None:
            continue
        rest += [type_.of, *(field for _, field in type_.fields)]
        if type_.kind == "e":
            made[oid] = ("e", str(oid), *type_.labels)
            written[oid] = ("w", str(oid), *map(str, type_.written))
        elif type_.kind == "c":
            made[oid] = ("c", str(oid), *(f"{number} {field}" for number, field in type_.fields))
    printed = (("n", kind, catalog.names.get(kind, "")) for kind in sorted(names))
    return (*(made[oid] for oid in sorted(made)), *(written[oid] for oid in sorted(written)), *printed)


@dataclass(frozen=True, slots=True)
class Source:
    """A column of the replica, and the source of its values: a former column, or one value for all rows.

    A `value` of None is NULL.
    """

    column: str
    former: str | None
    value: str | None = None


def sources(
    former: Layout,
    present: Layout,
    former_columns: Mapping[str, str],
    present_columns: Mapping[str, str],
    *,
    listed: bool,
) -> tuple[Source, ...]:
    """The source of each present column for the rows that the replica already has.

    `former_columns` and `present_columns` are the published ones with their Spark types. `listed` says that a
    column list may have kept an added column out of the stream. Raises SchemaChangedError.
    """
    refuse_ambiguity(former, present)
    return tuple(
        _source(former, present, name, former_columns, spark, listed=listed)
        for name, spark in present_columns.items()
    )


def refuse_ambiguity(former: Layout, present: Layout) -> None:
    """Raise if a name may have meant several columns between the two states: messages have only names."""
    if former.oid != present.oid:
        raise SchemaChangedError("it was dropped and created again")
    added = present.added_since(former)
    if len(added) != present.columns_ever - former.columns_ever:
        raise SchemaChangedError("a column was added and dropped again")
    names = {c.name for c in former.columns}
    for column in present.columns:
        before = former.numbered(column.number)
        if column.name in names and (before is None or before.name != column.name):
            raise SchemaChangedError(f'column "{column.name}" is another one than before')
    dropped = {c.type_oid for c in former.columns if present.numbered(c.number) is None}
    if any(c.type_oid in dropped for c in added):
        raise SchemaChangedError("a column was dropped and one of the same type added")


def _source(
    former: Layout, present: Layout, name: str, columns: Mapping[str, str], spark: str, *, listed: bool
) -> Source:
    column = present.named(name)
    assert column is not None
    before = former.numbered(column.number)
    if before is None:
        if listed:
            raise SchemaChangedError(f'column "{name}" was added beside a column list')
        return Source(name, None, missing_value(column, former, present))
    if before.name not in columns:
        raise SchemaChangedError(f'column "{name}" is published now')
    if columns[before.name] != spark or not _prints_alike(before.type_oid, column.type_oid):
        raise SchemaChangedError(f'column "{name}" has another type')
    if _is_altered(before.made, column.made):
        raise SchemaChangedError(f'the type of column "{name}" was altered, or a name that its values print')
    if column.changed != before.changed and _files_differ(former, present):
        raise SchemaChangedError(f'column "{name}" was altered and the table rewritten')
    return Source(name, before.name)


def missing_value(column: LayoutColumn, former: Layout, present: Layout) -> str | None:
    """The value of an added column in older rows.

    Raises SchemaChangedError if the value is unknown.
    """
    if len(column.missing) > 1:
        raise SchemaChangedError(
            f'column "{column.name}" was added with a default that partitions disagree on'
        )
    value = column.missing[0] if column.missing else None
    if value is None and _files_differ(former, present):
        raise SchemaChangedError(f'column "{column.name}" was added and the table rewritten')
    return value


def _prints_alike(former: int, present: int) -> bool:
    return former == present or {former, present} <= _TEXTS


def _is_altered(former: tuple[tuple[str, ...], ...], present: tuple[tuple[str, ...], ...]) -> bool:
    """Whether values may print differently; new labels at the end of an enum do not count.

    A record of an earlier version of pgsieve may lack an entry. Then labels count as not altered, and printed
    names as altered.
    """
    before = {entry[:2]: entry for entry in former}
    return any(
        (entry[: len(was)] if entry[0] in {"e", "w"} else entry) != was
        if (was := before.get(entry[:2])) is not None
        else entry[0] == "n"
        for entry in present
    )


def _files_differ(former: Layout, present: Layout) -> bool:
    """Whether all rows of the table, or of a leaf in both states, were rewritten."""
    files = dict(present.files)
    return any(files.get(oid, file) != file for oid, file in former.files)


def present_names(
    columns: Iterable[tuple[str, int]], relation_id: int, former: Layout, present: Layout
) -> tuple[str, ...]:
    """The present names of a Relation message's columns (name and type); it is not later than `present`.

    Dropped columns keep their name. Raises SchemaChangedError for a name that neither state has.
    """
    names, numbers = [], []
    for name, type_oid in columns:
        column = present.named(name) or former.named(name)
        if column is None:
            raise SchemaChangedError(f'column "{name}" had another name before and after')
        now, before = present.numbered(column.number), former.numbered(column.number)
        if type_oid not in {c.type_oid for c in (now, before) if c}:
            raise SchemaChangedError(f'column "{name}" had another type before and after')
        names.append(now.name if now else name)
        numbers.append(column.number)
    if relation_id != present.oid:
        # A leaf numbers its columns in its own way, so their order does not reveal swapped names.
        renamed = [c for c in present.columns if (b := former.numbered(c.number)) and b.changed != c.changed]
        if renamed:
            raise SchemaChangedError(f'column "{renamed[0].name}" was altered')
    elif any(low >= high for low, high in pairwise(numbers)):
        raise SchemaChangedError("columns exchanged their names")
    return tuple(names)
