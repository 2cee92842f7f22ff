"""After the first session the jars of Delta are known, as long as the files exist."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from pgsieve.resources.lake import jars as jars_module
from pgsieve.resources.lake.jars import (
    JarsUnavailableError,
    Packages,
    copy_jars,
    fetch_packages,
    find_recorded_jars,
    list_delta_packages,
    list_s3_packages,
    make_class_path_settings,
    record_jars,
)

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "io.delta:delta-spark_4.1_2.13:4.4.0"


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    """Two files in a folder whose name has to be escaped in a URI."""
    folder = tmp_path / "a b"
    folder.mkdir()
    files = [folder / "delta-spark.jar", folder / "delta-storage.jar"]
    for file in files:
        file.touch()
    return files


def test_jars_are_those_that_spark_resolved_in_its_order(tmp_path: Path, jars: list[Path]) -> None:
    record_jars(PACKAGE, ",".join(jar.as_uri() for jar in reversed(jars)), tmp_path / "kept.json")
    assert find_recorded_jars(PACKAGE, tmp_path / "kept.json") == [str(jar) for jar in reversed(jars)]


def test_jars_of_another_version_are_not_used(tmp_path: Path, jars: list[Path]) -> None:
    record_jars(PACKAGE, ",".join(jar.as_uri() for jar in jars), tmp_path / "kept.json")
    assert find_recorded_jars(PACKAGE.replace("4.4.0", "4.4.1"), tmp_path / "kept.json") is None


def test_one_deleted_jar_makes_all_unknown(tmp_path: Path, jars: list[Path]) -> None:
    record_jars(PACKAGE, ",".join(jar.as_uri() for jar in jars), tmp_path / "kept.json")
    jars[1].unlink()
    assert find_recorded_jars(PACKAGE, tmp_path / "kept.json") is None


@pytest.mark.parametrize("spark_jars", ["", ","])
def test_a_session_without_jars_leaves_them_unknown(tmp_path: Path, spark_jars: str) -> None:
    record_jars(PACKAGE, spark_jars, tmp_path / "kept.json")
    assert find_recorded_jars(PACKAGE, tmp_path / "kept.json") is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"another": []}'])
def test_an_unreadable_record_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept.json").write_text(content, encoding="utf-8")
    assert find_recorded_jars(PACKAGE, tmp_path / "kept.json") is None


def test_a_record_that_cannot_be_stored_is_made_again(tmp_path: Path, jars: list[Path]) -> None:
    nowhere = tmp_path / "missing" / "kept.json"
    record_jars(PACKAGE, jars[0].as_uri(), nowhere)
    assert find_recorded_jars(PACKAGE, nowhere) is None


def test_records_of_several_sets_of_jars_are_kept(tmp_path: Path, jars: list[Path]) -> None:
    kept = tmp_path / "kept.json"
    record_jars("a", jars[0].as_uri(), kept)
    record_jars("b", jars[1].as_uri(), kept)
    assert find_recorded_jars("a", kept) == [str(jars[0])]
    assert find_recorded_jars("b", kept) == [str(jars[1])]


DELTA = Packages((PACKAGE,))
S3 = Packages(("org.apache.hadoop:hadoop-aws:3.4.2", "software.amazon.awssdk:s3:2.29.52"), ("a:bundle",))


def test_the_users_packages_are_added(tmp_path: Path, jars: list[Path]) -> None:
    kept = tmp_path / "kept.json"
    record_jars(DELTA.name, jars[0].as_uri(), kept)
    conf = {"spark.jars.packages": "org.postgresql:postgresql:42.7.4, x:y:1", "spark.jars": "/own.jar"}
    assert make_class_path_settings(
        [DELTA, S3], ["/log.jar"], {**conf, "spark.jars.excludes": "b:c"}, kept
    ) == {
        "spark.jars": f"/log.jar,{jars[0]},/own.jar",
        "spark.jars.packages": f"{S3.name},org.postgresql:postgresql:42.7.4,x:y:1",
        "spark.jars.excludes": "a:bundle,b:c",
    }


@pytest.mark.parametrize("theirs", ["io.delta:delta-spark_2.13:4.0.1", "io.delta:delta-spark_4.1_2.13:4.4.1"])
def test_the_users_packages_are_not_added_in_another_version(tmp_path: Path, theirs: str) -> None:
    conf = {"spark.jars.packages": theirs}
    assert make_class_path_settings([DELTA], [], conf, tmp_path / "kept.json") == conf


def test_s3a_has_the_version_of_sparks_hadoop_and_lacks_the_whole_sdk() -> None:
    hadoop = list_s3_packages().coordinates[0]
    assert hadoop.startswith("org.apache.hadoop:hadoop-aws:3.")
    assert "software.amazon.awssdk:bundle" in list_s3_packages().excluded_dependencies


def test_a_copied_folder_names_its_jars_wherever_it_is(
    tmp_path: Path, jars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    record_jars(DELTA.name, ",".join(jar.as_uri() for jar in jars))
    copy_jars(tmp_path / "copy", [DELTA])
    elsewhere = (tmp_path / "copy").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    assert find_recorded_jars(DELTA.name) is None
    monkeypatch.setenv("PGSIEVE_JARS", str(elsewhere))
    assert find_recorded_jars(DELTA.name) == [str(elsewhere / jar.name) for jar in jars]
    fetch_packages([DELTA], {})  # nothing has to be downloaded


def test_a_folder_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSIEVE_JARS", str(tmp_path))
    with pytest.raises(
        JarsUnavailableError, match=r"has no jars of io\.delta:delta-spark_4\.1_2\.13:4\.4\.0"
    ) as raised:
        fetch_packages([DELTA], {})
    assert "pgsieve jars FOLDER" in str(raised.value.hint)
    fetch_packages([DELTA], {"spark.jars.packages": DELTA.name})  # Spark downloads the user's own packages


def test_spark_downloads_if_no_record_can_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(jars_module, "_fetch", lambda *_: pytest.fail("asked"))
    fetch_packages([DELTA], {})
    assert make_class_path_settings([DELTA], [], {})["spark.jars.packages"] == DELTA.name


@pytest.mark.parametrize(
    ("home", "ivy"), [("{tmp_path}", None), ("/nonexistent", "{tmp_path}/ivy"), ("", "{tmp_path}/ivy")]
)
def test_without_a_home_jars_are_kept_beside_their_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, ivy: str | None
) -> None:
    """Not in the folder of the process that downloads them, which ends with that process."""
    monkeypatch.setenv("HOME", home.format(tmp_path=tmp_path))
    if not home:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Without an entry in /etc/passwd.
    asked = list[dict[str, str]]()
    monkeypatch.setattr(jars_module, "_fetch", lambda _, repositories, __: asked.append(repositories))
    fetch_packages([DELTA], {}, tmp_path / "kept.json")
    fetch_packages([DELTA], {"spark.jars.ivy": "/own"}, tmp_path / "kept.json")
    kept = {} if ivy is None else {"spark.jars.ivy": ivy.format(tmp_path=tmp_path)}
    assert asked == [kept, {"spark.jars.ivy": "/own"}]


def test_threads_that_need_the_same_jars_fetch_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jars: list[Path]
) -> None:
    asked = list[str]()

    def fetch(packages: Packages, _: object, resolutions_path: Path) -> None:
        asked.append(packages.name)
        time.sleep(0.1)
        record_jars(packages.name, ",".join(jar.as_uri() for jar in jars), resolutions_path)

    monkeypatch.setattr(jars_module, "_fetch", fetch)
    with ThreadPoolExecutor(2) as pool:
        for fetched in [pool.submit(fetch_packages, [DELTA], {}, tmp_path / "kept.json") for _ in range(2)]:
            fetched.result()
    assert asked == [DELTA.name]


#: An unreachable repository, and an empty cache.
NO_REPOSITORY = """<ivysettings>
  <settings defaultResolver="none"/>
  <resolvers><ibiblio name="none" m2compatible="true" root="http://me:word@127.0.0.1:9/maven/"/></resolvers>
