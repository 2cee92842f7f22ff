"""Spark starts on a machine without the usual environment, and leaves nothing there that other users can read.

The user id has no entry in /etc/passwd and no home. The locale is C, but the lake's name is not ASCII. The temporary folder's name
has a blank and an umlaut. The host's name does not resolve, and Maven's repositories are not asked.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pgsieve.resources.lake.jars import copy_jars, list_delta_packages
from tests.fixtures.shop import Shop

USER = 54321
#: Runs a command as another user, which can read the interpreter of these tests wherever it is.
AS_USER = (
    *("unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"),
    *("setpriv", f"--reuid={USER}", "--regid=0", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    sys.executable,
)

#: Writes a table with Spark and Python functions into a folder, and reads it.
SPARK = """
import sys
from pgsieve.resources.lake.session import SparkEngine
spark = SparkEngine(master="local[1]").session
spark.range(3).mapInArrow(lambda batches: batches, "id long").write.format("delta").save(sys.argv[1])
print(sorted(row.id for row in spark.read.format("delta").load(sys.argv[1]).collect()))
"""


def _run(
    shop: Shop, temporary: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    environment |= {
        "PATH": os.environ["PATH"],
        "PGSIEVE_JARS": str(shop.path.parent / "jars"),
        "TMPDIR": str(temporary),
    }
    command = [*AS_USER, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", check=False, timeout=900
    )


@pytest.fixture
def project() -> Iterator[Path]:
    """A folder that another user can reach. pytest's own folders are private."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.spark
@pytest.mark.drawn
def test_a_run_needs_no_environment_and_leaves_no_files(shop: Shop, project: Path) -> None:
    """It takes long: two runs and a JVM, in processes of another user."""
    shop.path = project / "pgsieve.yaml"
    temporary = project / "temporary ü files"
    copy_jars(project / "jars", [list_delta_packages()])
    temporary.mkdir()
    shop.configure(lake="./lakeé")
    run = ("-m", "pgsieve.pipelines.command_line.cli", "-c", str(shop.path), "run", "one")
    for path in (project, temporary, shop.path):
        shutil.chown(path, USER)

    copied = _run(shop, temporary, *run, LC_ALL="C", HOME="/nonexistent", PYTHONUTF8="0")
    assert copied.returncode == 0, copied.stderr
    assert stat.S_IMODE((project / "lakeé" / "_pgsieve").stat().st_mode) == 0o700

    shop.database.execute("update orders set id = id + 1000 where id = 2")
    applied = _run(shop, temporary, *run, LC_ALL="de_DE.ISO-8859-1")
    assert applied.returncode == 0, applied.stderr
    assert shop.ids("one", "orders") == [3, 4, 1002]

    # Only the user can read Spark's temporary files, and they are deleted in the end.
    modes = set()
    with ThreadPoolExecutor() as pool:
        script = ("-c", SPARK, str(project / "lakeé" / "table"))
        shell = {"LC_ALL": "de_DE.ISO-8859-1", "TZ": "Asia/Tokyo", "SPARK_LOCAL_DIRS": str(temporary)}
        running = pool.submit(_run, shop, temporary, *script, **shell)
        while not running.done():
            modes |= {stat.S_IMODE(path.stat().st_mode) for path in temporary.iterdir()}
            time.sleep(0.5)
    done = running.result()
    assert done.returncode == 0, done.stderr + done.stdout
    assert modes == {0o700}
    assert not list(temporary.iterdir())
    assert done.stdout == "[0, 1, 2]\n"
    assert done.stderr == ""
    assert (project / "lakeé" / "table" / "_delta_log").is_dir(), "Spark and Python use different folders"
