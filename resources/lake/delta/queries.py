"""SQL over Delta tables by DataFusion, the query engine within delta-rs.

In: a table as delta-rs has it open, and a query of it. Out: rows. Raises DeltaError.
"""

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError


def quoted_column(column: str) -> str:
    """A column quoted for DataFusion."""
    return '"' + column.replace('"', '""') + '"'


def queried(table: DeltaTable, query: str) -> pa.Table:
    """What SQL says of a table `t`; raises DeltaError where a file is missing, which delta-rs gives no class."""
    result = QueryBuilder().register("t", table).execute(query)
    try:
        return pa.table(result.read_all())
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise DeltaError(str(error)) from error
