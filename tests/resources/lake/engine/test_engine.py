"""The warm engine is started, shared, replaced and ended, by commands and by its own files."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import pytest

from pgsieve.resources.lake.engine import control, installed_code, server
from pgsieve.resources.lake.engine.record import EngineError, EngineFolder, EngineRecord
from pgsieve.resources.lake.java.jvm import format_properties
from tests.fixtures import commands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.shop import Shop

SETTINGS = {"spark.master": "local[1]", "spark.secret.word": "a b=c:ü\n#!\\"}


def _until(holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _lives(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def folder(tmp_path: Path) -> EngineFolder:
    folder = EngineFolder(tmp_path / "engine")
    folder.create()
    return folder


def test_a_process_that_looks_for_an_engine_keeps_none_from_serving(
    folder: EngineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_serving` locks the file for a moment, which the engine must not take for another engine."""
    looking, serves = folder.lock("serving", is_shared=True), RuntimeError("it serves")

    def begin() -> int:
        raise serves

    monkeypatch.setattr(server, "_find_free_port", begin)
    assert looking is not None
    Timer(0.2, looking.close).start()
    with pytest.raises(RuntimeError, match="it serves"):
        server.serve(folder, server.EnginePlan("", 1))


def test_an_engine_ends_if_another_one_serves(folder: EngineFolder) -> None:
    other = folder.lock("serving")
    assert other is not None
    with other:
        assert server.serve(folder, server.EnginePlan("", 1)) == 0


def test_a_record_is_valid_while_its_process_is_alive(folder: EngineFolder) -> None:
    record = EngineRecord(1, 2, "token", control.compute_fingerprint(SETTINGS), "0", 0.0)
    folder.write_record(record)
    assert folder.read_record() is None, "there is an engine"
    serving = folder.lock("serving")
    assert serving is not None
    with serving:
        # In a process, a second lock of a file waits for the first one, as another process's lock would.
        assert folder.read_record() == record
        used = control.begin_use(folder, SETTINGS)
        assert used is not None
        assert control.is_used(folder)
        used.close()
        assert not control.is_used(folder)
        assert control.begin_use(folder, {**SETTINGS, "spark.master": "local[2]"}) is None
    assert control.begin_use(folder, SETTINGS) is None


def test_an_engine_has_the_same_code_only_if_no_file_of_it_has_changed(
    folder: EngineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_code_digest = installed_code.compute_code_digest
    digest = compute_code_digest()
    assert digest
    serving = folder.lock("serving")
    assert serving is not None
    with serving:
        for code, is_same in ((digest, True), (digest[:-1], False), ("", False)):
            folder.write_record(
                EngineRecord(1, 2, "token", control.compute_fingerprint(SETTINGS), "0", 0.0, code)
            )
            used = control.begin_use(folder, SETTINGS)
            assert used is not None
            assert used.has_same_code == is_same
            used.close()
    package = folder.path / "package"
    (package / "part").mkdir(parents=True)
    monkeypatch.setattr(installed_code.pgsieve, "__file__", str(package / "__init__.py"))
    assert not compute_code_digest()
    (package / "part" / "module.py").write_text("one = 1")
    assert not compute_code_digest(), "the file is younger than this process"
    monkeypatch.setattr(installed_code, "_IMPORT_TIME_NS", time.time_ns() + 10**9)
    first_digest = compute_code_digest()
    assert first_digest
    (package / "part" / "module.py").write_text("one = 12")
    assert compute_code_digest() not in {"", first_digest}


def test_only_the_owner_can_read_what_an_engine_writes(folder: EngineFolder) -> None:
    folder.write_record(EngineRecord(1, 2, "token", "", "0", 0.0))
    files = [folder.path, *folder.path.iterdir()]
    assert [stat.S_IMODE(file.stat().st_mode) & 0o077 for file in files] == [0] * len(files)


def test_settings_are_written_in_javas_format() -> None:
    (line,) = format_properties({"a b": "c=d:ü\n#!\\𝄞"}).splitlines()
    assert line == r"a\ b=c\=d\:\u00fc\n\#\!\\\ud834\udd1e"


def test_an_engine_that_does_not_start_says_why(
    folder: EngineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/none")
    with pytest.raises(EngineError, match="does not start to serve") as caught:
        control.start(folder, SETTINGS, timedelta(minutes=1))
    assert "a b=c" not in caught.value.message
    assert not folder.is_serving()


def _cli(shop: Shop, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run("-c", str(shop.path), *arguments, seconds=180)


@pytest.fixture
def ended(shop: Shop) -> Iterator[None]:
    yield
    _cli(shop, "engine", "stop")


#: A client of the engine that loses its Spark.
_LOSES = """
import os, signal
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pathlib import Path

lake = build_project(load_config(Path({path!r}))).lake.open()
lake.spark.range(1).collect()
os.kill({pid}, signal.SIGKILL)
try:
    lake.spark.range(1).collect()
except Exception:
    print("lost")
"""


def _daemons(pid: int) -> list[int]:
    """The Python processes that a JVM has started."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [child for child in children if b"python" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _status(shop: Shop) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(_cli(shop, "engine", "status", "--json").stdout)
    return status


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.usefixtures("ended")
def test_runs_share_an_engine_which_ends_when_unused(shop: Shop) -> None:
    """It takes long: three JVMs, of two engines and of a run without one."""
    shop.configure(spark={"conf": {"spark.pgsieve.smallBytes": "0"}})
    assert _cli(shop, "engine", "status").returncode == 1
    started = _cli(shop, "engine", "start", "--json")
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout)["serving"]
    first = _status(shop)
    assert first["current"]
    assert not first["used"]

    # Two runs at once need Spark, and neither starts a JVM of its own.
    shop.database.execute("update stock set n = n + 1")
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda name: _cli(shop, "run", name), ("one", "two")))
    assert [run.returncode for run in runs] == [0, 0], runs
    assert _cli(shop, "check").returncode == 0
    assert _status(shop)["pid"] == first["pid"]
    # A repair uses pyspark's functions. They must be those of Spark Connect, as this process has no JVM.
    shop.table("two", "stock").delete()
    assert _cli(shop, "check", "--repair", "two").returncode == 1
    assert _cli(shop, "check", "two").returncode == 0
    # Python imports stay for the next run: all sessions share the daemon that forks the workers.
    record = EngineFolder(shop.path.parent / ".pgsieve" / "engine").read_record()
    assert record is not None
    assert len(_daemons(record.spark_pid)) == 1

    # A lost Spark is retried for seconds, and at the end not at all. pyspark by itself retries for ten minutes each time.
    script = _LOSES.format(path=str(shop.path), pid=record.spark_pid)
    completed = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert completed.stdout == "lost\n", completed

    # Other settings need another engine; here `run` gets its own session.
    shop.configure(spark={"conf": {"spark.pgsieve.smallBytes": "0", "spark.sql.shuffle.partitions": "1"}})
    assert not _status(shop)["current"]
    assert _cli(shop, "engine", "start").returncode == 0
    second = _status(shop)
    assert second["current"]
    assert second["pid"] != first["pid"]
    assert not _lives(first["pid"])

    # The process that watches the engine may be killed. Then its Spark ends, and no command uses it as an engine.
    record = EngineFolder(shop.path.parent / ".pgsieve" / "engine").read_record()
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    _until(lambda: not _lives(record.spark_pid))
    assert not _status(shop)["serving"]
    shop.database.execute("update stock set n = n + 1")
    assert _cli(shop, "run").returncode == 0
