"""A table that is altered, or gets another state from another process, while it is copied is copied again. No JVM."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.slot_consumption.slot import forget_copies
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
