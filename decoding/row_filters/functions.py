"""Makes nodes of a row filter's tree: for calls of functions and operators, and for comparisons of rows.

In: the nodes of the operands. Out: the node of the call. Raises RefusedError for operations without an exact
counterpart in pgsieve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Final, Literal, cast

from pgsieve.decoding.row_filters import collations, procedures
from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.letter_case import CaseFunction, CaseMappingFinder, find_ascii_mapping
from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    INT4,
    INTERVAL,
    NUMERIC,
    TEXT,
    UNKNOWN,
    Array,
    Case,
    CaseChange,
    Coalesce,
    Comparison,
    Constant,
    Digits,
    EachElement,
    Element,
    FunctionCall,
    Interval,
    Logical,
    Node,
    Operator,
    is_null,
    tree_can_fail,
)
from pgsieve.decoding.row_filters.simplification import simplify_part
from pgsieve.decoding.row_filters.type_rules import (
    NUMBERS,
    coerce,
    convert_to_common_type,
    find_array_type,
    make_arithmetic,
    make_comparison,
    make_extreme,
    make_null_if,
    type_name,
)
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS
from pgsieve.decoding.wording import quantity


def make_logical(connective: Literal["AND", "OR"], operands: Sequence[Node]) -> Node:
    """Return AND or OR of the operands.

    If an operand is itself an AND or OR of the same kind, its operands are taken instead. Without operands, AND is true
    and OR is false, as ALL and ANY are for an empty array.
    """
    flat_operands: list[Node] = []
    for operand in operands:
        is_nested = isinstance(operand, Logical) and operand.connective == connective
        flat_operands.extend(cast("Logical", operand).operands if is_nested else (operand,))
    if not flat_operands:
        return Constant(connective == "AND", type_oid=BOOL)
    return flat_operands[0] if len(flat_operands) == 1 else Logical(connective, tuple(flat_operands))


def compare_rows(
    operator: Operator, left: tuple[Node, ...], right: tuple[Node, ...], major_version: int
) -> Node:
    """Return the node that compares two rows as a server of this version does.

    For <, <=, > and >=, the server compares the pairs of fields from the left. It stops at the first pair that
    differs or has a NULL (PostgreSQL documentation, Row Constructor Comparison; ExecInterpExpr() in
    src/backend/executor/execExprInterp.c).
    """
    pairs = list(zip(left, right, strict=True))
    if operator in ("=", "<>"):
        return make_logical(
            "AND" if operator == "=" else "OR", [make_comparison(operator, *pair) for pair in pairs]
        )
    simplify_for_version = partial(simplify_part, major_version=major_version)
    if any(
        any(map(tree_can_fail, pair)) and any(map(is_null, map(simplify_for_version, pair))) for pair in pairs
    ):
        # `simplification` would not evaluate a field that is compared with NULL. In a comparison of rows the server
        # evaluates the field, and this can fail.
        raise RefusedError("PostgreSQL evaluates a field that is compared with NULL, and this can fail")
    strict_operator: Operator = "<" if operator in ("<", "<=") else ">"

    def prepend_pair(later_pairs: Node, pair: tuple[Node, Node]) -> Node:
        equality, strict_comparison = make_comparison("=", *pair), make_comparison(strict_operator, *pair)
        return Case((equality,), (later_pairs,), strict_comparison, type_oid=BOOL)

    return reduce(prepend_pair, reversed(pairs[:-1]), cast("Node", make_comparison(operator, *pairs[-1])))


# --- functions and operators of the catalog ----------------------------------------------


def make_builtin_call(
    name: str, operands: Sequence[Node], find_mapping: CaseMappingFinder = find_ascii_mapping
) -> Node:
    """Return the node of a call of the built-in function or operator with this SQL name."""
    procedure = procedures.resolve_procedure(name, [operand.type_oid for operand in operands])
    converted_operands = tuple(map(coerce, operands, procedure.argument_oids))
    if procedure.name in ("lower", "upper", "initcap"):
        return make_case_change(cast("CaseFunction", procedure.name), converted_operands[0], find_mapping)
    check_operands = _REQUIREMENTS.get(procedure.name)
    if check_operands is not None:
        check_operands(converted_operands)
    digits = _result_digits(procedure.name, converted_operands) if procedure.result_oid == NUMERIC else None
    return FunctionCall(
        procedure.name, converted_operands, procedure.can_fail, type_oid=procedure.result_oid, digits=digits
    )


def make_case_change(function: CaseFunction, operand: Node, find_mapping: CaseMappingFinder) -> CaseChange:
    """Return lower(), upper() or initcap() of an operand, under the operand's collation."""
    mapping = collations.case_mapping((operand,), function, find_mapping)
    return CaseChange(function, operand, mapping, type_oid=TEXT)


