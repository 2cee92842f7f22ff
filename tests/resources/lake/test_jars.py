"""Delta's jars are known from the first session on, as long as the files are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgsieve.resources.lake.jars import delta_jars, keep_jars

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "io.delta:delta-spark_4.1_2.13:4.4.0"


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    """Two files in a folder whose name a URI cannot hold as it is."""
    folder = tmp_path / "a b"
    folder.mkdir()
    files = [folder / "delta-spark.jar", folder / "delta-storage.jar"]
    for file in files:
        file.touch()
    return files


def test_jars_are_those_that_spark_resolved_in_its_order(tmp_path: Path, jars: list[Path]) -> None:
    keep_jars(PACKAGE, ",".join(jar.as_uri() for jar in reversed(jars)), tmp_path / "kept.json")
    assert delta_jars(PACKAGE, tmp_path / "kept.json") == [str(jar) for jar in reversed(jars)]


def test_jars_of_another_version_are_not_taken(tmp_path: Path, jars: list[Path]) -> None:
    keep_jars(PACKAGE, ",".join(jar.as_uri() for jar in jars), tmp_path / "kept.json")
    assert delta_jars(PACKAGE.replace("4.4.0", "4.4.1"), tmp_path / "kept.json") is None


def test_one_deleted_jar_makes_all_unknown(tmp_path: Path, jars: list[Path]) -> None:
    keep_jars(PACKAGE, ",".join(jar.as_uri() for jar in jars), tmp_path / "kept.json")
    jars[1].unlink()
    assert delta_jars(PACKAGE, tmp_path / "kept.json") is None


@pytest.mark.parametrize("spark_jars", ["", ","])
def test_a_session_without_jars_leaves_them_unknown(tmp_path: Path, spark_jars: str) -> None:
    keep_jars(PACKAGE, spark_jars, tmp_path / "kept.json")
    assert delta_jars(PACKAGE, tmp_path / "kept.json") is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"another": []}'])
def test_an_answer_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept.json").write_text(content, encoding="utf-8")
    assert delta_jars(PACKAGE, tmp_path / "kept.json") is None


def test_an_answer_that_cannot_be_kept_is_asked_for_again(tmp_path: Path, jars: list[Path]) -> None:
    nowhere = tmp_path / "missing" / "kept.json"
    keep_jars(PACKAGE, jars[0].as_uri(), nowhere)
    assert delta_jars(PACKAGE, nowhere) is None
