"""The choice of a slice's messages, in this process. Scenarios check the same of Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pgsieve.assets.steps.update_transformation.messages import (
    FIRST_ORDINAL,
    FewMessages,
    MessageFilter,
    read_commit_lsns,
)
from pgsieve.assets.steps.update_transformation.windows import Window

#: commit_lsn, ordinal, kind, relation_id
_MESSAGES = [
    (10, 1, "R", 1),
    (10, 2, "I", 1),
    (10, 4, "D", 2),
    (30, 2, "U", 1),
    (50, 2, "T", 1),
    (50, 4, "I", 1),
]
_TABLE = pa.table(
    dict(zip(("commit_lsn", "ordinal", "kind", "relation_id"), zip(*_MESSAGES, strict=True), strict=True))
)


def chosen(choice: MessageFilter) -> list[tuple[int, int]]:
    table = FewMessages(_TABLE).apply_filter(choice).table
    return list(zip(table["commit_lsn"].to_pylist(), table["ordinal"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("choice", "places"),
    [
        pytest.param(MessageFilter(), [(lsn, ordinal) for lsn, ordinal, *_ in _MESSAGES], id="all"),
        pytest.param(
            MessageFilter(after_order=(10, 2), before_order=(50, 4)),
            [(10, 4), (30, 2), (50, 2)],
            id="between order keys",
        ),
        pytest.param(
            MessageFilter(after_order=(30, FIRST_ORDINAL)),
            [(30, 2), (50, 2), (50, 4)],
            id="from a transaction on",
        ),
        pytest.param(
            MessageFilter(before_order=(30, FIRST_ORDINAL)),
            [(10, 1), (10, 2), (10, 4)],
            id="up to a transaction",
        ),
        pytest.param(MessageFilter(excluded_lsn=10), [(30, 2), (50, 2), (50, 4)], id="without a transaction"),
        pytest.param(
            MessageFilter(relations=frozenset({1})), [(10, 2), (30, 2), (50, 4)], id="changes of a relation"
        ),
    ],
)
def test_a_choice_of_messages(choice: MessageFilter, places: list[tuple[int, int]]) -> None:
    assert chosen(choice) == places


def test_a_window_chooses_the_transactions_that_it_holds() -> None:
    window = Window(slice_end=100, begin=10, end=50, skipped_lsn=30)
    assert {lsn for lsn, _ in chosen(window.message_filter)} == {
        lsn for lsn, *_ in _MESSAGES if window.contains(lsn)
    }


def test_choices_add_up_without_a_session() -> None:
    messages = (
        FewMessages(_TABLE)
        .apply_filter(MessageFilter(relations=frozenset({1})))
        .apply_filter(MessageFilter(after_order=(10, 2)))
    )
    assert read_commit_lsns(messages) == [30, 50]
