"""Describes a MERGE, so that both engines, delta-rs and Spark, can run it.

A description has the conditions and the assignments of the MERGE. In them the table is `t`, and the source is `s`.

In: the columns of the table, and of the source. One column of the source is `action`.
Out: the clauses of the MERGE, with names that are quoted for an engine.

Raises LakeError for a column that conflicts with a column of Spark's own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.records import quote_name

#: The function of an engine that quotes the name of a column.
QuoteColumn = Callable[[str], str]

#: Delta's MERGE in Spark adds these columns to the rows (ClassicMergeExecutor and MergeOutputGeneration in Delta Lake).
#: It fails for a table that has all columns of one of these sets.
_RESERVED_COLUMN_SETS = (
    {"_target_row_present_"},
    {"_source_row_present_"},
    {"_row_dropped_"},
    {"_row_id_", "_file_name_", "_condition_"},
)


def refuse_reserved_columns(columns: Collection[str]) -> None:
    """Raise LakeError if Spark's MERGE would fail because it adds columns with the names of the table's columns."""
    names = {name.lower() for name in columns}
    for reserved_columns in _RESERVED_COLUMN_SETS:
        if reserved_columns <= names:
            column_names = ", ".join(sorted(reserved_columns))
            raise LakeError(
                f"Delta's MERGE itself adds a column {column_names}, so it cannot change a table with this column",
                hint="rename the column, or publish a column list without it",
                sqlstate="42701",
            )


@dataclass(frozen=True)
class Clauses:
    """The clauses of a MERGE.

    Rows of the table that match a row of the source (`match_condition`) are deleted or updated. Rows of the source that
    match none are inserted. Names of columns are quoted.
    """

    match_condition: str
    #: The condition for the rows of the source that are inserted if they match no row, and the values to insert.
    insert_condition: str
    insert_values: Mapping[str, str]
    #: The condition for the rows that are deleted if they match. None means that all matching rows are deleted.
    delete_condition: str | None = None
    #: The condition for the rows that end if they match (they are deleted, but stay in the table), and the new values of
    #: their metadata columns. Their other columns keep their values.
    end_condition: str | None = None
    end_values: Mapping[str, str] = field(default_factory=dict)
    #: The values for all other matching rows.
    update_values: Mapping[str, str] = field(default_factory=dict)

    def format_statement(self, target: str, source: str) -> str:
        """The MERGE as a statement of Spark's SQL."""
        delete_condition = f" and {self.delete_condition}" if self.delete_condition else ""
        end_action = f" and {self.end_condition} then update set {_format_assignments(self.end_values)}"
        end_clause = f" when matched{end_action}" if self.end_values else ""
        update_clause = (
            f" when matched then update set {_format_assignments(self.update_values)}"
            if self.update_values
            else ""
        )
        return (
            f"merge into {target} t using {source} s on {self.match_condition}"
            f" when matched{delete_condition} then delete{end_clause}{update_clause}"
            f" when not matched and {self.insert_condition} then insert ({', '.join(self.insert_values)})"
            f" values ({', '.join(self.insert_values.values())})"
        )


def _format_assignments(values: Mapping[str, str]) -> str:
    """The part of an UPDATE after SET."""
    return ", ".join(f"t.{column} = {value}" for column, value in values.items())


@dataclass(frozen=True)
class Merge:
    """A net change of a table that has a key: for each changed key, one row of the source with an action.

    The actions are delete, upsert and end. The action end is for a deleted row that stays in the table, and updates only
    the columns `ended_columns`.

    - `key_source_by_column`, `value_source_by_column`: map columns of the table to columns of the source
    """

    key_source_by_column: Mapping[str, str]
    value_source_by_column: Mapping[str, str]
    ended_columns: Collection[str] = ()

    @classmethod
    def from_numbered_columns(
        cls,
        key: Sequence[str],
        columns: Sequence[str],
        ended_columns: Collection[str] = (),
    ) -> "Merge":
        """A merge of a source whose columns are k0, k1, ... (key) and v0, ... (values)."""
        return cls(
            key_source_by_column={name: f"k{i}" for i, name in enumerate(key)},
            value_source_by_column={name: f"v{i}" for i, name in enumerate(columns)},
            ended_columns=ended_columns,
        )

    def make_clauses(self, quote: QuoteColumn) -> Clauses:
        """The clauses of the MERGE. `quote` quotes the names of columns."""
        new_values = {
            quote(column): f"s.{source_column}"
            for column, source_column in self.value_source_by_column.items()
        }
        return Clauses(
            match_condition=" and ".join(
                f"t.{quote(column)} = s.{source_column}"
                for column, source_column in self.key_source_by_column.items()
            ),
            delete_condition="s.action = 'delete'",
            end_condition="s.action = 'end'",
            end_values={
                quote(column): f"s.{self.value_source_by_column[column]}" for column in self.ended_columns
            },
            update_values=new_values,
            insert_condition="s.action = 'upsert'",
            insert_values=new_values,
        )


def make_clauses_without_key(equality_condition: str, columns: Sequence[str]) -> Clauses:
    """Make clauses for a table without a key.

    They delete the table's rows that equal a row of the source with the action delete, and insert the rows of the source
    with the action insert.

    `equality_condition` is a condition in Spark's SQL. It says that a row of the table and a row of the source are equal.
    """
    return Clauses(
        match_condition=f"s.action = 'delete' and {equality_condition}",
        insert_condition="s.action = 'insert'",
        insert_values={quote_name(column): f"s.row.{quote_name(column)}" for column in columns},
    )
