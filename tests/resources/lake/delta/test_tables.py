"""A table that is held open is used as long as it is the newest version of the table that is there."""

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
    """The paths of tables that were opened."""
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
    path, held = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    assert [held.open(path).version() for _ in range(3)] == [0, 0, 0]
    append(tmp_path / "t", 2)
    assert [held.open(path).version() for _ in range(3)] == [1, 1, 1]
    assert len(opened) == 1


def test_a_version_that_was_committed_with_it_is_the_newest(tmp_path: Path, opened: list[str]) -> None:
    path, held = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    write_deltalake(held.open(path), pa.table({"n": [2]}), mode="append")
    assert held.open(path).version() == 1
    append(tmp_path / "t", 3)
    assert held.open(path).version() == 2
    assert sorted(pa.table(held.open(path).to_pyarrow_table())["n"].to_pylist()) == [1, 2, 3]
    assert len(opened) == 1


def test_threads_share_the_tables_that_none_works_with(tmp_path: Path, opened: list[str]) -> None:
    path, held = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)

    def of_another_thread() -> tuple[int, int]:
        table = held.open(path)
        held.release()
        return id(table), table.version()

    with ThreadPoolExecutor(1) as pool:
        mine = held.open(path)
        assert pool.submit(of_another_thread).result()[0] != id(mine), (
            "while one works with it, it is its own"
        )
        assert len(opened) == 2
        held.release()
        append(tmp_path / "t", 2)
        assert pool.submit(of_another_thread).result()[1] == 1
    assert held.open(path).version() == 1
    assert len(opened) == 2


def test_what_is_read_of_a_version_is_read_once(tmp_path: Path) -> None:
    path, held = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    asked = list[int]()

    def remembered() -> list[dict[str, int]]:
        table = held.open(path)
        return held.remembered(
            path, table, "files", lambda: asked.append(1) or [{"n": len(table.file_uris())}]
        )

    assert [remembered(), remembered()] == [[{"n": 1}]] * 2
    append(tmp_path / "t", 2)
    assert [remembered(), remembered()] == [[{"n": 2}]] * 2
    assert len(asked) == 2


def test_another_table_in_its_place_is_that_one(tmp_path: Path) -> None:
    path, held = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    first = held.open(path).metadata().id
    shutil.rmtree(path)
    append(tmp_path / "t", 1)
    assert held.open(path).metadata().id != first
    shutil.copytree(path, tmp_path / "backup")
    append(tmp_path / "t", 2)
    assert held.open(path).version() == 1
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    assert held.open(path).version() == 0
    shutil.rmtree(path)
    assert held.open_if_any(path) is None


def test_so_many_tables_are_held(tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_OPEN", 4)
    held, paths = Tables(Store()), [tmp_path / str(number) for number in range(6)]
    for path in paths:
        append(path, 1)
        held.open(str(path))
    held.open(str(paths[-1]))
    assert len(opened) == len(paths)
    held.open(str(paths[0]))
    assert len(opened) == len(paths) + 1
