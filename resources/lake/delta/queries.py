"""Runs SQL over Delta tables by DataFusion, the query engine that is a part of delta-rs.

In: a table that delta-rs has open, and a query.
Out: rows.

Raises DeltaError.
"""

from datetime import datetime
from typing import Literal

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

#: The function of SQL for the least or the greatest value.
Bound = Literal["min", "max"]
#: The SQL for a time, in the dialects of delta-rs and Spark. The placeholder is for microseconds since 1970.
DELTA_RS_TIME, SPARK_TIME = (
    "arrow_cast({}, 'Timestamp(Microsecond, Some(\"UTC\"))')",
    "timestamp_micros({})",
)


def format_time(template: str, time: datetime | None) -> str:
    """A time in the SQL of an engine. The SQL is null for None."""
    return template.format(round(time.timestamp() * 1_000_000)) if time else "null"


def quote_column(column: str) -> str:
    """The name of a column, quoted for DataFusion."""
    return '"' + column.replace('"', '""') + '"'


def query_table(table: DeltaTable, query: str) -> pa.Table:
    """The result of an SQL query. In the query the name of the table is `t`.

    Raises DeltaError. If a file of the table is missing, delta-rs raises an error of the class Exception itself, which
    becomes a DeltaError, too.
    """
    result = QueryBuilder().register("t", table).execute(query)
    try:
        return pa.table(result.read_all())
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise DeltaError(str(error)) from error
