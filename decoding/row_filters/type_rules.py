"""Type rules of PostgreSQL's operators, for the types that a row filter may compare.

In: nodes of a row filter's tree. Out: nodes with the implicit casts that PostgreSQL's parser adds (PostgreSQL
documentation, Type Conversion; parse_oper.c, parse_coerce.c). Raises RefusedError if PostgreSQL has no operator for
these types, or if pgsieve cannot evaluate the operator exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, TypeVar

from pgsieve.decoding.row_filters.collations import is_collatable, require_collation
from pgsieve.decoding.row_filters.constants import (
    InvalidConstantError,
    RefusedError,
    apply_modifier,
    constant_from_text,
    convert_constant,
    split_array_text,
)
from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    FLOATS,
    INT2,
    INT4,
    INT8,
    INTEGER_DIGITS,
    INTEGERS,
    INTERVAL,
    NUMERIC,
    STRINGS,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    UUID,
    VARCHAR,
    Arithmetic,
    Array,
    Case,
    Cast,
    Collate,
    Comparison,
    Constant,
    Digits,
    Extreme,
    Node,
    NotDistinct,
    NullIf,
    Operator,
    common_digits,
)
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS
from pgsieve.decoding.values.catalog_names import TYPE_NAMES

# Each type in this tuple converts implicitly to all types after it.
NUMBERS: Final = (INT2, INT4, INT8, NUMERIC, FLOAT4, FLOAT8)
_COMPARABLE_TYPES: Final = frozenset(
    (BOOL, BYTEA, DATE, TIME, TIMESTAMP, TIMESTAMPTZ, INTERVAL, UUID, *NUMBERS, *STRINGS)
)
_TEMPORAL_TYPES: Final = frozenset((DATE, TIMESTAMP, TIMESTAMPTZ))
_ARRAY_OID_BY_ELEMENT: Final = {element: array for array, element in ELEMENT_OIDS.items()}

_Converted = TypeVar("_Converted", Constant, Constant | None)


def type_name(type_oid: int) -> str:
    """Return the SQL name of a type, for messages."""
    return "unknown" if type_oid == UNKNOWN else TYPE_NAMES.get(type_oid, f"with oid {type_oid}")


def find_array_type(element_oid: int) -> int:
    """Return the oid of a type's array type."""
    if element_oid not in _ARRAY_OID_BY_ELEMENT or element_oid not in _COMPARABLE_TYPES:
        raise RefusedError(f"an array of type {type_name(element_oid)} has no counterpart in pgsieve")
    return _ARRAY_OID_BY_ELEMENT[element_oid]


# --- conversions -------------------------------------------------------------------------


def column_digits(type_oid: int, type_modifier: int) -> Digits | None:
    """Return the digits (precision and scale) of a numeric(p,s) column, or of the elements of a numeric(p,s)[] column.

    Returns None for other types, and if pgsieve stores the numbers as text. That is so for a numeric without a
    precision, and for one whose digits do not fit into a decimal type.
    """
    if NUMERIC not in (type_oid, ELEMENT_OIDS.get(type_oid)) or type_modifier < 0:
        return None
    packed_digits = type_modifier - 4
    precision, scale = packed_digits >> 16 & 0xFFFF, ((packed_digits & 0x7FF) ^ 1024) - 1024
    return Digits(precision, scale) if 0 <= scale <= precision <= Digits.MAX_PRECISION else None


