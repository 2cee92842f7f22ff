"""The owner of a connection: no byte is sent to a port before its process is known."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pgsieve.resources.lake.engine.entrance import connect_to_process

#: Listens, prints its port and what it receives. It accepts one connection, or leaves it in the queue.
LISTENER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
connection, _ = listener.accept()
print(repr(connection.recv(100)), flush=True)
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LISTENER, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_connection_is_made_only_to_the_expected_process(
    other: subprocess.Popen[str],
) -> None:
    assert other.stdin is not None
    assert other.stdout is not None
    port = int(other.stdout.readline())
    other.stdin.write("accept\n")
    other.stdin.flush()
    assert connect_to_process(os.getpid(), port) is None, (
        "the listener belongs to the same user, but is another process"
    )
    assert other.stdout.readline() == "b''\n", "it received bytes"

    with socket.create_server(("127.0.0.1", 0)) as own:
        own_port = own.getsockname()[1]
        accepted: list[socket.socket] = []
        from threading import Thread

        thread = Thread(target=lambda: accepted.append(own.accept()[0]))
        thread.start()
        connection = connect_to_process(os.getpid(), own_port)
        thread.join()
        assert connection is not None
        connection.close()
        accepted[0].close()
    assert connect_to_process(os.getpid(), own_port) is None, "no process listens any more"
