"""Spark's DDL for columns, the order key of changes, and other columns of Spark."""

from collections.abc import Iterable

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.resources.lake.delta.records import quoted

#: The order key of a change: the LSN of its commit record and its place in the transaction.
Order = tuple[int, int]


def ddl(columns: Iterable[tuple[str, str]]) -> str:
    """Column names and Spark types as a DDL schema."""
    return ", ".join(f"{quoted(name)} {spark}" for name, spark in columns)


def struct_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """Column names and Spark types as a struct type."""
    return f"struct<{', '.join(f'{quoted(name)}: {spark}' for name, spark in columns)}>"


def changes_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """The DDL schema of a table's transformed changes (`changes_schema`); `columns` are the replica's."""
    struct = struct_ddl(columns)
    return (
        "slice bigint, commit_lsn bigint, ordinal bigint, number bigint, commit_time timestamp, operation string,"
        f" unchanged array<string>, old {struct}, new {struct}"
    )


def field(struct: str, name: str) -> Column:
    """A field of a struct column; its name may have any characters."""
    return F.col(struct).getField(name)