def coerce(node: Node, type_oid: int) -> Node:
    """Cast a node implicitly to a type.

    A quoted constant becomes a constant of the type. A number becomes a number of a wider type. A string keeps its
    characters, except the trailing blanks of type character.
    """
    if isinstance(node, Constant):
        if node.type_oid == UNKNOWN:
            return _make_constant_of_type(None if node.value is None else str(node.value), type_oid)
        if node.type_oid != type_oid:
            converted_constant = _convert_constant(partial(convert_constant, node, type_oid))
            if converted_constant is not None:
                return converted_constant
    if node.type_oid == type_oid:
        return node
    if isinstance(node, Collate):
        # PostgreSQL converts the operand of COLLATE, and drops the COLLATE if the new type has no collations
        # (coerce_type() in src/backend/parser/parse_coerce.c).
        operand = coerce(node.operand, type_oid)
        return replace(node, operand=operand, type_oid=type_oid) if is_collatable(type_oid) else operand
    if isinstance(node, Array) and type_oid in ELEMENT_OIDS:
        return make_array(
            [coerce(element, ELEMENT_OIDS[type_oid]) for element in node.elements], ELEMENT_OIDS[type_oid]
        )
    return Cast(node, type_oid=type_oid, digits=_find_cast_digits(node, type_oid))


def _make_constant_of_type(text: str | None, type_oid: int) -> Node:
    """Return what the type's input function makes of a quoted constant."""
    if type_oid not in ELEMENT_OIDS:
        return constant_from_text(text, type_oid)
    if text is None:
        return Constant(None, type_oid=find_array_type(ELEMENT_OIDS[type_oid]))
    element_oid = ELEMENT_OIDS[type_oid]
    return make_array([constant_from_text(item, element_oid) for item in split_array_text(text)], element_oid)


def make_array(elements: Sequence[Node], element_oid: int) -> Array:
    """Return ARRAY[…] of elements that have this type."""
    digits = common_digits(element.digits for element in elements) if element_oid == NUMERIC else None
    return Array(tuple(elements), type_oid=find_array_type(element_oid), digits=digits)


def _convert_constant(conversion: Callable[[], _Converted]) -> _Converted:
    """Convert a constant; raises RefusedError if the conversion fails.

    PostgreSQL accepts a filter with such a constant, because it converts the constant only when it evaluates the
    filter for a row.
    """
    try:
        return conversion()
    except InvalidConstantError as error:
        raise RefusedError(f"it fails for every row: {error}") from None


def resolve_unknown_type(type_oid: int) -> int:
    """Return the type that a quoted constant takes beside a value of this type.

    It is the type of the other operand. But beside varchar or another quoted constant it is text.
    """
    return TEXT if type_oid in (UNKNOWN, VARCHAR) else type_oid


def resolve_unknown_as_text(node: Node) -> Node:
    """Convert a quoted constant without a type to text; return any other node unchanged."""
    return coerce(node, TEXT) if node.type_oid == UNKNOWN else node


# For these conversions pgsieve has PostgreSQL's result or PostgreSQL's error. Conversions between numbers, and
# conversions between strings, are exact, too. PostgreSQL converts most other types through text, and does not allow
# that in a row filter (check_simple_rowfilter_expr_walker()).
_EXACT_CASTS: Final = frozenset(
    (
        *((INT4, BOOL), (BOOL, INT4), (DATE, TIMESTAMP), (TIMESTAMP, DATE)),
        *((BOOL, string) for string in STRINGS),
    )
)


def _find_cast_digits(node: Node, target_oid: int) -> Digits | None:
    """Return the digits of a conversion's result.

    Raises RefusedError if the conversion can give another result than PostgreSQL's.
    """
    source_oid = node.type_oid
    if target_oid == NUMERIC and source_oid in INTEGERS:
        return INTEGER_DIGITS[source_oid]
    element_oids = ELEMENT_OIDS.get(source_oid), ELEMENT_OIDS.get(target_oid)
    is_exact = (
        {source_oid, target_oid} <= set(NUMBERS)
        or {source_oid, target_oid} <= set(STRINGS)
        or (source_oid, target_oid) in _EXACT_CASTS
        or element_oids == (VARCHAR, TEXT)
    )
    if not is_exact:
        raise RefusedError(
            f"the conversion of {type_name(source_oid)} to {type_name(target_oid)} is not supported"
        )
    return None


