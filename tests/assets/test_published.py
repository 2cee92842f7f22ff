"""The description of a table in Dagster: as its replica was copied, without anything unknown."""

from __future__ import annotations

import pytest

from pgsieve.assets.published import PublishedTable, format_filter
from pgsieve.assets.steps.records.table_states import SyncState, TableState
from pgsieve.assets.steps.subscription import Definition, PublicationRecord
from pgsieve.decoding.publications.evolution import Layout


@pytest.mark.parametrize(
    ("row_filters", "text"), [(None, "none"), (("(a > 1)",), "(a > 1)"), (("(a)", "(b)"), "(a) OR (b)")]
)
def test_texts_of_row_filters(row_filters: tuple[str, ...] | None, text: str) -> None:
    assert format_filter(row_filters) == text


@pytest.mark.parametrize(
    ("published", "shown"),
    [
        (None, (("p", "q"), None)),
        (PublicationRecord(None, ("p",)), (("p",), "none")),
        (PublicationRecord(("(a > 1)",), ("q",)), (("q",), "(a > 1)")),
    ],
)
def test_a_replica_shows_the_definition_of_its_copy(
    published: PublicationRecord | None, shown: tuple[tuple[str, ...], str | None]
) -> None:
    definition = Definition((), (), Layout(1, (), 0, ()), published=published)
    state = TableState("public", "t", SyncState.READY, definition=definition)
    table = PublishedTable.from_state(state, ("p", "q"))
    assert (table.publications, table.row_filter) == shown
