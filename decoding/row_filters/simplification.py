"""Simplifies the constant parts of a row filter, as PostgreSQL's planner does before it reads a row.

In: a typed tree. Out: the tree without the parts that PostgreSQL never evaluates. For example, PostgreSQL never
divides for `NULL > 1 / a` or `1 / a > 0 AND false`. So there is no error if `a` is 0, and pgsieve must not raise
one either. A tree that cannot fail is left as it is, because it has the same result without simplification.

Raises RefusedError if the simplification depends on the value of a constant expression that only PostgreSQL
computes.

Source: eval_const_expressions() in src/backend/optimizer/util/clauses.c, which ExecPrepareExpr() calls for the
filters of a publication. From PostgreSQL 19 on, the planner also replaces IS NULL of an expression if
expr_is_nonnullable() in the same file recognises that the expression is never NULL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any, Final

from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    STRINGS,
    TEXT,
    VARCHAR,
    Arithmetic,
    Array,
    Case,
    CaseChange,
    Cast,
    Coalesce,
    Collate,
    ColumnValue,
    Comparison,
    Constant,
    EachElement,
    Element,
    Extreme,
    FunctionCall,
    IsNull,
    IsTruth,
    Like,
    Logical,
    Node,
    Not,
    NotDistinct,
    NullIf,
    Regex,
    children,
    is_null,
    tree_can_fail,
)
from pgsieve.decoding.server_versions import OLDEST_SERVER
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS

_STRICT_NODES: Final = (Arithmetic, CaseChange, Cast, Collate, Comparison, FunctionCall, Like, Not, Regex)
_FUNCTIONS_CALLED_ON_NULL: Final = frozenset(("array_position",))
# The functions that can return NULL although no operand is NULL.
_FUNCTIONS_RETURNING_NULL: Final = frozenset((
    "array_length", "array_lower", "array_ndims", "date_part_date", "extract_date", "extract_timestamp",
    "numeric_min_scale", "numeric_scale", "timestamp_part",
))  # fmt: skip
# A conversion from or to one of these types may be a mere relabelling, which keeps the bytes of the value.
_RELABELLED_TYPES: Final = frozenset((*STRINGS, *ELEMENT_OIDS))

#: The first major version whose planner replaces IS NULL of an expression that cannot be NULL.
_NULL_TEST_VERSION: Final = 19
#: Maps an implementation of a function (`prosrc`) to the first major version that has it, and to the implementation
#: before that version. From 16 on, a difference of timestamps that overflows is an error. From 17 on, differences of
#: infinite timestamps are infinite. From 19 on, right() accepts the least integer, -2147483648.
_FORMER_FUNCTIONS: Final = MappingProxyType(
    {
        "timestamp_mi": (17, "timestamp_mi_before_17"),
        "timestamp_mi_before_17": (16, "timestamp_mi_before_16"),
        "text_right": (19, "text_right_before_19"),
    }
)
_OLDEST_VERSION: Final = OLDEST_SERVER // 10000


def simplify(tree: Node, major_version: int = _OLDEST_VERSION) -> Node:
    """Return the tree that a server of that version evaluates for each row."""
    tree = choose_implementations(tree, major_version)
    return simplify_part(tree, major_version) if tree_can_fail(tree) else tree


def choose_implementations(node: Node, major_version: int) -> Node:
    """Give each function the name of the implementation that behaves as a server of that version does."""
    node = _replace_children(node, partial(choose_implementations, major_version=major_version))
    while isinstance(node, FunctionCall) and node.name in _FORMER_FUNCTIONS:
        first_version, former_name = _FORMER_FUNCTIONS[node.name]
        if major_version >= first_version:
            break
        node = replace(node, name=former_name)
    return node


def simplify_part(node: Node, major_version: int = _OLDEST_VERSION) -> Node:
    """Return what the planner makes of a part of a filter, even if the part cannot fail."""
    node = _fold_constants(_replace_children(node, partial(simplify_part, major_version=major_version)))
    return _decide_null_test(node) if major_version >= _NULL_TEST_VERSION else node


def _fold_constants(node: Node) -> Node:
    match node:
        case Logical():
            return _fold_logical(node)
        case Case():
            return _fold_case(node)
        case Coalesce():
            return _fold_coalesce(node)
        case Not(operand=Constant(value=bool() as value)):
            return Constant(not value, type_oid=BOOL)
        case IsNull(operand=Constant(value=value)):
            return Constant(value is None, type_oid=BOOL)
        case IsTruth(operand=Constant(value=value), truth=truth):
            return Constant(value is truth, type_oid=BOOL)
        case NullIf(left=left, right=right) if is_null(left) or is_null(right):
            return left
        case NullIf(left=left, right=right) if _can_become_null(left) and _can_fail_for_a_row(right):
            raise _make_undecided_error()
        case _ if _is_strict(node):
            return _fold_strict(node)
        case _:
            return node


def _decide_null_test(node: Node) -> Node:
    match node:
        case IsNull(operand=operand) if _depends_on_row(operand):
            is_nonnullable = _is_nonnullable(operand)
            if is_nonnullable is None:
                raise _make_undecided_error()
            return Constant(False, type_oid=BOOL) if is_nonnullable else node
        case NotDistinct(left=left, right=right) if is_null(left) or is_null(right):
            return _decide_null_test(_fold_constants(IsNull(right if is_null(left) else left)))
        case NotDistinct(left=left, right=right) if _can_become_null(left) or _can_become_null(right):
            if _can_fail_for_a_row(node):
                raise _make_undecided_error()
            return node
        case _:
            return node


def _is_nonnullable(node: Node) -> bool | None:
    """Whether the planner recognises that a part is never NULL; the operands of the part are already simplified.

    Returns None if the answer is not known, for example because it depends on a value that only the server computes.
    """
    match node:
        case Array() | IsNull():
            return True
        case _ if not _depends_on_row(node):
            return _is_never_null(node) or (False if is_null(node) else None)
        case Coalesce(operands=operands) | Extreme(operands=operands):
            answers = set(map(_is_nonnullable, operands))
            return True if True in answers else None if None in answers else False
        case Case(conditions=conditions, results=results, default=default):
            answers = set(map(_is_nonnullable, (*results, default)))
            if answers == {True}:
                return True
            return False if False in answers and not any(map(_can_become_constant, conditions)) else None
        case Collate(operand=operand):
            return _is_nonnullable(operand)
        case Cast(operand=operand, modifier=()) if node.type_oid in STRINGS and operand.type_oid in (
            TEXT,
            VARCHAR,
        ):
            return _is_nonnullable(operand)
        case IsTruth(operand=operand) | Not(operand=IsTruth(operand=operand)):
            # If the operand is never NULL, the planner replaces the test by the operand or its negation. Whether it
            # recognises the replacement as never NULL is not known.
            return True if _is_nonnullable(operand) is False and not _can_become_constant(operand) else None
        case Not(operand=IsNull()):
            return True
        case _ if _can_become_constant(node):
            return None
        case Comparison(left=left, right=right) | NotDistinct(left=left, right=right) if (
            left.type_oid == BOOL
        ):
            # If one of two booleans is a constant, the planner replaces their comparison by the other one or its
            # negation.
            variable_side = right if _can_become_constant(left) else left
            has_constant_side = _can_become_constant(left) or _can_become_constant(right)
            return None if has_constant_side and _is_nonnullable(variable_side) is not False else False
        case Cast(operand=operand) if (
            operand.type_oid != node.type_oid and not {operand.type_oid, node.type_oid} & _RELABELLED_TYPES
        ):
            return False
        case Cast(operand=operand) | Not(operand=operand) | NullIf(left=operand):
            return False if _is_nonnullable(operand) is False else None
        case _:
            return False


def _replace_children(node: Node, replace_child: Callable[[Node], Node]) -> Node:
    replacements: dict[str, Any] = {}
    for field in fields(node):
        value = getattr(node, field.name)
        if isinstance(value, Node):
            replacements[field.name] = replace_child(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Node):
            replacements[field.name] = tuple(map(replace_child, value))
    return _replace_operands(node, **replacements)


def _replace_operands(node: Node, **operands: Any) -> Node:
    """Return a node with these operands; the same object if no operand changed.

    The compiler of row filters compiles an object only once, even if it occurs several times in a tree. So the object is
    not copied without need.
    """
    is_same = all(_is_same_object(getattr(node, name), value) for name, value in operands.items())
    return node if is_same else replace(node, **operands)


def _is_same_object(left: Any, right: Any) -> bool:
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(is_, left, right))
    return left is right


def _fold_strict(node: Node) -> Node:
    operands = tuple(children(node))
    if any(map(is_null, operands)):
        return _make_null_constant(node)
    for index, operand in enumerate(operands):
        other_operands = (*operands[:index], *operands[index + 1 :])
        # Ask about the other operands first. Mostly they are a constant or a column, so the answer takes no walk
        # through a deep tree.
        if any(map(_can_fail_for_a_row, other_operands)) and _can_become_null(operand):
            raise _make_undecided_error()
    return node


def _fold_logical(node: Logical) -> Node:
    deciding_value = node.connective == "OR"
    remaining_operands: list[Node] = []
    for operand in node.operands:
        match operand:
            case Constant(value=bool() as value) if value is deciding_value:
                return operand
            case Constant(value=bool()):
                continue
            case Constant():  # NULL neither decides the result nor can be left out.
                remaining_operands.append(operand)
            case _ if _can_become_constant(operand) and any(map(_can_fail_for_a_row, remaining_operands)):
                raise _make_undecided_error()
            case _:
                remaining_operands.append(operand)
    if not remaining_operands:
        return Constant(not deciding_value, type_oid=BOOL)
    return (
        remaining_operands[0]
        if len(remaining_operands) == 1
        else _replace_operands(node, operands=tuple(remaining_operands))
    )


def _fold_case(node: Case) -> Node:
    branches: list[tuple[Node, Node]] = []
    default = node.default
    for condition, result in zip(node.conditions, node.results, strict=True):
        match condition:
            case Constant(value=True):
                default = result
                break
            case Constant():
                continue
            case _:
                branches.append((condition, result))
    if not branches and isinstance(default, Constant):
        return replace(default, digits=node.digits)
    conditions, results = zip(*branches, strict=True) if branches else ((), ())
    return _replace_operands(node, conditions=conditions, results=results, default=default)


def _fold_coalesce(node: Coalesce) -> Node:
    remaining_operands: list[Node] = []
    for operand in node.operands:
        if is_null(operand):
            continue
        remaining_operands.append(operand)
        if isinstance(operand, Constant):
            break
    if not remaining_operands:
        return _make_null_constant(node)
    if isinstance(remaining_operands[0], Constant):
        return replace(remaining_operands[0], digits=node.digits)
    return _replace_operands(node, operands=tuple(remaining_operands))


def _is_strict(node: Node) -> bool:
    return isinstance(node, _STRICT_NODES) and not (
        isinstance(node, FunctionCall) and node.name in _FUNCTIONS_CALLED_ON_NULL
    )


def _make_null_constant(node: Node) -> Constant:
    return Constant(None, type_oid=node.type_oid, digits=node.digits)


def _can_fail_for_a_row(node: Node) -> bool:
    return _depends_on_row(node) and tree_can_fail(node)


def _depends_on_row(node: Node) -> bool:
    match node:
        case ColumnValue() | Element():
            return True
        case EachElement(subject=subject, array=array):
            return _depends_on_row(subject) or _depends_on_row(array)
        case _:
            return any(map(_depends_on_row, children(node)))


def _can_become_null(node: Node) -> bool:
    return _can_become_constant(node) and not _is_never_null(node)


def _can_become_constant(node: Node) -> bool:
    """Whether the planner can reduce a part to a constant, even if only PostgreSQL can compute the constant."""
    match node:
        case Logical(operands=operands):
            return any(map(_can_become_constant, operands))
        case Case(conditions=conditions, results=results, default=default):
            return (not conditions or any(map(_can_become_constant, conditions))) and any(
                map(_can_become_constant, (*results, default))
            )
        case Coalesce(operands=operands):
            return _can_become_constant(operands[0])
        case IsNull(operand=operand) | IsTruth(operand=operand):
            return _can_become_constant(operand)
        case NullIf(left=left, right=right):
            return _can_become_constant(left) and (not _is_never_null(left) or _can_become_constant(right))
        case EachElement(subject=subject, array=array):
            return all(map(_can_become_constant, (subject, array)))
        case ColumnValue() | Element():
            return False
        case _:
            # Each child is visited once. With two visits per level, a sum of 30 terms would take hours.
            constant_children = [child for child in children(node) if _can_become_constant(child)]
            can_be_null = _is_strict(node) and not all(map(_is_never_null, constant_children))
            return can_be_null or len(constant_children) == sum(1 for _ in children(node))


def _is_never_null(node: Node) -> bool:
    match node:
        case Constant(value=value):
            return value is not None
        case IsNull() | IsTruth() | NotDistinct() | Array():
            return True
        case Coalesce(operands=operands) | Extreme(operands=operands):
            return any(map(_is_never_null, operands))
        case Case(results=results, default=default):
            return all(map(_is_never_null, (*results, default)))
        case FunctionCall(name=name) if name in _FUNCTIONS_RETURNING_NULL:
            return False
        case _ if isinstance(node, Logical) or _is_strict(node):
            return all(map(_is_never_null, children(node)))
        case _:
            return False


def _make_undecided_error() -> RefusedError:
    return RefusedError(
        "a constant expression decides whether PostgreSQL evaluates another part, and that part can fail: "
        "write the value of the constant expression instead"
    )
