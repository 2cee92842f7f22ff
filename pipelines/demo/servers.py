"""The folder of a demo, its servers, and sessions on the servers."""

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo


def make_demo_folder(folder: Path | None) -> Path:
    """Make the folder of a demo, or a temporary folder. Raises PgsieveError if the folder exists and is not empty."""
    home = (folder or Path(tempfile.mkdtemp(prefix="pgsieve-demo-"))).resolve()
    if home.exists() and any(home.iterdir()):
        raise PgsieveError(f'folder "{home}" is not empty', hint="choose a new folder for --keep")
    home.mkdir(parents=True, exist_ok=True)
    return home


@contextmanager
def start_servers(*servers: EmbeddedServer) -> Iterator[Callable[[], None]]:
    """Start servers while the block runs, and stop them at its end.

    Yields a function that waits until they have started. The function raises EmbeddedServerError if one does not start.
    """
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        threads = stack.enter_context(ThreadPoolExecutor(len(servers)))
        starts = [threads.submit(server.start) for server in servers]

        def wait() -> None:
            for start in starts:
                start.result()

        yield wait


def session(server: EmbeddedServer, **extra: str) -> psycopg.Connection[Any]:
    """Open a session of the demo's user. Names of tables need no schema there."""
    connection = Conninfo(server.conninfo(**extra)).connect()
    connection.execute("set search_path = public")
    return connection


def execute_all(connection: psycopg.Connection[Any], statements: str) -> None:
    """Execute statements that are separated by semicolons, each in a transaction of its own."""
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)
