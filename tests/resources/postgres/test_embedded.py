"""The embedded server: real processes are started and stopped."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer, EmbeddedServerError

pytestmark = pytest.mark.slow

QUICK = {"fsync": "off", "shared_buffers": "16MB"}
#: How many seconds a process may take to end on a busy machine.
PATIENCE = 300
#: A user id that is not in /etc/passwd.
NAMELESS = 54321


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def postmaster(data: Path) -> int:
    return int((data / "postmaster.pid").read_text().split()[0])


def ended(pid: int, seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def setting(server: EmbeddedServer, name: str) -> str:
    with psycopg.connect(server.conninfo()) as connection:
        row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])


def nameless(folder: Path, path: str = os.defpath) -> subprocess.CompletedProcess[str]:
    """A process that starts a server under a user id which /etc/passwd does not have. Only root can change to one.

    It changes after all imports, because root's Python may be unreadable for others.
    """
    program = """
import os, sys
from pathlib import Path
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.postgres.embedded import EmbeddedServer, _allow_traversal
server = EmbeddedServer(Path(sys.argv[1]), settings={"shared_buffers": "16MB"})
_allow_traversal(server.programs_path)
os.environ["PATH"] = sys.argv[3]
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    with server:
        print("running", server.data_path.stat().st_uid)
except PgsieveError as error:
    print(error.hint)
"""
    folder.mkdir()
    os.chown(folder, NAMELESS, NAMELESS)
    command = [sys.executable, "-c", program, str(folder / "data"), str(NAMELESS), path]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_id_without_a_name_starts_a_server_or_gets_advice(server_folder: Path) -> None:
    with pytest.raises(KeyError):
        pwd.getpwuid(NAMELESS)
    server_folder.chmod(0o755)
    entry = f"echo 'pgsieve:x:{NAMELESS}:{NAMELESS}::/tmp:/bin/sh' >>/etc/passwd"
    # For machines on which users may create namespaces; containers rarely allow it.
    may = subprocess.run(["unshare", "--user", "true"], user=NAMELESS, check=False, capture_output=True)
    started = nameless(server_folder / "a")
    if may.returncode == 0:
        assert (started.stdout.split(), started.stderr) == (["running", str(NAMELESS)], "")
    else:
        assert entry in started.stdout, started.stderr
    # For machines without a program for that.
    refused = nameless(server_folder / "b", path="/nonexistent")
    assert entry in refused.stdout, refused.stderr


@pytest.mark.parametrize("version", [16, 18])
def test_a_new_server_is_ready_for_logical_replication(server_folder: Path, version: int) -> None:
    with EmbeddedServer(server_folder / "data", version=version, settings=QUICK) as server:
        assert server.is_running
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            assert connection.info.server_version // 10000 == version == server.version
            made = connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')").fetchone()
            assert made is not None
            connection.execute("SELECT pg_drop_replication_slot('s')")
        assert setting(server, "TimeZone") == "UTC"
        assert setting(server, "server_encoding") == "UTF8"
        assert setting(server, "max_replication_slots") == "64"
    assert not server.is_running
    assert not (server.data_path / "postmaster.pid").exists()


def test_data_and_port_survive_a_stop_and_new_settings_count_at_the_next_start(server_folder: Path) -> None:
    server = EmbeddedServer(server_folder / "data", settings=QUICK).start()
    port = server.port
    with psycopg.connect(server.conninfo()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS a")
    server.stop()
    server.stop()  # the second stop does nothing
    with server.start():
        assert server.port == port
        with psycopg.connect(server.conninfo()) as connection:
            assert connection.execute("SELECT a FROM kept").fetchone() == (1,)
    with EmbeddedServer(
        server.data_path, settings={**QUICK, "work_mem": "123kB", "application_name": "it's"}
    ) as again:
        assert setting(again, "work_mem") == "123kB"
        assert setting(again, "application_name") == "it's"


def test_a_server_recovers_from_an_immediate_stop(server_folder: Path) -> None:
    server = EmbeddedServer(server_folder / "data", settings={**QUICK, "synchronous_commit": "on"}).start()
    with psycopg.connect(server.conninfo()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS a")
    server.stop(immediate=True)
    with server.start(), psycopg.connect(server.conninfo()) as connection:
        assert connection.execute("SELECT a FROM kept").fetchone() == (1,)
    assert "was not properly shut down" in server.log_path.read_text()


def test_conninfo_adds_and_replaces_keywords(server_folder: Path) -> None:
    with EmbeddedServer(server_folder / "data", settings=QUICK) as server:
        with psycopg.connect(server.conninfo(application_name="a 'b'", dbname="template1")) as connection:
            settings = connection.execute(
                "SELECT current_setting('application_name'), current_database()"
            ).fetchone()
        assert settings == ("a 'b'", "template1")
        with psycopg.connect(server.conninfo(host=str(server.data_path))) as connection:
            assert connection.execute("SELECT inet_client_addr()").fetchone() == (None,)


def test_a_server_that_cannot_start_says_why_with_the_end_of_its_log(server_folder: Path) -> None:
    server = EmbeddedServer(server_folder / "data", settings={"shared_buffers": "nonsense"})
    with pytest.raises(
        EmbeddedServerError, match=r'(?s)did not start.*invalid value for parameter "shared_buffers"'
    ):
        server.start()
    assert not server.is_running
    assert not (server.data_path / "postmaster.pid").exists()


def test_a_port_in_use_is_an_error(server_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedServerError, match="could not bind"):
            EmbeddedServer(server_folder / "data", port=port, settings=QUICK).start()


def test_one_data_directory_is_served_once(server_folder: Path) -> None:
    with EmbeddedServer(server_folder / "data", settings=QUICK) as server:
        with pytest.raises(EmbeddedServerError, match="lock file"):
            EmbeddedServer(server.data_path, settings=QUICK).start()
        assert setting(server, "wal_level") == "logical"


def test_another_version_of_the_data_is_refused(server_folder: Path) -> None:
    with EmbeddedServer(server_folder / "data", version=16, settings=QUICK) as server:
        pass
    with pytest.raises(EmbeddedServerError, match="made by PostgreSQL 16, not 18"):
        EmbeddedServer(server.data_path, version=18).start()
    with pytest.raises(EmbeddedServerError, match="versions: 16, 18"):
        EmbeddedServer(server.data_path, version=9)


def test_there_is_no_port_before_the_first_start(server_folder: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="no port yet"):
        EmbeddedServer(server_folder / "data").conninfo()


STARTS_ONE = """
import sys, time
from pathlib import Path
from pgsieve.resources.postgres.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), settings={"fsync": "off"}).start()
print("ready", flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGKILL"])
def test_no_server_outlives_the_process_that_started_it(server_folder: Path, end: str) -> None:
    data = server_folder / "data"
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, str(data), "exit" if end == "exit" else "wait"],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if end == "exit":
            assert process.wait(PATIENCE) == 0
        else:
            pid = postmaster(data)
            process.send_signal(signal.Signals[end])
            process.wait(PATIENCE)
            assert ended(pid)
    assert not (data / "postmaster.pid").exists()
