"""Functions of `decoding` over columns, where Spark has no expression with PostgreSQL's meaning.

In: a function of Python values. Out: one of Columns, which hands whole Arrow batches to the executors' Python.
Spark evaluates such a call, and its operands, for every row that reaches it, whatever conditions are around it:
one that may fail returns its error, and `value_of` raises that where Spark comes to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StringType, StructField, StructType

from pgsieve.assets.steps.row_filters.expressions import bound
from pgsieve.decoding.errors import PgsieveError

_VALUE: Final = "value"
_ERROR: Final = "filter_error"


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
        values = [None if self.strict and None in row else self.function(*row) for row in rows]
        return pa.array(values, to_arrow_type(self.returns))

    def attempted(self, operands: Sequence[pa.Array]) -> pa.Array:
        """Return the values or errors of rows of operands."""
        # PostgreSQL evaluates operands from the left: what fails first is what is told.
        failed = pc.coalesce(
            pa.nulls(len(operands[0]), pa.string()), *(o.field(_ERROR) for o in operands if _is_outcome(o))
        ).to_pylist()
        operand_values = [operand.field(_VALUE) if _is_outcome(operand) else operand for operand in operands]
        rows = zip(*(operand.to_pylist() for operand in operand_values), strict=True)
        outcomes = [self._attempt(row, error) for row, error in zip(rows, failed, strict=True)]
        values = pa.array([value for value, _ in outcomes], to_arrow_type(self.returns))
        errors = pa.array([error for _, error in outcomes], pa.string())
        return pa.StructArray.from_arrays([values, errors], [_VALUE, _ERROR])

    def _attempt(self, row: tuple[Any, ...], error: str | None) -> tuple[Any, str | None]:
        if error is not None or (self.strict and None in row):
            return None, error
        try:
            return self.function(*row), None
        except PgsieveError as raised:
            return None, str(raised)


def _is_outcome(operand: pa.Array) -> bool:
    return isinstance(operand, pa.StructArray) and operand.type.get_field_index(_ERROR) >= 0


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

    # Imported late: Spark 4.0 has none, and most filters do not need it.
    from pyspark.sql.pandas.functions import arrow_udf

    evaluated: Callable[..., Column] = arrow_udf(evaluate, returns)  # type: ignore[call-overload]
    return evaluated
