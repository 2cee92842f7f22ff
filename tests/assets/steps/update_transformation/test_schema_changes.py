"""A table is altered while changes from before the alteration still wait. No JVM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.update_transformation.transform import Transformation, transform
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources import failpoints
from pgsieve.resources.failpoints import VARIABLE, Failpoint
from tests.fixtures.shop import Shop

_ALTERATIONS = {
    "a column is renamed": "alter table notes rename column n to pieces",
    "a column is dropped": "alter table notes drop column n",
    "a column is added": "alter table notes add column m int",
    "a column is added with a value": "alter table notes add column m int default 7",
    "another column takes the name": "alter table notes drop column n; alter table notes add column n int",
    "the key changes": "alter table notes alter n set default 6; alter table notes alter n set not null; create unique index notes_n on notes (n);"
    " alter table notes replica identity using index notes_n",
}


def quiet(_: str) -> None:
    pass


def replicated(shop: Shop) -> list[dict[str, object]]:
    return sorted(shop.table("one", "notes").to_pyarrow_table().to_pylist(), key=lambda row: row["id"])


def published(shop: Shop) -> list[dict[str, object]]:
    cursor = shop.database.execute("select * from notes order by id")
    assert cursor.description is not None
    return [{c.name: v for c, v in zip(cursor.description, row, strict=True)} for row in cursor]


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("alteration", "row_filter"),
    [
        ("another column takes the name", "pipeline"),
        ("a column is renamed", "publisher"),
        *(
            pytest.param(alteration, "pipeline", marks=pytest.mark.long)
            for alteration in _ALTERATIONS
            if alteration != "another column takes the name"
        ),
    ],
)
def test_a_run_that_died_before_recording_a_slice_leaves_no_rows_with_former_columns(
    shop: Shop, alteration: str, row_filter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.written["subscriptions"]["one"]["row_filter"] = row_filter
    shop.configure()
    shop.copy()
    shop.database.execute("update notes set n = n + 10 where id = 2; insert into notes values (5, 5)")
    monkeypatch.setattr(failpoints, "_reach_counts", Counter())
    monkeypatch.setenv(VARIABLE, f"{Failpoint.CHANGES_WRITTEN}!")
    code, output = shop.cli("run")
    assert code != 0, output
    monkeypatch.delenv(VARIABLE)
    shop.database.execute(_ALTERATIONS[alteration])
    shop.database.execute("update notes set id = 30 where id = 3; insert into notes values (6)")
    # The next run notices that the table has to be copied; the run after it copies.
    outputs = [shop.cli("run")[1] for _ in range(2)]
    assert replicated(shop) == published(shop), "\n".join(outputs)
    assert shop.state("one", "notes") == "ready"


@pytest.mark.drawn
@pytest.mark.parametrize(
    "moment",
    [
        "after the first",
        *(
            pytest.param(moment, marks=pytest.mark.long)
            for moment in ("before the first", "before the second")
        ),
    ],
)
def test_changes_that_another_process_transforms_during_an_alteration_are_not_lost(
    shop: Shop, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has no lock, which may get lost without an error. It leaves the altered table out, because its columns are unclear."""
    shop.copy()
    shop.run()
    project = build_project(load_config(shop.path))
    one, lake = project.subscriptions["one"], project.lake.open()
    shop.database.execute("update notes set n = n + 10 where id = 2; insert into notes values (5, 5)")
    drain_slot(one.slot_stream, lake, [one], quiet)
    shop.database.execute(_ALTERATIONS["a column is renamed"])
    fence, fences = TransformedSlices.fence, list[str]()

    def by_another_process(record: TransformedSlices) -> int:
        fences.append(["first", "second"][len(fences)])
        if moment == f"before the {fences[-1]}":
            Transformation(one, build_project(load_config(shop.path)).lake.open(), quiet).run([])
        position = fence(record)
        if moment == f"after the {fences[-1]}":
            Transformation(one, build_project(load_config(shop.path)).lake.open(), quiet).run([])
        return position

    monkeypatch.setattr(TransformedSlices, "fence", by_another_process)
    transform(one, lake, quiet)
    monkeypatch.setattr(TransformedSlices, "fence", fence)
    outputs = [shop.cli("run")[1] for _ in range(2)]
    assert fences[:1] == ["first"]
    assert replicated(shop) == published(shop), "\n".join(outputs)


@pytest.mark.parametrize("alteration", ["a column is added", "a column is renamed"])
def test_a_table_is_copied_if_another_process_says_so_during_an_alteration(
    shop: Shop, alteration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that reads the slot says so if the server cannot send a transaction. It does not hold the subscription's lock."""
    shop.copy()
    project = build_project(load_config(shop.path))
    one, lake = project.subscriptions["one"], project.lake.open()
    states, name, fence = TableStates(lake, "one"), ("public", "notes"), TransformedSlices.fence
    shop.database.execute(_ALTERATIONS[alteration])
    drain_slot(one.slot_stream, lake, [one], quiet)

    def by_another_process(record: TransformedSlices) -> int:
        state = states.read_newest()[name]
        if state.is_being_altered:
            states.append([replace(state, reason="the server did not send a transaction")])
        return fence(record)

    monkeypatch.setattr(TransformedSlices, "fence", by_another_process)
    transform(one, lake, quiet)
    monkeypatch.setattr(TransformedSlices, "fence", fence)
    assert states.read_newest()[name].state == SyncState.INITIALIZE
    outputs = [shop.cli("run")[1] for _ in range(2)]
    assert replicated(shop) == published(shop), "\n".join(outputs)
    assert shop.state("one", "notes") == "ready"


def test_states_are_read_no_more_often_for_several_altered_tables(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alteration adds states, so reading all of them for each altered table would take quadratic time."""
    shop.written["spark"] = {"master": "threads[2]"}
    shop.configure()
    shop.copy()
    project = build_project(load_config(shop.path))
    one, lake = project.subscriptions["one"], project.lake.open()
    read, reads, counts = TableStates._read_rows_by_table, list[str](), list[int]()

    def counted(states: TableStates) -> dict[Name, list[Mapping[str, Any]]]:
        reads.append(states.path)
        return read(states)

    monkeypatch.setattr(TableStates, "_read_rows_by_table", counted)
    alteration = "alter table {} add column {} int; insert into {} (id) values ({})"
    for number, tables in enumerate((["notes"], ["notes", "orders"])):
        for table in tables:
            shop.database.execute(alteration.format(table, f"m{number}", table, 100 + number))
        drain_slot(one.slot_stream, lake, [one], quiet)
        reads.clear()
        transform(one, lake, quiet)
        counts.append(len(reads))
        apply(one, lake, quiet)
        assert all(
            f"m{number}" in lake.columns(lake.paths.replica("one", "public", table)) for table in tables
        )
    assert counts[0] == counts[1]
