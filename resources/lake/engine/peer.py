"""Verifies the peer of a connection: by its process for TCP on this machine, by its user for a Unix socket.

In: a connection. Out: whether the peer is the expected process or user. A moment after a server has ended,
another user's process may have its port. So callers verify a connection before they send a byte; the peer of a
connection cannot change.

proc(5): /proc/net/tcp has each socket's inode, and /proc/<pid>/fd the sockets that a process has open.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Both tables in /proc/net, because the JVM opens IPv6 sockets even for IPv4.
_TABLES = ("tcp", "tcp6")
#: 127.0.0.1 in the tables' format (words of 32 bits in the machine's byte order), alone and in an IPv6 address.
_LOOPBACK_WORD = f"{socket.htonl(0x7F000001):08X}"
_LOOPBACK = (_LOOPBACK_WORD, f"{0:016X}{socket.htonl(0xFFFF):08X}{_LOOPBACK_WORD}")
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.005


def is_of_process(connection: socket.socket, pid: int) -> bool:
    """Whether the process is the peer of a connection over 127.0.0.1; waits until a process has accepted it."""
    ports = connection.getpeername()[1], connection.getsockname()[1]
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        inodes = set(_inodes(*ports))
        if inodes & _sockets(pid):
            return True
        # The inode is 0 until a process has accepted the connection.
        if inodes != {0}:
            return False
        time.sleep(_POLL_SECONDS)
    return False


def is_own(connection: socket.socket) -> bool:
    """Whether the peer of a Unix socket is a process of this user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def _inodes(local_port: int, remote_port: int) -> Iterator[int]:
    """The inodes of the sockets at port `local_port` that are connected to port `remote_port`, both on 127.0.0.1."""
    for table in _TABLES:
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if _port(fields[1]) == local_port and _port(fields[2]) == remote_port:
                    yield int(fields[9])


def _port(address: str) -> int | None:
    """The port of an address on 127.0.0.1; None for another host."""
    host, port = address.split(":")
    return int(port, 16) if host in _LOOPBACK else None


def _sockets(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open."""
    inodes = set()
    with suppress(FileNotFoundError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                kind, _, inode = str(file.readlink()).partition(":")
                if kind == "socket":
                    inodes.add(int(inode[1:-1]))
    return inodes
