"""Rows that this process marks as deleted are gone for every reader, also if other writers write to the table and mark rows."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier, Thread, current_thread
from traceback import format_exception

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta import log as log_module
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import LakeUnavailableError, OvertakenError
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.log import Log, UnmarkableError
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit, quote_name
from pgsieve.resources.lake.delta.row_removal import (
    can_mark_rows,
    enable_marking,
    mark_rows,
)
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.objects import Objects, open_objects
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.lakes import find_marked_files, no_session
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.s3_proxy import CUT, DENIED, EXPIRED, INTERNAL, SLOW_DOWN, Answer, S3Proxy, s3_proxy
from tests.fixtures.s3_server import BUCKET, SECRET, S3Server

_ROWS = pa.schema({"id": pa.int64(), "n": pa.int64()})


@dataclass(frozen=True)
class Place:
    """The place of a test's table: a folder, or S3."""

    path: str
    storage: Storage

    @property
    def store(self) -> Store:
        return Store.from_storage(self.storage)

    def local(self) -> DeltaRsRecords:
        """The tables as a process without open tables sees them."""
        return DeltaRsRecords(store := self.store, Tables(store))

    def table(self) -> DeltaTable:
        return DeltaTable(self.path, storage_options=self.storage.make_delta_rs_options() or None)

    def rows(self) -> dict[int, int]:
        """The rows that delta-rs reads from a newly opened table."""
        rows = self.local().read_all_rows(self.path)
        assert len(set(rows["id"].to_pylist())) == rows.num_rows
        return dict(zip(rows["id"].to_pylist(), rows["n"].to_pylist(), strict=True))

    def files(self, end: str) -> list[str]:
        """The names of files in the table's folder and in its log that end with `end`."""
        return [name for name in self.store.list_file_names(self.path) if name.endswith(end)]

    def remove(self, name: str) -> None:
        files, inner = self.store.find_file_system(f"{self.path}/{name}")
        files.delete_file(inner)


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place(str(tmp_path / "t"), Storage.from_address(str(tmp_path)))
    server: S3Server = request.getfixturevalue("s3_server")
    storage = Storage.from_address(request.getfixturevalue("s3_folder"), server.storage)
    return Place(f"{storage.address}/t", storage)


def table_of(place: Place, keys: range, files: int = 3) -> DeltaRsRecords:
    """A table that allows deletion vectors; `n` is twice `id`."""
    local, path = place.local(), place.path
    for number in range(files):
        ids = list(keys)[number::files]
        local.write(path, pa.table({"id": ids, "n": [2 * each for each in ids]}, _ROWS), Commit(number + 1))
    assert can_mark_rows(local, path, _ROWS.names)
    enable_marking(local, path)
    return local


def mark(
    local: DeltaRsRecords, path: str, keys: list[int], position: int, rows: dict[int, int] | None = None
) -> None:
    """Mark the rows of these keys, and add other rows, in one commit."""
    base = local.version(path)
    matches = local.find_key_matches(
        path, pa.table({"id": pa.array(keys, pa.int64())}), [np.ones(len(keys), bool)], None
    )
    assert matches is not None
    marked = find_marked_files(local, path, matches, base)
    new = pa.table({"id": list(rows or {}), "n": list((rows or {}).values())}, _ROWS)
    files = [
        f
        for batch in write_files(path, _ROWS, new.to_batches(), store=local.store)
        for f in batch.to_pylist()
    ]
    mark_rows(local, path, marked, files, position, base)


def test_marked_rows_are_gone_and_the_position_is_reached_once(place: Place) -> None:
    local = table_of(place, range(30))
    mark(local, place.path, [1, 2, 29, 1000], 10, {2: -2, 40: 80})
    expected = {n: 2 * n for n in range(30) if n not in {1, 29}} | {2: -2, 40: 80}
    assert place.rows() == expected
    version = local.version(place.path)
    assert local.position(place.path) == 10
    mark(local, place.path, [3], 10)
    assert (local.version(place.path), place.rows()) == (version, expected)
    mark(local, place.path, [2, 3], 11)
    assert place.rows() == {k: v for k, v in expected.items() if k not in {2, 3}}


