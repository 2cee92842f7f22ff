"""Describes a MERGE for both engines: conditions and changes for a table `t` and a source `s`.

In: columns of the table and of the source, which has a column `action`. Out: clauses with names that are quoted
for an engine. Raises LakeError for a column that conflicts with Spark's own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.records import quoted

#: An engine's function to quote a column's name.
Quote = Callable[[str], str]

#: Sets of columns that Delta's MERGE in Spark adds to the rows (ClassicMergeExecutor and MergeOutputGeneration in
#: Delta Lake). A table that has all columns of a set conflicts with them.
_RESERVED = (
    {"_target_row_present_"},
    {"_source_row_present_"},
    {"_row_dropped_"},
    {"_row_id_", "_file_name_", "_condition_"},
)


def refuse_reserved_columns(columns: Collection[str]) -> None:
    """Raise LakeError if Spark's MERGE would fail because it adds columns of the same names."""
    names = {name.lower() for name in columns}
    for reserved in _RESERVED:
        if reserved <= names:
            listed = ", ".join(sorted(reserved))
            raise LakeError(
                f"Delta's MERGE itself adds a column {listed}, so it cannot change a table with this column",
                hint="rename the column, or publish a column list without it",
                sqlstate="42701",
            )


@dataclass(frozen=True)
class Clauses:
    """The clauses of a MERGE: rows that match `on` are deleted or updated, others are inserted. Columns are quoted."""

    on: str
    #: The condition under which source rows without a match are inserted, and their values.
    insert_condition: str
    insert: Mapping[str, str]
    #: The condition under which matched rows are deleted; None means that all are.
    delete_condition: str | None = None
    #: The condition under which only the columns of `close` are updated in matched rows, and their values.
    close_condition: str | None = None
    close: Mapping[str, str] = field(default_factory=dict)
    #: The values of all other matched rows.
    update: Mapping[str, str] = field(default_factory=dict)

    def statement(self, target: str, source: str) -> str:
        """The MERGE as Spark's SQL."""
        delete = f" and {self.delete_condition}" if self.delete_condition else ""
        closing = f" and {self.close_condition} then update set {_assignments(self.close)}"
        close = f" when matched{closing}" if self.close else ""
        update = f" when matched then update set {_assignments(self.update)}" if self.update else ""
        return (
            f"merge into {target} t using {source} s on {self.on}"
            f" when matched{delete} then delete{close}{update}"
            f" when not matched and {self.insert_condition} then insert ({', '.join(self.insert)})"
            f" values ({', '.join(self.insert.values())})"
        )


def _assignments(values: Mapping[str, str]) -> str:
    return ", ".join(f"t.{column} = {value}" for column, value in values.items())


@dataclass(frozen=True)
class Merge:
    """A net change by key. `action` is delete, update, upsert, or end, which updates only the columns `of_ended`.

    `key` and `values` map columns of the table to the source's. `unknown` maps columns of the table to boolean
    columns of the source: where true, the row keeps its value.
    """

    key: Mapping[str, str]
    values: Mapping[str, str]
    unknown: Mapping[str, str]
    of_ended: Collection[str] = ()

    @classmethod
    def flat(
        cls,
        key: Sequence[str],
        columns: Sequence[str],
        unsent: Collection[str],
        of_ended: Collection[str] = (),
    ) -> "Merge":
        """A merge of a source with the columns k0, ... (key), v0, ... (values) and u0, ... (true for unsent values)."""
        return cls(
            key={name: f"k{i}" for i, name in enumerate(key)},
            values={name: f"v{i}" for i, name in enumerate(columns)},
            unknown={name: f"u{i}" for i, name in enumerate(columns) if name in unsent},
            of_ended=of_ended,
        )

    def clauses(self, quote: Quote) -> Clauses:
        """The clauses, with column names quoted by `quote`."""

        def new(column: str, value: str) -> str:
            if column not in self.unknown:
                return f"s.{value}"
            return f"case when s.{self.unknown[column]} then t.{quote(column)} else s.{value} end"

        return Clauses(
            on=" and ".join(f"t.{quote(column)} = s.{value}" for column, value in self.key.items()),
            delete_condition="s.action = 'delete'",
            close_condition="s.action = 'end'",
            close={quote(column): f"s.{self.values[column]}" for column in self.of_ended},
            update={quote(column): new(column, value) for column, value in self.values.items()},
            insert_condition="s.action = 'upsert'",
            insert={quote(column): f"s.{value}" for column, value in self.values.items()},
        )


def keyless_clauses(same_row: str, columns: Sequence[str]) -> Clauses:
    """Clauses that delete the rows equal to a deleted row, and insert the inserted rows.

    `same_row` is the condition in Spark's SQL that a row of the table and of the source are equal.
    """
    return Clauses(
        on=f"s.action = 'delete' and {same_row}",
        insert_condition="s.action = 'insert'",
        insert={quoted(column): f"s.row.{quoted(column)}" for column in columns},
    )
