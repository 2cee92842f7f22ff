"""A table that is altered, or gets another state from another process, while it is copied is copied again. No JVM."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates, find_newest_version
from pgsieve.assets.steps.slot_consumption.slot import forget_copies
from pgsieve.assets.steps.validation import waiting
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from tests.fixtures.shop import Shop

ALTERATIONS = {
    "a column is dropped": ("alter table stock drop column n", ["id"], 4),
    "a column is renamed": ("alter table stock rename column n to pieces", ["id", "pieces"], 4),
    "the table is dropped and made again": (
        "drop table stock; create table stock as select 9 id; alter publication q add table stock",
        ["id"],
        1,
    ),
}


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_a_copy_has_the_table_as_altered(shop: Shop, alteration: str) -> None:
    statements, columns, rows = ALTERATIONS[alteration]
    lines: list[str] = []

    def altering(line: str) -> None:
        # By now the snapshot's definitions are read, but no rows.
        if line.startswith("copying ") and not any(before.startswith("copying ") for before in lines):
            shop.database.execute(statements)
        lines.append(line)

    project = build_project(load_config(shop.path))
    two, lake = project.subscriptions["two"], project.lake.open()
    (copied,) = copy_tables(two, lake, find_tables_to_copy(two, lake), altering)
    assert copied.problem is None
    assert any(line.endswith("to be copied again: 1 table") for line in lines), lines
    assert TableStates(lake, "two").read_newest()["public", "stock"].state == SyncState.READY
    replica = DeltaTable(lake.paths.replica("two", "public", "stock"))
    assert [field.name for field in replica.schema().fields] == columns
    assert replica.to_pyarrow_table().num_rows == rows


@pytest.mark.parametrize(
    ("moment", "states"), [("copying ", [SyncState.READY]), ("copied in", [SyncState.INITIALIZE])]
)
@pytest.mark.parametrize("is_slot_new", [True, False])
def test_a_copy_leaves_the_state_that_another_process_has_written_meanwhile(
    shop: Shop, moment: str, states: list[SyncState], is_slot_new: bool
) -> None:
    """Before the copy has announced its snapshot, it begins again at another one. After that, the next run copies the table."""
    lines: list[str] = []
    project = build_project(load_config(shop.path))
    two, lake = project.subscriptions["two"], project.lake.open()
    record = TableStates(lake, "two")

    def interrupt(line: str) -> None:
        if moment in line and not any(moment in before for before in lines):
            if is_slot_new:
                forget_copies(lake, ["two"])
            else:
                reason = "the server did not send a transaction"
                record.append([TableState("public", "stock", SyncState.INITIALIZE, reason=reason)])
        lines.append(line)

    copy_tables(two, lake, find_tables_to_copy(two, lake), interrupt)
    assert [state.state for state in record.read_newest().values()] == states, lines
    copy_tables(two, lake, find_tables_to_copy(two, lake), interrupt)
    assert [state.state for state in record.read_newest().values()] == [SyncState.READY], lines


def test_a_drop_removes_a_table_whose_state_another_process_writes_meanwhile(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.copy()
    append, is_first = TableStates.append, [True]

    def append_after_other(record: TableStates, states: Iterable[TableState], *rest: int | None) -> None:
        if is_first.pop() if is_first else False:
            append(record, [TableState("public", "late", SyncState.DATA_SYNC)])
        append(record, states, *rest)

    monkeypatch.setattr(TableStates, "append", append_after_other)
    shop.drop("two")
    states = TableStates(shop.lake, "two").read_newest()
    assert {name[1]: state.state for name, state in states.items()} == {
        "stock": SyncState.REMOVED,
        "late": SyncState.REMOVED,
    }


def test_a_table_that_another_process_sets_aside_meanwhile_does_not_wait(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is set aside is not copied before the user asks for that."""
    shop.copy()
    project = build_project(load_config(shop.path))
    two, lake = project.subscriptions["two"], project.lake.open()
    record = TableStates(lake, "two")

    def describe_after_other(error: PgsieveError) -> str:
        record.append([state.with_problem("two", "damaged") for state in record.read_newest().values()])
        return error.message

    monkeypatch.setattr(waiting, "describe_waiting_reason", describe_after_other)
    waiting.hold_back_tables(two, lake, {("public", "stock"): PgsieveError("has no key")})
    assert record.read_newest()["public", "stock"].state == SyncState.SET_ASIDE


def test_replicas_are_noted_as_altered_after_maintenance(shop: Shop) -> None:
    """It compacts the table of states in a version without a state. A run that skips a transaction notes this."""
    shop.copy()
    record = TableStates(shop.lake, "two")
    for number in range(30):
        record.append([TableState("public", f"t{number}", SyncState.INITIALIZE)])
    assert (maintained := shop.cli("maintain"))[0] == 0, maintained
    assert record.read_version() > find_newest_version(record.read_newest().values())
    record.note_altered()
    assert not any(s.definition.unaltered for s in record.read_newest().values() if s.definition)
