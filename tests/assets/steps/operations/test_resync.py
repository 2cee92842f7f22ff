"""The reported differences of a table between its copy and now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgsieve.assets.steps.operations.resync import describe_changes_since_copy
from pgsieve.assets.steps.records.table_states import SyncState, TableState
from pgsieve.assets.steps.subscription import Definition, PublicationRecord
from pgsieve.decoding.publications.evolution import Layout

PUBLISHED = PublicationRecord(row_filters=("a > 1",), publications=("sales",))
COPIED = Definition(
    columns=(("a", "int"), ("b", "string")), key=("a",), layout=Layout(1, (), 0, ()), published=PUBLISHED
)
STATE = TableState("public", "t", SyncState.READY, definition=COPIED)


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        (COPIED, ()),
        (replace(COPIED, published=replace(PUBLISHED, row_filters=None)), ("row filter: a > 1 → every row",)),
        (
            replace(COPIED, published=replace(PUBLISHED, row_filters=("a > 1", "b = 'x'"))),
            ("row filter: a > 1 → a > 1 OR b = 'x'",),
        ),
        (
            replace(COPIED, published=replace(PUBLISHED, publications=("sales", "more"))),
            ("publications: sales → sales, more",),
        ),
        (
            replace(COPIED, columns=(("a", "bigint"), ("c", "string"))),
            ("columns: without b, c added, a int → bigint",),
        ),
        (replace(COPIED, columns=COPIED.columns[::-1]), ("columns: another order",)),
        (replace(COPIED, key=("a", "b")), ("key: (a) → (a, b)",)),
    ],
)
def test_differences_are_reported_as_then_and_now(now: Definition, changes: tuple[str, ...]) -> None:
    assert describe_changes_since_copy(STATE, now) == changes


def test_a_table_that_was_never_copied_has_no_differences() -> None:
    assert describe_changes_since_copy(None, COPIED) == ()
    assert describe_changes_since_copy(replace(STATE, definition=None), COPIED) == ()