def test_each_version_is_read_without_spark(place: Place) -> None:
    local, expected = table_of(place, range(12)), {}
    for position, key in enumerate((3, 4, 5), 10):
        mark(local, place.path, [key], position)
        expected[local.version(place.path)] = {n for n in range(12) if not 3 <= n <= key}
    lake = Lake(place.storage.address, no_session, storage=place.storage)
    assert not lake.policy.is_read_by_spark(place.path)
    for version, keys in expected.items():
        batches = local.read_version_batches(place.path, version)
        assert sorted(n for batch in batches for n in batch.column("id").to_pylist()) == sorted(keys)


@pytest.mark.parametrize("how", ["overwrite", "merge", "delete"])
def test_delta_rs_writes_to_tables_with_marked_rows(place: Place, how: str) -> None:
    local, expected = table_of(place, range(9)), {n: 2 * n for n in range(9) if n != 1}
    mark(local, place.path, [1], 10)
    table, rows = place.table(), pa.table({"id": [4], "n": [-4]}, _ROWS)
    match how:
        case "overwrite":
            local.write(place.path, rows, Commit(11, overwrite=True))
            expected = {4: -4}
        case "merge":
            merger = table.merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
            merger.when_matched_update({"n": "s.n"}).execute()
            expected[4] = -4
        case "delete":
            table.delete("id = 4")
            del expected[4]
    assert place.rows() == expected
    mark(local, place.path, sorted(expected), 12)
    assert place.rows() == {}


def test_a_file_whose_rows_are_all_marked_leaves_the_table(place: Place) -> None:
    local = table_of(place, range(9))
    mark(local, place.path, [0, 3], 10)
    mark(local, place.path, [6, 1], 11)
    assert len(local.open_table(place.path).file_uris()) == 2
    assert place.rows() == {n: 2 * n for n in (2, 4, 5, 7, 8)}
    assert len(place.files(".bin")) == 2


def test_the_slower_writer_marks_nothing(place: Place) -> None:
    local, other = table_of(place, range(9)), place.local()
    base = local.version(place.path)
    key = pa.table({"id": [4]})
    matches = local.find_key_matches(place.path, key, [np.ones(1, bool)], None)
    assert matches
    marked = find_marked_files(local, place.path, matches, base)
    place.local().append(place.path, pa.table({"id": [100], "n": [200]}, _ROWS))
    with pytest.raises(OvertakenError):
        mark_rows(local, place.path, marked, [], 10, base)
    # This also holds if the log entry appears only after the check.
    mark(other, place.path, [4], 11)
    with pytest.raises(OvertakenError):
        mark_rows(local, place.path, marked, [], 12, base)
    assert place.rows() == {n: 2 * n for n in [*range(9), 100] if n != 4}
    assert not place.files(".tmp")


def test_a_log_without_the_add_action_of_a_file_is_refused(place: Place) -> None:
    local = table_of(place, range(9))
    matches = local.find_key_matches(place.path, pa.table({"id": [4]}), [np.ones(1, bool)], None)
    assert matches
    place.remove(f"_delta_log/{0:020}.json")
    other = FileMatches("other.parquet", "", 0, *[np.empty(0, int)] * 3)
    with pytest.raises(UnmarkableError):
        find_marked_files(local, place.path, [*matches, other], 3)


def test_a_long_log_is_read_backwards_to_its_checkpoint(place: Place) -> None:
    # Only the checkpoint says how the last two files were added.
    local, expected = table_of(place, range(24), files=8), {n: 2 * n for n in range(24)}
    place.table().create_checkpoint()
    for version in range(local.version(place.path)):
        place.remove(f"_delta_log/{version:020}.json")
    keys = [*range(6), *range(8, 14), *range(16, 22)]
    for position, key in enumerate([*keys, 6], 10):
        mark(local, place.path, [key], position)
        del expected[key]
    assert place.rows() == expected
    place.remove("_delta_log/_last_checkpoint")
    with pytest.raises(UnmarkableError, match="is missing"):
        mark(local, place.path, [7], 100)


def test_one_of_two_writers_of_a_version_learns_that_it_exists(place: Place) -> None:
    table_of(place, range(3))
    log = Log.open(place.path, place.store)
    assert log is not None

    def commits(version: int, writer: int) -> bool:
        together.wait()
        try:
            log.commit(version, [{"commitInfo": {"txnId": f"{version}/{writer}"}}])
        except CommitFailedError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        for version in range(10, 40):
            together = Barrier(2)
            ended = list(pool.map(commits, [version] * 2, range(2)))
            assert sorted(ended) == [False, True]
            (entry,) = next(iter(log.read_backwards(version, "commitInfo", None)))
            assert entry["txnId"] == f"{version}/{ended.index(True)}"


