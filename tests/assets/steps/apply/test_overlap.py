"""Two processes work on the same tables at the same moment, without a lock. Each change is applied once."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgsieve.assets.steps.apply import batch
from pgsieve.assets.steps.apply.batch import Batch
from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.checks import consistency
from pgsieve.assets.steps.checks.consistency import check_consistency
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.initial_sync.one_table import SnapshotCopy
from pgsieve.assets.steps.initial_sync.readiness import CopyCompleter
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.slot_consumption import appending
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.resources.lake import committers as delta
from pgsieve.resources.lake.byte_limits import SMALL_BYTES_DEFAULT
from pgsieve.resources.lake.delta import commits, delta_rs
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.named_records import NamedRecords
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.lake.spark_settings import SESSION_SETTINGS
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.servers import drop_slots

pytestmark = pytest.mark.spark

TABLES = {
    "appended": "id int primary key, v text",
    "merged": "id int primary key, v text",
    "moved": "id int primary key, v text",
    "keyless": "id int, v text",
    "emptied": "id int primary key, v text",
}
#: Tables that are copied again.
COPIED = [("public", "merged"), ("public", "keyless")]
_numbers = itertools.count(1000)


@dataclass(frozen=True)
class Process:
    """One of two processes that work on a lake. It has its own session, and relies only on Delta."""

    subscription: Subscription
    lake: Lake

    def copy(self, names: list[tuple[str, str]] | None = None) -> None:
        wanted = find_tables_to_copy(self.subscription, self.lake) if names is None else names
        copy_tables(self.subscription, self.lake, wanted, _quiet)

    def drain(self, upto: int | None = None) -> None:
        drain_slot(self.subscription.slot_stream, self.lake, [self.subscription], _quiet, upto)

    def receive(self) -> None:
        self.drain()
        transform(self.subscription, self.lake, _quiet)

    def apply_oldest(self) -> None:
        """Apply the oldest slice, as a process that has seen no other slice."""
        apply(self.subscription, self.lake, _quiet, divide=lambda ends: [ends[:1]])

    def run(self) -> None:
        self.copy()
        self.receive()
        apply(self.subscription, self.lake, _quiet)


@dataclass
class Overlap:
    """A publisher, and two processes that replicate it into the same lake."""

    database: psycopg.Connection
    folder: Path
    first: Process
    second: Process

    def write(self) -> None:
        """Commit a transaction with changes for each way to apply a batch."""
        n = next(_numbers)
        with self.database.transaction():
            self.database.execute("insert into appended values (%s, 'new')", [n])
            self.database.execute("insert into merged values (%s, 'new')", [n])
            self.database.execute("update merged set v = v || 'x' where id <= 3")
            self.database.execute("delete from merged where id = %s", [n - 1])
            self.database.execute("update moved set id = id + 10 where v = 'old'")
            self.database.execute("insert into keyless values (1, 'old'), (%s, 'new')", [n])
            self.database.execute(
                "delete from keyless where ctid = (select min(ctid) from keyless where v = 'old')"
            )
            self.database.execute("truncate emptied")
            self.database.execute("insert into emptied values (%s, 'new')", [n])

    def overtake(self) -> None:
        """Commit a transaction, and let the second process replicate everything."""
        self.write()
        self.second.run()

    def verify(self) -> None:
        """Assert that replicas equal the publisher, histories have no change twice, and cuts name the right versions."""
        for name in TABLES:
            expected = Counter(self.database.execute(f"select * from {name}").fetchall())
            assert Counter(self._rows(f"sub/public/{name}")) == expected, name
            changes = self._rows(f"sub/_changes/public/{name}", "commit_lsn, ordinal")
            assert len(changes) == len(set(changes)), f"{name}: a change twice in its history"
        cut = Cuts(self.first.lake, "sub").read_all()[-1]
        for (_, name), version in cut.tables.items():
            expected = Counter(self.database.execute(f"select * from {name}").fetchall())
            assert Counter(self._rows(f"sub/public/{name}", version=version)) == expected, (
                f"{name} at the cut"
            )

    def _rows(self, table: str, columns: str = "*", version: int | None = None) -> list[tuple]:
        path = self.folder / table
        if not path.exists():
            return []
        query = QueryBuilder().register("t", DeltaTable(str(path), version=version))
        rows = pa.table(query.execute(f"select {columns} from t").read_all())
        return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _quiet(_: str) -> None:
    pass


def _process(folder: Path, conninfo: str, name: str, writer: str, *, filtered: bool) -> Process:
    session = engine().session.newSession()
    for key, value in SESSION_SETTINGS.items():
        session.conf.set(key, value)
    session.conf.set("spark.databricks.delta.properties.defaults.enableDeletionVectors", "false")
    uri = folder.as_uri() if writer == "spark" else str(folder)
    slot_stream = SlotStream(name, Source("shop", conninfo), name, name, filtered, {"sub": ("p",)})
    small = SMALL_BYTES_DEFAULT if writer == "process" else -1
    settings = LakeSettings(small, thread_count=2 if writer == "threads" else None)
    lake = Lake(uri, lambda: session, settings)
    if lake.delta_rs:
        # Each process has its own open tables.
        lake.delta_rs = delta_rs.DeltaRsRecords(lake.store, Tables(lake.store))
        lake.records = NamedRecords(lake.delta_rs, lake.access.translate_errors)
        lake.policy = replace(lake.policy, delta_rs=lake.delta_rs)
    return Process(Subscription("sub", slot_stream), lake)


@pytest.fixture(
    scope="module",
    params=[
        "process",
        *(pytest.param(writer, marks=pytest.mark.long) for writer in ("executors", "threads", "spark")),
    ],
)
def overlap(
    publisher_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Overlap]:
    """One lake for all tests of a writer: each test continues where the one before it ended."""
    name, folder = f"overlap_{request.param}", tmp_path_factory.mktemp("lake")
    with (
        pytest.MonkeyPatch.context() as patch,
        psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin,
    ):
        # A lost lock gives no error.
        patch.setattr(Source, "hold_lock", lambda *_: nullcontext())
        # Each process has its own lock.
        patch.setattr(batch, "_LARGE_APPLY", nullcontext())
        admin.execute(f"create database {name}")
        conninfo = publisher_server.conninfo(dbname=name)
        with psycopg.connect(conninfo, autocommit=True) as database:
            for table, columns in TABLES.items():
                database.execute(f"create table {table} ({columns})")
                database.execute(f"insert into {table} select i, 'old' from generate_series(1, 5) i")
            database.execute("alter table keyless replica identity full")
            database.execute("create publication p for all tables")
            first, second = (
                _process(folder, conninfo, name, request.param, filtered=False) for _ in range(2)
            )
            overlap = Overlap(database, folder, first, second)
            first.run()
            overlap.write()
            first.run()
            overlap.verify()
            yield overlap
            drop_slots(database)
        admin.execute(f"drop database {name} with (force)")


def _meanwhile(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[[], None]
) -> list[str]:
    """At the first call of a function, let another process work. Return the list of calls."""
    real, lock, calls = getattr(owner, name), threading.Lock(), list[str]()

    def interrupted(*args: object, **options: object) -> object:
        with lock:
            calls.append(name)
            is_first = len(calls) == 1
        if is_first:
            work()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)
    return calls


@pytest.mark.parametrize("moment", ["planned", "written"])
def test_changes_of_a_batch_that_another_process_applied_are_not_applied_again(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    for _ in range(2):
        overlap.write()
        overlap.first.receive()
    if moment == "planned":
        owner, function = Batch, "apply"
    else:
        # After the version was checked, the commit itself is refused.
        owner, function = (
            (commits, "_make_commit_properties")
            if overlap.first.lake.delta_rs
            else (delta, "add_version_guard")
        )
    calls = _meanwhile(monkeypatch, owner, function, overlap.second.apply_oldest)
    apply(overlap.first.subscription, overlap.first.lake, _quiet)
    assert len(calls) > 1
    overlap.verify()


def test_a_batch_that_another_process_overtook_is_not_applied_again(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap.write()
    overlap.first.receive()
    calls = _meanwhile(monkeypatch, Batch, "apply", overlap.overtake)
    apply(overlap.first.subscription, overlap.first.lake, _quiet)
    assert len(calls) > 1
    overlap.verify()


@pytest.mark.parametrize("altered", [False, True])
def test_two_drains_of_a_slot_append_each_transaction_once(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch, altered: bool
) -> None:
    overlap.write()
    if altered:
        overlap.database.execute("create publication q for table appended")
        overlap.database.execute("alter publication p set (publish_via_partition_root = true)")
    between = read_current_lsn(overlap.database)
    overlap.write()
    function = "read_slice_by_executor" if overlap.first.lake.delta_rs is None else "commit_slice"
    # The first process's slice begins with the transactions that the second process appends.
    calls = _meanwhile(monkeypatch, appending, function, lambda: overlap.second.drain(between))
    overlap.first.receive()
    assert len(calls) > 2, "the first process does not begin again"
    overlap.first.run()
    overlap.verify()


def test_a_slice_that_another_process_transformed_is_recorded_once(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap.write()
    _meanwhile(monkeypatch, TransformedSlices, "append", overlap.overtake)
    overlap.first.run()
    overlap.verify()


def test_a_table_is_copied_again_if_slices_were_transformed_without_it(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another() -> None:
        overlap.write()
        overlap.second.receive()
        apply(overlap.second.subscription, overlap.second.lake, _quiet)

    _meanwhile(monkeypatch, CopyCompleter, "complete_copies", another)
    overlap.first.copy(COPIED)
    overlap.first.run()
    overlap.verify()


def test_a_slice_that_is_transformed_during_a_copy_has_the_copied_tables(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap.write()
    drain_slot(
        overlap.first.subscription.slot_stream, overlap.first.lake, [overlap.first.subscription], _quiet
    )

    def another() -> None:
        overlap.write()
        overlap.second.copy(COPIED)
        overlap.write()

    _meanwhile(monkeypatch, TransformedSlices, "append", another)
    overlap.first.run()
    overlap.first.run()
    overlap.verify()


def test_the_later_of_two_parallel_copies_counts(overlap: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    def another() -> None:
        overlap.write()
        overlap.second.copy(COPIED)
        overlap.write()
        overlap.second.run()

    _meanwhile(monkeypatch, SnapshotCopy, "_write_copy", another)
    overlap.first.copy(COPIED)
    overlap.verify()
    overlap.write()
    overlap.first.run()
    overlap.verify()


def test_a_check_does_not_compare_with_later_changes_of_another_process(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap.write()
    _meanwhile(monkeypatch, consistency, "apply", overlap.overtake)
    with pytest.raises(OvertakenError):
        check_consistency(overlap.first.subscription, overlap.first.lake, _quiet)
    checked = check_consistency(overlap.first.subscription, overlap.first.lake, _quiet)
    assert [c.table for c in checked if not c.equal] == []
