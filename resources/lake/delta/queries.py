"""SQL over Delta tables by DataFusion, the query engine within delta-rs.

In: a table that delta-rs has open, and a query. Out: rows. Raises DeltaError.
"""

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError


def quoted_column(column: str) -> str:
    """A column name, quoted for DataFusion."""
    return '"' + column.replace('"', '""') + '"'


def query_table(table: DeltaTable, query: str) -> pa.Table:
    """The result of SQL over a table `t`.

    Raises DeltaError, even for a missing file, for which delta-rs raises a plain Exception.
    """
    result = QueryBuilder().register("t", table).execute(query)
    try:
        return pa.table(result.read_all())
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise DeltaError(str(error)) from error