def test_a_table_gets_only_the_features_that_a_writer_needs(place: Place) -> None:
    local = table_of(place, range(3))
    protocol = local.open_table(place.path).protocol()
    assert set(protocol.reader_features or ()) == {"deletionVectors"}
    assert set(protocol.writer_features or ()) == {"appendOnly", "deletionVectors", "invariants"}
    assert local.has_deletion_vectors(place.path)
    assert local.position(place.path) == 3


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_spark_and_this_process_mark_rows_in_turns(place: Place, seed: int) -> None:
    """It takes long: Spark starts, and takes many turns."""
    spark, draw = engine().session.newSession(), random.Random(seed)
    for key, value in place.storage.make_spark_settings().items():
        spark.conf.set(key, value)
    name = f"delta.{quote_name(place.path)}"
    local, expected = table_of(place, range(60)), {n: 2 * n for n in range(60)}
    spark.sql(f"alter table {name} set tblproperties ('delta.checkpointInterval' = '4')")
    for turn in range(12):
        keys = draw.sample(sorted(expected), 3)
        match draw.choice(["mark", "mark", "delete", "update", "compact", "checkpoint"]):
            case "mark":
                mark(local, place.path, keys, 100 + turn, {keys[0]: turn, 1000 + turn: turn})
                expected = {k: v for k, v in expected.items() if k not in keys} | {
                    keys[0]: turn,
                    1000 + turn: turn,
                }
            case "delete":
                spark.sql(f"delete from {name} where id in ({keys[0]}, {keys[1]})")
                expected = {k: v for k, v in expected.items() if k not in keys[:2]}
            case "update":
                spark.sql(f"update {name} set n = {turn} where id = {keys[0]}")
                expected[keys[0]] = turn
            case "compact":
                spark.sql(f"optimize {name}")
            case "checkpoint":
                place.table().create_checkpoint()
        by_spark = {row["id"]: row["n"] for row in spark.read.format("delta").load(place.path).collect()}
        assert (by_spark, place.rows()) == (expected, expected), f"turn {turn}"
    assert spark.sql(f"select count(*) from {name}").collect()[0][0] == len(expected)


