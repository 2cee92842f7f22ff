"""Spark's commits on S3: an existing commit stays, and a writer recognises its own commit if the answer was lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from tests.fixtures.s3_proxy import S3Proxy, s3_proxy
from tests.fixtures.s3_server import S3Server
from tests.fixtures.spark_writer import SparkWriter, spark_writer

pytestmark = pytest.mark.spark

_TAKEN = "java.nio.file.FileAlreadyExistsException"


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3_server.url) as made:
        yield made


@pytest.fixture(scope="module")
def spark(
    s3_server: S3Server, proxy: S3Proxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkWriter]:
    """Spark, whose requests go through the proxy."""
    options = {**s3_server.storage, "endpoint": proxy.url}
    with spark_writer("s3://lake", options, tmp_path_factory.mktemp("spark")) as writer:
        yield writer


@pytest.fixture
def path(s3_folder: str) -> str:
    return s3_folder.replace("s3://", "s3a://")


def commit(unique: bool = True) -> list[str]:
    """The lines of a commit, as Delta writes them, with or without a random identifier."""
    info = {"commitInfo": {"operation": "WRITE", **({"txnId": str(uuid.uuid4())} if unique else {})}}
    return [json.dumps(info, separators=(",", ":")), '{"add":{"path":"ä.parquet"}}']


@pytest.mark.drawn
def test_an_existing_object_stays(spark: SparkWriter, path: str) -> None:
    first = commit()
    assert spark.put(f"{path}/_delta_log/1.json", first) is None
    assert _TAKEN in str(spark.put(f"{path}/_delta_log/1.json", commit()))
    # The first object stays: a writer of the same bytes considers it its own.
    assert spark.put(f"{path}/_delta_log/1.json", first) is None


@pytest.mark.parametrize("lost", [1, 2])
def test_a_commit_whose_answer_was_lost_is_recognised(
    spark: SparkWriter, proxy: S3Proxy, path: str, lost: int
) -> None:
    proxy.answered.clear()
    proxy.lose_first("PUT", "/1.json", lost)
    assert spark.put(f"{path}/_delta_log/1.json", commit()) is None
    puts = [status for method, asked, status in proxy.answered if method == "PUT" and "/1.json" in asked]
    assert puts == [200] + [412] * lost


def test_a_commit_without_an_identifier_is_not_mistaken_for_its_own(
    spark: SparkWriter, proxy: S3Proxy, path: str
) -> None:
    proxy.lose_first("PUT", "/1.json")
    assert _TAKEN in str(spark.put(f"{path}/_delta_log/1.json", commit(unique=False)))


@pytest.mark.drawn
def test_rows_exist_once_although_the_answer_to_their_commit_was_lost(
    spark: SparkWriter, proxy: S3Proxy, s3_server: S3Server, path: str
) -> None:
    assert spark.append(path, [1]) is None
    proxy.lose_first("PUT", "/00000000000000000001.json")
    assert spark.append(path, [2]) is None
    table = DeltaTable(path, storage_options=s3_server.delta_rs)
    assert table.version() == 1
    assert ids_in(table) == [1, 2]


def ids_in(table: DeltaTable) -> list[int]:
    rows = pa.table(QueryBuilder().register("t", table).execute("select id from t order by id").read_all())
    ids: list[int] = rows["id"].to_pylist()
    return ids


def _append(path: str, options: dict[str, str], number: int) -> None:
    write_deltalake(path, pa.table({"id": [number]}), mode="append", storage_options=options)


_THIRD = """
import json, sys
import pyarrow as pa
from deltalake import write_deltalake

path, options, number = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
while not select.select([sys.stdin], [], [], 0)[0]:
    write_deltalake(path, pa.table({"id": [number]}), mode="append", storage_options=options)
    print(number, flush=True)
    number += 1
    time.sleep(0.3)  # A writer without a pause lets no slower one commit.
"""


@pytest.mark.long
@pytest.mark.parametrize("rounds", [4, 30])
def test_every_commit_of_three_parallel_writers_is_kept(
    s3_server: S3Server, path: str, spark: SparkWriter, rounds: int
) -> None:
    """It takes long: Spark, this process and another one write, and all of them write checkpoints."""
    options, often = s3_server.delta_rs, {"delta.checkpointInterval": "5"}
    first = pa.table({"id": pa.array([0], pa.int64())})
    write_deltalake(path, first, storage_options=options, configuration=often)
    third = subprocess.Popen(
        [sys.executable, "-c", f"import select\nimport time\n{_THIRD}", path, json.dumps(options), "1000000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    written, ended = [0], threading.Event()

    def write_here() -> None:
        while not ended.is_set():
            _append(path, options, len(written))
            written.append(len(written))
            time.sleep(0.3)  # without a pause, no slower writer could commit

    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(write_here)
        refused = [spark.append(path, [2_000_000 + number]) for number in range(rounds)]
        ended.set()
        others, _ = third.communicate("\n")
        here.result()
    assert third.returncode == 0
    assert refused == [None] * rounds
    expected = [*written, *map(int, others.split()), *range(2_000_000, 2_000_000 + rounds)]
    table = DeltaTable(path, storage_options=options)
    assert ids_in(table) == expected
    assert table.version() == len(expected) - 1
    assert spark.count(path) == len(expected)
