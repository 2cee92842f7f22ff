"""`pgsieve demo` with its lake on an S3 server of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pgsieve.pipelines.command_line.cli import app


def test_the_demo_that_stays_has_its_lake_in_a_folder() -> None:
    result = CliRunner().invoke(app, ["demo", "--ui", "--lake", "s3"])
    assert result.exit_code == 2
    assert "leave out `--lake` or `--ui`" in result.output


@pytest.mark.long
@pytest.mark.spark
def test_the_demo_runs_on_an_s3_server(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "pgsieve", "demo", "--lake", "s3", "--keep", str(folder)],
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
