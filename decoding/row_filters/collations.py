"""The collation of an expression over strings, and whether a comparison of bytes gives the same result.

In: nodes. Out: the collation's name, its mapping of case. Raises RefusedError for a collation under which
bytes give another result (section 23.2, parse_collate.c).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.letter_case import CaseFunction, CaseMapping, CaseMappings
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
from pgsieve.decoding.values.builtin_types import ELEMENTS

# Collations whose order is that of the bytes in UTF-8.
_BYTE_ORDER: Final = frozenset(("C", "POSIX", "ucs_basic", "pg_c_utf8", "pg_unicode_fast"))
# Collations of pg_catalog under which equal means equal bytes: a database's default and libc's always, and
# those that initdb imports from ICU. A user-defined one may be nondeterministic (section 23.2.2.4).
_DETERMINISTIC: Final = re.compile(
    r"default|C|POSIX|ucs_basic|pg_c_utf8|pg_unicode_fast|unicode|C\.\S+"
    r"|[a-z]{2,3}_[A-Z]{2,3}(\.\w+)?(@\w+)?|(und|[a-z]{2,3})(-\w+)*-x-icu"
)


class _Strength(IntEnum):
    """Where a collation comes from; the stronger source wins (section 23.2.1)."""

    DEFAULT = 0
    IMPLICIT = 1
    EXPLICIT = 2


def _collation(node: Node) -> tuple[_Strength, frozenset[str]]:
    """The strength of an expression's collation, and the names with that strength; several names conflict."""
    match node:
        case Collate(collation=name):
            return _Strength.EXPLICIT, frozenset((name,))
        case ColumnValue(collation=name) | Element(collation=name):
            named = name not in ("", "default")
            return (_Strength.IMPLICIT if named else _Strength.DEFAULT), frozenset((name or "default",))
        case Cast(operand=operand) | CaseChange(operand=operand):
            return _collation(operand)
        case Array(elements=operands) | FunctionCall(operands=operands):
            return _merged([operand for operand in operands if _collatable(operand)])
        case Coalesce(operands=operands) | Extreme(operands=operands):
            return _merged(operands)
        case NullIf(left=left, right=right):
            return _merged((left, right))
        case Case(results=results, default=default):
            return _merged((default, *results))
        case _:
            return _Strength.DEFAULT, frozenset(("default",))


def _merged(nodes: Sequence[Node]) -> tuple[_Strength, frozenset[str]]:
    collations = [_collation(node) for node in nodes] or [(_Strength.DEFAULT, frozenset(("default",)))]
    strongest = max(strength for strength, _ in collations)
    names = (names for strength, names in collations if strength == strongest)
    return strongest, frozenset[str]().union(*names)


def of_elements(array: Node) -> str:
    """Return the name of the collation of an array's elements; '' for the default collation."""
    return "" if _merged((array,))[0] == _Strength.DEFAULT else name_of((array,))


def _collatable(node: Node) -> bool:
    return node.type_oid in STRINGS or ELEMENTS.get(node.type_oid) in STRINGS


def require_collation(nodes: Sequence[Node], *, ordering: bool) -> None:
    """Refuse a collation that does not compare these strings as their bytes.

    With `ordering` it has to order them as their bytes, too.
    """
    name = name_of(nodes)
    if ordering and name not in _BYTE_ORDER:
        raise RefusedError(f"it depends on the collation {name}, and pgsieve orders text by bytes")
    if not _DETERMINISTIC.fullmatch(name):
        raise RefusedError(f"the collation {name} may treat different strings as equal")


def name_of(nodes: Sequence[Node]) -> str:
    """Return the name of the collation that PostgreSQL uses for these strings.

    Strings with conflicting collations are refused.
    """
    names = _merged(nodes)[1]
    if len(names) > 1:
        raise RefusedError(f"its collation is ambiguous: {' or '.join(sorted(names))}")
    return next(iter(names))


def has_ascii_letters(nodes: Sequence[Node]) -> bool:
    """Whether the collation of these strings, like C, knows letters, digits and case of ASCII only."""
    return _merged(nodes)[1] <= {"C", "POSIX"}


def case_mapping(nodes: Sequence[Node], function: CaseFunction, mappings: CaseMappings) -> CaseMapping:
    """Return the case mapping of the collation of these strings; refuse a collation without a mapping."""
    name = name_of(nodes)
    mapping = mappings(name, function)
    if mapping is None or mapping.refusal:
        reason = f", and {mapping.refusal}" if mapping is not None else ""
        raise RefusedError(f"the case of letters depends on the collation {name}{reason}")
    return mapping