@pytest.mark.parametrize("place", ["folder"], indirect=True)
def test_a_folder_without_hard_links_is_left_to_other_writers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = table_of(place, range(9))
    matches = local.find_key_matches(place.path, pa.table({"id": [4]}), [np.ones(1, bool)], None)
    assert matches

    def refuses(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    with pytest.raises(UnmarkableError, match="Operation not permitted"):
        find_marked_files(local, place.path, matches, local.version(place.path))
    assert not place.files(".tmp")


class TestOnABadNetwork:
    """An object store whose answers get lost, or are errors."""

    @pytest.fixture
    def proxy(self, s3_server: S3Server) -> Iterator[S3Proxy]:
        with s3_proxy(s3_server.url) as made:
            yield made

    @pytest.fixture
    def place(
        self, s3_server: S3Server, s3_folder: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> Place:
        """The proxy carries only this process's own writes: delta-rs holds Python's lock while it waits for an answer."""
        storage = Storage.from_address(s3_folder, s3_server.storage)
        behind = Storage.from_address(s3_folder, {**s3_server.storage, "endpoint": proxy.url})
        objects = Objects(f"s3a://{BUCKET}", behind.make_delta_rs_options())

        def reached(path: str, options: tuple[tuple[str, str], ...]) -> Objects | None:
            return open_objects(path, options) if current_thread().name == "faster" else objects

        monkeypatch.setattr(log_module, "open_objects", reached)
        return Place(f"{storage.address}/t", storage)

    @pytest.mark.parametrize(("lost", "then"), [(1, 412), (2, 412), (1, 403)])
    def test_a_writer_recognises_its_entry_after_a_lost_answer(
        self, place: Place, proxy: S3Proxy, lost: int, then: int
    ) -> None:
        local = table_of(place, range(9))
        version = local.version(place.path)
        entry = f"{version + 1:020}.json"

        def puts() -> list[int]:
            return [
                status for asked, path, status in proxy.answered if asked == "PUT" and path.endswith(entry)
            ]

        proxy.lose_first("PUT", entry, lost)
        proxy.refused = lambda method, _: DENIED if then == 403 and method == "PUT" and puts() else None
        mark(local, place.path, [4], 10)
        assert puts() == [200] + [412] * (lost if then == 412 else 0)
        assert (local.version(place.path), local.position(place.path)) == (version + 1, 10)
        assert place.rows() == {n: 2 * n for n in range(9) if n != 4}

    def test_another_writers_entry_is_not_mistaken_for_its_own(self, place: Place, proxy: S3Proxy) -> None:
        local = table_of(place, range(9))
        base = local.version(place.path)
        matches = local.find_key_matches(place.path, pa.table({"id": [4]}), [np.ones(1, bool)], None)
        assert matches
        marked = find_marked_files(local, place.path, matches, base)
        faster = place.local()

        def refused(method: str, path: str) -> Answer | None:
            if method != "PUT" or not path.endswith(f"{base + 1:020}.json"):
                return None
            # The other writer commits before this request reaches the server, which it never does.
            proxy.refused = lambda *_: None
            write.start()
            write.join()
            return CUT

        write = Thread(name="faster", target=lambda: mark(faster, place.path, [5], 11))
        proxy.refused = refused
        with pytest.raises(OvertakenError):
            mark_rows(local, place.path, marked, [], 10, base)
        assert place.local().position(place.path) == 11
        assert place.rows() == {n: 2 * n for n in range(9) if n != 5}

    @pytest.mark.parametrize("answer", [SLOW_DOWN, INTERNAL, CUT], ids=["slow_down", "error", "cut"])
    def test_temporary_faults_are_waited_for(self, place: Place, proxy: S3Proxy, answer: Answer) -> None:
        local, expected = table_of(place, range(30)), {n: 2 * n for n in range(30)}
        proxy.refuse(answer, every=3)
        for turn in range(4):
            mark(local, place.path, [turn], 10 + turn)
            del expected[turn]
        assert proxy.refusals
        proxy.heal()
        assert place.rows() == expected

    def test_a_refusing_store_is_reported_without_a_secret(self, place: Place, proxy: S3Proxy) -> None:
        local = table_of(place, range(9))
        files = FileCommitter(local, Lake(place.storage.address, no_session, storage=place.storage).access)
        key = pa.table({"id": [4]})
        matches = local.find_key_matches(place.path, key, [np.ones(1, bool)], None)
        assert matches
        base = local.version(place.path)
        marked = files.prepare_marked_files(place.path, matches, base)
        proxy.refuse(EXPIRED, methods="PUT", part="deletion_vector_")
        with pytest.raises(
            LakeUnavailableError, match=r"does not accept the credentials \(ExpiredToken\)"
        ) as raised:
            files.commit_marked_files(lambda: pa.table({}), place.path, marked, 10, base)
        assert raised.value.hint
        assert SECRET not in "".join(format_exception(raised.value))
        assert place.local().position(place.path) == 3
        # If the store refuses this library, delta-rs may still reach it. Then Spark marks the rows.
        proxy.refuse(DENIED, methods="GET", part="_last_checkpoint")
        with pytest.raises(UnmarkableError, match="cannot be read"):
            files.prepare_marked_files(place.path, matches, base)


def test_where_delta_rs_would_find_no_vector_no_row_is_marked(place: Place) -> None:
    """In the name of an object it encodes a character such as `~`, which stands in the folder of "Orders", once more."""
    escaped = replace(place, path=f"{place.path}~g1")
    escaped.local().write(escaped.path, pa.table({"id": [1, 2], "n": [2, 4]}, _ROWS), Commit(1))
    in_folder = "://" not in place.path
    assert can_mark_rows(escaped.local(), escaped.path, _ROWS.names) is in_folder
    lake = Lake(place.path.rpartition("/")[0], no_session, storage=place.storage)
    lake.enable_deletion_vectors(escaped.path)
    assert bool(lake.records.has_deletion_vectors(escaped.path)) is in_folder
    if not in_folder:
        enable_marking(escaped.local(), escaped.path)
    mark(escaped.local(), escaped.path, [1], 2, {3: 4})
    if in_folder:
        assert escaped.rows() == {2: 4, 3: 4}
    else:
        with pytest.raises(Exception, match="t%7Eg1/deletion_vector"):
            escaped.rows()
