"""Operators and functions of a row filter that are made of others, and the functions it may call.

In: nodes. Out: nodes. Raises RefusedError for what has no exact counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Final, Literal, cast

from decoding.filter_constants import RefusedError
from decoding.filter_nodes import (
    BOOL,
    BPCHAR,
    BYTEA,
    INT4,
    NUMERIC,
    TEXT,
    VARCHAR,
    Coalesce,
    Constant,
    FunctionCall,
    Logical,
    Node,
    Operator,
)
from decoding.filter_types import (
    NUMBERS,
    arithmetic,
    coerce,
    comparison,
    extreme,
    known,
    null_if,
    require_ascii_case,
    to_common_type,
)


def logical(connective: Literal["AND", "OR"], operands: Sequence[Node]) -> Node:
    """Join; of nothing it is what ANY or ALL of an empty array is. Both are associative: nested ones are one."""
    flat: list[Node] = []
    for operand in operands:
        nested = isinstance(operand, Logical) and operand.connective == connective
        flat.extend(cast("Logical", operand).operands if nested else (operand,))
    if not flat:
        return Constant(connective == "AND", type_oid=BOOL)
    return flat[0] if len(flat) == 1 else Logical(connective, tuple(flat))


def row_comparison(operator: Operator, left: tuple[Node, ...], right: tuple[Node, ...]) -> Node:
    """Compare rows field by field from the left, until a pair differs or has a NULL (section 9.25.5)."""
    pairs = list(zip(left, right, strict=True))
    if operator in ("=", "<>"):
        return logical("AND" if operator == "=" else "OR", [comparison(operator, *pair) for pair in pairs])
    strict: Operator = "<" if operator in ("<", "<=") else ">"

    def earlier(rest: Node, pair: tuple[Node, Node]) -> Node:
        return logical("OR", [comparison(strict, *pair), logical("AND", [comparison("=", *pair), rest])])

    return reduce(earlier, reversed(pairs[:-1]), cast("Node", comparison(operator, *pairs[-1])))


# Spark's -x and abs(x) of a decimal go by Scala's BigDecimal, whose unary operators round (DECIMAL128).
_EXACT_SIGN_DIGITS: Final = 34


def sign_function(name: Literal["abs", "negate"], operand: Node) -> Node:
    """`abs(operand)` and `- operand`, where Spark's are exact."""
    if operand.type_oid not in NUMBERS:
        raise RefusedError(f"{name} is supported on numbers only")
    if operand.type_oid == NUMERIC and operand.digits is None:
        raise RefusedError("arithmetic on numeric without precision is not exact in Spark")
    if operand.digits is not None and operand.digits.precision > _EXACT_SIGN_DIGITS:
        raise RefusedError(f"Spark rounds it to {_EXACT_SIGN_DIGITS} digits")
    return FunctionCall(name, operand, type_oid=operand.type_oid, digits=operand.digits)


def _length(operand: Node) -> Node:
    operand = known(operand)
    if operand.type_oid == VARCHAR:
        operand = coerce(operand, TEXT)
    if operand.type_oid not in (TEXT, BPCHAR, BYTEA):
        raise RefusedError("length is supported on strings and bytea only")
    return FunctionCall("length", operand, type_oid=INT4)


def _case_function(name: Literal["lower", "upper"], operand: Node) -> Node:
    operand = coerce(operand, TEXT)
    require_ascii_case(operand)
    return FunctionCall(name, operand, type_oid=TEXT)


def _coalesce(operands: Sequence[Node]) -> Node:
    converted, type_oid, digits = to_common_type(operands)
    return Coalesce(converted, type_oid=type_oid, digits=digits)


_MANY = 1600  # columns of a table; no expression needs more arguments
FUNCTIONS: Final[dict[str, tuple[int, int, Callable[[list[Node]], Node]]]] = {
    "abs": (1, 1, lambda operands: sign_function("abs", *operands)),
    "mod": (2, 2, lambda operands: arithmetic("%", *operands)),
    "length": (1, 1, lambda operands: _length(*operands)),
    "lower": (1, 1, lambda operands: _case_function("lower", *operands)),
    "upper": (1, 1, lambda operands: _case_function("upper", *operands)),
    "coalesce": (1, _MANY, _coalesce),
    "nullif": (2, 2, lambda operands: null_if(*operands)),
    "greatest": (1, _MANY, partial(extreme, "GREATEST")),
    "least": (1, _MANY, partial(extreme, "LEAST")),
}
