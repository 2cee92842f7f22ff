"""Another user of the machine gets nothing from the warm engine: no token, no session, and no data sent to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from pgsieve.resources.lake.engine import control
from pgsieve.resources.lake.engine.entrance import connect_to_process
from pgsieve.resources.lake.engine.record import EngineError, EngineFolder, EngineRecord
from pgsieve.resources.lake.session import SparkEngine

OTHER = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", sys.executable, "-c")

#: Prints the arguments and environments of all processes, as far as this user can read them.
READER = """
from pathlib import Path
for process in Path("/proc").glob("[0-9]*"):
    for name in ("cmdline", "environ"):
        try:
            print((process / name).read_bytes().replace(b"\\0", b" ").decode(errors="replace"))
        except OSError:
            pass
"""

#: Listens on an address and a port, and prints each byte that it receives.
LISTENER = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
for attempt in range(200):
    try:
        listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
    except OSError as error:
        print(error, flush=True)
        time.sleep(0.1)
    else:
        break
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    print(repr(connection.recv(100)), flush=True)
"""

#: Asks Spark Connect for its version, without a token and with a guess, and connects to the socket. Prints the answers.
GUESSER = """
import os, socket, sys
import grpc
from pyspark.sql.connect.proto import AnalyzePlanRequest, SparkConnectServiceStub
request = AnalyzePlanRequest(session_id="00112233-4455-6677-8899-aabbccddeeff")
request.user_context.user_id = "other"
request.spark_version.SetInParent()
for metadata in ([], [("authorization", "Bearer guess")]):
    with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
        try:
            print(SparkConnectServiceStub(channel).AnalyzePlan(request, metadata=metadata))
        except grpc.RpcError as error:
            print(error.code().name)
try:
    os.chdir(sys.argv[2])
    socket.socket(socket.AF_UNIX).connect("socket")
except OSError as error:
    print(type(error).__name__)
"""

#: A message of Spark's own protocol for its other ports, as an executor sends it: length, kind, request.
FETCH = bytes([0, 0, 0, 0, 0, 0, 0, 19, 6, 0, 0, 0, 6]) + b"/jars/"


def _output_of_another_user(script: str, *arguments: object) -> str:
    command = [*OTHER, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def _listening(address: str, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [*OTHER, LISTENER, address, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        # A process that has just ended may keep the port for a moment.
        while (line := process.stdout.readline()) != "listening\n":
            assert "in use" in line
        yield process
        process.kill()


def _line_of(listener: subprocess.Popen[str]) -> str:
    listener.kill()
    assert listener.stdout is not None
    return listener.stdout.read()


def _ports(pid: int) -> list[str]:
    """The addresses on which a process listens."""
    lines = subprocess.run(("ss", "-ltnpH"), capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3] for line in lines if f"pid={pid}," in line]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SparkEngine]:
    # Others may enter the project's folder, and its path is longer than the address of a socket may be.
    project = tmp_path / ("project " * 15)
    project.mkdir()
    for folder in (project, tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    engine = SparkEngine(
        master="local[1]", engine="start", engine_folder=str(project / "engine"), engine_idle=600
    )
    # A session of the engine sets a variable with which no later test could start a session of its own.
    with patch.dict(os.environ):
        yield engine
    control.stop(engine.folder)


@pytest.fixture
def stopped(engine: SparkEngine) -> Iterator[ExitStack]:
    """Resources that are released before the engine ends."""
    assert engine
    with ExitStack() as stack:
        yield stack


@pytest.mark.drawn
@pytest.mark.spark
def test_another_user_gets_nothing_of_an_engine(
    engine: SparkEngine, stopped: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long: an engine starts, with a JVM."""
    session = engine.session
    record = engine.folder.read_record()
    assert record is not None
    assert session.range(3).count() == 3

    output = _output_of_another_user(READER)
    assert "EngineServer" in output, "the engine's processes are among those that are read"
    ports = _ports(record.spark_pid)
    numbers = [address.rpartition(":")[2] for address in ports]
    assert not [word for word in (record.token, engine.engine_folder, *numbers) if word in output]

    # The system's tables show where Spark listens: only on this machine, and every port demands a secret.
    assert len(ports) == 3
    assert {address.rpartition(":")[0] for address in ports} == {"[::ffff:127.0.0.1]"}
    answers = {}
    for port in numbers:
        with socket.create_connection(("127.0.0.1", int(port)), 10) as connection:
            connection.sendall(FETCH)
            answers[port] = connection.recv(300)
    (connect,) = [port for port, answer in answers.items() if b"Unauthenticated call" not in answer]
    refused = ["UNAUTHENTICATED", "UNAUTHENTICATED", "PermissionError"]
    assert _output_of_another_user(GUESSER, connect, engine.folder.path).split() == refused

    # A listener on [::1], which `localhost` may mean first.
    with _listening("::1", int(connect)) as listener:
        another = SparkEngine(**{name: getattr(engine, name) for name in type(engine).model_fields})
        assert another.session.range(3).count() == 3
        another.session.stop()
        assert not _line_of(listener)

    # Spark dies and another user takes its port, before the engine's process notices.
    session.stop()
    os.kill(record.pid, signal.SIGSTOP)
    stopped.callback(os.kill, record.pid, signal.SIGCONT)
    os.kill(record.spark_pid, signal.SIGKILL)
    while _ports(record.spark_pid):
        time.sleep(0.05)
    with _listening("127.0.0.1", int(connect)) as listener:
        assert connect_to_process(record.spark_pid, int(connect)) is None
        assert engine.folder.read_record() == record, "the record is gone"
        stopped.close()
        used = control.begin_use(engine.folder, engine.settings)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as visitor:
            monkeypatch.chdir(engine.engine_folder)
            visitor.connect("socket")
            visitor.sendall(b"the token")
            assert not visitor.recv(100)
        if used is not None:
            used.close()
        while engine.folder.is_serving():
            time.sleep(0.05)
        assert control.begin_use(engine.folder, engine.settings) is None
        assert set(_line_of(listener).split()) <= {"b''"}


def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    folder = EngineFolder(tmp_path / "engine")
    folder.create()
    settings = {"spark.master": "local[1]"}
    folder.write_record(EngineRecord(1, 2, "theirs", control.compute_fingerprint(settings), "0", 0.0))
    os.chown(folder.path, 54321, 54321)
    assert control.begin_use(folder, settings) is None
    for access in (folder.read_record, folder.create):
        with pytest.raises(EngineError, match="other users have access") as caught:
            access()
        assert caught.value.sqlstate == "42501"
    os.chown(folder.path, os.geteuid(), os.getegid())
    folder.path.chmod(0o770)
    assert control.begin_use(folder, settings) is None
