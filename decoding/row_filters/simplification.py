"""Simplifies a row filter by its constants, as PostgreSQL's planner does before any row is read.

In: a typed tree. Out: the tree without parts that PostgreSQL never evaluates: `NULL > 1 / a` and `1 / a > 0
AND false` divide for no row. Raises RefusedError if this depends on a constant expression whose value only
PostgreSQL computes. A tree that cannot fail is returned as it is, because its order of evaluation makes no
difference.

PostgreSQL: eval_const_expressions() in src/backend/optimizer/util/clauses.c, which ExecPrepareExpr() calls
for the filters of a publication. From 19 on, expr_is_nonnullable() in the same file also decides IS NULL of
an expression that cannot be NULL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from operator import is_
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
    can_fail,
    children,
    is_null,
)
from pgsieve.decoding.server_versions import OLDEST_SERVER
from pgsieve.decoding.values.builtin_types import ELEMENTS

_STRICT: Final = (Arithmetic, CaseChange, Cast, Collate, Comparison, FunctionCall, Like, Not, Regex)
_CALLED_ON_NULL: Final = frozenset(("array_position",))
# Functions that may return NULL for operands that are not NULL.
_NULL_OF_VALUES: Final = frozenset((
    "array_length", "array_lower", "array_ndims", "date_part_date", "extract_date", "extract_timestamp",
    "numeric_min_scale", "numeric_scale", "timestamp_part",
))  # fmt: skip
# Types between which a conversion may leave the value as it is.
_LABELLED: Final = frozenset((*STRINGS, *ELEMENTS))

#: The first major version whose planner decides IS NULL of an expression that cannot be NULL, and whose
#: right() accepts the least integer.
_NULL_TESTS_ARE_DECIDED: Final = 19
_OLDEST: Final = OLDEST_SERVER // 10000


def simplified(tree: Node, major_version: int = _OLDEST) -> Node:
    """The tree that a server of that version evaluates for a row."""
    tree = of_version(tree, major_version)
    return planned(tree, major_version) if can_fail(tree) else tree


def of_version(node: Node, major_version: int) -> Node:
    """The tree with each function by the name of its implementation in a server of that version."""
    if major_version >= _NULL_TESTS_ARE_DECIDED:
        return node
    node = _with_children(node, partial(of_version, major_version=major_version))
    if isinstance(node, FunctionCall) and node.name == "text_right":
        return replace(node, name="text_right_before_19")
    return node


def planned(node: Node, major_version: int = _OLDEST) -> Node:
    """The planner's result for a part of a filter, whether or not the part can fail."""
    node = _constants_folded(_with_children(node, partial(planned, major_version=major_version)))
    return _null_test_decided(node) if major_version >= _NULL_TESTS_ARE_DECIDED else node


def _constants_folded(node: Node) -> Node:
    match node:
        case Logical():
            return _logical(node)
        case Case():
            return _case(node)
        case Coalesce():
            return _coalesce(node)
        case Not(operand=Constant(value=bool() as value)):
            return Constant(not value, type_oid=BOOL)
        case IsNull(operand=Constant(value=value)):
            return Constant(value is None, type_oid=BOOL)
        case IsTruth(operand=Constant(value=value), truth=truth):
            return Constant(value is truth, type_oid=BOOL)
        case NullIf(left=left, right=right) if is_null(left) or is_null(right):
            return left
        case NullIf(left=left, right=right) if _may_become_null(left) and _can_fail_for_a_row(right):
            raise _undecided()
        case _ if _is_strict(node):
            return _strict(node)
        case _:
            return node


def _null_test_decided(node: Node) -> Node:
    match node:
        case IsNull(operand=operand) if _varies(operand):
            nonnullable = _nonnullable(operand)
            if nonnullable is None:
                raise _undecided()
            return Constant(False, type_oid=BOOL) if nonnullable else node
        case NotDistinct(left=left, right=right) if is_null(left) or is_null(right):
            return _null_test_decided(_constants_folded(IsNull(right if is_null(left) else left)))
        case NotDistinct(left=left, right=right) if _may_become_null(left) or _may_become_null(right):
            if _can_fail_for_a_row(node):
                raise _undecided()
            return node
        case _:
            return node


def _nonnullable(node: Node) -> bool | None:
    """Whether the planner recognises that a part with simplified operands is never NULL.

    None if only the server can say.
    """
    match node:
        case Array() | IsNull():
            return True
        case _ if not _varies(node):
            return _never_null(node) or (False if is_null(node) else None)
        case Coalesce(operands=operands) | Extreme(operands=operands):
            answers = set(map(_nonnullable, operands))
            return True if True in answers else None if None in answers else False
        case Case(conditions=conditions, results=results, default=default):
            answers = set(map(_nonnullable, (*results, default)))
            if answers == {True}:
                return True
            return False if False in answers and not any(map(_may_become_constant, conditions)) else None
        case Collate(operand=operand):
            return _nonnullable(operand)
        case Cast(operand=operand, modifier=()) if node.type_oid in STRINGS and operand.type_oid in (
            TEXT,
            VARCHAR,
        ):
            return _nonnullable(operand)
        case IsTruth(operand=operand) | Not(operand=IsTruth(operand=operand)):
            # If the operand is never NULL, the planner replaces the test by the operand, or its NOT, and does
            # not simplify that further.
            return True if _nonnullable(operand) is False and not _may_become_constant(operand) else None
        case Not(operand=IsNull()):
            return True
        case _ if _may_become_constant(node):
            return None
        case Comparison(left=left, right=right) | NotDistinct(left=left, right=right) if (
            left.type_oid == BOOL
        ):
            # A comparison with a constant becomes the other operand, or its NOT.
            other = right if _may_become_constant(left) else left
            alone = _may_become_constant(left) or _may_become_constant(right)
            return None if alone and _nonnullable(other) is not False else False
        case Cast(operand=operand) if (
            operand.type_oid != node.type_oid and not {operand.type_oid, node.type_oid} & _LABELLED
        ):
            return False
        case Cast(operand=operand) | Not(operand=operand) | NullIf(left=operand):
            return False if _nonnullable(operand) is False else None
        case _:
            return False


