"""The choice of a slice's messages, in this process. Scenarios check the same of Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pgsieve.assets.steps.update_transformation.messages import FIRST, Choice, Messages
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


def no_frame() -> None:
    raise AssertionError("no session is needed here")


def chosen(choice: Choice) -> list[tuple[int, int]]:
    table = Messages(no_frame, _TABLE).chosen(choice).table
    return list(zip(table["commit_lsn"].to_pylist(), table["ordinal"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("choice", "places"),
    [
        pytest.param(Choice(), [(lsn, ordinal) for lsn, ordinal, *_ in _MESSAGES], id="all"),
        pytest.param(
            Choice(after=(10, 2), before=(50, 4)), [(10, 4), (30, 2), (50, 2)], id="between order keys"
        ),
        pytest.param(Choice(after=(30, FIRST)), [(30, 2), (50, 2), (50, 4)], id="from a transaction on"),
        pytest.param(Choice(before=(30, FIRST)), [(10, 1), (10, 2), (10, 4)], id="up to a transaction"),
        pytest.param(Choice(without=10), [(30, 2), (50, 2), (50, 4)], id="without a transaction"),
        pytest.param(
            Choice(relations=frozenset({1})), [(10, 2), (30, 2), (50, 4)], id="changes of a relation"
        ),
    ],
)
def test_a_choice_of_messages(choice: Choice, places: list[tuple[int, int]]) -> None:
    assert chosen(choice) == places


def test_a_window_chooses_the_transactions_that_it_holds() -> None:
    window = Window(slice=100, begin=10, end=50, skipped=30)
    assert {lsn for lsn, _ in chosen(window.choice)} == {lsn for lsn, *_ in _MESSAGES if window.holds(lsn)}


def test_choices_add_up_without_a_session() -> None:
    messages = (
        Messages(no_frame, _TABLE).chosen(Choice(relations=frozenset({1}))).chosen(Choice(after=(10, 2)))
    )
    assert messages.commits() == [30, 50]
