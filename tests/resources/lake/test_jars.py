"""Delta's jars are known from the first session on, as long as the files are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgsieve.resources.lake.jars import Packages, class_path, keep_jars, kept_jars, s3_packages

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
    assert kept_jars(PACKAGE, tmp_path / "kept.json") == [str(jar) for jar in reversed(jars)]


def test_jars_of_another_version_are_not_taken(tmp_path: Path, jars: list[Path]) -> None:
    keep_jars(PACKAGE, ",".join(jar.as_uri() for jar in jars), tmp_path / "kept.json")
    assert kept_jars(PACKAGE.replace("4.4.0", "4.4.1"), tmp_path / "kept.json") is None


def test_one_deleted_jar_makes_all_unknown(tmp_path: Path, jars: list[Path]) -> None:
    keep_jars(PACKAGE, ",".join(jar.as_uri() for jar in jars), tmp_path / "kept.json")
    jars[1].unlink()
    assert kept_jars(PACKAGE, tmp_path / "kept.json") is None


@pytest.mark.parametrize("spark_jars", ["", ","])
def test_a_session_without_jars_leaves_them_unknown(tmp_path: Path, spark_jars: str) -> None:
    keep_jars(PACKAGE, spark_jars, tmp_path / "kept.json")
    assert kept_jars(PACKAGE, tmp_path / "kept.json") is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"another": []}'])
def test_an_answer_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept.json").write_text(content, encoding="utf-8")
    assert kept_jars(PACKAGE, tmp_path / "kept.json") is None


def test_an_answer_that_cannot_be_kept_is_asked_for_again(tmp_path: Path, jars: list[Path]) -> None:
    nowhere = tmp_path / "missing" / "kept.json"
    keep_jars(PACKAGE, jars[0].as_uri(), nowhere)
    assert kept_jars(PACKAGE, nowhere) is None


def test_answers_for_several_sets_are_kept_side_by_side(tmp_path: Path, jars: list[Path]) -> None:
    kept = tmp_path / "kept.json"
    keep_jars("a", jars[0].as_uri(), kept)
    keep_jars("b", jars[1].as_uri(), kept)
    assert kept_jars("a", kept) == [str(jars[0])]
    assert kept_jars("b", kept) == [str(jars[1])]


DELTA = Packages((PACKAGE,))
S3 = Packages(("org.apache.hadoop:hadoop-aws:3.4.2", "software.amazon.awssdk:s3:2.29.52"), ("a:bundle",))


def test_the_users_packages_are_added(tmp_path: Path, jars: list[Path]) -> None:
    kept = tmp_path / "kept.json"
    keep_jars(DELTA.name, jars[0].as_uri(), kept)
    conf = {"spark.jars.packages": "org.postgresql:postgresql:42.7.4, x:y:1", "spark.jars": "/own.jar"}
    assert class_path([DELTA, S3], ["/log.jar"], {**conf, "spark.jars.excludes": "b:c"}, kept) == {
        "spark.jars": f"/log.jar,{jars[0]},/own.jar",
        "spark.jars.packages": f"{S3.name},org.postgresql:postgresql:42.7.4,x:y:1",
        "spark.jars.excludes": "a:bundle,b:c",
    }


@pytest.mark.parametrize("theirs", ["io.delta:delta-spark_2.13:4.0.1", "io.delta:delta-spark_4.1_2.13:4.4.1"])
def test_packages_that_the_user_chose_are_not_added_in_another_version(tmp_path: Path, theirs: str) -> None:
    conf = {"spark.jars.packages": theirs}
    assert class_path([DELTA], [], conf, tmp_path / "kept.json") == conf


def test_s3a_is_of_sparks_hadoop_and_without_the_whole_sdk() -> None:
    hadoop = s3_packages().coordinates[0]
    assert hadoop.startswith("org.apache.hadoop:hadoop-aws:3.")
    assert "software.amazon.awssdk:bundle" in s3_packages().excluded
