"""Describes a MERGE, so that both engines can run it: the conditions and the changes for a table `t` and a source `s`.

In: the columns of the table, and of the source. One column of the source is `action`.
Out: the clauses of the MERGE, with names that are quoted for an engine.

Raises LakeError for a column that conflicts with a column of Spark's own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.records import quoted

#: The function of an engine that quotes the name of a column.
Quote = Callable[[str], str]

#: Sets of columns. Delta's MERGE in Spark adds the columns of one set to the rows (ClassicMergeExecutor and
#: MergeOutputGeneration in Delta Lake). A table that has all columns of a set conflicts with them.
_RESERVED = (
    {"_target_row_present_"},
    {"_source_row_present_"},
    {"_row_dropped_"},
    {"_row_id_", "_file_name_", "_condition_"},
)


def refuse_reserved_columns(columns: Collection[str]) -> None:
    """Raise LakeError if Spark's MERGE would fail because it adds columns with the names of the table's columns."""
    names = {name.lower() for name in columns}
    for reserved in _RESERVED:
        if reserved <= names:
            column_names = ", ".join(sorted(reserved))
            raise LakeError(
                f"Delta's MERGE itself adds a column {column_names}, so it cannot change a table with this column",
                hint="rename the column, or publish a column list without it",
                sqlstate="42701",
            )


@dataclass(frozen=True)
class Clauses:
    """The clauses of a MERGE.

    Rows that match `on` are deleted or updated, and other rows are inserted. Columns are quoted.
    """

    on: str
    #: The condition for the rows of the source that are inserted if they match no row, and the values to insert.
    insert_condition: str
    insert: Mapping[str, str]
    #: The condition for the rows that are deleted if they match. None means that all matching rows are deleted.
    delete_condition: str | None = None
    #: The condition for matching rows of which only the columns of `close` are updated, and the values of these columns.
    close_condition: str | None = None
    close: Mapping[str, str] = field(default_factory=dict)
    #: The values for all other matching rows.
    update: Mapping[str, str] = field(default_factory=dict)

    def statement(self, target: str, source: str) -> str:
        """The MERGE as a statement of Spark's SQL."""
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
    """The part of an UPDATE after SET."""
    return ", ".join(f"t.{column} = {value}" for column, value in values.items())


@dataclass(frozen=True)
class Merge:
    """A net change of a table that has a key. Each row of the source has an action.

    The actions are delete, update, upsert and end. The action end updates only the columns `of_ended`.

    - `key`, `values`: map columns of the table to columns of the source
    - `unknown`: maps columns of the table to boolean columns of the source. Where the boolean is true, the row of
      the table keeps its value.
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
        """A merge of a source whose columns are k0, k1, ... (key), v0, ... (values) and u0, ... (true for unsent values)."""
        return cls(
            key={name: f"k{i}" for i, name in enumerate(key)},
            values={name: f"v{i}" for i, name in enumerate(columns)},
            unknown={name: f"u{i}" for i, name in enumerate(columns) if name in unsent},
            of_ended=of_ended,
        )

    def clauses(self, quote: Quote) -> Clauses:
        """The clauses of the MERGE. `quote` quotes the names of columns."""

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
    """The clauses that delete the rows equal to a deleted row, and insert the inserted rows.

    `same_row` is a condition in Spark's SQL. It says that a row of the table and a row of the source are equal.
    """
    return Clauses(
        on=f"s.action = 'delete' and {same_row}",
        insert_condition="s.action = 'insert'",
        insert={quoted(column): f"s.row.{quoted(column)}" for column in columns},
    )
