"""How a JVM is started: pgsieve chooses its environment, and its arguments contain nothing of the environment."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pgsieve.resources.lake.engine.server import SERVER_SETTINGS
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.java.jvm import JAVA_OPTIONS, make_environment, write_parameters
from pgsieve.resources.lake.spark_settings import make_session_config
from pgsieve.resources.lake.stores.storage import find_storage
from pgsieve.resources.private_folder import private_folder
from tests.fixtures import commands
from tests.fixtures.pgsieve_replica import engine

SHELL = {
    "LANG": "tr_TR.UTF-8",
    "LC_ALL": "C",
    "LC_CTYPE": "de_DE.ISO-8859-1",
    "TZ": "Asia/Tokyo",
    "SPARK_HOME": "/other/spark",
    "SPARK_REMOTE": "sc://elsewhere",
    "SPARK_LOCAL_DIRS": "/none",
    "HADOOP_CONF_DIR": "/etc/hadoop",
    "PATH": "/bin",
    "HOME": "/nonexistent",
}


def _nameless(_: int) -> None:
    raise KeyError


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    private_folder()  # As the tests' own environment says.
    # os.environ itself stays: a module that is imported meanwhile would keep another mapping as its environment.
    for name in tuple(os.environ):
        monkeypatch.delenv(name)
    for name, value in {**SHELL, "SPARK_LOCAL_DIRS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_shells_environment_does_not_reach_the_jvm(shell: pytest.MonkeyPatch) -> None:
    own = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": str(private_folder()), "TMPDIR": str(private_folder())}
    kept = {
        "HADOOP_CONF_DIR": "/etc/hadoop",
        "PATH": "/bin",
        "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    shell.delenv("PYTEST_CURRENT_TEST")
    assert make_environment("local[2]") == {**own, **kept, "SPARK_LOCAL_IP": "127.0.0.1"}
    # A cluster's executors must reach the driver, and the user's Spark may have settings for the cluster.
    assert make_environment("yarn") == {**own, **kept, "SPARK_HOME": "/other/spark"}
    shell.setitem(os.environ, "SPARK_LOCAL_IP", "192.0.2.1")
    assert make_environment("local[2]")["SPARK_LOCAL_IP"] == "192.0.2.1"
    shell.setitem(os.environ, "HOME", "/")
    assert make_environment("local[2]")["HOME"] == "/"


@pytest.mark.parametrize("variable", ["JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"])
def test_sparks_launcher_starts_with_the_garbage_collector_of_the_environment(
    shell: pytest.MonkeyPatch, variable: str
) -> None:
    shell.setenv(variable, "-Dx=y -XX:+UseG1GC")
    environment = {**make_environment("local"), "PATH": os.defpath}
    command = ["java", *environment["SPARK_LAUNCHER_OPTS"].split(), "-version"]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def test_a_user_without_a_name_is_called_by_the_number(shell: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shell.setattr(pwd, "getpwuid", _nameless)
    shell.delenv("HOME")
    number = str(os.geteuid())
    assert make_environment("local")["HADOOP_USER_NAME"] == number
    assert make_environment("local")["HOME"] == str(private_folder())
    write_parameters({"spark.master": "local"}, tmp_path, {})
    assert f"-Duser.name={number}" in shlex.split((tmp_path / "java.options").read_text())


def test_settings_in_the_environment_are_read_unchanged(shell: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shell
    options = '-Dhttp.proxyPassword=\'a b\' "-Dü=1" -Dc=\\"d'
    written = write_parameters(
        {"spark.master": "local", "spark.driver.extraJavaOptions": options}, tmp_path, {"spark.x": "=1 ü"}
    )
    for file in (written, tmp_path / "java.options"):
        assert file.stat().st_mode & 0o077 == 0
    settings = dict(line.split("=", 1) for line in written.read_text().splitlines())
    assert settings["spark.x"] == r"\=1\ \u00fc"
    assert Path(settings["spark.sql.warehouse.dir"]).parent == private_folder(), (
        "the warehouse is in the current folder"
    )
    assert Path(settings["spark.local.dir"]).parent == tmp_path
    jvm_options = ("-Dhttp.proxyPassword=a b", "-Dü=1", '-Dc="d')
    assert (tmp_path / "java.options").read_text().splitlines()[-3:] == [
        f'"{jvm_options[0]}"',
        f'"{jvm_options[1]}"',
        f"'{jvm_options[2]}'",
    ]


@pytest.mark.spark
def test_a_session_shows_nothing_to_other_users() -> None:
    session = engine().session
    assert session.conf.get("spark.authenticate") == "true"
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    for pid in {pid for task in children for pid in task.read_text().split()}:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        # The Spark Connect server of other tests is excluded.
        if b"pyspark-shell" in arguments:
            break
    assert b"--conf" not in arguments
    assert not [each for each in arguments if b"spark.jars" in each]
    listening = subprocess.run(("ss", "-ltnpH"), capture_output=True, text=True, check=True).stdout
    addresses = [
        line.split()[3].rpartition(":")[0] for line in listening.splitlines() if f"pid={pid}," in line
    ]
    assert len(addresses) == 3
    assert set(addresses) == {"[::ffff:127.0.0.1]"}


def test_a_folder_that_sparks_launcher_cannot_pass_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jvm, "private_folder", lambda: tmp_path / "😀")
    with (
        pytest.raises(jvm.JavaEndedError, match="set TMPDIR"),
        jvm._start_gateway({"spark.master": "local"}, 1.0),
    ):
        pass


def test_the_users_garbage_collector_takes_the_place_of_the_engines(tmp_path: Path) -> None:
    """With two of them a JVM does not start."""
    for users, collector in (("-XX:+UseSerialGC", "UseSerialGC"), ("-Xss2m", "UseG1GC")):
        write_parameters({"spark.master": "local[1]", JAVA_OPTIONS: users}, tmp_path, SERVER_SETTINGS)
        written = (tmp_path / "java.options").read_text(encoding="utf-8")
        assert re.findall(r"Use\w+GC", written) == [collector]


def test_the_code_cache_is_large_in_each_jvm_unless_the_user_chooses_another(tmp_path: Path) -> None:
    """A JVM takes the last of two options. With only the first compiler its default would be 48 MB."""
    users = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=64m"
    for settings in (jvm._OWN_JVM_SETTINGS, SERVER_SETTINGS):
        for own, sizes in (("", ["240"]), (users, ["240", "64"])):
            write_parameters({"spark.master": "local[1]", JAVA_OPTIONS: own}, tmp_path, settings)
            written = (tmp_path / "java.options").read_text(encoding="utf-8")
            assert re.findall(r"ReservedCodeCacheSize=(\d+)m", written) == sizes


#: A process that ends, with a program in place of a JVM, which does not end when its standard input is closed.
_ENDING = """
import atexit, subprocess
from pgsieve.resources.lake.java import jvm
command = ["sh", "-c", "cat; echo closed; exec sleep 100"]
atexit.register(jvm._end_jvm, subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True), 100.0)
"""


def test_another_ctrl_c_does_not_wait_for_the_jvm_and_prints_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ENDING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "closed\n"
        process.send_signal(signal.SIGINT)
        # The streams end only when the program has ended, too.
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "home", "reason"),
    [
        ("-XX:+NoSuch", None, "Unrecognized VM option 'NoSuch'"),
        ("-XX:+UseG1GC -XX:+UseSerialGC -Dpassword=Error", None, "Multiple garbage collectors selected"),
        ("", "/none", "/none/bin/java: No such file or directory"),
    ],
)
def test_a_jvm_that_does_not_start_names_the_reason(
    monkeypatch: pytest.MonkeyPatch, options: str, home: str | None, reason: str
) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", options)
    if home is not None:
        monkeypatch.setenv("JAVA_HOME", home)
    settings = make_session_config("local[1]", {}, find_storage("/none"))
    monkeypatch.setattr(jvm, "_launches", jvm._Launches())
    with pytest.raises(jvm.JavaEndedError, match=re.escape(reason)), jvm._start_gateway(settings, 1.0):
        pass


#: A process whose JVM ends before it has read a request.
_LOSING_JVM = """
import contextlib, threading
import psutil
from pyspark import SparkContext
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.spark_settings import make_session_config
from pgsieve.resources.lake.stores.storage import find_storage