def make_operation(operator: Literal["+", "-", "*", "/", "%"], left: Node, right: Node) -> Node:
    """Return `left operator right` on numbers, dates or times."""
    oids = {left.type_oid, right.type_oid}
    if oids & set(NUMBERS) and oids <= {*NUMBERS, UNKNOWN}:
        return make_arithmetic(operator, left, right)
    return make_builtin_call(operator, (left, right))


# The fields of EXTRACT that are NULL for an infinite date (datetime.c, NonFiniteTimestampTzPart).
_BOUNDED_FIELDS: Final = frozenset(("day", "dow", "doy", "isodow", "month", "quarter", "week"))
# The fields of EXTRACT that are infinite for an infinite date.
_UNBOUNDED_FIELDS: Final = frozenset(
    ("year", "isoyear", "decade", "century", "millennium", "julian", "epoch")
)
_WHOLE_CLOCK_FIELDS: Final = frozenset(("hour", "minute"))
_CLOCK_FIELDS: Final = frozenset((*_WHOLE_CLOCK_FIELDS, "second", "milliseconds", "microseconds"))
_TRUNCATION_FIELDS: Final = frozenset(
    (*_CLOCK_FIELDS, "day", "week", "month", "quarter", "year", "decade", "century", "millennium")
)
# PostgreSQL raises an error if a repeated or padded string is longer than 1 GB. With at most this count, the result can
# be too long only if the repeated text has more than 100 kB.
_MAX_COUNT: Final = 10_000


def _result_digits(name: str, operands: tuple[Node, ...]) -> Digits | None:
    if name in ("numeric_abs", "numeric_uminus"):
        return operands[0].digits
    if name.startswith("extract_") and _find_field_name(operands) in _BOUNDED_FIELDS | _WHOLE_CLOCK_FIELDS:
        return Digits(3, 0)
    return None


def _find_field_name(operands: tuple[Node, ...]) -> str:
    match operands[0]:
        case Constant(value=str() as field):
            return field.lower()
        case _:
            raise RefusedError("the field must be a constant")


def _require_field_in(*allowed_sets: frozenset[str]) -> Callable[[tuple[Node, ...]], None]:
    allowed_fields = frozenset[str]().union(*allowed_sets)

    def require_allowed_field(operands: tuple[Node, ...]) -> None:
        field = _find_field_name(operands)
        if field not in allowed_fields:
            raise RefusedError(f"the field {field} is not supported here")

    return require_allowed_field


def _require_deterministic_collation(operands: tuple[Node, ...]) -> None:
    collations.require_collation(
        [operand for operand in operands if operand.type_oid != INT4], needs_order=False
    )


def _require_small_count(operands: tuple[Node, ...]) -> None:
    match operands[1]:
        case Constant(value=int() as count) if count <= _MAX_COUNT:
            return
        case _:
            raise RefusedError(f"the count must be a constant of at most {_MAX_COUNT}")


def _require_constant_interval(operands: tuple[Node, ...]) -> None:
    intervals = [operand for operand in operands if operand.type_oid == INTERVAL]
    if not all(
        isinstance(operand, Constant) and isinstance(operand.value, Interval) for operand in intervals
    ):
        raise RefusedError("the interval must be a constant")


#: Maps the `prosrc` of a function to a check of its operands: it raises RefusedError for operands with which pgsieve's
#: result could differ from PostgreSQL's.
_REQUIREMENTS: Final = MappingProxyType(
    {
        **dict.fromkeys(
            ("textpos", "replace_text", "split_part", "text_starts_with"), _require_deterministic_collation
        ),
        **dict.fromkeys(("repeat", "lpad", "rpad"), _require_small_count),
        **dict.fromkeys(
            ("date_pl_interval", "date_mi_interval", "timestamp_pl_interval", "timestamp_mi_interval"),
            _require_constant_interval,
        ),
        "extract_date": _require_field_in(_BOUNDED_FIELDS, _UNBOUNDED_FIELDS),
        **dict.fromkeys(
            ("extract_timestamp", "timestamp_part", "date_part_date"),
            _require_field_in(_BOUNDED_FIELDS, _UNBOUNDED_FIELDS, _CLOCK_FIELDS),
        ),
        "timestamp_trunc": _require_field_in(_TRUNCATION_FIELDS),
    }
)


# --- arrays ------------------------------------------------------------------------------


