"""`pgsieve demo`: without Java, with many rows, and with its lake on its own S3 server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import yaml
from typer.testing import CliRunner

from pgsieve.pipelines.command_line.cli import app
from pgsieve.pipelines.demo.at_size import measure_large_table
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.postgres.embedded import EmbeddedServer


def test_the_demo_that_keeps_running_has_its_lake_in_a_folder() -> None:
    result = CliRunner().invoke(app, ["demo", "--ui", "--lake", "s3"])
    assert result.exit_code == 2
    assert "leave out `--lake` or `--ui`" in result.output


def test_without_java_nothing_is_created_and_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path / "demo")])
    assert result.exit_code == 2
    assert "pgsieve demo --without-spark" in " ".join(result.output.split())
    assert not (tmp_path / "demo").exists()


class _Quiet:
    """Discards the progress."""

    def start(self, task: str) -> None: ...

    def finish(self, task: str) -> None: ...

    def tell(self, line: str) -> None: ...


@pytest.mark.drawn
def test_with_many_rows_both_sides_do_the_same_work_and_the_replica_is_equal(
    tmp_path: Path, server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers, and twice the rows."""
    spark = {"master": "threads[2]", "conf": {"spark.pgsieve.smallBytes": "-1"}}
    with EmbeddedServer(server_folder / "p") as publisher, EmbeddedServer(server_folder / "s") as subscriber:
        servers = publisher, subscriber
        with monkeypatch.context() as patch:
            patch.setattr(SparkEngine, "fetch_jars", _unavailable)
            with pytest.raises(SparkUnavailableError):
                measure_large_table(tmp_path, servers, {"master": "local[2]"}, {}, 4000, _Quiet())
        for server in servers:
            with psycopg.connect(server.conninfo(), autocommit=True) as admin:
                begun = admin.execute("select count(*) from pg_replication_slots").fetchone()
                assert begun == (0,), "jars are fetched before the clock of either runs"
                admin.execute("drop database at_size")
        report = measure_large_table(tmp_path, servers, spark, {}, 4000, _Quiet())
    assert report.equal
    assert [(step.title, step.rows) for step in report.steps] == [("first copy", 4000), ("catch-up", 2000)]
    assert all(step.spent and step.spent.engine == "threads" for step in report.steps)
    assert all(step.spent.tasks and step.spent.bytes for step in report.steps if step.spent)


def _unavailable(_: SparkEngine) -> None:
    raise SparkUnavailableError("no repository", hint="none")


@pytest.mark.long
@pytest.mark.spark
def test_the_demo_runs_on_an_s3_server(tmp_path: Path) -> None:
    """It takes long: the whole demo runs, with a JVM and an S3 server."""
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "pgsieve", "demo", "--rows", "20000", "--lake", "s3", "--keep", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every replica holds just the rows" in done.stdout
    written = yaml.safe_load((folder / "pgsieve.yaml").read_text())
    assert written["lake"] == "s3://lake/demo"
    assert not (folder / "lake").exists()
    assert written["storage"]["secret_access_key"] not in done.stdout + done.stderr
