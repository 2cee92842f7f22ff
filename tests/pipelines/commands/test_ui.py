"""The web interface: the processes that it starts, how they end, and the folder of Dagster's records."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import pytest
import yaml

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands import ui
from pgsieve.pipelines.config.model import parse_config

ROOT = Path(__file__).parents[3]
LEAST = "lake: ./lake\nspark: {engine: off}\nsources: {shop: {conninfo: dbname=shop}}\n"


@pytest.fixture
def config(tmp_path):
    return parse_config(LEAST, tmp_path / "pgsieve.yaml", {})


def test_dagsters_folder_is_created_next_to_the_file_without_telemetry(config, tmp_path):
    home = ui.find_dagster_home(config, {})
    assert home == tmp_path / ".pgsieve" / "dagster"
    settings = home / "dagster.yaml"
    quiet = {"telemetry": {"enabled": False}, "nux": {"enabled": False}}
    assert yaml.safe_load(settings.read_text()) == quiet
    settings.write_text("telemetry:\n  enabled: false\n")
    ui.find_dagster_home(config, {})
    assert yaml.safe_load(settings.read_text()) == quiet, "settings of an earlier version are not completed"


def test_existing_settings_stay(config):
    settings = ui.find_dagster_home(config, {}) / "dagster.yaml"
    settings.write_text("telemetry: {enabled: true}\n")
    ui.find_dagster_home(config, {})
    assert settings.read_text() == "telemetry: {enabled: true}\n"


def test_the_users_own_folder_is_left_alone(config, tmp_path):
    assert ui.find_dagster_home(config, {"DAGSTER_HOME": str(tmp_path / "mine")}) == tmp_path / "mine"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(config, tmp_path):
    (tmp_path / ".pgsieve").write_text("a file")
    with pytest.raises(PgsieveError, match=r"dagster cannot be made") as caught:
        ui.find_dagster_home(config, {})
    assert caught.value.hint == "set DAGSTER_HOME to a folder that can be written"


def test_the_definitions_read_the_same_file(config, tmp_path):
    environ = ui.make_server_environment(config, {"A": "b", "PGSIEVE_CONFIG": "other.yaml"})
    assert environ == {
        "A": "b",
        "PGSIEVE_CONFIG": str(tmp_path / "pgsieve.yaml"),
        "DAGSTER_HOME": str(tmp_path / ".pgsieve" / "dagster"),
    }


@pytest.mark.drawn
@pytest.mark.slow
def test_dagster_knows_the_options_of_the_command():
    """Parse the options with Dagster's own parser: with --help it starts nothing."""
    command = ui.make_server_command("127.0.0.1", 3999)
    assert command[command.index("-d") + 1] == str(ROOT / "src")
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    wrong = subprocess.run([*command, "--no-such"], capture_output=True, text=True, check=False, timeout=120)
    assert wrong.returncode == 2
    assert "--no-such" in wrong.stderr


def _with_another_server(tmp_path: Path, body: str, errors: IO[str] | None = None) -> subprocess.Popen[str]:
    """`pgsieve ui` with another program instead of Dagster."""
    server = tmp_path / "python"
    server.write_text(f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\n{body}\n")
    server.chmod(0o755)
    file = tmp_path / "pgsieve.yaml"
    file.write_text(LEAST)
    code = (
        "import sys, os\nfrom pgsieve.pipelines.command_line.cli import app\n"
        f"sys.executable = {str(server)!r}\n"
        f"app(['ui', '-c', {str(file)!r}, '--port', '3999'])"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
    )


@pytest.mark.drawn
@pytest.mark.slow
def test_the_server_gets_its_arguments_and_variables_and_its_exit_code_is_the_commands(tmp_path):
    process = _with_another_server(
        tmp_path, "print(json.dumps([sys.argv[1:], os.environ['PGSIEVE_CONFIG']]))\nsys.exit(7)"
    )
    out, _ = process.communicate(timeout=60)
    arguments, path = json.loads(out)
    assert path == str(tmp_path / "pgsieve.yaml")
    assert arguments == ui.make_server_command("127.0.0.1", 3999)[1:]
    assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_dagster_is_importing_its_modules_prints_no_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Dagster handles signals only after its imports. The sleep stands for these."""
    with (tmp_path / "stderr").open("w+") as errors:
        process = _with_another_server(tmp_path, 'print("up", flush=True)\ntime.sleep(600)', errors)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
        errors.seek(0)
        assert errors.read() == ""


#: A server whose child ends only by SIGKILL. Both print that they are ready.
_STUBBORN = """
child = 'import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print("up"); time.sleep(600)'
subprocess.Popen([os.environ["PYTHON"], "-c", child])
print(os.getpid())
time.sleep(600)
"""


def _started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[subprocess.Popen[str], int]:
    monkeypatch.setenv("PYTHON", sys.executable)
    process = _with_another_server(tmp_path, _STUBBORN)
    assert process.stdout is not None
    printed = {process.stdout.readline().strip() for _ in range(2)}
    assert "up" in printed
    return process, int((printed - {"up"}).pop())


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_second_signal_kills_children_that_do_not_end(tmp_path, monkeypatch, number):
    process, session = _started(tmp_path, monkeypatch)
    process.send_signal(number)
    time.sleep(1)
    assert process.poll() is None
    assert _processes(session), "the child had no time to end"
    process.send_signal(number)
    assert process.wait(20) == 0
    assert not _processes(session)


@pytest.mark.drawn
@pytest.mark.slow
def test_a_killed_command_leaves_no_server(tmp_path, monkeypatch):
    process, session = _started(tmp_path, monkeypatch)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(line.split()[0] == str(session) for line in _processes(session)):
        assert time.monotonic() < deadline, _processes(session)
        time.sleep(0.05)
    os.killpg(session, signal.SIGKILL)


def _processes(session: int) -> list[str]:
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    return listed.stdout.splitlines()


@pytest.mark.drawn
@pytest.mark.slow
def test_a_signal_ends_the_server_and_its_children_though_a_shell_started_it_in_the_background(tmp_path):
    """It takes long: Dagster's web server and code server start and end."""
    file = tmp_path / "pgsieve.yaml"
    file.write_text(LEAST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        # A shell without job control starts `pgsieve ui &` in this way.
        script = 'trap "" INT; exec "$@"'
        command = [
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            "-m",
            "pgsieve",
            "ui",
            "-c",
            str(file),
            "--port",
            str(port),
        ]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=5) as answer,
            ):
                assert answer.status == 200
                break
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 3, (
            "the children are not Dagster, the web server, the daemon and the code server"
        )
        process.terminate()
        assert process.wait(120) == 0
        assert not psutil.wait_procs(children, timeout=0)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
