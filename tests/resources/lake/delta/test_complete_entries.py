"""A truncated log entry, or one without actions, is damage. It never counts as a version without changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.complete_entries import find_defect
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.delta.row_removal import enable_marking, mark_rows
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.lakes import find_marked_files, no_session
from tests.resources.lake.delta.test_illegible_files import _change as change
from tests.resources.lake.delta.test_illegible_files import lake as lake  # noqa: PLC0414 - a fixture

Act = Callable[[DeltaRsRecords, str], object]


def rows(*values: int) -> pa.Table:
    return pa.table({"a": pa.array(values, pa.int32())})


def _write(records: DeltaRsRecords, path: str) -> None:
    records.write(path, rows(2), Commit(20))


def _overwrite(records: DeltaRsRecords, path: str) -> None:
    records.write(path, rows(2, 3), Commit(20, overwrite=True))


def _commit(records: DeltaRsRecords, path: str) -> None:
    files = [f for b in write_files(path, rows(4).schema, rows(4).to_batches()) for f in b.to_pylist()]
    records.commit(path, rows(4).schema, files, Commit(20))


def _merge(records: DeltaRsRecords, path: str) -> None:
    keys = pa.array([5, 1], pa.int32())
    source = pa.table({"action": ["upsert", "delete"], "k0": keys, "v0": keys})
    records.merge(path, source, Merge.from_numbered_columns(("a",), ("a",)), Commit(20, expected_version=0))


def _merge_with_feed(records: DeltaRsRecords, path: str) -> None:
    _merge(records, path)


def _versioned(records: DeltaRsRecords, path: str) -> None:
    records.append_versioned(path, rows(7))


def _mark(records: DeltaRsRecords, path: str) -> None:
    records.write(path, rows(8, 9), Commit(15))
    enable_marking(records, path)
    matches = [
        m
        for m in records.find_key_matches(path, rows(8), [np.array([True])], None) or ()
        if len(m.row_numbers)
    ]
    mark_rows(records, path, find_marked_files(records, path, matches, 2), [], 20, 2)


@pytest.mark.parametrize("act", [_write, _overwrite, _commit, _merge, _merge_with_feed, _versioned, _mark])
def test_an_entry_truncated_anywhere_is_damage(tmp_path: Path, act: Act) -> None:
    path = str(tmp_path / "t")
    writer = DeltaRsRecords(Store(), Tables(Store()))
    properties = {"delta.enableChangeDataFeed": "true"} if act is _merge_with_feed else {}
    writer.write(path, rows(1), Commit(10, properties=properties))
    act(writer, path)
    entry = max(Path(path, "_delta_log").glob("*.json"))
    whole = entry.read_bytes()
    assert find_defect(whole) is None
    # The rows name their version, so nothing is lost without the txn action.
    end = whole.find(b'\n{"txn":{"appId":"pgsieve.version"')
    for length in range(len(whole.rstrip()) if end < 0 else end):
        assert find_defect(whole[:length]) is not None, (length, whole[:length])
    # Once as the table is opened, once as an open table is refreshed.
    for content in (b"", b"\n", whole[: len(whole) // 2], whole[: whole.index(b"\n")]):
        entry.write_bytes(content)
        for records in (DeltaRsRecords(Store(), Tables(Store())), writer):
            refused = pytest.raises(DamagedTableError, match="its log cannot be read: ")
            with refused, Lake(path, no_session).access.translate_errors(path):
                records.head(path)
            assert records.exists(path)
    entry.write_bytes(whole)
    assert DeltaRsRecords(Store(), Tables(Store())).head(path).version == int(entry.stem)


def test_an_empty_entry_is_damage_in_a_folder_and_on_a_store(lake: Lake) -> None:
    assert lake.delta_rs is not None
    path = f"{lake.uri}/t"
    for position in (1, 2, 3):
        lake.delta_rs.append(path, rows(position), position)
    version = lake.records.version(path)
    assert not lake.records.is_restored(path, version)
    change(lake, f"{path}/_delta_log", f"{version:020d}.json", lambda _: b"")
    looks: dict[str, Callable[[DeltaRsRecords], object]] = {
        "rows": lambda records: records.rows(path),
        "position": lambda records: records.position(path),
        "the version of a cut": lambda records: records.is_restored(path, version),
        "the version before": lambda records: records.is_restored(path, version - 1),
    }
    for look, act in looks.items():
        with pytest.raises(DamagedTableError, match=f"its entry {version} has no actions"):
            act(DeltaRsRecords(lake.store, Tables(lake.store)))
        assert DeltaRsRecords(lake.store, Tables(lake.store)).exists(path), look


def test_an_entry_that_differs_from_the_one_of_a_cut_is_damage(tmp_path: Path) -> None:
    path, records = str(tmp_path / "t"), DeltaRsRecords()
    for position in (1, 2, 3):
        records.append(path, rows(position), position)
    entries = records.entry_bytes(path, 1)
    assert not records.is_restored(path, 1, entries)
    entry = Path(path, "_delta_log", f"{1:020d}.json")
    entry.write_text('{"commitInfo": {}}\n')
    with pytest.raises(DamagedTableError, match="its entry 1 has another size than was written"):
        records.is_restored(path, 1, entries)