def make_cast(node: Node, type_oid: int, modifier: tuple[int, ...]) -> Node:
    """Return `node::type(modifier)`, an explicit conversion."""
    converted_node = coerce(node, type_oid)
    if not modifier:
        return converted_node
    if isinstance(converted_node, Constant):
        return _convert_constant(partial(apply_modifier, converted_node, modifier))
    if type_oid == NUMERIC:
        precision, scale = (*modifier, 0)[:2]
        # If the operand has no digits, it may be NaN. Arrow's decimal types have no NaN, so the result has no digits
        # either.
        digits = None if converted_node.digits is None else Digits.from_digit_counts(precision - scale, scale)
        return Cast(converted_node, modifier, type_oid=type_oid, digits=digits)
    if type_oid in (VARCHAR, BPCHAR):
        return Cast(converted_node, modifier, type_oid=type_oid)
    raise RefusedError("a type modifier is supported on numeric, varchar and character only")


# --- operators ---------------------------------------------------------------------------


def _find_comparison_type(left_oid: int, right_oid: int) -> int:
    """Return the type to which PostgreSQL converts values of these two types for a comparison."""
    type_oids = {left_oid, right_oid} - {UNKNOWN}
    if not type_oids:
        return TEXT
    unsupported_oids = {ELEMENT_OIDS.get(oid, oid) for oid in type_oids} - _COMPARABLE_TYPES
    if unsupported_oids:
        raise RefusedError(f"type {type_name(max(unsupported_oids))} has no counterpart in pgsieve")
    if len(type_oids) == 1:
        (common_oid,) = type_oids
        return TEXT if common_oid == VARCHAR else common_oid
    if type_oids <= set(NUMBERS):
        # PostgreSQL compares float4 with another type as float8, the type that it prefers for numbers.
        return FLOAT8 if type_oids & set(FLOATS) else max(type_oids, key=NUMBERS.index)
    if type_oids <= set(STRINGS):
        return BPCHAR if type_oids == {BPCHAR, VARCHAR} else TEXT
    if {ELEMENT_OIDS.get(oid) for oid in type_oids} == {VARCHAR, TEXT}:
        return find_array_type(TEXT)
    if type_oids <= _TEMPORAL_TYPES:
        raise RefusedError("the comparison depends on the session's TimeZone")
    raise RefusedError(f"no operator compares {type_name(left_oid)} with {type_name(right_oid)}")


def _convert_comparison_operands(left: Node, right: Node, *, needs_order: bool) -> tuple[Node, Node]:
    if {left.type_oid, right.type_oid} == {DATE, TIMESTAMP}:
        return left, right  # PostgreSQL calls date_cmp_timestamp, so no conversion can fail.
    type_oid = _find_comparison_type(left.type_oid, right.type_oid)
    left, right = coerce(left, type_oid), coerce(right, type_oid)
    if {type_oid, ELEMENT_OIDS.get(type_oid)} & set(STRINGS):
        require_collation((left, right), needs_order=needs_order)
    return left, right


def make_comparison(operator: Operator, left: Node, right: Node) -> Comparison:
    """Return `left operator right`, with both sides converted to the type in which PostgreSQL compares them."""
    return Comparison(
        operator, *_convert_comparison_operands(left, right, needs_order=operator not in ("=", "<>"))
    )


def make_not_distinct(left: Node, right: Node) -> NotDistinct:
    """Return `left IS NOT DISTINCT FROM right`."""
    return NotDistinct(*_convert_comparison_operands(left, right, needs_order=False))


def make_null_if(left: Node, right: Node) -> Node:
    """Return `NULLIF(left, right)`.

    If PostgreSQL has an operator = for the two types as they are, the result has the type of `left`. Otherwise the result
    has their common type.
    """
    type_oids = {left.type_oid, right.type_oid}
    if len(type_oids) == 2 and (
        type_oids <= set(INTEGERS) or (left.type_oid == FLOAT4 and type_oids <= set(NUMBERS))
    ):
        null_constant = constant_from_text(None, left.type_oid)
        return Case((make_comparison("=", left, right),), (null_constant,), left, type_oid=left.type_oid)
    left, right = _convert_comparison_operands(left, right, needs_order=False)
    return NullIf(left, right, type_oid=left.type_oid, digits=left.digits)


