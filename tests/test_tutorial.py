"""The tutorials as written: their SQL, their pgsieve.yaml, and their commands, in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import own_database
from tests.fixtures.spark_servers import free_port
from tests.test_docs import FENCE, ROOT, command_lines

pytestmark = pytest.mark.long

PASSWORD = "of-the-tutorial"


def test_the_tutorial_with_the_readers_own_database_works_as_written(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: every command of the tutorial is a process."""
    if publisher_server.version < 15:
        pytest.skip("row filters of the server need version 15")
    text = (ROOT / "docs/tutorial-database.md").read_text(encoding="utf-8")
    environment = {**os.environ, "SHOP_PASSWORD": PASSWORD, "DAGSTER_HOME": str(tmp_path)}
    server = conninfo_to_dict(publisher_server.conninfo())
    ran: list[str] = []
    with own_database(publisher_server, "tutorial") as owner:
        try:
            for _, language, block in FENCE.findall(text):
                if language == "sql":
                    owner.execute(block.replace("'…'", f"'{PASSWORD}'"))
                elif language == "yaml":
                    own = f"host={server['host']} port={server['port']} dbname=tutorial user=pgsieve"
                    file = block.replace("host=db dbname=shop user=pgsieve", own)
                    assert own in file
                    (tmp_path / "pgsieve.yaml").write_text(file)
                elif language == "python":
                    done = subprocess.run(
                        [sys.executable, "-c", block],
                        cwd=tmp_path,
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    assert sorted(map(int, re.findall(r"'id': (\d+)", done.stdout))) == [1, 4]
                elif language == "console":
                    for words in command_lines(block):
                        done = subprocess.run(
                            [sys.executable, "-m", "pgsieve", *words],
                            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
                        )  # fmt: skip
                        assert done.returncode == 0, (words, done.stdout, done.stderr)
                        assert PASSWORD not in done.stdout + done.stderr
                        ran.append(words[0])
                        if words == [
                            "validate"
                        ]:  # the tables' owner runs the printed SQL; then no problem is left
                            assert "no problems" in done.stdout
                            (statement,) = re.findall(r"^create publication .*;$", done.stdout, re.MULTILINE)
                            owner.execute(statement)
        finally:
            owner.execute("drop publication if exists sales; drop publication if exists pgsieve_shop")
            if owner.execute("select from pg_roles where rolname = 'pgsieve'").rowcount:
                owner.execute("drop owned by pgsieve; drop role pgsieve")
    assert ran == ["validate", "run", "run", "status", "check", "drop"]


def test_the_tutorial_with_the_demo_works_as_written(tmp_path: Path) -> None:
    """It takes long: the demo starts two servers, a web interface and a follower."""
    text = (ROOT / "docs/tutorial-demo.md").read_text(encoding="utf-8")
    blocks = [block for _, language, block in FENCE.findall(text) if language == "console"]
    own = {
        "make demo ARGS='--keep ./demo'": "pgsieve demo --keep ./demo",
        ".venv/bin/python": sys.executable,
        # It runs until it is interrupted; tests/pipelines/demo/test_live_demo.py checks its output.
        ".venv/bin/pgsieve demo --ui": f"timeout --signal INT 60 pgsieve demo --ui --keep ./live --port {free_port()} || test $? = 124",
        "/tmp/pgsieve-demo-…": "live",
    }
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    replaced = set[str]()
    for block in blocks:
        replaced |= {written for written in own if written in block}
        commands = reduce(lambda text, written: text.replace(written, own[written]), own, block)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env={**os.environ, "PATH": programs, "DAGSTER_HOME": str(tmp_path / "dagster")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (commands, done.stdout, done.stderr)
    assert replaced == own.keys()
