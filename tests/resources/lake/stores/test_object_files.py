"""Objects of a store as files: the number of requests, and other threads that work during a request.

The proxy runs in this process. If Python's lock were held during a request, no request would be answered.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.stores.objects import FIRST_BYTES, PART_BYTES, open_objects
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.s3_proxy import DENIED, S3Proxy, s3_proxy
from tests.fixtures.s3_server import S3Server

NUMBERS = pa.schema({"n": pa.int64()})


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3_server.url) as made:
        yield made


@pytest.fixture
def store(proxy: S3Proxy, s3_folder: str) -> Store:
    made = Store.from_storage(Storage.from_address(s3_folder, S3Server(proxy.url).storage))
    return replace(made, open_objects=partial(open_objects, options=made.options))


def asked(proxy: S3Proxy) -> list[str]:
    """The requests to the store since the last call."""
    methods = [method for method, _, _ in proxy.answered]
    proxy.answered.clear()
    return methods


def write(store: Store, path: str, content: bytes) -> None:
    files, inner = store.find_file_system(path)
    with files.open_output_stream(inner) as stream:
        stream.write(content)


def test_a_small_file_is_written_and_read_with_one_request_each(
    proxy: S3Proxy, store: Store, s3_folder: str
) -> None:
    rows = pa.RecordBatch.from_pydict({"n": range(1000)}, NUMBERS)
    ((row,),) = (batch.to_pylist() for batch in write_files(s3_folder, NUMBERS, [rows], store=store))
    assert asked(proxy) == ["PUT"]
    path = f"{s3_folder}/{row['path']}"
    assert store.read_rows(path).to_batches() == [rows]
    assert asked(proxy) == ["GET"]
    ((group, read),) = store.iterate_group_readers(store.list_row_groups(path))
    assert group.row_count == 1000
    assert read(["n"]).to_batches() == [rows]
    assert asked(proxy) == ["GET", "GET"]
    stamp = store.read_stamp(path)
    assert stamp is not None
    assert stamp[1] == row["size"]
    assert asked(proxy) == ["HEAD"]


@pytest.mark.parametrize("size", [0, 1, FIRST_BYTES, FIRST_BYTES + 1, PART_BYTES, 3 * PART_BYTES + 7])
def test_a_file_of_any_size_is_read_as_it_was_written(store: Store, s3_folder: str, size: int) -> None:
    rng = random.Random(size)
    content, path = rng.randbytes(size), f"{s3_folder}/a b/~41ü/x'y+z,&=@:!$()"
    write(store, path, content)
    files, inner = store.find_file_system(path)
    expected = io.BytesIO(content)
    with files.open_input_file(inner) as file:
        assert file.size() == size
        for _ in range(30):
            start, length = rng.randint(0, size), rng.choice([0, 1, 100, FIRST_BYTES, size])
            file.seek(start)
            expected.seek(start)
            assert file.read(length) == expected.read(length)
            assert file.tell() == expected.tell()
        file.seek(-min(size, 5), 2)
        assert file.read() == content[size - min(size, 5) :]
    with files.open_input_stream(inner) as stream:
        assert stream.read() == content


def test_a_missing_or_refused_object_is_an_os_error(proxy: S3Proxy, store: Store, s3_folder: str) -> None:
    files, inner = store.find_file_system(f"{s3_folder}/none")
    with pytest.raises(FileNotFoundError, match="none not found") as missing:
        files.open_input_file(inner)
    assert "Debug source" not in str(missing.value)
    assert files.get_file_info(inner).type == pafs.FileType.NotFound
    proxy.refused = lambda method, path: DENIED
    for attempt in (
        lambda: files.open_input_file(inner),
        lambda: write(store, f"{s3_folder}/x", b"1"),
        lambda: write(store, f"{s3_folder}/x", bytes(2 * PART_BYTES)),
    ):
        with pytest.raises(OSError, match="AccessDenied"):
            attempt()
