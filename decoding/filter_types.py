"""Type and collation rules of PostgreSQL's operators, for the types a row filter may compare.

In: nodes. Out: nodes with the implicit casts that PostgreSQL's parser adds (chapter 10, parse_oper.c,
parse_coerce.c, parse_collate.c). Raises RefusedError where there is no such operator or where evaluating it
elsewhere would not be exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Final, Literal, TypeVar

from decoding.filter_constants import (
    INTEGER_DIGITS,
    InvalidConstantError,
    RefusedError,
    constant_from_text,
    convert_constant,
    modified,
)
from decoding.filter_nodes import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    INTEGERS,
    NUMERIC,
    STRINGS,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    UUID,
    VARCHAR,
    Arithmetic,
    Case,
    Cast,
    Coalesce,
    Collate,
    ColumnValue,
    Comparison,
    Constant,
    Digits,
    Extreme,
    FunctionCall,
    Node,
    NotDistinct,
    NullIf,
    Operator,
    common_digits,
)

TYPE_NAMES: Final = {
    BOOL: "boolean", BYTEA: "bytea", INT2: "smallint", INT4: "integer", INT8: "bigint", NUMERIC: "numeric",
    FLOAT4: "real", FLOAT8: "double precision", TEXT: "text", VARCHAR: "character varying",
    BPCHAR: "character", DATE: "date", TIMESTAMP: "timestamp without time zone",
    TIMESTAMPTZ: "timestamp with time zone", UUID: "uuid", UNKNOWN: "unknown",
}  # fmt: skip

# Each converts implicitly to the ones after it.
NUMBERS: Final = (INT2, INT4, INT8, NUMERIC, FLOAT4, FLOAT8)
_COMPARABLE: Final = frozenset((BOOL, BYTEA, DATE, TIMESTAMP, TIMESTAMPTZ, UUID, *NUMBERS, *STRINGS))
_TEMPORAL: Final = frozenset((DATE, TIMESTAMP, TIMESTAMPTZ))

# Collations whose order is that of the bytes in UTF-8, which is Spark's.
_BYTE_ORDER: Final = frozenset(("C", "POSIX", "ucs_basic", "pg_c_utf8", "pg_unicode_fast"))
# Collations of pg_catalog under which equal means equal bytes: a database's default and libc's always are, and
# those that initdb imports from ICU are. One that a user made may be nondeterministic (section 23.2.2.4).
_DETERMINISTIC: Final = re.compile(
    r"default|C|POSIX|ucs_basic|pg_c_utf8|pg_unicode_fast|unicode|C\.\S+"
    r"|[a-z]{2,3}_[A-Z]{2,3}(\.\w+)?(@\w+)?|(und|[a-z]{2,3})(-\w+)*-x-icu"
)


_Converted = TypeVar("_Converted", Constant, Constant | None)


def type_name(type_oid: int) -> str:
    """Return the type's SQL name."""
    return TYPE_NAMES.get(type_oid, f"with oid {type_oid}")


# --- conversions -------------------------------------------------------------------------


def column_digits(type_oid: int, type_modifier: int) -> Digits | None:
    """Digits of a numeric(p,s) column; None when its Spark type is string (no precision, or none Spark has)."""
    if type_oid != NUMERIC or type_modifier < 0:
        return None
    packed = type_modifier - 4
    precision, scale = packed >> 16 & 0xFFFF, ((packed & 0x7FF) ^ 1024) - 1024
    return Digits(precision, scale) if 0 <= scale <= precision <= Digits.MAXIMUM else None


def coerce(node: Node, type_oid: int) -> Node:
    """Convert implicitly: a quoted constant takes the type, a number widens, a string is relabelled."""
    if isinstance(node, Constant):
        if node.type_oid == UNKNOWN:
            return constant_from_text(None if node.value is None else str(node.value), type_oid)
        if node.type_oid != type_oid:
            converted = _converted(partial(convert_constant, node, type_oid))
            if converted is not None:
                return converted
    if node.type_oid == type_oid:
        return node
    return Cast(node, type_oid=type_oid, digits=_cast_digits(node, type_oid))


def _converted(conversion: Callable[[], _Converted]) -> _Converted:
    """Convert a constant now; PostgreSQL does it for each row, and so fails for rows only."""
    try:
        return conversion()
    except InvalidConstantError as error:
        raise RefusedError(f"it fails for every row: {error}") from None


def known(node: Node) -> Node:
    """Return a quoted constant that nothing gives a type as text, and any other node as it is."""
    return coerce(node, TEXT) if node.type_oid == UNKNOWN else node


