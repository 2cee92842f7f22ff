"""The archive of classes with which Spark starts."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pgsieve.resources.lake.java import class_archive
from pgsieve.resources.lake.java.class_archive import (
    copy_archive,
    find_archive_path,
    make_archive,
    make_archive_options,
)
from tests.fixtures.pgsieve_replica import engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the jars and the archive."""
    monkeypatch.setenv("PGSIEVE_JARS", str(tmp_path))
    return tmp_path


def test_without_an_archive_java_gets_no_option_for_one(folder: Path) -> None:
    assert make_archive_options("") == []
    find_archive_path().write_bytes(b"")
    assert find_archive_path().parent == folder
    assert make_archive_options("-Xmx1g")[0] == f"-XX:SharedArchiveFile={find_archive_path()}"


@pytest.mark.parametrize("own", ["-XX:SharedArchiveFile=/mine.jsa", "-XX:ArchiveClassesAtExit=/mine.jsa"])
def test_an_archive_that_the_user_configures_is_respected(folder: Path, own: str) -> None:
    assert folder
    find_archive_path().write_bytes(b"")
    assert make_archive_options(own) == []


def test_another_java_has_another_archive(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = find_archive_path()
    program = tmp_path / "jdk" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("another")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    assert find_archive_path() != ours
    assert find_archive_path().parent == folder


def test_a_session_that_fails_leaves_no_part_of_an_archive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_archive, "_PROGRAM", "this")
    assert not make_archive()
    assert list(folder.iterdir()) == []


def test_a_copy_gets_its_name_when_it_is_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_archive_path().write_bytes(b"classes")
    copy = folder / "copy"
    copy.mkdir()

    def half(_: Path, made: Path) -> None:
        made.write_bytes(b"cla")
        raise OSError

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(shutil, "copyfile", half)
        with pytest.raises(OSError):
            copy_archive(copy)
    assert list(copy.iterdir()) == []
    copy_archive(copy)
    assert [file.read_bytes() for file in copy.iterdir()] == [b"classes"]


@pytest.mark.spark
def test_a_session_reads_the_archive_and_forks_workers_with_imports() -> None:
    assert make_archive(), "there is no archive: run `make setup`"
    session = engine().session

    def seen(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        imported = "pgsieve.assets.steps.apply.by_files" in sys.modules
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"is_imported": [imported] * batch.num_rows})

    rows = session.range(0, 2, 1, 2).mapInArrow(seen, "is_imported boolean").toArrow()
    assert rows["is_imported"].to_pylist() == [True, True]
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = {pid for task in children for pid in task.read_text().split()}
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    assert any(str(find_archive_path()) in each for each in maps), shutil.which("java")
