"""Functions of `decoding` over columns, where Spark has no expression with PostgreSQL's meaning.

In: a function of Python values. Out: one of Columns, which hands whole Arrow batches to the executors' Python; Spark 4.0 rows.
Spark evaluates such a call, and its operands, for every row that reaches it, whatever conditions are around it:
one that may fail returns its error, and `value_of` raises that where Spark comes to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StringType, StructField, StructType

from pgsieve.assets.steps.row_filters.expressions import bound
from pgsieve.decoding.errors import PgsieveError

_VALUE: Final = "value"
_ERROR: Final = "filter_error"
#: A value, or an error, as Spark has it in a row.
_OUTCOME: Final = Row(_VALUE, _ERROR)


@dataclass(frozen=True)
class PythonFunction:
    """A function of Python values; one that is strict is NULL where an operand is, and not called."""

    function: Callable[..., Any]
    returns: DataType
    strict: bool = True

    def values(self, *operands: Column) -> Column:
        """Return its values; it must not fail."""
        return udf(self, can_fail=False)(*operands)

    def outcomes(self, *operands: Column) -> Column:
        """Return its values or errors, for `value_of`; an operand may be such an outcome, whose error is handed on."""
        return udf(self, can_fail=True)(*operands)

    def evaluated(self, operands: Sequence[pa.Array]) -> pa.Array:
        """Return the values of rows of operands."""
        rows = zip(*(operand.to_pylist() for operand in operands), strict=True)
        return pa.array([self.value(*row) for row in rows], to_arrow_type(self.returns))

    def attempted(self, operands: Sequence[pa.Array]) -> pa.Array:
        """Return the values or errors of rows of operands."""
        rows = zip(*(operand.to_pylist() for operand in operands), strict=True)
        outcomes = [self.outcome(*row) for row in rows]
        values = pa.array([value for value, _ in outcomes], to_arrow_type(self.returns))
        errors = pa.array([error for _, error in outcomes], pa.string())
        return pa.StructArray.from_arrays([values, errors], [_VALUE, _ERROR])

    def value(self, *operands: Any) -> Any:
        """Return the value of a row of operands."""
        row = [bytes(each) if isinstance(each, bytearray) else each for each in operands]
        return None if self.strict and None in row else self.function(*row)

    def outcome(self, *operands: Any) -> tuple[Any, str | None]:
        """Return the value of a row of operands, or the error: of an operand that is an outcome, or the function's own."""
        # PostgreSQL evaluates operands from the left: what fails first is what is told.
        outcomes = [operand for operand in operands if isinstance(operand, dict | Row)]
        failed = next((each[_ERROR] for each in outcomes if each[_ERROR] is not None), None)
        if failed is not None:
            return None, failed
        try:
            return self.value(
                *(each[_VALUE] if isinstance(each, dict | Row) else each for each in operands)
            ), None
        except PgsieveError as raised:
            return None, str(raised)

    def outcome_in_row(self, *operands: Any) -> Row:
        """Return the same by its fields: Spark hands it to the function around as it is, where both are called row by row."""
        return _OUTCOME(*self.outcome(*operands))


def value_of(outcome: Column) -> Column:
    """Return the value of an outcome, or fail with its error."""

    def build(made: Column) -> Column:
        return F.when(made[_ERROR].isNotNull(), F.raise_error(made[_ERROR])).otherwise(made[_VALUE])

    return bound(build, outcome)


@cache
def udf(of: PythonFunction, *, can_fail: bool) -> Callable[..., Column]:
    """Return a function of Columns: of values, or of outcomes where it can fail."""
    error = StructField(_ERROR, StringType())
    returns = StructType([StructField(_VALUE, of.returns), error]) if can_fail else of.returns

    def evaluate(*operands: pa.Array) -> pa.Array:
        return of.attempted(operands) if can_fail else of.evaluated(operands)

    evaluated: Callable[..., Column]
    try:
        # Imported late: most filters do not need it.
        from pyspark.sql.pandas.functions import arrow_udf
    except ImportError:
        # Spark 4.0 has none, and hands Python each row.
        evaluated = F.udf(of.outcome_in_row if can_fail else of.value, returns, useArrow=False)
    else:
        evaluated = arrow_udf(evaluate, returns)  # type: ignore[call-overload]
    return evaluated