def make_arithmetic(operator: Literal["+", "-", "*", "/", "%"], left: Node, right: Node) -> Arithmetic:
    """Return `left operator right` on numbers; both are converted to the wider of their types.

    A real beside another type is converted to double precision.
    """
    type_oids = {left.type_oid, right.type_oid} - {UNKNOWN}
    type_oid = max(type_oids, key=NUMBERS.index)
    if len(type_oids) > 1 and type_oid in FLOATS:
        type_oid = FLOAT8
    if operator == "%" and type_oid in FLOATS:
        raise RefusedError(f"type {type_name(type_oid)} has no operator %")
    left, right = coerce(left, type_oid), coerce(right, type_oid)
    digits = _find_result_digits(operator, left.digits, right.digits) if type_oid == NUMERIC else None
    return Arithmetic(operator, left, right, type_oid=type_oid, digits=digits)


def _find_result_digits(operator: str, left: Digits | None, right: Digits | None) -> Digits | None:
    """Return digits that fit all results; None for a quotient, because its scale depends on the values."""
    if operator == "/" or left is None or right is None:
        return None
    if operator == "*":
        return Digits.from_digit_counts(
            left.integral_digits + right.integral_digits, left.scale + right.scale
        )
    operand_digits = common_digits(iter((left, right)))
    if operator == "%" or operand_digits is None:
        return operand_digits
    return Digits.from_digit_counts(operand_digits.integral_digits + 1, operand_digits.scale)


def find_common_type(nodes: Sequence[Node]) -> int:
    """Return the common type of the values of CASE, COALESCE, IN, ARRAY, GREATEST or LEAST.

    PostgreSQL documentation, UNION, CASE, and Related Constructs; select_common_type().
    """
    type_oids = [node.type_oid for node in nodes if node.type_oid != UNKNOWN]
    if not type_oids:
        return TEXT
    common_oid = type_oids[0]
    for type_oid in type_oids[1:]:
        if {common_oid, type_oid} <= set(NUMBERS):
            common_oid = max(common_oid, type_oid, key=NUMBERS.index)
        elif {common_oid, type_oid} == {DATE, TIMESTAMP}:
            common_oid = TIMESTAMP
        elif type_oid != common_oid and not {common_oid, type_oid} <= set(STRINGS):
            # All strings convert to each other, so the first type stays.
            raise RefusedError(f"{type_name(common_oid)} and {type_name(type_oid)} have no common type")
    if ELEMENT_OIDS.get(common_oid, common_oid) not in _COMPARABLE_TYPES:
        raise RefusedError(f"type {type_name(common_oid)} has no counterpart in pgsieve")
    return common_oid


def convert_to_common_type(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], int, Digits | None]:
    """Convert nodes to their common type.

    Returns the converted nodes, the type, and for numerics the digits that fit all values.
    """
    type_oid = find_common_type(nodes)
    converted_nodes = tuple(coerce(node, type_oid) for node in nodes)
    is_numeric = NUMERIC in (type_oid, ELEMENT_OIDS.get(type_oid))
    return (
        converted_nodes,
        type_oid,
        common_digits(node.digits for node in converted_nodes) if is_numeric else None,
    )


def make_extreme(function: Literal["GREATEST", "LEAST"], operands: Sequence[Node]) -> Extreme:
    """Return GREATEST or LEAST of the operands in their common type.

    Raises RefusedError for values of type character, and for strings under a collation that does not order them by
    their bytes.
    """
    converted_operands, type_oid, digits = convert_to_common_type(operands)
    element_oid = ELEMENT_OIDS.get(type_oid, type_oid)
    if element_oid == BPCHAR:
        raise RefusedError(
            "PostgreSQL does not define the greater of two strings that differ in trailing blanks only"
        )
    if element_oid in STRINGS:
        require_collation(converted_operands, needs_order=True)
    return Extreme(function, converted_operands, type_oid=type_oid, digits=digits)
