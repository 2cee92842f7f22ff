"""An open table is used as long as its version is the newest one of the same table."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgsieve.resources.lake.delta import tables
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.stores.store import Store


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the tables that were opened."""
    paths: list[str] = []

    class Counted(DeltaTable):
        def __init__(self, path: str, **options: object) -> None:
            paths.append(path)
            super().__init__(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tables, "DeltaTable", Counted)
    return paths


def append(path: Path, n: int) -> None:
    write_deltalake(str(path), pa.table({"n": [n]}), mode="append")


def test_the_newest_version_is_opened_once(tmp_path: Path, opened: list[str]) -> None:
    path, kept_tables = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    assert [kept_tables.open(path).version() for _ in range(3)] == [0, 0, 0]
    append(tmp_path / "t", 2)
    assert [kept_tables.open(path).version() for _ in range(3)] == [1, 1, 1]
    assert len(opened) == 1


def test_the_version_that_an_open_table_committed_is_the_newest(tmp_path: Path, opened: list[str]) -> None:
    path, kept_tables = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    write_deltalake(kept_tables.open(path), pa.table({"n": [2]}), mode="append")
    assert kept_tables.open(path).version() == 1
    append(tmp_path / "t", 3)
    assert kept_tables.open(path).version() == 2
    assert sorted(pa.table(kept_tables.open(path).to_pyarrow_table())["n"].to_pylist()) == [1, 2, 3]
    assert len(opened) == 1


def test_threads_share_tables_that_are_not_in_use(tmp_path: Path, opened: list[str]) -> None:
    path, kept_tables = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)

    def of_another_thread() -> tuple[int, int]:
        table = kept_tables.open(path)
        kept_tables.release_tables()
        return id(table), table.version()

    with ThreadPoolExecutor(1) as pool:
        mine = kept_tables.open(path)
        assert pool.submit(of_another_thread).result()[0] != id(mine), (
            "two threads use the same table at once"
        )
        assert len(opened) == 2
        kept_tables.release_tables()
        append(tmp_path / "t", 2)
        assert pool.submit(of_another_thread).result()[1] == 1
    assert kept_tables.open(path).version() == 1
    assert len(opened) == 2


def test_a_version_is_read_once(tmp_path: Path) -> None:
    path, kept_tables = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    asked = list[int]()

    def cached_rows() -> list[dict[str, int]]:
        table = kept_tables.open(path)
        return kept_tables.cached_rows(
            path, table, "files", lambda: asked.append(1) or [{"n": len(table.file_uris())}]
        )

    assert [cached_rows(), cached_rows()] == [[{"n": 1}]] * 2
    append(tmp_path / "t", 2)
    assert [cached_rows(), cached_rows()] == [[{"n": 2}]] * 2
    assert len(asked) == 2


def test_threads_share_what_was_read_of_a_version(tmp_path: Path) -> None:
    path, kept_tables = str(tmp_path / "t"), Tables(Store())
    asked = list[int]()

    def cached_rows() -> list[dict[str, int]]:
        table = kept_tables.open(path)
        return kept_tables.cached_rows(
            path, table, "files", lambda: asked.append(1) or table.to_pyarrow_table().to_pylist()
        )

    append(tmp_path / "t", 1)
    with ThreadPoolExecutor(1) as pool:
        assert [cached_rows(), pool.submit(cached_rows).result()] == [[{"n": 1}]] * 2
        assert len(asked) == 1
        shutil.rmtree(path)
        append(tmp_path / "t", 2)
        assert [pool.submit(cached_rows).result(), cached_rows()] == [[{"n": 2}]] * 2
        assert len(asked) == 2, "another table at the same path has the same version"
        table = kept_tables.open(path)
        write_deltalake(table, pa.table({"n": [2]}), mode="overwrite")
        kept_tables.cache_rows(path, table, "files", [{"n": 3}])
        assert kept_tables.cached_rows(path, table, "files", list) == [{"n": 3}]
        assert pool.submit(cached_rows).result() == [{"n": 2}]


def test_another_table_at_the_same_path_is_noticed(tmp_path: Path) -> None:
    path, kept_tables = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    first = kept_tables.open(path).metadata().id
    shutil.rmtree(path)
    append(tmp_path / "t", 1)
    assert kept_tables.open(path).metadata().id != first
    shutil.copytree(path, tmp_path / "backup")
    append(tmp_path / "t", 2)
    assert kept_tables.open(path).version() == 1
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    assert kept_tables.open(path).version() == 0
    shutil.rmtree(path)
    assert kept_tables.open_if_exists(path) is None


def test_the_number_of_open_tables_is_limited(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MAX_OPEN_TABLES", 4)
    kept_tables, paths = Tables(Store()), [tmp_path / str(number) for number in range(6)]
    for path in paths:
        append(path, 1)
        kept_tables.open(str(path))
    kept_tables.open(str(paths[-1]))
    assert len(opened) == len(paths)
    kept_tables.open(str(paths[0]))
    assert len(opened) == len(paths) + 1
