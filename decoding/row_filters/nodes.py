"""The typed tree of a row filter: `analysis` makes the tree, and `evaluation.compiler` compiles it.

Nodes are immutable. Each node has the oid of its PostgreSQL type. A numeric node may also have `digits`: a precision
and a scale that fit all of its values. PostgreSQL's implicit conversions are `Cast` nodes, so the compiler needs no
type rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import date, datetime
from decimal import Decimal
from typing import Literal, TypeAlias

from pgsieve.decoding.row_filters.letter_case import CaseFunction, CaseMapping

# The oids of types, from pg_type.dat. A filter may use columns of other types only in IS NULL.
BOOL, BYTEA, INT8, INT2, INT4, TEXT = 16, 17, 20, 21, 23, 25
FLOAT4, FLOAT8, UNKNOWN, BPCHAR, VARCHAR = 700, 701, 705, 1042, 1043
DATE, TIME, TIMESTAMP, TIMESTAMPTZ, INTERVAL, NUMERIC, UUID = 1082, 1083, 1114, 1184, 1186, 1700, 2950

INTEGERS = (INT2, INT4, INT8)
FLOATS = (FLOAT4, FLOAT8)
STRINGS = (TEXT, VARCHAR, BPCHAR)


@dataclass(frozen=True, slots=True)
class Interval:
    """A constant of type interval, in PostgreSQL's three parts (PostgreSQL documentation, Interval Input)."""

    months: int
    days: int
    microseconds: int


def comparison_microseconds(interval: Interval) -> int:
    """Return an interval as the microseconds that PostgreSQL compares; a month has 30 days and a day 24 hours.

    Source: interval_cmp_value in timestamp.c.
    """
    return (interval.months * 30 + interval.days) * 86_400_000_000 + interval.microseconds


@dataclass(frozen=True, slots=True)
class Infinity:
    """An infinite date or timestamp; `sign` is 1 or -1."""

    sign: int


ConstantValue: TypeAlias = (
    bool | int | Decimal | float | str | bytes | date | datetime | Interval | Infinity | None
)
Operator: TypeAlias = Literal["=", "<>", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True)
class Digits:
    """The precision and scale of a decimal type: it has `precision` digits, of which `scale` are after the point."""

    precision: int
    scale: int

    MAX_PRECISION = 38  # The precision of Arrow's decimal128.

    @staticmethod
    def from_digit_counts(integral_digits: int, scale: int) -> Digits | None:
        """Return `integral_digits` digits before the point and `scale` digits after it.

        Returns None if these are more than MAX_PRECISION.
        """
        precision = max(integral_digits + scale, 1)
        return Digits(precision, scale) if precision <= Digits.MAX_PRECISION else None

    @property
    def integral_digits(self) -> int:
        """The number of digits before the point."""
        return self.precision - self.scale


INTEGER_DIGITS = {INT2: Digits(5, 0), INT4: Digits(10, 0), INT8: Digits(19, 0)}


def common_digits(operands: Iterator[Digits | None]) -> Digits | None:
    """Return digits that fit the values of all operands.

    Returns None if an operand has no digits, or if the digits exceed MAX_PRECISION.
    """
    integral_digits = scale = 0
    for digits in operands:
        if digits is None:
            return None
        integral_digits, scale = max(integral_digits, digits.integral_digits), max(scale, digits.scale)
    return Digits.from_digit_counts(integral_digits, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An expression.

    Only a numeric or an array of numerics may have `digits`. A numeric without digits is text in Arrow.
    """

    type_oid: int
    digits: Digits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicate(Node):
    """An expression that is true, false or NULL."""

    type_oid: int = BOOL


@dataclass(frozen=True, slots=True)
class ColumnValue(Node):
    """A column of the filtered row."""

    name: str
    collation: str = ""


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """A constant.

    The value of a timestamptz is in UTC, and the value of a timestamp has no time zone. The value of a numeric is a
    Decimal, also for NaN and infinities.
    """

    value: ConstantValue


@dataclass(frozen=True, slots=True)
class Cast(Node):
    """A conversion to `type_oid`; `modifier` is empty, (length,), (precision,) or (precision, scale)."""

    operand: Node
    modifier: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Collate(Node):
    """COLLATE: the same value under another collation."""

    operand: Node
    collation: str


@dataclass(frozen=True, slots=True)
class Comparison(Predicate):
    """`left operator right`, or NULL if a side is NULL.

    Both sides have the same type, or one is a date and the other a timestamp.
    """

    operator: Operator
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class NotDistinct(Predicate):
    """IS NOT DISTINCT FROM: equality that treats NULL as a value."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Logical(Predicate):
    """AND or OR of any number of operands, evaluated from the left until one decides the result."""

    connective: Literal["AND", "OR"]
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not(Predicate):
    """NOT: true if the operand is false, and NULL if the operand is NULL."""

    operand: Node


@dataclass(frozen=True, slots=True)
class IsNull(Predicate):
    """IS NULL, and IS UNKNOWN."""

    operand: Node


@dataclass(frozen=True, slots=True)
class IsTruth(Predicate):
    """IS TRUE or IS FALSE, which are never NULL."""

    operand: Node
    truth: bool


@dataclass(frozen=True, slots=True)
class Like(Predicate):
    """LIKE. `pattern` has a backslash only before a literal %, _ or backslash."""

    operand: Node
    pattern: str


@dataclass(frozen=True, slots=True)
class Regex(Predicate):
    """`operand ~ pattern`: a part of the string matches. `pattern` is in RE2's syntax."""

    operand: Node
    pattern: str


@dataclass(frozen=True, slots=True)
class Arithmetic(Node):
    """`left operator right` on numbers of one type; / truncates integers toward zero.

    A result out of the type's range raises an error, and so does a division by zero.
    """

    operator: Literal["+", "-", "*", "/", "%"]
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class FunctionCall(Node):
    """A call of a built-in function of PostgreSQL, named by its `prosrc` in pg_proc.

    The result is NULL if an operand is NULL; only array_position can search for NULL. `can_fail` says that the function
    raises an error for some values.
    """

    name: str
    operands: tuple[Node, ...]
    can_fail: bool = False


@dataclass(frozen=True, slots=True)
class CaseChange(Node):
    """A call of lower, upper or initcap; `mapping` says which letters change under the operand's collation."""

    function: CaseFunction
    operand: Node
    mapping: CaseMapping


@dataclass(frozen=True, slots=True)
class Array(Node):
    """ARRAY[…]: the elements in their common type."""

    elements: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Element(Node):
    """Stands for one element of an array. In an `EachElement` it stands for each element, one after the other."""

    collation: str = ""


@dataclass(frozen=True, slots=True)
class EachElement(Predicate):
    """`subject operator ANY (array)`, or ALL if `is_all`; `test` compares `subject` with `element`."""

    is_all: bool
    subject: Node
    array: Node
    element: Element
    test: Node


@dataclass(frozen=True, slots=True)
class Coalesce(Node):
    """COALESCE: the first operand that is not NULL."""

    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Extreme(Node):
    """GREATEST or LEAST of the operands that are not NULL."""

    function: Literal["GREATEST", "LEAST"]
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class NullIf(Node):
    """NULLIF: NULL if both operands are equal, else `left`."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Case(Node):
    """CASE WHEN: the result of the first condition that is true, else the default."""

    conditions: tuple[Node, ...]
    results: tuple[Node, ...]
    default: Node


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A parsed row filter: a row matches if `tree` is true, and does not if `tree` is false or NULL."""

    expression: str
    tree: Node
    columns: frozenset[str]


def children(node: Node) -> Iterator[Node]:
    """The operands of a node, in order."""
    for field in fields(node):
        value = getattr(node, field.name)
        if isinstance(value, Node):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Node))