def _with_children(node: Node, changed_child: Callable[[Node], Node]) -> Node:
    changed: dict[str, Any] = {}
    for field in fields(node):
        value = getattr(node, field.name)
        if isinstance(value, Node):
            changed[field.name] = changed_child(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Node):
            changed[field.name] = tuple(map(changed_child, value))
    return _with(node, **changed)


def _with(node: Node, **operands: Any) -> Node:
    """Return the same object if nothing changed, so that a repeated part of a filter is compiled once."""
    same = all(_is_same(getattr(node, name), value) for name, value in operands.items())
    return node if same else replace(node, **operands)


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_, before, after))
    return before is after


def _strict(node: Node) -> Node:
    operands = tuple(children(node))
    if any(map(is_null, operands)):
        return _null_of(node)
    for number, operand in enumerate(operands):
        others = (*operands[:number], *operands[number + 1 :])
        if _may_become_null(operand) and any(map(_can_fail_for_a_row, others)):
            raise _undecided()
    return node


def _logical(node: Logical) -> Node:
    decisive = node.connective == "OR"
    kept: list[Node] = []
    for operand in node.operands:
        match operand:
            case Constant(value=bool() as value) if value is decisive:
                return operand
            case Constant(value=bool()):
                continue
            case Constant():  # NULL decides nothing
                kept.append(operand)
            case _ if _may_become_constant(operand) and any(map(_can_fail_for_a_row, kept)):
                raise _undecided()
            case _:
                kept.append(operand)
    if not kept:
        return Constant(not decisive, type_oid=BOOL)
    return kept[0] if len(kept) == 1 else _with(node, operands=tuple(kept))


def _case(node: Case) -> Node:
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
    return _with(node, conditions=conditions, results=results, default=default)


def _coalesce(node: Coalesce) -> Node:
    kept: list[Node] = []
    for operand in node.operands:
        if is_null(operand):
            continue
        kept.append(operand)
        if isinstance(operand, Constant):
            break
    if not kept:
        return _null_of(node)
    if isinstance(kept[0], Constant):
        return replace(kept[0], digits=node.digits)
    return _with(node, operands=tuple(kept))


def _is_strict(node: Node) -> bool:
    return isinstance(node, _STRICT) and not (isinstance(node, FunctionCall) and node.name in _CALLED_ON_NULL)


def _null_of(node: Node) -> Constant:
    return Constant(None, type_oid=node.type_oid, digits=node.digits)


def _can_fail_for_a_row(node: Node) -> bool:
    return _varies(node) and can_fail(node)


def _varies(node: Node) -> bool:
    match node:
        case ColumnValue() | Element():
            return True
        case EachElement(subject=subject, array=array):
            return _varies(subject) or _varies(array)
        case _:
            return any(map(_varies, children(node)))


def _may_become_null(node: Node) -> bool:
    return _may_become_constant(node) and not _never_null(node)


def _may_become_constant(node: Node) -> bool:
    """Whether the planner may reduce a part to a constant whose value only PostgreSQL computes."""
    if not _varies(node):
        return True
    match node:
        case Logical(operands=operands):
            return any(map(_may_become_constant, operands))
        case Case(conditions=conditions, results=results, default=default):
            return (not conditions or any(map(_may_become_constant, conditions))) and any(
                map(_may_become_constant, (*results, default))
            )
        case Coalesce(operands=operands):
            return _may_become_constant(operands[0])
        case IsNull(operand=operand) | IsTruth(operand=operand):
            return _may_become_constant(operand)
        case NullIf(left=left, right=right):
            return _may_become_constant(left) and (not _never_null(left) or _may_become_constant(right))
        case EachElement(subject=subject, array=array):
            return all(map(_may_become_constant, (subject, array)))
        case ColumnValue() | Element():
            return False
        case _:
            # Each child is visited once: with two visits per level, a sum of 30 terms would take hours.
            constant = [child for child in children(node) if _may_become_constant(child)]
            is_null = _is_strict(node) and not all(map(_never_null, constant))
            return is_null or len(constant) == sum(1 for _ in children(node))


def _never_null(node: Node) -> bool:
    match node:
        case Constant(value=value):
            return value is not None
        case IsNull() | IsTruth() | NotDistinct() | Array():
            return True
        case Coalesce(operands=operands) | Extreme(operands=operands):
            return any(map(_never_null, operands))
        case Case(results=results, default=default):
            return all(map(_never_null, (*results, default)))
        case FunctionCall(name=name) if name in _NULL_OF_VALUES:
            return False
        case _ if isinstance(node, Logical) or _is_strict(node):
            return all(map(_never_null, children(node)))
        case _:
            return False


def _undecided() -> RefusedError:
    return RefusedError(
        "an expression of constants decides whether another part is evaluated, and that part may fail: "
        "write its value instead"
    )