def make_each_element(
    subject: Node, array: Node, *, is_all: bool, compare: Callable[[Node, Node], Node]
) -> Node:
    """Return `subject operator ANY (array)`, or ALL if `is_all`, for an array that is not written as ARRAY[…]."""
    element_oid = ELEMENT_OIDS[array.type_oid]
    element = Element(collations.element_collation(array), type_oid=element_oid, digits=array.digits)
    test = compare(subject, element)
    if not isinstance(test, Comparison):
        raise RefusedError("only comparisons with the elements of a column are supported")
    return EachElement(is_all, subject, array, element, test)


def _make_array_operator(name: str, operands: Sequence[Node]) -> Node:
    if not any(operand.type_oid in ELEMENT_OIDS for operand in operands):
        raise RefusedError(
            f"{name} takes arrays, not {' and '.join(type_name(operand.type_oid) for operand in operands)}"
        )
    left, right = (
        coerce(operand, other.type_oid) if operand.type_oid not in ELEMENT_OIDS else operand
        for operand, other in zip(operands, reversed(operands), strict=True)
    )
    # These functions accept the same types as the operator =, and convert them in the same way.
    equality = make_comparison("=", left, right)
    return FunctionCall(name, (equality.left, equality.right), type_oid=BOOL)


def _make_array_property(name: str, operands: Sequence[Node]) -> Node:
    subject = operands[0]
    if subject.type_oid not in ELEMENT_OIDS:
        raise RefusedError(f"{name} takes an array, not {type_name(subject.type_oid)}")
    dimensions = [coerce(dimension, INT4) for dimension in operands[1:]]
    return FunctionCall(name, (subject, *dimensions), type_oid=INT4)


def _make_array_position(operands: Sequence[Node]) -> Node:
    array, sought_element = operands
    if array.type_oid not in ELEMENT_OIDS:
        raise RefusedError(f"array_position takes an array, not {type_name(array.type_oid)}")
    element = Element(
        collations.element_collation(array), type_oid=ELEMENT_OIDS[array.type_oid], digits=array.digits
    )
    equality = make_comparison("=", element, sought_element)
    if equality.left != element:
        raise RefusedError("the second argument of array_position must have the element's type")
    return FunctionCall("array_position", (array, equality.right), type_oid=INT4)


def make_array_constructor(elements: Sequence[Node]) -> Array:
    """Return ARRAY[…] with the elements in their common type."""
    if not elements:
        raise RefusedError("an empty ARRAY needs a cast")
    converted_elements, type_oid, digits = convert_to_common_type(elements)
    return Array(converted_elements, type_oid=find_array_type(type_oid), digits=digits)


def _make_coalesce(operands: Sequence[Node]) -> Node:
    converted_operands, type_oid, digits = convert_to_common_type(operands)
    return Coalesce(converted_operands, type_oid=type_oid, digits=digits)


_MAX_ARGUMENTS = 1600  # The most columns of a table; no expression needs more arguments.
FUNCTIONS: Final[dict[str, tuple[int, int, Callable[[list[Node]], Node]]]] = {
    "mod": (2, 2, lambda operands: make_operation("%", *operands)),
    "coalesce": (1, _MAX_ARGUMENTS, _make_coalesce),
    "nullif": (2, 2, lambda operands: make_null_if(*operands)),
    "greatest": (1, _MAX_ARGUMENTS, partial(make_extreme, "GREATEST")),
    "least": (1, _MAX_ARGUMENTS, partial(make_extreme, "LEAST")),
    "cardinality": (1, 1, partial(_make_array_property, "array_cardinality")),
    "array_length": (2, 2, partial(_make_array_property, "array_length")),
    # The first subscript of an array is 1 (`pgsieve.decoding.values.arrays`), so the last one is the length.
    "array_upper": (2, 2, partial(_make_array_property, "array_length")),
    "array_lower": (2, 2, partial(_make_array_property, "array_lower")),
    "array_ndims": (1, 1, partial(_make_array_property, "array_ndims")),
    "array_position": (2, 2, _make_array_position),
    "@>": (2, 2, partial(_make_array_operator, "arraycontains")),
    "<@": (2, 2, partial(_make_array_operator, "arraycontained")),
    "&&": (2, 2, partial(_make_array_operator, "arrayoverlap")),
}
"""The functions and operators that `procedures` does not list, because they accept values of many types.

Maps the SQL name to the least and the greatest number of arguments, and to the function that makes the node.
"""


def make_function_node(
    name: str, operands: list[Node], find_mapping: CaseMappingFinder = find_ascii_mapping
) -> Node:
    """Return the node of a function or binary operator with these operands."""
    rule = FUNCTIONS.get(name)
    if rule is None:
        return make_builtin_call(name, operands, find_mapping)
    min_operands, max_operands, make_node = rule
    if not min_operands <= len(operands) <= max_operands:
        raise RefusedError(f"{name} does not take {quantity(len(operands), 'argument')}")
    return make_node(operands)
