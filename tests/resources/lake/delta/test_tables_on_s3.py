"""Requests to an object store: a process opens a table once, and reads each version of a small table once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.resources.lake.delta import log_entries
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.s3_proxy import S3Proxy, s3_proxy
from tests.fixtures.s3_server import S3Server

#: The output of a process, and the paths that it requested from the store.
_Step = tuple[Any, list[str]]

_ROOT = Path(__file__).resolve().parents[4]
#: A separate process, because delta-rs holds Python's lock while it waits for an answer of the proxy.
_PROGRAM = """
import json, sys
import pyarrow as pa
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage

storage = Storage.from_address(sys.argv[1], json.loads(sys.argv[2]))
path = f"{storage.address}/t"

def lake():
    return Lake(storage.address, None, storage=storage)

def look():
    rows = lake().records.rows(path)
    print(json.dumps([sorted(row["id"] for row in rows), lake().records.head(path).position]), flush=True)
    for row in rows:
        row["id"] = None  # The caller may change the rows that it has read.
    sys.stdin.readline()

for number in range(3):
    lake().records.append(path, pa.table({"id": [number]}), number + 1)
look()
look()
lake().records.append(path, pa.table({"id": [3]}), 4)
look()
"""
#: Reads an existing table.
_READING = """
import json, sys
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage

storage = Storage.from_address(sys.argv[1], json.loads(sys.argv[2]))
rows = Lake(storage.address, None, storage=storage).records.rows(f"{storage.address}/t")
print(json.dumps(sorted(row["id"] for row in rows)), flush=True)
"""
#: Looks at existing tables and a missing one, in one moment, and again after another process has written.
_MOMENT = """
import json, sys
import pyarrow as pa
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage

storage = Storage.from_address(sys.argv[1], json.loads(sys.argv[2]))
paths = [f"{storage.address}/t{number}" for number in range(9)]
lake = Lake(storage.address, None, storage=storage)
for path in paths[:8]:
    lake.records.append(path, pa.table({"id": [1]}), 1)

def tell(told):
    print(json.dumps(told), flush=True)
    return sys.stdin.readline()

def seen():
    return [lake.records.head(path).position if lake.records.exists(path) else None for path in paths]

tell(None)
with lake.consistent_read(*paths):
    tell(seen())
    tell(seen())  # Another has written.
tell(seen())
lake.records.append(paths[0], pa.table({"id": [3]}), 3)
with lake.consistent_read():
    tell(seen())
"""
#: Looks at an existing table and a missing one, again and again.
_AGAIN = """
import json, sys
import pyarrow as pa
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage

storage = Storage.from_address(sys.argv[1], json.loads(sys.argv[2]))
lake = Lake(storage.address, None, storage=storage)
lake.records.append(f"{storage.address}/t", pa.table({"id": [1]}), 1)
told = None
while True:
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
    rows = lake.records.rows(f"{storage.address}/t")
    told = [sorted(row["id"] for row in rows), lake.records.exists(f"{storage.address}/none")]
