"""A store says whether it accepts a file, and the probe leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage, is_uri
from pgsieve.resources.lake.stores.store import PART_BYTES, RowGroup, Store, divide_groups
from tests.fixtures.lakes import no_session
from tests.fixtures.s3_proxy import s3_proxy
from tests.fixtures.s3_server import S3Server


def _touch(store: Store, path: str) -> None:
    """Create an empty file in a folder, which may not exist yet."""
    if not is_uri(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    store.touch(path)


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    Store().probe(tmp_path.as_uri(), ".probe")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_probe_of_s3_leaves_nothing(s3_server: S3Server, s3_folder: str) -> None:
    store = Store.from_storage(Storage.from_address(s3_folder, s3_server.storage))
    store.probe(s3_folder, ".probe")
    assert ".probe" not in store.list_file_names(s3_folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AWS_SESSION_TOKEN", "AWS_TOKEN", "aws_session_token"])
@pytest.mark.parametrize("token", ["of-other-keys", ""])
@pytest.mark.parametrize("keys", ["storage", "profile", "environment"])
def test_a_token_of_the_environment_is_not_combined_with_other_keys(
    s3_server: S3Server,
    s3_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    keys: str,
    token: str,
    name: str,
) -> None:
    own = {"access_key_id", "secret_access_key"}
    monkeypatch.setenv(name, token)
    monkeypatch.setenv("HOME", str(tmp_path))
    if keys == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.storage["access_key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.storage["secret_access_key"])
    elif keys == "profile":
        lines = [f"aws_{each} = {s3_server.storage[each]}" for each in own]
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws" / "credentials").write_text("\n".join(["[default]", *lines]))
    with s3_proxy(s3_server.url) as proxy:
        options = {
            each: value for each, value in s3_server.storage.items() if keys == "storage" or each not in own
        }
        storage = Storage.from_address(s3_folder, {**options, "endpoint": proxy.url})
        lake = Lake(storage.address, no_session, storage=storage)
        if keys == "environment" and token:
            with pytest.raises(LakeError):
                lake.records.append(f"{lake.uri}/t", pa.table({"id": [1]}))
            assert proxy.tokens == {token}
        else:
            try:
                lake.records.append(f"{lake.uri}/t", pa.table({"id": [1]}))
            except LakeError as error:
                error.add_note(f"session tokens of the requests: {proxy.tokens}")
                raise
            lake.store.touch(f"{lake.uri}/x")
            assert lake.store.open_objects is not None
            objects = lake.store.open_objects(lake.uri)
            assert objects is not None
            assert objects.read_stamp("none") is None
            assert proxy.tokens == {None}
    assert os.environ[name] == token, "other code of this process may need it"


@pytest.mark.slow
def test_the_environment_does_not_decide_where_the_bucket_is(
    s3_server: S3Server, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    storage = Storage.from_address(s3_folder, s3_server.storage)
    lake = Lake(storage.address, no_session, storage=storage)
    lake.records.append(f"{lake.uri}/t", pa.table({"id": [1]}))
    assert lake.records.count_rows(f"{lake.uri}/t") == 1


@pytest.mark.slow
def test_a_removal_removes_a_folder_and_not_its_neighbours_with_the_same_prefix(
    s3_server: S3Server, s3_folder: str, tmp_path: Path
) -> None:
    for lake in (s3_folder, str(tmp_path)):
        store = Store.from_storage(Storage.from_address(s3_folder, s3_server.storage))
        names = (
            "lake/sales/t/_x",
            "lake/sales2/x",
            "lake/sales~2/x",
            "lake/sales.old/x",
            "lake2/sales/x",
            "lake/sale/x",
        )
        for name in names:
            _touch(store, f"{lake}/{name}")
        assert store.remove(f"{lake}/lake/sales")
        assert not store.remove(f"{lake}/lake/sales")
        assert [name for name in names if store.has_file(f"{lake}/{name}")] == list(names[1:])


@pytest.mark.slow
def test_a_folder_is_found_at_any_depth_by_its_whole_name(
    s3_server: S3Server, s3_folder: str, tmp_path: Path
) -> None:
    for lake in (s3_folder, str(tmp_path)):
        store = Store.from_storage(Storage.from_address(s3_folder, s3_server.storage))
        assert not store.has_folder(f"{lake}/sales", "_pgsieve")
        for name, expected in (("a/_pgsieve2/x", False), ("_pgsieve", False), ("b/c/_pgsieve/x", True)):
            _touch(store, f"{lake}/sales/{name}")
            assert store.has_folder(f"{lake}/sales", "_pgsieve") is expected


def test_a_refusing_store_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-folder"):
        Store().probe(f"{tmp_path.as_uri()}/no-folder", ".probe")


def _groups(sizes: Sequence[int]) -> list[RowGroup]:
    return [RowGroup("file", number, 1, size) for number, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 3 * PART_BYTES), max_size=40), st.integers(1, 8))
def test_parts_have_all_row_groups_in_their_order_and_their_bytes_are_bounded(
    sizes: list[int], beside: int
) -> None:
    groups, largest = _groups(sizes), max(sizes, default=0)
    parts = divide_groups(groups, beside)
    assert [group for part in parts for group in part] == groups
    assert all(parts)
    assert all(sum(group.uncompressed_bytes for group in part) <= PART_BYTES + largest for part in parts)


@pytest.mark.parametrize(
    ("megabytes", "beside", "parts"),
    [(3, 2, 1), (8, 2, 2), (33, 2, 2), (75, 1, 3), (75, 2, 4), (75, 4, 4), (0, 2, 0)],
)
def test_parallel_executors_have_the_same_number_of_parts(megabytes: int, beside: int, parts: int) -> None:
    sizes = [len(part) for part in divide_groups(_groups([1024 * 1024] * megabytes), beside)]
    assert len(sizes) == parts
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_bounds_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Python's dates and times end in the year 9999, so they cannot express PostgreSQL's."""
    kinds = {
        "day": (pa.date32(), pa.array([2**31 - 1, None, -(2**31)], pa.int32())),
        "time": (pa.timestamp("us", "UTC"), pa.array([2**62, -(2**62), None])),
        "small": (pa.int16(), pa.array([7, None, -7], pa.int32())),
        "text": (pa.string(), pa.array(["ä", "", None])),
    }
    rows = {name: values.cast(kind) for name, (kind, values) in kinds.items()}
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"new": pa.StructArray.from_arrays([*rows.values()], [*rows])}), path)
    read = Store().read_row_group_bounds(path, {f"new.{name}": kind for name, (kind, _) in kinds.items()})
    expected = {name: pc.min_max(values) for name, values in rows.items()}
    assert read == {f"new.{name}": [(each["min"], each["max"])] for name, each in expected.items()}
