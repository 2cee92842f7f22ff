"""Makes the nodes of function calls in a row filter, and of operators that become several nodes.

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
from pgsieve.decoding.row_filters.letter_case import CaseFunction, CaseMappings, ascii_only_mappings
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
from pgsieve.decoding.row_filters.simplification import planner_result
from pgsieve.decoding.row_filters.type_rules import (
    NUMBERS,
    arithmetic,
    array_type_of,
    coerce,
    comparison,
    convert_to_common_type,
    extreme,
    null_if,
    type_name,
)
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS
from pgsieve.decoding.wording import quantity


def logical(connective: Literal["AND", "OR"], operands: Sequence[Node]) -> Node:
    """Return AND or OR of the operands.

    If an operand is itself an AND or OR of the same kind, its operands are taken instead. AND of no operands is true
    and OR of no operands is false, as ALL and ANY are for an empty array.
    """
    flat: list[Node] = []
    for operand in operands:
        nested = isinstance(operand, Logical) and operand.connective == connective
        flat.extend(cast("Logical", operand).operands if nested else (operand,))
    if not flat:
        return Constant(connective == "AND", type_oid=BOOL)
    return flat[0] if len(flat) == 1 else Logical(connective, tuple(flat))


def row_comparison(
    operator: Operator, left: tuple[Node, ...], right: tuple[Node, ...], major_version: int
) -> Node:
    """Compare two rows as a server of that version does.

    For <, <=, > and >=, the server compares the pairs of fields from the left. It stops at the first pair that
    differs or has a NULL (PostgreSQL documentation, Row Constructor Comparison; ExecInterpExpr() in
    src/backend/executor/execExprInterp.c).
    """
    pairs = list(zip(left, right, strict=True))
    if operator in ("=", "<>"):
        return logical("AND" if operator == "=" else "OR", [comparison(operator, *pair) for pair in pairs])
    plan = partial(planner_result, major_version=major_version)
    if any(any(map(tree_can_fail, pair)) and any(map(is_null, map(plan, pair))) for pair in pairs):
        # The planner does not replace this pair by NULL, so PostgreSQL evaluates the field that can fail.
        raise RefusedError("PostgreSQL evaluates a field that is compared with NULL, and that can fail")
    strict: Operator = "<" if operator in ("<", "<=") else ">"

    def prepend_pair(later_pairs: Node, pair: tuple[Node, Node]) -> Node:
        equality, strict_comparison = comparison("=", *pair), comparison(strict, *pair)
        return Case((equality,), (later_pairs,), strict_comparison, type_oid=BOOL)

    return reduce(prepend_pair, reversed(pairs[:-1]), cast("Node", comparison(operator, *pairs[-1])))


# --- functions and operators of the catalog ----------------------------------------------


def builtin_call(name: str, operands: Sequence[Node], mappings: CaseMappings = ascii_only_mappings) -> Node:
    """Return the node of a call of the built-in function or operator with this SQL name."""
    procedure = procedures.resolve(name, [operand.type_oid for operand in operands])
    converted = tuple(map(coerce, operands, procedure.arguments))
    if procedure.name in ("lower", "upper", "initcap"):
        return case_change(cast("CaseFunction", procedure.name), converted[0], mappings)
    require_exact = _REQUIREMENTS.get(procedure.name)
    if require_exact is not None:
        require_exact(converted)
    digits = _result_digits(procedure.name, converted) if procedure.result == NUMERIC else None
    return FunctionCall(
        procedure.name, converted, procedure.can_fail, type_oid=procedure.result, digits=digits
    )


def case_change(function: CaseFunction, operand: Node, mappings: CaseMappings) -> CaseChange:
    """Return lower(), upper() or initcap() of an operand, under the operand's collation."""
    mapping = collations.case_mapping((operand,), function, mappings)
    return CaseChange(function, operand, mapping, type_oid=TEXT)


def operation(operator: Literal["+", "-", "*", "/", "%"], left: Node, right: Node) -> Node:
    """Return `left operator right` on numbers, dates or times."""
    oids = {left.type_oid, right.type_oid}
    if oids & set(NUMBERS) and oids <= {*NUMBERS, UNKNOWN}:
        return arithmetic(operator, left, right)
    return builtin_call(operator, (left, right))


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
# PostgreSQL raises an error if a repeated or padded string is longer than 1 GB. With this count no string is.
_MAX_COUNT: Final = 10_000


def _result_digits(name: str, operands: tuple[Node, ...]) -> Digits | None:
    if name in ("numeric_abs", "numeric_uminus"):
        return operands[0].digits
    if name.startswith("extract_") and _field_name(operands) in _BOUNDED_FIELDS | _WHOLE_CLOCK_FIELDS:
        return Digits(3, 0)
    return None


def _field_name(operands: tuple[Node, ...]) -> str:
    match operands[0]:
        case Constant(value=str() as field):
            return field.lower()
        case _:
            raise RefusedError("the field must be a constant")


