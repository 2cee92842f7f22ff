"""After a power cut, a table is restored to its last complete version, and no further back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.resources.lake import unsynced
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import LakeUnavailableError
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.delta.row_removal import enable_marking, mark_rows
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.half_written import roll_back_tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.lakes import find_marked_files, no_session

Break = Callable[[Path], object]


def rows(*values: int) -> pa.Table:
    return pa.table({"a": pa.array(values, pa.int32())})


def entry(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def parquet_of(table: Path, version: int) -> Path:
    (added,) = [
        name
        for name in pa.table(DeltaTable(str(table), version=version).get_add_actions())["path"].to_pylist()
        if version == 0
        or name
        not in pa.table(DeltaTable(str(table), version=version - 1).get_add_actions())["path"].to_pylist()
    ]
    return table / str(added)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


#: By kind of loss in a table with versions 0 to 3, its newest complete version.
LEFT: dict[str, tuple[Break, int | None]] = {
    "all": (lambda _: None, 3),
    "an empty entry": (lambda t: empty(entry(t, 3)), 2),
    "an entry of zeros": (lambda t: zero(entry(t, 3)), 2),
    "half an entry": (lambda t: entry(t, 3).write_bytes(entry(t, 3).read_bytes()[:300]), 2),
    "an empty entry before a whole one": (lambda t: empty(entry(t, 2)), 1),
    "an entry less": (lambda t: entry(t, 2).unlink(), 1),
    "the first entry less": (lambda t: entry(t, 0).unlink(), None),
    "an empty file": (lambda t: empty(parquet_of(t, 3)), 2),
    "a file of zeros": (lambda t: zero(parquet_of(t, 2)), 1),
    "no file": (lambda t: parquet_of(t, 3).unlink(), 2),
    "nothing whole": (lambda t: empty(entry(t, 0)), None),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_table_is_restored_to_its_last_complete_version(tmp_path: Path, left: str) -> None:
    table, (spoil, version) = tmp_path / "lake" / "sub" / "public" / "t", LEFT[left]
    for position in range(1, 5):
        DeltaRsRecords().append(str(table), rows(position), position)
    spoil(table)
    roll_back_tables(tmp_path / "lake", 0)
    records = DeltaRsRecords(Store(), Tables(Store()))
    assert records.exists(str(table)) == (version is not None)
    if version is not None:
        assert records.head(str(table)).version == version
        assert records.position(str(table)) == version + 1
        assert records.count_rows(str(table)) == version + 1
    # The table continues from there.
    records.append(str(table), rows(9), 9)
    assert records.position(str(table)) == 9


def test_older_or_removed_files_are_left_alone(tmp_path: Path) -> None:
    table = tmp_path / "sub" / "t"
    for position in range(1, 5):
        DeltaRsRecords().append(str(table), rows(position), position)
    whole = entry(table, 3).read_bytes()
    empty(entry(table, 3))
    roll_back_tables(tmp_path, entry(table, 3).stat().st_mtime_ns + 10**10)
    assert entry(table, 3).exists(), "this loss is damage, because the entry was on disk"
    entry(table, 3).write_bytes(whole)
    DeltaTable(str(table)).optimize.compact()
    DeltaTable(str(table)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    roll_back_tables(tmp_path, 0)
    assert DeltaRsRecords().count_rows(str(table)) == 4


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_gap_after_the_last_older_version_is_found(tmp_path: Path, has_checkpoint: bool) -> None:
    """A checkpoint at the lost version, or after it, replaces its entry."""
    table = tmp_path / "sub" / "t"
    for position in range(1, 5):
        DeltaRsRecords().append(str(table), rows(position), position)
    for version in (0, 1):
        os.utime(entry(table, version), (0, 0))
    if has_checkpoint:
        DeltaTable(str(table)).create_checkpoint()
        entry(table, 0).unlink()
    entry(table, 2).unlink()
    roll_back_tables(tmp_path, 10**10)
    assert entry(table, 3).exists() == has_checkpoint
    assert DeltaRsRecords(Store(), Tables(Store())).position(str(table)) == (4 if has_checkpoint else 2)


def test_an_entry_whose_predecessor_has_an_older_time_stays(tmp_path: Path) -> None:
    table = tmp_path / "sub" / "t"
    for position in range(1, 5):
        DeltaRsRecords().append(str(table), rows(position), position)
    os.utime(entry(table, 2), (0, 0))
    roll_back_tables(tmp_path, 10**10)
    assert DeltaRsRecords(Store(), Tables(Store())).position(str(table)) == 4


def test_an_incomplete_checkpoint_and_its_pointer_are_removed(tmp_path: Path) -> None:
    table = tmp_path / "sub" / "t"
    for position in range(1, 5):
        DeltaRsRecords().append(str(table), rows(position), position)
    log = table / "_delta_log"
    DeltaTable(str(table)).create_checkpoint()
    for spoil in (
        lambda: empty(log / "_last_checkpoint"),
        lambda: empty(log / f"{3:020d}.checkpoint.parquet"),
    ):
        spoil()
        roll_back_tables(tmp_path, 0)
        assert not (log / "_last_checkpoint").exists()
        assert DeltaRsRecords(Store(), Tables(Store())).count_rows(str(table)) == 4
        DeltaTable(str(table)).create_checkpoint()
    # A checkpoint of a removed version is removed, too.
    empty(entry(table, 3))
    roll_back_tables(tmp_path, 0)
    assert DeltaRsRecords(Store(), Tables(Store())).position(str(table)) == 3


def test_a_checkpoint_of_json_is_removed_if_it_is_incomplete_or_its_version_is(tmp_path: Path) -> None:
    table, log = tmp_path / "t", tmp_path / "t" / "_delta_log"
    for position in range(1, 5):
        DeltaRsRecords().append(str(table), rows(position), position)
    complete, cut_off, empty_one = (log / f"{version:020d}.checkpoint.a-b.json" for version in (3, 2, 1))
    complete.write_text('{"checkpointMetadata": {"version": 3}}\n{"protocol": {}}\n')
    cut_off.write_text('{"checkpointMetadata": {"version": 2}}\n{"proto')
    empty_one.touch()
    roll_back_tables(tmp_path, 0)
    assert (complete.exists(), cut_off.exists(), empty_one.exists()) == (True, False, False)
    cut_off.write_bytes(complete.read_bytes())
    empty(parquet_of(table, 3))
    roll_back_tables(tmp_path, 0)
    assert not entry(table, 3).exists()
    assert (complete.exists(), cut_off.exists()) == (False, True)


def test_checksums_of_hadoop_are_removed_from_every_folder_if_they_were_written_last(tmp_path: Path) -> None:
    """A file system keeps a time only with its own resolution, so a checksum just before the time counts as written since."""
    table, since_ns = tmp_path / "t", 1_700_000_000_000_000_000
    DeltaRsRecords().append(str(table), rows(1), 1)
    folders = table, table / "day=1", table / "_delta_log"
    ages = {"new": 0, "just before": 10**9, "old": 10**10}
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for name, age_ns in ages.items():
            (folder / f".{name}.crc").touch()
            os.utime(folder / f".{name}.crc", ns=(since_ns - age_ns, since_ns - age_ns))
    roll_back_tables(tmp_path, since_ns)
    for folder in folders:
        assert [path.name for path in folder.glob(".*.crc")] == [".old.crc"]


def test_a_version_with_incomplete_deletion_vectors_is_removed(tmp_path: Path) -> None:
    table, records = tmp_path / "t", DeltaRsRecords()
    records.write(str(table), rows(8, 9), Commit(10))
    enable_marking(records, str(table))
    matches = [
        m
        for m in records.find_key_matches(str(table), rows(8), [np.array([True])], None) or ()
        if len(m.row_numbers)
    ]
    marked = find_marked_files(records, str(table), matches, 1)
    mark_rows(records, str(table), marked, [], 20, 1)
    roll_back_tables(tmp_path, 0)
    assert DeltaRsRecords(Store(), Tables(Store())).position(str(table)) == 20
    (vector,) = table.glob("*.bin")
    vector.write_bytes(vector.read_bytes()[:-1])
    roll_back_tables(tmp_path, 0)
    assert DeltaRsRecords(Store(), Tables(Store())).position(str(table)) == 10


def test_a_killed_process_leaves_its_mark_and_the_next_one_repairs(tmp_path: Path) -> None:
    lake, marks = tmp_path / "lake", tmp_path / "lake" / "_pgsieve" / ".unsynced"
    killed = (
        "import os, signal, sys; from pgsieve.resources.lake.unsynced import get_unsynced_writes;"
        " mark = get_unsynced_writes(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", killed, str(lake)], check=False)
    (mark,) = [each for each in marks.iterdir() if each.name != "lock"]
    table = lake / "sub" / "t"
    for position in (1, 2):
        DeltaRsRecords().append(str(table), rows(position), position)
    empty(entry(table, 1))
    one = Lake(str(lake), no_session)
    one.access.begin_writing()
    assert not mark.exists()
    assert DeltaRsRecords(Store(), Tables(Store())).position(str(table)) == 1
    # Another process sees that the mark is locked, and restores nothing.
    DeltaRsRecords(Store(), Tables(Store())).append(str(table), rows(3), 3)
    empty(entry(table, 1))
    subprocess.run([sys.executable, "-c", killed.partition("os.kill")[0], str(lake)], check=True)
    assert entry(table, 1).exists()
    unsynced.close_all_lakes()
    assert [each.name for each in marks.iterdir()] == ["lock"]


def test_a_process_that_ends_meanwhile_refuses_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process removes its mark when it ends, also while another one looks at the marks."""
    other, open_file = unsynced.UnsyncedWrites(tmp_path), os.open
    (mark,) = (each for each in (tmp_path / "_pgsieve" / ".unsynced").iterdir() if each.name != "lock")

    def close_and_open(path: str, *rest: int) -> int:
        if Path(path) == mark:
            other.close()
        return open_file(path, *rest)

    monkeypatch.setattr(os, "open", close_and_open)
    unsynced.UnsyncedWrites(tmp_path).close()
    assert not other.close.alive