def _cast_digits(node: Node, target: int) -> Digits | None:
    """Check that the conversion is exact or fails, as PostgreSQL's; return the result's digits."""
    source = node.type_oid
    if target == NUMERIC and source in INTEGERS:
        return INTEGER_DIGITS[source]
    exact = (
        (source in STRINGS and target in STRINGS)
        or (source in INTEGERS and target in (*INTEGERS, FLOAT4, FLOAT8))
        or (source == FLOAT4 and target == FLOAT8)
        or (source == NUMERIC and target == FLOAT8 and node.digits is not None)
    )
    if not exact:
        raise RefusedError(
            f"the conversion of {type_name(source)} to {type_name(target)} is not exact in Spark"
        )
    return None


def cast(node: Node, type_oid: int, modifier: tuple[int, ...]) -> Node:
    """Convert explicitly: `node::type(modifier)`."""
    converted = coerce(node, type_oid)
    if not modifier:
        return converted
    if isinstance(converted, Constant):
        return _converted(partial(modified, converted, modifier))
    scale = modifier[1] if len(modifier) > 1 else 0
    own = converted.digits
    if own is not None and own.scale <= scale and own.integral <= modifier[0] - scale:
        return converted
    raise RefusedError("a cast that shortens or rounds its value is not exact in Spark")


# --- operators ---------------------------------------------------------------------------


def _comparison_type(left: int, right: int) -> int:
    """Return the type in which PostgreSQL compares these two."""
    pair = {left, right} - {UNKNOWN}
    if not pair:
        return TEXT
    if not pair <= _COMPARABLE:
        raise RefusedError(f"type {type_name(max(pair - _COMPARABLE))} has no counterpart in Spark")
    if len(pair) == 1:
        (only,) = pair
        return TEXT if only == VARCHAR else only
    if pair <= set(NUMBERS):
        # float4 meets another type in float8, the preferred type of numbers.
        return FLOAT8 if pair & {FLOAT4, FLOAT8} else max(pair, key=NUMBERS.index)
    if pair <= set(STRINGS):
        return BPCHAR if pair == {BPCHAR, VARCHAR} else TEXT
    if pair <= _TEMPORAL:
        raise RefusedError(
            "date and timestamp types differ in range, and one with a zone depends on TimeZone"
        )
    raise RefusedError(f"no operator compares {type_name(left)} with {type_name(right)}")


def _compared(left: Node, right: Node, *, ordering: bool) -> tuple[Node, Node]:
    type_oid = _comparison_type(left.type_oid, right.type_oid)
    left, right = coerce(left, type_oid), coerce(right, type_oid)
    if type_oid in STRINGS:
        require_collation((left, right), ordering=ordering)
    return left, right


def comparison(operator: Operator, left: Node, right: Node) -> Comparison:
    """`left operator right`, both sides converted to the type PostgreSQL compares them in."""
    return Comparison(operator, *_compared(left, right, ordering=operator not in ("=", "<>")))


def not_distinct(left: Node, right: Node) -> NotDistinct:
    """`left IS NOT DISTINCT FROM right`."""
    return NotDistinct(*_compared(left, right, ordering=False))


def null_if(left: Node, right: Node) -> NullIf:
    """`NULLIF(left, right)`: of the type in which the two are compared."""
    left, right = _compared(left, right, ordering=False)
    return NullIf(left, right, type_oid=left.type_oid, digits=left.digits)


def arithmetic(operator: Literal["+", "-", "*", "/", "%"], left: Node, right: Node) -> Arithmetic:
    """`left operator right` on integers, and on numerics where the result is exact."""
    oids = {left.type_oid, right.type_oid} - {UNKNOWN}
    if not oids or not oids <= set(NUMBERS):
        raise RefusedError(f"{operator} is supported on integers and numeric only")
    if oids & {FLOAT4, FLOAT8}:
        raise RefusedError("floating-point arithmetic fails in PostgreSQL where Spark goes on with infinity")
    type_oid = max(oids, key=NUMBERS.index)
    left, right = coerce(left, type_oid), coerce(right, type_oid)
    digits = _result_digits(operator, left, right) if type_oid == NUMERIC else None
    return Arithmetic(operator, left, right, type_oid=type_oid, digits=digits)


