"""Opens the entrance of the warm engine, a local Spark Connect server.

The entrance is a Unix socket in the engine's folder, which forwards bytes to Spark's port and back.

In: the process of Spark, and its port.
Out: connections to Spark. Only processes of the same user can open them.

Spark listens on a port of 127.0.0.1, and any user's process could listen there instead. But only this user can
open the folder, so only this user can have created the socket in it. Before this module sends a byte to Spark's
port, it verifies that the process at the other end of the connection is Spark's.
"""

import socket
from contextlib import suppress
from pathlib import Path
from threading import Thread

from pgsieve.resources.lake.engine.peer import is_peer_of_this_user, is_peer_process
from pgsieve.resources.lake.engine.record import SOCKET_NAME

_CHUNK_BYTES = 1 << 20
_CONNECT_SECONDS = 10.0


def connect_to_process(pid: int, port: int) -> socket.socket | None:
    """Connect to a process at its port on 127.0.0.1. None if no process, or another process, listens there."""
    connection = socket.socket()
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(("127.0.0.1", port))
        if is_peer_process(connection, pid):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def open_entrance(pid: int, port: int) -> None:
    """Let this user's processes reach Spark through a socket in the current folder, until this process ends."""
    with suppress(FileNotFoundError):
        Path(SOCKET_NAME).unlink()
    listener = socket.socket(socket.AF_UNIX)
    # The name is relative to the current folder, because the whole path may be too long for the address of a socket.
    listener.bind(SOCKET_NAME)
    listener.listen()
    Thread(target=_accept_connections, args=(listener, pid, port), daemon=True).start()


def _accept_connections(listener: socket.socket, pid: int, port: int) -> None:
    """Accept connections for ever. Each connection has a thread."""
    while True:
        client, _ = listener.accept()
        Thread(target=_serve, args=(client, pid, port), daemon=True).start()


def _serve(client: socket.socket, pid: int, port: int) -> None:
    """Forward bytes in both directions, until either end closes its connection."""
    spark = connect_to_process(pid, port) if is_peer_of_this_user(client) else None
    if spark is None:
        client.close()
        return
    answers = Thread(target=_forward_bytes, args=(spark, client), daemon=True)
    answers.start()
    _forward_bytes(client, spark)
    answers.join()
    client.close()
    spark.close()


def _forward_bytes(source: socket.socket, sink: socket.socket) -> None:
    """Forward bytes from one connection to another, until one of them ends. Then end both."""
    with suppress(OSError):
        while octets := source.recv(_CHUNK_BYTES):
            sink.sendall(octets)
    for connection in (source, sink):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