def test_after_a_write_that_did_not_reach_the_disk_nothing_counts_as_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(str(tmp_path / "lake"), no_session)
    lake.access.make_durable()
    for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):

        def refuse(_: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(unsynced, "_sync_file_system", refuse)
            with pytest.raises(LakeUnavailableError, match="cannot be written: "):
                lake.access.make_durable()
        # The kernel reports the error only once, but the pages stay lost.
        with pytest.raises(LakeUnavailableError, match="cannot be written: "):
            lake.access.make_durable()
    unsynced.close_all_lakes()
    assert len(list((tmp_path / "lake" / "_pgsieve" / ".unsynced").iterdir())) == 2, "the mark is gone"


def test_the_mark_goes_after_all_file_systems_of_the_lake_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of a subscription may be on another disk."""
    lake, synced_devices = tmp_path / "lake", set[int]()
    real_sync = unsynced._sync_file_system

    def record(descriptor: int) -> None:
        real_sync(descriptor)
        assert list((lake / "_pgsieve" / ".unsynced").iterdir()) != [], "the mark is gone"
        synced_devices.add(os.fstat(descriptor).st_dev)

    with TemporaryDirectory(dir="/dev/shm") as elsewhere:
        lake.mkdir()
        (lake / "sales").symlink_to(elsewhere)
        writes = unsynced.get_unsynced_writes(str(lake))
        monkeypatch.setattr(unsynced, "_sync_file_system", record)
        writes.close()
    assert len(synced_devices) == 2
    assert [each.name for each in (lake / "_pgsieve" / ".unsynced").iterdir()] == ["lock"]
