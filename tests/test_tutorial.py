"""The tutorial with one's own database, as it is written: its SQL, its pgsieve.yaml, and its commands in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import own_database
from tests.test_docs import FENCE, ROOT, command_lines

pytestmark = pytest.mark.long

PASSWORD = "of-the-tutorial"


def test_the_tutorial_with_a_database_of_ones_own_works_as_written(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
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
                        ]:  # What it prints is run by the tables' owner, then nothing is left.
                            assert "no problems" in done.stdout
                            (statement,) = re.findall(r"^create publication .*;$", done.stdout, re.MULTILINE)
                            owner.execute(statement)
        finally:
            owner.execute("drop publication if exists sales; drop publication if exists pgsieve_shop")
            if owner.execute("select from pg_roles where rolname = 'pgsieve'").rowcount:
                owner.execute("drop owned by pgsieve; drop role pgsieve")
    assert ran == ["validate", "run", "run", "status", "check", "drop"]
