"""Columns in Spark's notation, and the order key of changes."""

from collections.abc import Iterable

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.resources.lake.delta.records import quote_name

#: The order key of a change: the LSN of the commit record of its transaction, and its ordinal (its number in the
#: transaction).
OrderKey = tuple[int, int]


def format_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """Write columns as a schema in Spark's DDL. Each column is a name and a Spark type."""
    return ", ".join(f"{quote_name(name)} {spark_type}" for name, spark_type in columns)


def format_struct_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """Write columns as a struct type in Spark's DDL. Each column is a name and a Spark type."""
    return f"struct<{', '.join(f'{quote_name(name)}: {spark_type}' for name, spark_type in columns)}>"


def format_changes_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """The schema of a table's transformed (decoded and filtered) changes in Spark's DDL.

    `columns` are the columns of the replica. `changes_schema` is the same schema for Arrow.
    """
    struct = format_struct_ddl(columns)
    return (
        "slice bigint, commit_lsn bigint, ordinal bigint, number bigint, commit_time timestamp, operation string,"
        f" unchanged array<string>, old {struct}, new {struct}"
    )


def get_struct_field(struct: str, name: str) -> Column:
    """A field of a struct column. Unlike in Spark's `col`, the name of the field may have any characters."""
    return F.col(struct).getField(name)
