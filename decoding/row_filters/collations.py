"""Finds the collation of expressions over strings, and refuses collations under which pgsieve cannot compare.

In: nodes of a row filter's tree. Out: the name of the collation that PostgreSQL would use for these nodes, and its case
mapping (the letters that lower, upper and initcap change).

pgsieve compares strings by their bytes. Raises RefusedError for a collation under which PostgreSQL may find another
result than a comparison of bytes (PostgreSQL documentation, Collation Support; parse_collate.c).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.letter_case import CaseFunction, CaseMapping, CaseMappingFinder
from pgsieve.decoding.row_filters.nodes import (
    STRINGS,
    Array,
    Case,
    CaseChange,
    Cast,
    Coalesce,
    Collate,
    ColumnValue,
    Element,
    Extreme,
    FunctionCall,
    Node,
    NullIf,
)
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS

# The collations that order strings by their bytes in UTF-8.
_BYTE_ORDER_COLLATIONS: Final = frozenset(("C", "POSIX", "ucs_basic", "pg_c_utf8", "pg_unicode_fast"))
# The collations of pg_catalog under which equal strings have equal bytes: the database's default, the collations of
# libc, and those that initdb imports from ICU. A user-defined collation may be nondeterministic, so that different
# bytes are equal.
_DETERMINISTIC_COLLATIONS: Final = re.compile(
    r"default|C|POSIX|ucs_basic|pg_c_utf8|pg_unicode_fast|unicode|C\.\S+"
    r"|[a-z]{2,3}_[A-Z]{2,3}(\.\w+)?(@\w+)?|(und|[a-z]{2,3})(-\w+)*-x-icu"
)


class _Strength(IntEnum):
    """How an expression got its collation.

    If several operands have a collation, PostgreSQL takes the one with the greatest strength (PostgreSQL documentation,
    Collation Concepts).
    """

    DEFAULT = 0
    IMPLICIT = 1
    EXPLICIT = 2


def _find_collation(node: Node) -> tuple[_Strength, frozenset[str]]:
    """Return the strength of an expression's collation, and the set of its names: several if the operands conflict."""
    match node:
        case Collate(collation=name):
            return _Strength.EXPLICIT, frozenset((name,))
        case ColumnValue(collation=name) | Element(collation=name):
            is_named = name not in ("", "default")
            return (_Strength.IMPLICIT if is_named else _Strength.DEFAULT), frozenset((name or "default",))
        case Cast(operand=operand) | CaseChange(operand=operand):
            return _find_collation(operand)
        case Array(elements=operands) | FunctionCall(operands=operands):
            return _find_strongest_collations(
                [operand for operand in operands if is_collatable(operand.type_oid)]
            )
        case Coalesce(operands=operands) | Extreme(operands=operands):
            return _find_strongest_collations(operands)
        case NullIf(left=left, right=right):
            return _find_strongest_collations((left, right))
        case Case(results=results, default=default):
            return _find_strongest_collations((default, *results))
        case _:
            return _Strength.DEFAULT, frozenset(("default",))


def _find_strongest_collations(nodes: Sequence[Node]) -> tuple[_Strength, frozenset[str]]:
    collations = [_find_collation(node) for node in nodes] or [(_Strength.DEFAULT, frozenset(("default",)))]
    greatest_strength = max(strength for strength, _ in collations)
    names = (names for strength, names in collations if strength == greatest_strength)
    return greatest_strength, frozenset[str]().union(*names)


def element_collation(array: Node) -> str:
    """Return the name of the collation of an array's elements; '' for the default collation."""
    return (
        "" if _find_strongest_collations((array,))[0] == _Strength.DEFAULT else find_collation_name((array,))
    )


def is_collatable(type_oid: int) -> bool:
    """True if a type has collations: strings, and arrays of strings."""
    return ELEMENT_OIDS.get(type_oid, type_oid) in STRINGS


def strip_collation(node: Node) -> Node:
    """Return a node without the COLLATE around it, even if there are several."""
    while isinstance(node, Collate):
        node = node.operand
    return node


def require_collation(nodes: Sequence[Node], *, needs_order: bool) -> None:
    """Raise RefusedError for a collation under which strings with different bytes can be equal.

    With `needs_order`, also raise RefusedError for a collation that does not order strings by their bytes.
    """
    name = find_collation_name(nodes)
    if needs_order and name not in _BYTE_ORDER_COLLATIONS:
        raise RefusedError(f"it depends on the collation {name}, and pgsieve orders text by bytes")
    if not _DETERMINISTIC_COLLATIONS.fullmatch(name):
        raise RefusedError(f"the collation {name} may treat different strings as equal")


def find_collation_name(nodes: Sequence[Node]) -> str:
    """Return the name of the collation that PostgreSQL uses for these strings.

    Raises RefusedError if their collations conflict.
    """
    names = _find_strongest_collations(nodes)[1]
    if len(names) > 1:
        raise RefusedError(f"its collation is ambiguous: {' or '.join(sorted(names))}")
    return next(iter(names))


def has_only_ascii_letters(nodes: Sequence[Node]) -> bool:
    """True if the collation of these strings knows only the letters and digits of ASCII, as the collation C does."""
    return _find_strongest_collations(nodes)[1] <= {"C", "POSIX"}


def case_mapping(
    nodes: Sequence[Node], function: CaseFunction, find_mapping: CaseMappingFinder
) -> CaseMapping:
    """Return the case mapping of the collation of these strings; raises RefusedError if the collation has none."""
    name = find_collation_name(nodes)
    mapping = find_mapping(name, function)
    if mapping is None or mapping.refusal:
        reason = f", and {mapping.refusal}" if mapping is not None else ""
        raise RefusedError(f"the case of letters depends on the collation {name}{reason}")
    return mapping
