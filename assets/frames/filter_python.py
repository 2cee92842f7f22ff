"""Functions of `decoding` over columns, where Spark has no expression with PostgreSQL's meaning.

In: a function of Python values. Out: one of Columns, which hands whole Arrow batches to the executors' Python.
Spark evaluates such a call, and its operands, for every row that reaches it, whatever conditions are around it:
`assets.frames.row_filter` makes the operands NULL for rows that PostgreSQL would not evaluate it for. An error of
the function's fails the task.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType


@cache
def python_function(
    function: Callable[..., Any], returns: DataType, *, strict: bool = True
) -> Callable[..., Column]:
    """Return `function` over columns; one that is strict is NULL where an operand is, and not called."""
    arrow_type = to_arrow_type(returns)

    def evaluate(*operands: pa.Array) -> pa.Array:
        rows = zip(*(operand.to_pylist() for operand in operands), strict=True)
        values = [None if strict and None in row else function(*row) for row in rows]
        return pa.array(values, arrow_type)

    evaluated: Callable[..., Column] = arrow_udf(evaluate, returns)  # type: ignore[call-overload]
    return evaluated
