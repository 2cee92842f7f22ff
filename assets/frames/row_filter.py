"""Row filters as Spark expressions.

In: a `RowFilter` and a way to name a column of the row. Out: a boolean Column that is true, false or NULL where
PostgreSQL's expression is; it fails where PostgreSQL's fails (overflow, division by zero), which needs
spark.sql.ansi.enabled, Spark's default. Only functions that Spark Connect has, and no text of the user becomes
SQL. Raises nothing: what Spark cannot do exactly, `decoding.row_filter` has refused.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial, reduce
from operator import add, and_, eq, ge, gt, le, lt, mod, mul, ne, or_, sub
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Final, TypeGuard

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from decoding import filter_nodes as nodes
from decoding.filter_nodes import Digits, Node
from decoding.row_filter import RowFilter

_TYPES: Final[dict[int, DataType]] = {
    nodes.BOOL: BooleanType(),
    nodes.BYTEA: BinaryType(),
    nodes.INT2: ShortType(),
    nodes.INT4: IntegerType(),
    nodes.INT8: LongType(),
    nodes.FLOAT4: FloatType(),
    nodes.FLOAT8: DoubleType(),
    nodes.DATE: DateType(),
    nodes.TIMESTAMP: TimestampNTZType(),
    nodes.TIMESTAMPTZ: TimestampType(),
}  # and strings, for the rest

_COMPARISONS: Final[dict[str, Callable[[Column, Column], Column]]] = {
    "=": eq, "<>": ne, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip
_ARITHMETIC: Final[dict[str, Callable[[Column, Column], Column]]] = {
    "+": add, "-": sub, "*": mul, "%": mod, "/": partial(F.call_function, "div"),
}  # fmt: skip


# Spark's IN has -0.0 differ from 0.0, and wants one decimal type for all.
_UNLISTED: Final = frozenset((nodes.FLOAT4, nodes.FLOAT8, nodes.NUMERIC))


def condition(row_filter: RowFilter, column: Callable[[str], Column]) -> Column:
    """Return the filter over the columns that `column` gives for their names."""
    return _Compiler(column).compile(row_filter.tree)


def _spark_type(node: Node) -> DataType:
    if node.type_oid == nodes.NUMERIC:
        return _decimal_type(node.digits)
    return _TYPES.get(node.type_oid, StringType())


def _decimal_type(of: Digits | None) -> DataType:
    """Return the type of a numeric: its text where no decimal type holds it."""
    return StringType() if of is None else DecimalType(of.precision, of.scale)


class _Compiler:
    """Nodes to Columns."""

    def __init__(self, column: Callable[[str], Column]) -> None:
        self._column = column

    def compile(self, node: Node) -> Column:
        """Return the Column of a node, of the Spark type of the node's PostgreSQL type."""
        match node:
            case nodes.ColumnValue(name=name):
                return self._column(name)
            case nodes.Constant(value=value):
                return _constant(value, _spark_type(node))
            case nodes.Cast(operand=operand):
                return self._cast(operand, node)
            case nodes.Collate(operand=operand):
                return self.compile(operand)
            case nodes.Comparison(operator=operator, left=left, right=right):
                return self._strict(_COMPARISONS[operator](*self._comparable(left, right)), right)
            case nodes.NotDistinct(left=left, right=right):
                first, second = self._comparable(left, right)
                return first.eqNullSafe(second)
            case nodes.Logical(connective=connective, operands=operands):
                return self._logical(connective, operands)
            case nodes.Not(operand=operand):
                return ~self.compile(operand)
            case nodes.IsNull(operand=operand):
                return self.compile(operand).isNull()
            case nodes.IsTruth(operand=operand, truth=truth):
                return self.compile(operand).eqNullSafe(F.lit(truth))
            case nodes.Like(operand=operand, pattern=pattern):
                return F.like(self.compile(operand), F.lit(pattern))
            case nodes.Arithmetic(operator=operator, left=left, right=right):
                result = _ARITHMETIC[operator](self.compile(left), self.compile(right))
                return self._strict(result.cast(_spark_type(node)), right)
            case nodes.FunctionCall(name=name, operand=operand):
                return _FUNCTIONS[name](self._trimmed(operand))
            case nodes.Coalesce(operands=operands):
                return F.coalesce(*self._alike(operands, node))
            case nodes.Extreme(function=function, operands=operands):
                several = self._alike(operands, node)
                choose = F.greatest if function == "GREATEST" else F.least
                return choose(*several) if len(several) > 1 else several[0]
            case nodes.NullIf(left=left, right=right):
                first, second = self._comparable(left, right)
                return F.when(first.eqNullSafe(second), F.lit(None)).otherwise(self.compile(left))
            case nodes.Case(conditions=conditions, results=results, default=default):
                *values, last = self._alike((*results, default), node)
                return _chosen(zip(map(self.compile, conditions), values, strict=True), last)
            case _:
                raise TypeError(f"no Spark expression for {type(node).__name__}")

    def _logical(self, connective: str, operands: Sequence[Node]) -> Column:
        listed = self._listed(connective, operands)
        if listed is not None:
            return listed
        columns = [self.compile(operand) for operand in operands]
        joined = _joined(and_ if connective == "AND" else or_, columns)
        if not any(nodes.can_fail(operand) for operand in operands[1:]):
            return joined
        # Spark may compute a common part of later operands first; the branches of a CASE are left alone.
        decided = F.lit(connective == "OR")
        return _chosen([(column.eqNullSafe(decided), decided) for column in columns[:-1]], joined)

    def _strict(self, result: Column, right: Node) -> Column:
        """Compute the right side too when the left is NULL, as PostgreSQL does: it may have to fail."""
        if not nodes.can_fail(right):
            return result
        return F.when(self.compile(right).isNull(), F.lit(None)).otherwise(result)

    def _listed(self, connective: str, operands: Sequence[Node]) -> Column | None:
        """Return `x = a OR x = b …` as Spark's IN, and the negation of it; None for what is neither."""
        operator = "=" if connective == "OR" else "<>"
        match operands[0]:
            case nodes.Comparison(left=subject) if subject.type_oid not in _UNLISTED:
                values = [operand.right for operand in operands if _compares(operand, operator, subject)]
            case _:
                return None
        if len(values) < len(operands) or not all(isinstance(value, nodes.Constant) for value in values):
            return None
        found = self._trimmed(subject).isin([self._trimmed(value) for value in values])
        return found if connective == "OR" else ~found

    def _cast(self, operand: Node, node: nodes.Cast) -> Column:
        source, target = operand.type_oid, node.type_oid
        if source == nodes.BPCHAR and target != nodes.BPCHAR:
            return self._trimmed(operand)
        value = self.compile(operand)
        return value if source in nodes.STRINGS else value.cast(_spark_type(node))

    def _trimmed(self, node: Node) -> Column:
        """Return a value to compare: the padding of character(n) has no meaning (section 8.3)."""
        value = self.compile(node)
        return F.rtrim(value) if node.type_oid == nodes.BPCHAR else value

    def _comparable(self, left: Node, right: Node) -> tuple[Column, Column]:
        if left.type_oid != nodes.NUMERIC:
            return self._trimmed(left), self._trimmed(right)
        common = nodes.common_digits(iter((left.digits, right.digits)))
        if common is None:
            return _numeric_order(self._as_text(left)), _numeric_order(self._as_text(right))
        return self.compile(left).cast(_decimal_type(common)), self.compile(right).cast(_decimal_type(common))

    def _as_text(self, node: Node) -> Column:
        return self.compile(node).cast(StringType())

    def _alike(self, operands: Iterable[Node], result: Node) -> list[Column]:
        """Return operands of one type oid in one Spark type."""
        several = [self.compile(operand) for operand in operands]
        if result.type_oid != nodes.NUMERIC:
            return several
        return [value.cast(_decimal_type(result.digits)) for value in several]


