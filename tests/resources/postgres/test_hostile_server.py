"""A server that lies about its messages costs neither unlimited memory nor unlimited time."""

from __future__ import annotations

import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.postgres.receiver import Receiver, Wakeup

MIB = 1024 * 1024
READY = b"Z\0\0\0\5I"


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


#: The end of the authentication, and the parameters that a client must know.
WELCOME = (
    _message(b"R", struct.pack("!i", 0))
    + _message(b"S", b"client_encoding\0UTF8\0")
    + _message(b"S", b"server_version\x0018.0\0")
    + _message(b"K", struct.pack("!ii", 1, 1))
    + READY
)
COPY_BOTH = _message(b"W", b"\0\0\0")


@contextmanager
def _server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port that speaks the protocol up to START_REPLICATION, and then calls `answer`."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening, listening.accept()[0] as client:
            client.recv(65536)
            client.sendall(WELCOME)
            client.recv(65536)
            try:
                client.sendall(COPY_BOTH)
                answer(client)
            except OSError:
                return  # the client has gone

    thread = threading.Thread(target=serve)
    thread.start()
    yield listening.getsockname()[1]
    thread.join(30)
    assert not thread.is_alive()


def _promise_a_gigabyte(client: socket.socket) -> None:
    client.sendall(b"d" + struct.pack("!i", 2**30) + b"w" * 100)
    client.recv(65536)
    time.sleep(2)


def _lie_about_the_length(client: socket.socket) -> None:
    client.sendall(b"d" + struct.pack("!i", -5) + b"w" * 100)
    client.recv(65536)


def _send_garbage(client: socket.socket) -> None:
    client.sendall(bytes(range(256)) * 64)
    client.recv(65536)


def _send_envelopes_of_no_kind(client: socket.socket) -> None:
    client.sendall(_message(b"d", b"?" + bytes(100)) * 1000)
    client.recv(65536)


@pytest.mark.parametrize(
    "answer", [_promise_a_gigabyte, _lie_about_the_length, _send_garbage, _send_envelopes_of_no_kind]
)
def test_invalid_messages_end_the_connection(answer: Callable[[socket.socket], None]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _server(answer) as port:
        conninfo = f"host=127.0.0.1 port={port} user=u dbname=d sslmode=disable gssencmode=disable"
        connection = psycopg.connect(conninfo, autocommit=True)
        connection.pgconn.exec_(b"START_REPLICATION SLOT s LOGICAL 0/0")
        receiver = Receiver(
            connection, 0, Wakeup(), buffer_bytes=MIB, status_seconds=0.2, silence_seconds=1.0
        )
        with pytest.raises((psycopg.Error, PgsieveError)):
            for _ in receiver.items():
                pass
        receiver.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_endless_messages_wait_at_the_server() -> None:
    """No consumer takes the messages: the receiver stops reading once its buffer is full."""
    row, stopped = _message(b"d", b"w" + bytes(24) + b"I" * 60_000), threading.Event()

    def flood(client: socket.socket) -> None:
        client.settimeout(0.2)
        while not stopped.is_set():
            try:
                client.sendall(row)
            except TimeoutError:
                continue

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _server(flood) as port:
        conninfo = f"host=127.0.0.1 port={port} user=u dbname=d sslmode=disable gssencmode=disable"
        connection = psycopg.connect(conninfo, autocommit=True)
        connection.pgconn.exec_(b"START_REPLICATION SLOT s LOGICAL 0/0")
        receiver = Receiver(
            connection, 0, Wakeup(), buffer_bytes=MIB, status_seconds=0.2, silence_seconds=60.0
        )
        time.sleep(2)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        stopped.set()
        receiver.end()
        receiver.close()
    assert grown < 64 * 1024
