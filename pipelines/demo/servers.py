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
    """Make the folder of a demo, or a temporary folder. Raises PgsieveError if it cannot be made, or is not empty."""
    demo_folder = (folder or Path(tempfile.mkdtemp(prefix="pgsieve-demo-"))).resolve()
    hint = "choose a new folder for --keep"
    try:
        demo_folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(demo_folder.iterdir())
    except OSError as error:
        raise PgsieveError(f'folder "{demo_folder}" cannot be made: {error.strerror}', hint=hint) from None
    if not is_empty:
        raise PgsieveError(f'folder "{demo_folder}" is not empty', hint=hint)
    return demo_folder


@contextmanager
def start_servers(*servers: EmbeddedServer) -> Iterator[Callable[[], None]]:
    """Start servers in the background, and stop them at the end of the block.

    Yields a function that waits until they have started. The function raises EmbeddedServerError if one does not start.
    """
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        thread_pool = stack.enter_context(ThreadPoolExecutor(len(servers)))
        start_futures = [thread_pool.submit(server.start) for server in servers]

        def wait_for_servers() -> None:
            for start_future in start_futures:
                start_future.result()

        yield wait_for_servers


def open_session(server: EmbeddedServer, **parameters: str) -> psycopg.Connection[Any]:
    """Open a session of the demo's user. Names of tables need no schema there."""
    connection = Conninfo(server.conninfo(**parameters)).connect()
    connection.execute("set search_path = public")
    return connection


def execute_all(connection: psycopg.Connection[Any], statements: str) -> None:
    """Execute statements that are separated by semicolons, each in a transaction of its own."""
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)
