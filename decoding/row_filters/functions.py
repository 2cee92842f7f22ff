"""Makes the nodes of a row filter's function calls, and of operators that consist of several nodes.

In: nodes. Out: nodes. Raises RefusedError for operations without an exact counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Final, Literal, cast

from pgsieve.decoding.row_filters import collations, procedures
from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.letter_case import CaseFunction, CaseMappings, only_ascii
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
    can_fail,
    is_null,
)
from pgsieve.decoding.row_filters.simplification import planned
from pgsieve.decoding.row_filters.type_rules import (
    NUMBERS,
    arithmetic,
    array_of,
    coerce,
    comparison,
    extreme,
    null_if,
    to_common_type,
    type_name,
)
from pgsieve.decoding.values.builtin_types import ELEMENTS
from pgsieve.decoding.wording import counted


def logical(connective: Literal["AND", "OR"], operands: Sequence[Node]) -> Node:
    """AND or OR of operands; without operands the result of ALL or ANY of an empty array.

    Both are associative: an operand with the same connective is merged.
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
    """Compare rows field by field until a pair differs or has a NULL, as a server of that version does.

    See section 9.25.5. With <, <=, > and >=, no later pair is evaluated (ExecInterpExpr() in
    src/backend/executor/execExprInterp.c).
    """
    pairs = list(zip(left, right, strict=True))
    if operator in ("=", "<>"):
        return logical("AND" if operator == "=" else "OR", [comparison(operator, *pair) for pair in pairs])
    plan = partial(planned, major_version=major_version)
    if any(any(map(can_fail, pair)) and any(map(is_null, map(plan, pair))) for pair in pairs):
        # The planner does not replace such a pair by NULL.
        raise RefusedError("PostgreSQL evaluates a field that is compared with NULL, and that may fail")
    strict: Operator = "<" if operator in ("<", "<=") else ">"

    def earlier(rest: Node, pair: tuple[Node, Node]) -> Node:
        same, decided = comparison("=", *pair), comparison(strict, *pair)
        return Case((same,), (rest,), decided, type_oid=BOOL)

    return reduce(earlier, reversed(pairs[:-1]), cast("Node", comparison(operator, *pairs[-1])))


# --- functions and operators of the catalog ----------------------------------------------


def call(name: str, operands: Sequence[Node], mappings: CaseMappings = only_ascii) -> Node:
    """Return the call of a built-in function or operator by its SQL name."""
    procedure = procedures.resolve(name, [operand.type_oid for operand in operands])
    converted = tuple(map(coerce, operands, procedure.arguments))
    if procedure.name in ("lower", "upper", "initcap"):
        return case_change(cast("CaseFunction", procedure.name), converted[0], mappings)
    require = _REQUIREMENTS.get(procedure.name)
    if require is not None:
        require(converted)
    digits = _digits(procedure.name, converted) if procedure.result == NUMERIC else None
    return FunctionCall(procedure.name, converted, procedure.fails, type_oid=procedure.result, digits=digits)


def case_change(function: CaseFunction, operand: Node, mappings: CaseMappings) -> CaseChange:
    """Return the change of an operand's case, under the operand's collation."""
    mapping = collations.case_mapping((operand,), function, mappings)
    return CaseChange(function, operand, mapping, type_oid=TEXT)


def operation(operator: Literal["+", "-", "*", "/", "%"], left: Node, right: Node) -> Node:
    """`left operator right`, on numbers or on dates and times."""
    oids = {left.type_oid, right.type_oid}
    if oids & set(NUMBERS) and oids <= {*NUMBERS, UNKNOWN}:
        return arithmetic(operator, left, right)
    return call(operator, (left, right))


# Fields that are NULL for an infinite date (datetime.c, NonFiniteTimestampTzPart).
_BOUNDED_FIELDS: Final = frozenset(("day", "dow", "doy", "isodow", "month", "quarter", "week"))
# Fields that are infinite for an infinite date.
_UNBOUNDED_FIELDS: Final = frozenset(
    ("year", "isoyear", "decade", "century", "millennium", "julian", "epoch")
)
_WHOLE_CLOCK_FIELDS: Final = frozenset(("hour", "minute"))
_CLOCK_FIELDS: Final = frozenset((*_WHOLE_CLOCK_FIELDS, "second", "milliseconds", "microseconds"))
_TRUNCATED: Final = frozenset(
    (*_CLOCK_FIELDS, "day", "week", "month", "quarter", "year", "decade", "century", "millennium")
)
# PostgreSQL refuses a repeated or padded string beyond 1 GB at run time; this limit stays far below.
_GREATEST_COUNT: Final = 10_000


def _digits(name: str, operands: tuple[Node, ...]) -> Digits | None:
    if name in ("numeric_abs", "numeric_uminus"):
        return operands[0].digits
    if name.startswith("extract_") and _field(operands) in _BOUNDED_FIELDS | _WHOLE_CLOCK_FIELDS:
        return Digits(3, 0)
    return None


def _field(operands: tuple[Node, ...]) -> str:
    match operands[0]:
        case Constant(value=str() as field):
            return field.lower()
        case _:
            raise RefusedError("the field has to be a constant")


def _of_fields(*sets: frozenset[str]) -> Callable[[tuple[Node, ...]], None]:
    allowed = frozenset[str]().union(*sets)

    def require(operands: tuple[Node, ...]) -> None:
        field = _field(operands)
        if field not in allowed:
            raise RefusedError(f"the field {field} is not supported here")

    return require


def _same_bytes(operands: tuple[Node, ...]) -> None:
    collations.require_collation(
        [operand for operand in operands if operand.type_oid != INT4], ordering=False
    )


