"""The collation of an expression, and the collations under which a comparison of bytes is right.

PostgreSQL documentation, Collation Support.
"""

from __future__ import annotations

import pytest

from pgsieve.decoding.row_filters.collations import case_mapping, has_only_ascii_letters, require_collation
from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.nodes import TEXT, Coalesce, Collate, ColumnValue, Constant, Node


def column(collation: str) -> ColumnValue:
    return ColumnValue("t", collation, type_oid=TEXT)


CONSTANT = Constant("x", type_oid=TEXT)
DEFAULT, C, GERMAN, FOLDED = (
    column("default"),
    column("C"),
    column("de_DE"),
    column("public.case_insensitive"),
)


@pytest.mark.parametrize(
    ("nodes", "equality", "order"),
    [
        pytest.param((DEFAULT, CONSTANT), True, False, id="the database's: equal means equal bytes"),
        pytest.param((C, CONSTANT), True, True, id="C: order of bytes"),
        pytest.param((C, DEFAULT), True, True, id="a column's own is stronger than the default"),
        pytest.param((GERMAN, Collate(CONSTANT, "C", type_oid=TEXT)), True, True, id="COLLATE is strongest"),
        pytest.param((GERMAN, CONSTANT), True, False, id="libc's: deterministic, and not of bytes"),
        pytest.param((C, GERMAN), False, False, id="two columns of different collations"),
        pytest.param((FOLDED, CONSTANT), False, False, id="a user's, which may be nondeterministic"),
        pytest.param(
            (Coalesce((C, CONSTANT), type_oid=TEXT),), True, True, id="an expression has its operands'"
        ),
    ],
)
def test_a_collation_allows_equality_order_or_neither(
    nodes: tuple[Node, ...],
    equality: bool,
    order: bool,
) -> None:
    for ordering, allowed in ((False, equality), (True, order)):
        if allowed:
            require_collation(nodes, needs_order=ordering)
        else:
            with pytest.raises(RefusedError, match="collation"):
                require_collation(nodes, needs_order=ordering)


def test_only_in_c_and_posix_are_letters_ascii_only() -> None:
    assert has_only_ascii_letters((C, column("POSIX")))
    assert not has_only_ascii_letters((DEFAULT,))
    with pytest.raises(RefusedError, match="case of letters depends on the collation de_DE"):
        case_mapping((GERMAN,), "lower", lambda _collation, _function: None)
