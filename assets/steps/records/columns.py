"""Names and Spark types as DDL, and the fixed columns of pgsieve's own tables."""

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.resources.lake.records import quoted

#: The order key of a change: the LSN of its commit record and its place in the transaction.
ORDER = ("commit_lsn", "ordinal")
Order = tuple[int, int]

#: Operations that change one row.
ROW_OPERATIONS = ("insert", "update", "delete")

#: What decided what the publications send, from an LSN on, and the subscriptions that the slot was read for.
CATALOGS = pa.schema(
    {
        "lsn": pa.int64(),
        "digest": pa.string(),
        "catalog": pa.string(),
        "subscriptions": pa.list_(pa.string()),
    }
)

#: The slices [begin, slice) that a subscription has as the publisher decided.
ALTERED = pa.schema({"subscription": pa.string(), "begin": pa.int64(), "slice": pa.int64()})


def ddl(columns: Iterable[tuple[str, str]]) -> str:
    """Column names and Spark types as a DDL schema."""
    return ", ".join(f"{quoted(name)} {spark}" for name, spark in columns)


def struct_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """Column names and Spark types as a struct type."""
    return f"struct<{', '.join(f'{quoted(name)}: {spark}' for name, spark in columns)}>"


def field(struct: str, name: str) -> Column:
    """A field of a struct column, whatever characters its name has."""
    return F.col(struct).getField(name)


def order() -> Column:
    """The order key as one comparable value."""
    return F.struct(*ORDER)