def _result_digits(operator: str, left: Node, right: Node) -> Digits:
    if operator in "/%":
        raise RefusedError(f"numeric {operator} chooses its scale by rules that Spark does not have")
    if left.digits is None or right.digits is None:
        raise RefusedError("arithmetic on numeric without precision is not exact in Spark")
    if operator == "*":
        # Spark types a product one digit wider than it can be, and drops scale beyond 38.
        result = Digits.of(
            left.digits.integral + right.digits.integral + 1, left.digits.scale + right.digits.scale
        )
    else:
        common = common_digits(iter((left.digits, right.digits)))
        result = None if common is None else Digits.of(common.integral + 1, common.scale)
    if result is None:
        raise RefusedError(f"the result needs more than {Digits.MAXIMUM} digits")
    return result


def common_type(nodes: Sequence[Node]) -> int:
    """Return the type of CASE, COALESCE, IN and the like (section 10.5, select_common_type)."""
    known = [node.type_oid for node in nodes if node.type_oid != UNKNOWN]
    if not known:
        return TEXT
    chosen = known[0]
    for candidate in known[1:]:
        if {chosen, candidate} <= set(NUMBERS):
            chosen = max(chosen, candidate, key=NUMBERS.index)
        elif candidate != chosen and not {chosen, candidate} <= set(STRINGS):
            # Between strings each converts to each, so the first stays.
            raise RefusedError(f"{type_name(chosen)} and {type_name(candidate)} have no common type")
    if chosen not in _COMPARABLE:
        raise RefusedError(f"type {type_name(chosen)} has no counterpart in Spark")
    return chosen


def to_common_type(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], int, Digits | None]:
    """Convert all to their common type; return them, the type, and the digits that hold them all."""
    type_oid = common_type(nodes)
    converted = tuple(coerce(node, type_oid) for node in nodes)
    digits = common_digits(node.digits for node in converted) if type_oid == NUMERIC else None
    return converted, type_oid, digits


def extreme(function: Literal["GREATEST", "LEAST"], operands: Sequence[Node]) -> Extreme:
    """GREATEST or LEAST in the operands' common type, where that type's order is Spark's."""
    converted, type_oid, digits = to_common_type(operands)
    if type_oid == BPCHAR:
        raise RefusedError(
            "which of two strings that differ in trailing blanks is the greater is not defined"
        )
    if type_oid == NUMERIC and digits is None:
        raise RefusedError("it needs more digits than Spark's decimal has")
    if type_oid in STRINGS:
        require_collation(converted, ordering=True)
    return Extreme(function, converted, type_oid=type_oid, digits=digits)


# --- collations --------------------------------------------------------------------------


class _Strength(IntEnum):
    """Where a collation comes from; the stronger source wins (section 23.2.1)."""

    DEFAULT = 0
    IMPLICIT = 1
    EXPLICIT = 2


def _collation(node: Node) -> tuple[_Strength, frozenset[str]]:
    """Return the names of the collations that meet in an expression: more than one is a conflict."""
    match node:
        case Collate(collation=name):
            return _Strength.EXPLICIT, frozenset((name,))
        case ColumnValue(collation=name):
            named = name not in ("", "default")
            return (_Strength.IMPLICIT if named else _Strength.DEFAULT), frozenset((name or "default",))
        case Cast(operand=operand) | FunctionCall(operand=operand):
            return _collation(operand)
        case Coalesce(operands=operands) | Extreme(operands=operands):
            return _merged(operands)
        case NullIf(left=left, right=right):
            return _merged((left, right))
        case Case(results=results, default=default):
            return _merged((default, *results))
        case _:
            return _Strength.DEFAULT, frozenset(("default",))


def _merged(nodes: Sequence[Node]) -> tuple[_Strength, frozenset[str]]:
    collations = [_collation(node) for node in nodes]
    strongest = max(strength for strength, _ in collations)
    names = (names for strength, names in collations if strength == strongest)
    return strongest, frozenset[str]().union(*names)


def require_collation(nodes: Sequence[Node], *, ordering: bool) -> None:
    """Refuse a collation under which these strings are not equal, or ordered, as their bytes are."""
    names = _merged(nodes)[1]
    if len(names) > 1:
        raise RefusedError(f"its collation is ambiguous: {' or '.join(sorted(names))}")
    (name,) = names
    if ordering and name not in _BYTE_ORDER:
        raise RefusedError(f"it depends on the collation {name}, and Spark orders text by bytes")
    if not _DETERMINISTIC.fullmatch(name):
        raise RefusedError(f"the collation {name} may take different strings for equal")


def require_ascii_case(node: Node) -> None:
    """Refuse a change of case that does more than ASCII letters, as every locale but C does."""
    names = _merged((node,))[1]
    if not names <= {"C", "POSIX"}:
        raise RefusedError(f"the case of letters depends on the collation {' or '.join(sorted(names))}")