"""


@contextmanager
def _program(text: str, folder: str, server: S3Server, proxy: S3Proxy) -> Iterator[Callable[[], _Step]]:
    """A process that does one step per call. A step returns its output and the requested paths."""
    options = json.dumps({**server.storage, "endpoint": proxy.url})
    program = subprocess.Popen(
        [sys.executable, "-c", text, folder, options],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    to, of = program.stdin, program.stdout
    assert to is not None
    assert of is not None
    waiting = False

    def step() -> _Step:
        nonlocal waiting
        if waiting:
            to.write("\n")
            to.flush()
        waiting = True
        told = json.loads(of.readline())
        _settle(proxy)
        asked = [path for _, path, _ in proxy.answered]
        proxy.answered.clear()
        return told, asked

    try:
        yield step
    finally:
        program.kill()
        program.communicate()


def _settle(proxy: S3Proxy) -> None:
    """Wait until the store is quiet: delta-rs sends more requests than it waits for, and late ones would count for the next step."""
    answered = -1
    while answered != len(proxy.answered):
        answered = len(proxy.answered)
        time.sleep(0.3)


@pytest.mark.slow
def test_another_object_for_the_same_lake_requests_only_new_entries(
    s3_server: S3Server, s3_folder: str
) -> None:
    with s3_proxy(s3_server.url) as proxy, _program(_PROGRAM, s3_folder, s3_server, proxy) as step:
        looks, asked = zip(*(step() for _ in range(3)), strict=True)
    assert looks == ([[0, 1, 2], 3], [[0, 1, 2], 3], [[0, 1, 2, 3], 4])
    # One look is at the rows, one at the position.
    assert [path.partition("?")[0] for path in asked[1]] == ["/lake"] * 2


@pytest.mark.drawn
@pytest.mark.slow
def test_within_one_moment_each_table_is_looked_at_once_in_parallel(
    s3_server: S3Server, s3_folder: str
) -> None:
    with s3_proxy(s3_server.url) as proxy, _program(_MOMENT, s3_folder, s3_server, proxy) as step:
        step()
        proxy.delay = 0.3
        seen, asked = step()
        proxy.delay = 0
        assert seen == [*[1] * 8, None]
        assert proxy.most_waiting >= 4
        assert len([path for path in asked if path.endswith("_last_checkpoint")]) == 9
        # For an existing table, the entry is read that identifies the table.
        assert len([path for path in asked if "list-type=2" in path]) == 9 + 8
        for name, position in (("t0", 2), ("t8", 1)):
            table = pa.table({"id": [2]})
            DeltaRsRecords(Store(tuple(s3_server.delta_rs.items()))).append(
                f"{s3_folder}/{name}", table, position
            )
        assert step() == ([*[1] * 8, None], [])
        assert step()[0] == [2, *[1] * 7, 1]
        # A process sees its own commits.
        assert step()[0] == [3, *[1] * 7, 1]


@pytest.mark.drawn
@pytest.mark.slow
def test_a_look_at_a_known_table_is_one_request_and_notices_a_recreated_one(
    s3_server: S3Server, s3_folder: str
) -> None:
    other = DeltaRsRecords(Store(tuple(s3_server.delta_rs.items())))
    with s3_proxy(s3_server.url) as proxy, _program(_AGAIN, s3_folder, s3_server, proxy) as step:
        step()
        assert step()[0] == [[1], False]
        told, asked = step()
        assert told == [[1], False]
        assert [path.partition("?")[0] for path in asked] == ["/lake"] * 2, (
            "more than a listing for each table"
        )
        # The recreated table has the same number of versions, but other rows.
        other.remove(f"{s3_folder}/t")
        other.append(f"{s3_folder}/t", pa.table({"id": [2]}), 1)
        other.append(f"{s3_folder}/none", pa.table({"id": [2]}), 1)
        assert step()[0] == [[2], True]
        other.append(f"{s3_folder}/t", pa.table({"id": [3]}), 2)
        # The listing is stale. A version that was seen before is requested by its name.
        proxy.late = float("inf")
        assert step()[0] == [[2], True]
        proxy.late = 0.0
        assert step()[0] == [[2, 3], True]
        other.remove(f"{s3_folder}/t")
        assert step()[0] == [[], True]


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["from here", "by delta-rs alone"])
def test_a_table_that_was_recreated_after_it_was_opened_is_noticed(
    s3_server: S3Server, s3_folder: str, monkeypatch: pytest.MonkeyPatch, reached: str
) -> None:
    if reached == "by delta-rs alone":
        monkeypatch.setattr(log_entries, "open_objects", lambda path, options: None)
    store, path = Store(tuple(s3_server.delta_rs.items())), f"{s3_folder}/t"
    one, other = DeltaRsRecords(store, Tables(store)), DeltaRsRecords(store, Tables(store))
    # First as many versions as the open table had, then more.
    for versions in ([1], [2], [3, 4]):
        if reached == "by delta-rs alone":
            time.sleep(1)  # the store gives the time of an entry in seconds
        other.remove(path)
        for position, number in enumerate(versions, 1):
            other.append(path, pa.table({"id": [number]}), position)
        assert sorted(row["id"] for row in one.rows(path)) == versions
    other.append(path, pa.table({"id": [5]}), 3)
    assert sorted(row["id"] for row in one.rows(path)) == [3, 4, 5]
    assert one.position(path) == 3


@pytest.mark.slow
def test_a_table_without_the_entry_of_its_newest_version_exists(s3_server: S3Server, s3_folder: str) -> None:
    store, paths = Store(tuple(s3_server.delta_rs.items())), [f"{s3_folder}/{name}" for name in "tu"]
    records = DeltaRsRecords(store, tables := Tables(store))
    for path in paths:
        records.append(path, pa.table({"id": [1]}), 1)
        records.open_table(path).create_checkpoint()
        files, entry = store.find_file_system(f"{path}/_delta_log/{0:020d}.json")
        files.delete_file(entry)
    for _ in range(2):
        with tables.consistent_read(paths):
            assert [(records.exists(path), records.position(path)) for path in paths] == [(True, 1)] * 2
    assert [records.rows(path) for path in paths] == [[{"id": 1}]] * 2


@pytest.mark.slow
def test_a_log_that_is_cleaned_up_while_it_is_read_is_read_again(s3_server: S3Server, s3_folder: str) -> None:
    options = dict(s3_server.delta_rs)
    other = DeltaRsRecords(Store(tuple(options.items())))
    for number in range(5):
        other.append(f"{s3_folder}/t", pa.table({"id": [number]}), number + 1)
    cleaned = []

    def clean_up(method: str, path: str) -> None:
        if method == "GET" and path.endswith("2.json") and not cleaned:
            cleaned.append(path)
            table = DeltaTable(f"{s3_folder}/t", storage_options=options)
            table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
            table.create_checkpoint()
            table.cleanup_metadata()

    with s3_proxy(s3_server.url) as proxy:
        proxy.refused = clean_up
        with _program(_READING, s3_folder, s3_server, proxy) as step:
            assert step()[0] == [0, 1, 2, 3, 4]
    assert cleaned