with jvm._start_gateway(make_session_config("local[1]", {}, find_storage("/none")), 10.0):
    SparkContext._ensure_initialized()
clock = SparkContext._jvm.java.lang.System
(process,) = psutil.Process().children()
process.suspend()
threading.Timer(0.5, process.kill).start()
with contextlib.suppress(Exception):
    clock.nanoTime()
"""


@pytest.mark.spark
def test_a_lost_jvm_is_reported_only_by_the_error() -> None:
    """Ctrl-C ends the JVM, perhaps while another thread starts the session."""
    losing = subprocess.run(
        [sys.executable, "-c", _LOSING_JVM], capture_output=True, text=True, check=False, timeout=60
    )
    assert (losing.returncode, losing.stdout, losing.stderr) == (0, "", "")


def _run_prepared(prepared_app: str, app: str) -> tuple[bool, str]:
    """Prepare a JVM, and start a session, in a process of its own.

    Return whether the session is in the prepared JVM, and the name of the session's application.
    """
    settings = make_session_config("local[1]", {}, find_storage("/none"))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jvm.prepare({**settings, "spark.app.name": prepared_app})
    (prepared,) = psutil.Process().children()
    jvm.prepare({**settings, "spark.app.name": "a second one"})
    assert psutil.Process().children() == [prepared], "a second JVM was prepared"
    session = jvm.start_session({**settings, "spark.app.name": app})
    return prepared.is_running(), session.sparkContext.appName


@pytest.mark.slow
@pytest.mark.spark
def test_a_prepared_jvm_is_used_if_the_settings_are_the_same() -> None:
    """It takes long: three JVMs."""
    assert commands.call(_run_prepared, "same", "same") == (True, "same")
    assert commands.call(_run_prepared, "former", "new") == (False, "new")
