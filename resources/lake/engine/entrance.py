"""The engine's entrance: a Unix socket in its folder, which forwards bytes to Spark's port and back.

In: the folder's socket, and Spark's process and port. Out: connections to that process, which only this user's
processes can open. Spark listens on a port of 127.0.0.1, where any user's process could listen. But only this user
can open the folder, so only this user can have made the socket in it. Before a byte is sent to Spark's port, the
peer of the connection is verified to be Spark's process.
"""

import socket
from contextlib import suppress
from pathlib import Path
from threading import Thread

from pgsieve.resources.lake.engine.peer import is_of_process, is_own
from pgsieve.resources.lake.engine.record import SOCKET

_CHUNK_BYTES = 1 << 20
_CONNECT_SECONDS = 10.0


def connect_to_process(pid: int, port: int) -> socket.socket | None:
    """Connect to the process's port on 127.0.0.1; None if no process or another one listens there."""
    connection = socket.socket()
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(("127.0.0.1", port))
        if is_of_process(connection, pid):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def open_entrance(pid: int, port: int) -> None:
    """Let this user's processes reach Spark by a socket in the current folder, until this process ends."""
    with suppress(FileNotFoundError):
        Path(SOCKET).unlink()
    entrance = socket.socket(socket.AF_UNIX)
    # The name is relative, as the whole path may exceed the length of a socket address.
    entrance.bind(SOCKET)
    entrance.listen()
    Thread(target=_admit, args=(entrance, pid, port), daemon=True).start()


def _admit(entrance: socket.socket, pid: int, port: int) -> None:
    while True:
        visitor, _ = entrance.accept()
        Thread(target=_serve, args=(visitor, pid, port), daemon=True).start()


def _serve(visitor: socket.socket, pid: int, port: int) -> None:
    """Forward in both directions until either end closes."""
    spark = connect_to_process(pid, port) if is_own(visitor) else None
    if spark is None:
        visitor.close()
        return
    back = Thread(target=_forward, args=(spark, visitor), daemon=True)
    back.start()
    _forward(visitor, spark)
    back.join()
    visitor.close()
    spark.close()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