def _require_field_in(*sets: frozenset[str]) -> Callable[[tuple[Node, ...]], None]:
    allowed = frozenset[str]().union(*sets)

    def require(operands: tuple[Node, ...]) -> None:
        field = _field_name(operands)
        if field not in allowed:
            raise RefusedError(f"the field {field} is not supported here")

    return require


def _require_deterministic_collation(operands: tuple[Node, ...]) -> None:
    collations.require_collation(
        [operand for operand in operands if operand.type_oid != INT4], ordering=False
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


def each_element(subject: Node, array: Node, *, every: bool, compare: Callable[[Node, Node], Node]) -> Node:
    """Return `subject operator ANY (array)`, or ALL if `every`, for an array that is not written as ARRAY[…]."""
    element_oid = ELEMENT_OIDS[array.type_oid]
    element = Element(collations.element_collation(array), type_oid=element_oid, digits=array.digits)
    test = compare(subject, element)
    if not isinstance(test, Comparison):
        raise RefusedError("only comparisons with the elements of a column are supported")
    return EachElement(every, subject, array, element, test)


def _array_operator(name: str, operands: Sequence[Node]) -> Node:
    left, right = (
        coerce(operand, other.type_oid) if operand.type_oid not in ELEMENT_OIDS else operand
        for operand, other in zip(operands, reversed(operands), strict=True)
    )
    # These functions accept the same types of both sides as the operator =, and convert them in the same way.
    equality = comparison("=", left, right)
    return FunctionCall(name, (equality.left, equality.right), type_oid=BOOL)


def _array_property(name: str, operands: Sequence[Node]) -> Node:
    subject = operands[0]
    if subject.type_oid not in ELEMENT_OIDS:
        raise RefusedError(f"{name} takes an array, not {type_name(subject.type_oid)}")
    dimensions = [coerce(dimension, INT4) for dimension in operands[1:]]
    return FunctionCall(name, (subject, *dimensions), type_oid=INT4)


def _array_position(operands: Sequence[Node]) -> Node:
    array, sought = operands
    if array.type_oid not in ELEMENT_OIDS:
        raise RefusedError(f"array_position takes an array, not {type_name(array.type_oid)}")
    element = Element(
        collations.element_collation(array), type_oid=ELEMENT_OIDS[array.type_oid], digits=array.digits
    )
    equality = comparison("=", element, sought)
    if equality.left != element:
        raise RefusedError("the second argument of array_position must have the element's type")
    return FunctionCall("array_position", (array, equality.right), type_oid=INT4)


def array_constructor(elements: Sequence[Node]) -> Array:
    """Return ARRAY[…] with the elements in their common type."""
    if not elements:
        raise RefusedError("an empty ARRAY needs a cast")
    converted, type_oid, digits = convert_to_common_type(elements)
    return Array(converted, type_oid=array_type_of(type_oid), digits=digits)


def _coalesce(operands: Sequence[Node]) -> Node:
    converted, type_oid, digits = convert_to_common_type(operands)
    return Coalesce(converted, type_oid=type_oid, digits=digits)


_MAX_ARGUMENTS = 1600  # The most columns of a table; no expression needs more arguments.
FUNCTIONS: Final[dict[str, tuple[int, int, Callable[[list[Node]], Node]]]] = {
    "mod": (2, 2, lambda operands: operation("%", *operands)),
    "coalesce": (1, _MAX_ARGUMENTS, _coalesce),
    "nullif": (2, 2, lambda operands: null_if(*operands)),
    "greatest": (1, _MAX_ARGUMENTS, partial(extreme, "GREATEST")),
    "least": (1, _MAX_ARGUMENTS, partial(extreme, "LEAST")),
    "cardinality": (1, 1, partial(_array_property, "array_cardinality")),
    "array_length": (2, 2, partial(_array_property, "array_length")),
    "array_upper": (2, 2, partial(_array_property, "array_length")),
    "array_lower": (2, 2, partial(_array_property, "array_lower")),
    "array_ndims": (1, 1, partial(_array_property, "array_ndims")),
    "array_position": (2, 2, _array_position),
    "@>": (2, 2, partial(_array_operator, "arraycontains")),
    "<@": (2, 2, partial(_array_operator, "arraycontained")),
    "&&": (2, 2, partial(_array_operator, "arrayoverlap")),
}
"""The functions that do not become a plain `FunctionCall`.

Maps the SQL name to the least and the greatest number of arguments, and to the function that makes the node.
"""


def function_node(name: str, operands: list[Node], mappings: CaseMappings = ascii_only_mappings) -> Node:
    """Return the node of a function call, or of a binary operator that stands for a function."""
    rule = FUNCTIONS.get(name)
    if rule is None:
        return builtin_call(name, operands, mappings)
    least, most, build = rule
    if not least <= len(operands) <= most:
        raise RefusedError(f"{name} does not take {quantity(len(operands), 'argument')}")
    return build(operands)
