"""A table that is held open is used as long as it is the newest version of the table that is there."""

from __future__ import annotations

import shutil
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
    assert len(opened) == 2


def test_a_version_that_was_committed_with_it_is_the_newest(tmp_path: Path) -> None:
    path, held = str(tmp_path / "t"), Tables(Store())
    append(tmp_path / "t", 1)
    write_deltalake(held.open(path), pa.table({"n": [2]}), mode="append")
    append(tmp_path / "t", 3)
    assert held.open(path).version() == 2


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


def test_few_tables_are_held(tmp_path: Path, opened: list[str]) -> None:
    held, paths = Tables(Store()), [tmp_path / str(number) for number in range(20)]
    for path in paths:
        append(path, 1)
        held.open(str(path))
    held.open(str(paths[-1]))
    assert len(opened) == len(paths)
    held.open(str(paths[0]))
    assert len(opened) == len(paths) + 1