def _small_count(operands: tuple[Node, ...]) -> None:
    match operands[1]:
        case Constant(value=int() as count) if count <= _GREATEST_COUNT:
            return
        case _:
            raise RefusedError(f"the count has to be a constant of at most {_GREATEST_COUNT}")


def _constant_interval(operands: tuple[Node, ...]) -> None:
    intervals = [operand for operand in operands if operand.type_oid == INTERVAL]
    if not all(
        isinstance(operand, Constant) and isinstance(operand.value, Interval) for operand in intervals
    ):
        raise RefusedError("the interval has to be a constant")


_REQUIREMENTS: Final = MappingProxyType(
    {
        **dict.fromkeys(("textpos", "replace_text", "split_part", "text_starts_with"), _same_bytes),
        **dict.fromkeys(("repeat", "lpad", "rpad"), _small_count),
        **dict.fromkeys(
            ("date_pl_interval", "date_mi_interval", "timestamp_pl_interval", "timestamp_mi_interval"),
            _constant_interval,
        ),
        "extract_date": _of_fields(_BOUNDED_FIELDS, _UNBOUNDED_FIELDS),
        **dict.fromkeys(
            ("extract_timestamp", "timestamp_part", "date_part_date"),
            _of_fields(_BOUNDED_FIELDS, _UNBOUNDED_FIELDS, _CLOCK_FIELDS),
        ),
        "timestamp_trunc": _of_fields(_TRUNCATED),
    }
)


# --- arrays ------------------------------------------------------------------------------


def each_element(subject: Node, array: Node, *, every: bool, compare: Callable[[Node, Node], Node]) -> Node:
    """`subject operator ANY (array)`, or ALL, for an array that is not written out (section 9.25.3)."""
    element_oid = ELEMENTS[array.type_oid]
    element = Element(collations.of_elements(array), type_oid=element_oid, digits=array.digits)
    test = compare(subject, element)
    if not isinstance(test, Comparison):
        raise RefusedError("only comparisons with the elements of a column are supported")
    return EachElement(every, subject, array, element, test)


def _array_operator(name: str, operands: Sequence[Node]) -> Node:
    left, right = (
        coerce(operand, other.type_oid) if operand.type_oid not in ELEMENTS else operand
        for operand, other in zip(operands, reversed(operands), strict=True)
    )
    # Like these functions, the operator = requires one type of both sides that can be compared.
    alike = comparison("=", left, right)
    return FunctionCall(name, (alike.left, alike.right), type_oid=BOOL)


def _of_array(name: str, operands: Sequence[Node]) -> Node:
    subject = operands[0]
    if subject.type_oid not in ELEMENTS:
        raise RefusedError(f"{name} takes an array, not {type_name(subject.type_oid)}")
    dimensions = [coerce(dimension, INT4) for dimension in operands[1:]]
    return FunctionCall(name, (subject, *dimensions), type_oid=INT4)


def _array_position(operands: Sequence[Node]) -> Node:
    array, sought = operands
    if array.type_oid not in ELEMENTS:
        raise RefusedError(f"array_position takes an array, not {type_name(array.type_oid)}")
    element = Element(collations.of_elements(array), type_oid=ELEMENTS[array.type_oid], digits=array.digits)
    alike = comparison("=", element, sought)
    if alike.left != element:
        raise RefusedError("the second argument of array_position has to be of the element's type")
    return FunctionCall("array_position", (array, alike.right), type_oid=INT4)


def array_constructor(elements: Sequence[Node]) -> Array:
    """ARRAY[…], its elements in their common type."""
    if not elements:
        raise RefusedError("an empty ARRAY needs a cast")
    converted, type_oid, digits = to_common_type(elements)
    return Array(converted, type_oid=array_of(type_oid), digits=digits)


def _coalesce(operands: Sequence[Node]) -> Node:
    converted, type_oid, digits = to_common_type(operands)
    return Coalesce(converted, type_oid=type_oid, digits=digits)


_MANY = 1600  # The most columns of a table; no expression needs more arguments.
FUNCTIONS: Final[dict[str, tuple[int, int, Callable[[list[Node]], Node]]]] = {
    "mod": (2, 2, lambda operands: operation("%", *operands)),
    "coalesce": (1, _MANY, _coalesce),
    "nullif": (2, 2, lambda operands: null_if(*operands)),
    "greatest": (1, _MANY, partial(extreme, "GREATEST")),
    "least": (1, _MANY, partial(extreme, "LEAST")),
    "cardinality": (1, 1, partial(_of_array, "array_cardinality")),
    "array_length": (2, 2, partial(_of_array, "array_length")),
    "array_upper": (2, 2, partial(_of_array, "array_length")),
    "array_lower": (2, 2, partial(_of_array, "array_lower")),
    "array_ndims": (1, 1, partial(_of_array, "array_ndims")),
    "array_position": (2, 2, _array_position),
    "@>": (2, 2, partial(_array_operator, "arraycontains")),
    "<@": (2, 2, partial(_array_operator, "arraycontained")),
    "&&": (2, 2, partial(_array_operator, "arrayoverlap")),
}
"""Functions that are not simply a FunctionCall: the least and the most arguments, and what makes the node."""


def function(name: str, operands: list[Node], mappings: CaseMappings = only_ascii) -> Node:
    """Return the node of a function call, or of a binary operator that works like one."""
    rule = FUNCTIONS.get(name)
    if rule is None:
        return call(name, operands, mappings)
    least, most, build = rule
    if not least <= len(operands) <= most:
        raise RefusedError(f"{name} does not take {counted(len(operands), 'argument')}")
    return build(operands)
