"""What is asked of an object store: tables are opened once in a process, and a version of a small one is read once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures.s3_proxy import S3Proxy, s3_proxy
from tests.fixtures.s3_server import S3Server

_ROOT = Path(__file__).resolve().parents[4]
#: A process of its own: while delta-rs waits for an answer it keeps Python's lock, which the proxy needs.
_PROGRAM = """
import json, sys
import pyarrow as pa
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage

storage = Storage.of(sys.argv[1], json.loads(sys.argv[2]))
path = f"{storage.address}/t"

def lake():
    return Lake(storage.address, None, storage=storage)

def look():
    rows = lake().records.rows(path)
    print(json.dumps([sorted(row["id"] for row in rows), lake().records.standing(path).position]), flush=True)
    for row in rows:
        row["id"] = None  # What was read is the caller's own.
    sys.stdin.readline()

for number in range(3):
    lake().records.append(path, pa.table({"id": [number]}), number + 1)
look()
look()
lake().records.append(path, pa.table({"id": [3]}), 4)
look()
"""


def _settle(proxy: S3Proxy) -> None:
    """delta-rs asks for more than it waits for: what it asked for in this look may be answered after it."""
    answered = -1
    while answered != len(proxy.answered):
        answered = len(proxy.answered)
        time.sleep(0.3)


@pytest.mark.slow
def test_another_object_for_the_same_lake_asks_only_for_what_is_new(
    s3_server: S3Server, s3_folder: str
) -> None:
    with s3_proxy(s3_server.url) as proxy:
        options = json.dumps({**s3_server.storage, "endpoint": proxy.url})
        program = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, s3_folder, options],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdin is not None
        assert program.stdout is not None
        looks, asked = [], []
        for _ in range(3):
            looks.append(json.loads(program.stdout.readline()))
            _settle(proxy)
            asked.append([path for _, path, _ in proxy.answered])
            proxy.answered.clear()
            program.stdin.write("\n")
            program.stdin.flush()
        program.communicate()
    assert looks == [[[0, 1, 2], 3], [[0, 1, 2], 3], [[0, 1, 2, 3], 4]]
    assert not [path for path in asked[1] if path.endswith((".json", ".parquet"))]
    assert len(asked[1]) <= 4