def column_names(node: Node) -> frozenset[str]:
    """The names of the columns that an expression reads."""
    own_name = frozenset((node.name,)) if isinstance(node, ColumnValue) else frozenset()
    return own_name.union(*(column_names(child) for child in children(node)))


def is_null(node: Node) -> bool:
    """Whether a node is the constant NULL."""
    return isinstance(node, Constant) and node.value is None


def node_can_fail(node: Node) -> bool:
    """Whether this node itself can raise an error, such as an overflow; its operands do not count."""
    match node:
        case Arithmetic(operator=operator):
            return node.type_oid != NUMERIC or operator in "/%" or not _is_in_numeric_range(node)
        case FunctionCall():
            return node.can_fail
        case Cast(operand=operand):
            return _cast_can_fail(operand, node)
        case _:
            return False


#: A numeric has at most this many digits before the point (PostgreSQL documentation, Numeric Types).
_MAX_INTEGRAL_DIGITS = 131_072


def _is_in_numeric_range(node: Node) -> bool:
    """Whether each value of a numeric node is certainly in the range of numeric."""
    digit_count = _count_integral_digits(node)
    return digit_count is not None and digit_count <= _MAX_INTEGRAL_DIGITS


def _count_integral_digits(node: Node) -> int | None:
    """Return the largest number of digits that a numeric node can have before the point; None if it is not known."""
    match node:
        case Arithmetic(operator="+" | "-" | "*" as operator, left=left, right=right):
            left_count, right_count = _count_integral_digits(left), _count_integral_digits(right)
            if left_count is None or right_count is None:
                return None
            return left_count + right_count if operator == "*" else max(left_count, right_count) + 1
        case Constant(value=Decimal() as value):
            return max(value.adjusted() + 1, 0) if value.is_finite() else 0
        case Cast(digits=None, operand=operand) if operand.type_oid in INTEGER_DIGITS:
            return INTEGER_DIGITS[operand.type_oid].integral_digits
        case _:
            return None if node.digits is None else node.digits.integral_digits


def tree_can_fail(node: Node) -> bool:
    """Whether a node or any node below it can raise an error."""
    return node_can_fail(node) or any(tree_can_fail(child) for child in children(node))


_TYPES_BY_RANGE = (INT2, INT4, INT8, NUMERIC, FLOAT8)


def _cast_can_fail(operand: Node, node: Cast) -> bool:
    source_oid, target_oid = operand.type_oid, node.type_oid
    if node.modifier:
        return target_oid == NUMERIC
    if target_oid == DATE or source_oid == TIME:
        return False
    if {source_oid, target_oid} <= {NUMERIC, *FLOATS}:
        # A numeric with digits fits into double precision. A cast to real counts as one that can fail.
        return (source_oid, target_oid) not in ((FLOAT4, FLOAT8), (FLOAT4, NUMERIC), (FLOAT8, NUMERIC)) and (
            target_oid == FLOAT4 or operand.digits is None
        )
    if source_oid in _TYPES_BY_RANGE and target_oid in INTEGERS:
        return _TYPES_BY_RANGE.index(target_oid) < _TYPES_BY_RANGE.index(source_oid)
    return (source_oid == FLOAT4 and target_oid in INTEGERS) or (source_oid, target_oid) == (DATE, TIMESTAMP)
