"""The typed tree of a row filter: what `decoding.row_filter` makes and an engine compiles.

In: nothing but other nodes. Out: immutable nodes, each with the oid of its PostgreSQL type and, for numeric,
the digits that hold every value it can have. Every implicit conversion of PostgreSQL is a `Cast` here, so both
sides of a comparison have one type and an engine needs no type rules of its own. Raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import date, datetime
from decimal import Decimal
from typing import Literal, TypeAlias

# pg_type.dat; a filter may use no other types, except in IS NULL.
BOOL, BYTEA, INT8, INT2, INT4, TEXT = 16, 17, 20, 21, 23, 25
FLOAT4, FLOAT8, UNKNOWN, BPCHAR, VARCHAR = 700, 701, 705, 1042, 1043
DATE, TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID = 1082, 1114, 1184, 1700, 2950

INTEGERS = (INT2, INT4, INT8)
STRINGS = (TEXT, VARCHAR, BPCHAR)

ConstantValue: TypeAlias = bool | int | Decimal | float | str | bytes | date | datetime | None
Operator: TypeAlias = Literal["=", "<>", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True)
class Digits:
    """Precision and scale of a decimal type: `precision` digits in all, `scale` of them after the point."""

    precision: int
    scale: int

    MAXIMUM = 38  # what Spark's and Arrow's decimal128 hold

    @staticmethod
    def of(integral: int, scale: int) -> Digits | None:
        """Digits with this many before and after the point, or None when no decimal type has so many."""
        precision = max(integral + scale, 1)
        return Digits(precision, scale) if precision <= Digits.MAXIMUM else None

    @property
    def integral(self) -> int:
        """Digits before the point."""
        return self.precision - self.scale


def common_digits(several: Iterator[Digits | None]) -> Digits | None:
    """Digits that hold the values of all of these, or None when that is no decimal type."""
    integral = scale = 0
    for digits in several:
        if digits is None:
            return None
        integral, scale = max(integral, digits.integral), max(scale, digits.scale)
    return Digits.of(integral, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An expression. `digits` is None unless numeric; a numeric without digits has PostgreSQL's text as value."""

    type_oid: int
    digits: Digits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicate(Node):
    """An expression that is true, false or NULL."""

    type_oid: int = BOOL


@dataclass(frozen=True, slots=True)
class ColumnValue(Node):
    """A column of the row that is filtered."""

    name: str
    collation: str = ""


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """A constant; timestamps are UTC, or local without a zone; numeric is a Decimal, NaN and infinities too."""

    value: ConstantValue


@dataclass(frozen=True, slots=True)
class Cast(Node):
    """A conversion to `type_oid`, one that is exact or fails."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Collate(Node):
    """COLLATE: the same value under another collation."""

    operand: Node
    collation: str


@dataclass(frozen=True, slots=True)
class Comparison(Predicate):
    """`left operator right`, NULL when a side is; both sides have one type."""

    operator: Operator
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class NotDistinct(Predicate):
    """IS NOT DISTINCT FROM: equality that takes NULL for a value."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Logical(Predicate):
    """AND or OR of any number of operands, evaluated from the left and no further than needed."""

    connective: Literal["AND", "OR"]
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not(Predicate):
    """NOT."""

    operand: Node


@dataclass(frozen=True, slots=True)
class IsNull(Predicate):
    """IS NULL, and IS UNKNOWN."""

    operand: Node


@dataclass(frozen=True, slots=True)
class IsTruth(Predicate):
    """IS TRUE or IS FALSE: never NULL."""

    operand: Node
    truth: bool


@dataclass(frozen=True, slots=True)
class Like(Predicate):
    r"""LIKE; in `pattern` a backslash stands before %, _ and \ where they mean themselves, and nowhere else."""

    operand: Node
    pattern: str


@dataclass(frozen=True, slots=True)
class Arithmetic(Node):
    """`left operator right`; on integers an overflow or a division by zero fails, / truncates toward zero."""

    operator: Literal["+", "-", "*", "/", "%"]
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class FunctionCall(Node):
    """A function of one argument; `lower` and `upper` are those of collation C: ASCII letters only."""

    name: Literal["abs", "negate", "length", "lower", "upper"]
    operand: Node


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
    """NULLIF: NULL when both are equal, else `left`."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Case(Node):
    """CASE WHEN: the result beside the first condition that is true, else the default."""

    conditions: tuple[Node, ...]
    results: tuple[Node, ...]
    default: Node


def children(node: Node) -> Iterator[Node]:
    """Return the operands of a node, in order."""
    for field in fields(node):
        value = getattr(node, field.name)
        if isinstance(value, Node):
            yield value
        elif isinstance(value, tuple):
            yield from value


def column_names(node: Node) -> frozenset[str]:
    """Return the columns that an expression reads."""
    own = frozenset((node.name,)) if isinstance(node, ColumnValue) else frozenset()
    return own.union(*(column_names(child) for child in children(node)))


def can_fail(node: Node) -> bool:
    """Tell whether evaluating can raise an error (overflow, division by zero) instead of giving a value."""
    match node:
        case Arithmetic() | FunctionCall(name="abs" | "negate") if node.type_oid in INTEGERS:
            return True
        case Cast(operand=operand) if node.type_oid in INTEGERS:
            narrower = INTEGERS.index(node.type_oid) < INTEGERS.index(operand.type_oid)
            return narrower or can_fail(operand)
        case _:
            return any(can_fail(child) for child in children(node))
