"""pgsieve's reads and writes of Delta tables work on an object store as in a folder, without a JVM."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.parquet_columns import ExtendedRows, write_extended_files
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit, TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.lakes import find_slices, no_session
from tests.fixtures.s3_server import S3Server

SCHEMA = pa.schema({"slice": pa.int64(), "id": pa.int64()})


@pytest.fixture(params=["folder", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    """A lake without a Spark, in a folder with a blank in its name or on S3."""

    storage = Storage.from_address(str(tmp_path / "a lake"))
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        storage = Storage.from_address(request.getfixturevalue("s3_folder"), server.storage)
    return Lake(storage.address, no_session, storage=storage)


@pytest.fixture
def records(lake: Lake) -> DeltaRsRecords:
    assert lake.delta_rs is not None
    return lake.delta_rs


def rows(end: int, *ids: int) -> pa.Table:
    return pa.table({"slice": [end] * len(ids), "id": list(ids)}, SCHEMA)


def by_another(lake: Lake) -> DeltaRsRecords:
    """The same lake as another process sees it, without open tables."""
    return DeltaRsRecords(lake.store)


def test_a_missing_table_has_no_rows_and_no_position(lake: Lake, records: DeltaRsRecords) -> None:
    path = f"{lake.uri}/none"
    assert not records.exists(path)
    assert records.rows(path) == []
    assert records.head(path) == TableHead()


def test_another_processs_commit_is_seen_and_is_no_base_of_a_later_write(
    lake: Lake, records: DeltaRsRecords
) -> None:
    path = f"{lake.uri}/sub/t~41"
    records.append(path, rows(10, 1), 10)
    assert records.head(path) == TableHead(0, 10)
    by_another(lake).append(path, rows(20, 2), 20)
    assert records.head(path) == TableHead(1, 20)
    with pytest.raises(OvertakenError):
        records.append(path, rows(30, 3), 30, expected_version=0)
    with pytest.raises(OvertakenError):
        records.append(path, rows(30, 3), 30, expected_position=10)
    records.append(path, rows(20, 2), 20)  # a position is written once
    assert records.count_rows(path) == 2
    assert not records.is_restored(path, 1)
    assert records.newest_rows(path, "slice") == [{"slice": 20, "id": 2}]


def test_rows_name_the_version_of_their_commit(lake: Lake, records: DeltaRsRecords) -> None:
    path = f"{lake.uri}/states"
    for writer in (records, by_another(lake), records):
        writer.append_versioned(path, pa.table({"name": ["a"]}))
    assert sorted(row["version"] for row in records.rows(path)) == [1, 2, 3]


def test_files_that_executors_wrote_are_committed_and_read_by_slice(
    lake: Lake, records: DeltaRsRecords
) -> None:
    path, store = f"{lake.uri}/log", pickle.loads(pickle.dumps(lake.store))
    assert isinstance(store, Store)
    for end, ids in ((10, (1, 2)), (20, (3, 4))):
        batches = rows(end, *ids).to_batches()
        (written,) = [batch.to_pylist() for batch in write_files(path, SCHEMA, batches, store=store)]
        records.commit(path, SCHEMA, written, Commit(end))
    assert records.slices(path, 0) == [10, 20]
    slices = find_slices(records, path, [20])
    (file,) = slices.files
    assert file.startswith(path)
    assert records.store.read_rows(file).to_pylist() == rows(20, 3, 4).to_pylist()
    readers = store.iterate_group_readers(slices.row_groups)
    assert [read(["id"])["id"].to_pylist() for _, read in readers] == [[3, 4]]
    matches = records.find_key_matches(path, pa.table({"id": [3, 7]}), [np.array([True, True])], 10**6)
    assert [
        (match.log_path, match.row_numbers.tolist(), match.key_indices.tolist()) for match in matches
    ] == [(file.rpartition("/")[2], [0], [0])]
    keys = pa.table({"id": [3, 7]})
    assert records.find_rows(path, keys, keys.schema)[0].tolist() == [0]
    assert records.size_bytes(path) > 0


def test_a_table_is_maintained(lake: Lake, records: DeltaRsRecords) -> None:
    path = f"{lake.uri}/t"
    for number in range(5):
        records.append(path, rows(number + 1, number), number + 1)
    tended = make_table_maintenance(lake, path)
    assert tended.delete("id = 0") == 1
    assert tended.compact() >= 1
    assert tended.vacuum(0) >= 4
    assert records.count_rows(path) == 4
    assert records.position(path) == 5
    assert abs(records.read_last_commit_time(path) - datetime.now(UTC)) < timedelta(hours=1)


def test_a_removed_folder_is_gone_and_can_be_created_again(lake: Lake, records: DeltaRsRecords) -> None:
    path = f"{lake.uri}/sub/t"
    records.append(path, rows(10, 1, 2), 10)
    assert records.remove(f"{lake.uri}/sub")
    assert not records.remove(f"{lake.uri}/sub")
    assert not records.exists(path)
    records.append(path, rows(20, 3), 20)
    assert records.head(path) == TableHead(0, 20)
    assert records.rows(path) == rows(20, 3).to_pylist()


def test_descriptions_are_kept_with_rows_and_position(lake: Lake, records: DeltaRsRecords) -> None:
    path = f"{lake.uri}/t"
    records.append(path, rows(10, 1), 10)
    lake.set_comments(path, "the table", {"id": "the key"})
    described = records.version(path)
    lake.set_comments(path, "the table", {"id": "the key"})
    assert records.version(path) == described, "an unchanged description is committed again"
    records.append(path, rows(20, 2), 20)
    table = records.open_table(path)
    assert table.metadata().description == "the table"
    assert {f.name: f.metadata.get("comment", "") for f in table.schema().fields} == {
        "slice": "",
        "id": "the key",
    }
    lake.set_comments(path, None, {})
    assert records.open_table(path).schema().fields[1].metadata.get("comment", "") == ""
    assert records.position(path) == 20
    assert records.count_rows(path) == 2


@pytest.mark.parametrize("has_objects", [True, False], ids=["this process", "an executor"])
def test_a_file_gets_encoded_columns_of_another(has_objects: bool, lake: Lake) -> None:
    folder, store = f"{lake.uri}/t", lake.store if has_objects else pickle.loads(pickle.dumps(lake.store))
    texts = [f"{number * number % 1000003:x}" * 9 for number in range(60_000)]
    table = pa.table({"id": range(len(texts)), "note": texts})
    (written,) = write_files(folder, table.schema, table.to_batches(), store)
    (name,) = written["path"].to_pylist()
    extended = pa.table({"id": table["id"], "note": table["note"], "since": pa.repeat(7, len(texts))})
    sources = [ExtendedRows([f"{folder}/{name}"], extended.select(["id", "since"]).to_batches(4_000))]
    (written,) = write_extended_files(folder, extended.schema, sources, store)
    (file,) = written.to_pylist()
    assert file["size"] > 3 * 64 * 1024, "it is written in several pieces"
    assert store.read_columns(f"{folder}/{file['path']}", extended.column_names).equals(extended)