def _compares(node: Node, operator: str, subject: Node) -> TypeGuard[nodes.Comparison]:
    return isinstance(node, nodes.Comparison) and node.operator == operator and node.left == subject


def _joined(connect: Callable[[Column, Column], Column], columns: Sequence[Column]) -> Column:
    """Join in halves: a filter of a thousand parts stays a shallow tree."""
    if len(columns) == 1:
        return columns[0]
    half = len(columns) // 2
    return connect(_joined(connect, columns[:half]), _joined(connect, columns[half:]))


def _chosen(branches: Iterable[tuple[Column, Column]], default: Column) -> Column:
    (first, *rest) = branches
    case = reduce(lambda built, branch: built.when(*branch), rest, F.when(*first))
    return case.otherwise(default)


def _constant(value: nodes.ConstantValue, spark_type: DataType) -> Column:
    match value:
        case bool() | bytes() | str():
            return F.lit(value)
        case Decimal():
            # By way of text: a Python Decimal's own precision would decide otherwise.
            return F.lit(str(value) if not value.is_finite() else format(value, "f")).cast(spark_type)
        case datetime() | date():
            # By way of text: neither the driver's time zone nor a calendar reform touches it.
            return F.lit(value.isoformat()).cast(spark_type)
        case _:
            return F.lit(value).cast(spark_type)


_NINES: Final = digits[::-1]


def _numeric_order(text: Column) -> Column:
    """Return a string that sorts as the numeric whose text this is: any number of digits, NaN and infinities.

    PostgreSQL prints a numeric without exponent and without leading zeros, so its size is the number of digits
    before the point, then those digits, then the ones after it. Below zero the order turns round: nines
    complement, and an end mark greater than any digit. numeric.c: NaN is equal to itself and the greatest.
    """
    negative = text.startswith("-")
    size = F.ltrim(text, F.lit("-"))
    whole = F.substring_index(size, ".", 1)
    point = F.instr(size, ".") > 0
    rest = F.when(point, F.rtrim(F.substring_index(size, ".", -1), F.lit("0"))).otherwise(F.lit(""))
    ordered = F.concat(F.lpad(F.length(whole).cast(StringType()), 6, "0"), whole, F.lit("."), rest)
    return _chosen(
        [
            (text == F.lit("NaN"), F.lit("7")),
            (text == F.lit("Infinity"), F.lit("6")),
            (text == F.lit("-Infinity"), F.lit("2")),
            ((whole == F.lit("0")) & (rest == F.lit("")), F.lit("4")),
            (negative, F.concat(F.lit("3"), F.translate(ordered, digits, _NINES), F.lit("~"))),
        ],
        F.concat(F.lit("5"), ordered),
    )


def _negate(value: Column) -> Column:
    return -value


_FUNCTIONS: Final[dict[str, Callable[[Column], Column]]] = {
    "abs": F.abs,
    "negate": _negate,
    "length": F.length,
    "lower": lambda value: F.translate(value, ascii_uppercase, ascii_lowercase),
    "upper": lambda value: F.translate(value, ascii_lowercase, ascii_uppercase),
}
