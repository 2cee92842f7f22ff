"""Spark writes only to the version from which it planned, whenever another process commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import DataFrame, SparkSession

from pgsieve.assets.steps.checkpoint import checkpoint
from pgsieve.resources.lake import committers as delta
from pgsieve.resources.lake.delta.errors import ConcurrentWriteError, OvertakenError
from pgsieve.resources.lake.delta.held_settings import hold_settings
from pgsieve.resources.lake.delta.records import APPLICATION_ID, Commit, quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.spark_writes import make_merge_settings, number_columns
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.version_guard import add_version_guard
from tests.fixtures.pgsieve_replica import engine

pytestmark = pytest.mark.spark

Write = Callable[[Lake, DataFrame, str, int], None]


def append(lake: Lake, rows: DataFrame, path: str, base: int) -> None:
    lake.write(rows, path, Commit(20, expected_version=base))


def overwrite(lake: Lake, rows: DataFrame, path: str, base: int) -> None:
    lake.write(rows, path, Commit(20, expected_version=base, overwrite=True))


def merge(lake: Lake, rows: DataFrame, path: str, base: int) -> None:
    delta.add_version_guard(checkpoint(rows), path, base, Store()).createOrReplaceTempView("merged")
    settings = make_merge_settings(Commit(20), can_mark_rows=False)
    with hold_settings(lake.spark, settings), lake.access.translate_errors(path):
        lake.spark.sql(
            f"merge into delta.{quote_name(path)} t using merged s on t.`a.b` = s.`a.b`"
            " when matched then update set * when not matched then insert *"
        ).collect()


@pytest.fixture
def session() -> SparkSession:
    return engine().session.newSession()


def _lake(session: SparkSession, folder: Path) -> tuple[Lake, str]:
    """A lake at a URI, and a table with two versions whose name Spark has to quote."""
    lake, path = Lake(folder.as_uri(), lambda: session), f"{folder.as_uri()}/t"
    for position in (5, 10):
        _by_another(folder, position)
    return lake, path


def _by_another(folder: Path, position: int | None) -> None:
    """Commit as another process: with a position, or without one (a compaction, a repair)."""
    transactions = None if position is None else [Transaction("pgsieve", position)]
    write_deltalake(
        folder / "t",
        pa.table({"a.b": pa.array([position or 0], pa.int64()), "s": [{"x": position or 0}]}),
        mode="append",
        commit_properties=CommitProperties(app_transactions=transactions),
    )


@pytest.mark.drawn
@pytest.mark.parametrize("position", [15, None])
@pytest.mark.parametrize("write", [append, overwrite, merge])
def test_a_write_planned_from_a_version_follows_no_later_one(
    session: SparkSession, tmp_path: Path, write: Write, position: int | None
) -> None:
    lake, path = _lake(session, tmp_path)
    rows = session.read.format("delta").load(path).where("`a.b` = 10")
    _by_another(tmp_path, position)
    with pytest.raises(OvertakenError):
        write(lake, rows, path, 1)
    assert DeltaTable(tmp_path / "t").version() == 2
    write(lake, rows, path, 2)
    newest = DeltaTable(tmp_path / "t")
    assert (newest.version(), newest.transaction_version("pgsieve")) == (3, 20)


def _committing_afterwards(
    folder: Path, position: int | None
) -> Callable[[DataFrame, str, int, Store], DataFrame]:
    """A guard whose frame lets another process commit after the log was checked and all rows were read."""

    def commit(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if DeltaTable(folder / "t").version() == 1:
            _by_another(folder, position)

    def guarded_before(frame: DataFrame, path: str, base: int, store: Store) -> DataFrame:
        rows = number_columns(add_version_guard(frame, path, base, store).coalesce(1))
        return rows.mapInArrow(commit, rows.schema).toDF(*frame.columns)

    return guarded_before


@pytest.mark.drawn
@pytest.mark.parametrize("write", [append, overwrite, merge])
def test_delta_refuses_a_position_that_appears_after_the_check_of_the_log(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    # Delta compares the log with its state at the begin of its transaction, which is before the check.
    lake, path = _lake(session, tmp_path)
    rows = session.read.format("delta").load(path).where("`a.b` = 10")
    monkeypatch.setattr(delta, "add_version_guard", _committing_afterwards(tmp_path, 15))
    with pytest.raises(ConcurrentWriteError):
        write(lake, rows, path, 1)
    newest = DeltaTable(tmp_path / "t")
    assert (newest.version(), newest.transaction_version("pgsieve")) == (2, 15)


@pytest.mark.drawn
def test_a_table_that_another_process_created_is_not_created_again(
    session: SparkSession, tmp_path: Path
) -> None:
    lake, path = _lake(session, tmp_path)
    rows = session.read.format("delta").load(path)
    with pytest.raises(OvertakenError):
        append(lake, rows, path, -1)
    lake.write(rows, f"{path}2", Commit(20, expected_version=-1))
    assert lake.records.head(f"{path}2").position == 20


@pytest.mark.drawn
def test_a_position_that_maintenance_kept_does_not_hide_a_later_one(
    session: SparkSession, tmp_path: Path
) -> None:
    lake, path = _lake(session, tmp_path)
    lake.write(session.read.format("delta").load(path), path, Commit(20))
    session.conf.set(
        "spark.databricks.delta.commitInfo.userMetadata", '{"pgsieve": {"lsn": 10, "kept": true}}'
    )
    session.sql(f"optimize delta.{quote_name(path)}")
    assert lake.records.head(path).version == 4 - 1
    assert lake.records.position(path) == 20


def test_a_write_without_a_position_gets_none_from_a_merge_at_the_same_time(
    session: SparkSession, tmp_path: Path
) -> None:
    """With the position of the MERGE, Delta would leave out the MERGE of its own table at that position."""
    lake, path = _lake(session, tmp_path)
    schema = lake.schema(path).append(pa.field("added", pa.int64()))
    ddl = "`a.b` bigint, s struct<x: bigint>, added bigint"
    lake.add_columns(
        path, lake.schema(path), "`a.b` bigint, s struct<x: bigint>", 1
    )  # The next write is faster.
    with ThreadPoolExecutor(1) as pool:
        with hold_settings(session, make_merge_settings(Commit(99), can_mark_rows=False)):
            write = pool.submit(lake.add_columns, path, schema, ddl, 2)
            assert not wait([write], 3).done
        write.result()
    assert DeltaTable(tmp_path / "t").transaction_version(APPLICATION_ID) == 10
    merge(lake, session.sql("select 7L as `a.b`, named_struct('x', 7L) as s, 8L as added"), path, 3)
    table = DeltaTable(tmp_path / "t")
    assert table.transaction_version(APPLICATION_ID) == 20
    assert 8 in table.to_pyarrow_table()["added"].to_pylist()
