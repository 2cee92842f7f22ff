"""Each address that pgsieve accepts for a lake is the same place for Spark, for delta-rs, and for files that executors write."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage, find_address_problem
from tests.fixtures.s3_server import BUCKET, KEY, REGION, SECRET, S3Server
from tests.fixtures.spark_writer import SparkWriter, spark_writer

pytestmark = [pytest.mark.spark, pytest.mark.long]

DOTTED = "my.dotted.bucket"


@pytest.fixture(scope="module")
def spark(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkWriter]:
    with spark_writer("s3://lake", s3_server.storage, tmp_path_factory.mktemp("spark")) as writer:
        yield writer


def _accepted(prefix: str) -> str:
    """All characters that pgsieve accepts in a path after a prefix, between letters."""
    characters = [
        c
        for c in string.printable + "äŁ日"
        if find_address_problem(f"{prefix}/a{c}b") is None and c not in "/\n\r\t\x0b\x0c"
    ]
    return "".join(characters)


def test_every_accepted_character_is_the_same_for_both_engines(
    s3_server: S3Server, spark: SparkWriter, tmp_path: Path
) -> None:
    """It takes long because Spark starts, and reads and writes at each address."""
    store = pafs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        endpoint_override=s3_server.url,
        region=REGION,
        allow_bucket_creation=True,
    )
    store.create_dir(DOTTED)
    in_uris, in_folders = _accepted(f"s3://{BUCKET}"), _accepted(str(tmp_path))
    assert set(in_uris) >= set(f"{string.ascii_letters}{string.digits} ~!$&'()+,-.:;=@_ä日")
    addresses = [f"s3://{BUCKET}/a{in_uris}b", f"S3A://{DOTTED}/a b/", f"{tmp_path}/a{in_folders}b"]
    for address in addresses:
        assert find_address_problem(address) is None
        storage = Storage.from_address(address, None if address.startswith("/") else s3_server.storage)
        lake = Lake(storage.address, lambda: None, storage=storage)  # type: ignore[arg-type, return-value]
        assert lake.delta_rs is not None
        path = lake.paths.replica("sales", "Public", f"T {in_uris[:20]}")
        lake.delta_rs.write(path, pa.table({"id": [1]}), Commit())
        assert spark.append(path, [2]) is None
        lake.delta_rs.write(path, pa.table({"id": [3]}), Commit())
        assert spark.count(path) == 3
        assert sorted(lake.delta_rs.read_all_rows(path)["id"].to_pylist()) == [1, 2, 3]
        keys = pa.table({"id": [1, 2, 3]})
        by_files = lake.delta_rs.find_key_matches(path, keys, [np.ones(3, np.bool_)], None)
        assert by_files is not None
        assert sorted(keys["id"][key].as_py() for match in by_files for key in match.key_indices) == [1, 2, 3]
        # All files are at this address.
        assert lake.store.has_file(f"{path}/_delta_log/00000000000000000002.json")
        assert lake.delta_rs.remove(f"{lake.uri}/sales")
        assert not lake.delta_rs.exists(path)
        assert lake.store.list_file_names(lake.uri) == []