</ivysettings>
"""


@pytest.mark.drawn
@pytest.mark.spark
def test_jars_are_fetched_once_and_a_repository_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It takes long: two JVMs search for the jars."""
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(NO_REPOSITORY)
    prefix = tmp_path / "prefix"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", prefix], check=True)
    # This process takes its prefix from its program's place, but its packages from here.
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "python"))
    needed = [list_delta_packages()]
    with pytest.raises(JarsUnavailableError, match=r"cannot be fetched: .*127\.0\.0\.1:9") as raised:
        fetch_packages(
            needed, {"spark.jars.ivySettings": str(settings), "spark.jars.ivy": str(tmp_path / "cache")}
        )
    assert "PGSIEVE_JARS=FOLDER" in str(raised.value.hint)
    assert "word" not in raised.value.message
    capfd.readouterr()
    fetch_packages(needed, {})
    output = capfd.readouterr().err
    assert output.startswith(f"fetching the jars of {needed[0].name} for Spark, once\nfetched ")
    fetch_packages(needed, {})
    assert capfd.readouterr().err == ""
    assert set(make_class_path_settings(needed, [], {})) == {"spark.jars"}


@pytest.mark.parametrize(
    ("spark", "delta", "name"),
    [
        ("4.1.4", "4.4.0", "io.delta:delta-spark_4.1_2.13:4.4.0"),
        ("4.0.5", "4.0.1", "io.delta:delta-spark_2.13:4.0.1"),
    ],
)
def test_the_jar_is_named_as_the_installed_delta_names_it(
    monkeypatch: pytest.MonkeyPatch, spark: str, delta: str, name: str
) -> None:
    monkeypatch.setattr(jars_module, "version", {"pyspark": spark, "delta-spark": delta}.__getitem__)
    assert list_delta_packages().name == name
