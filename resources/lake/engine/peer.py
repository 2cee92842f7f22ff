"""Verifies that the process at the other end of a connection, the peer, is the expected process.

In: a connection.
Out: whether the peer is the expected process (for TCP on this machine), or a process of this user (for a Unix
     socket).

Shortly after a server has ended, a process of another user may have its port. So callers verify a connection
before they send a byte. The peer of a connection cannot change later.

The file /proc/net/tcp has the inode of each socket, and the folder /proc/<pid>/fd has the sockets that a process
has open (proc(5)).
"""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: The tables of sockets in /proc/net. Both are needed, because the JVM opens IPv6 sockets even for IPv4.
_TABLES = ("tcp", "tcp6")
#: 127.0.0.1 in the format of the tables, words of 32 bits in the byte order of the machine; alone, and as a part
#: of an IPv6 address.
_LOOPBACK_WORD = f"{socket.htonl(0x7F000001):08X}"
_LOOPBACK = (_LOOPBACK_WORD, f"{0:016X}{socket.htonl(0xFFFF):08X}{_LOOPBACK_WORD}")
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.005


def is_peer_process(connection: socket.socket, pid: int) -> bool:
    """True if the process `pid` is the peer of a connection over 127.0.0.1.

    Waits until some process has accepted the connection.
    """
    ports = connection.getpeername()[1], connection.getsockname()[1]
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        inodes = set(_find_inodes(*ports))
        if inodes & _list_socket_inodes(pid):
            return True
        # As long as no process has accepted the connection, the inode is 0.
        if inodes != {0}:
            return False
        time.sleep(_POLL_SECONDS)
    return False


def is_peer_of_this_user(connection: socket.socket) -> bool:
    """True if the peer of a Unix socket is a process of this user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def _find_inodes(local_port: int, remote_port: int) -> Iterator[int]:
    """The inodes of the sockets at the port `local_port` that are connected to the port `remote_port`, both on 127.0.0.1."""
    for table in _TABLES:
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if (
                    _parse_loopback_port(fields[1]) == local_port
                    and _parse_loopback_port(fields[2]) == remote_port
                ):
                    yield int(fields[9])


def _parse_loopback_port(address: str) -> int | None:
    """The port of an address on 127.0.0.1. None if the address is on another host."""
    host, port = address.split(":")
    return int(port, 16) if host in _LOOPBACK else None


def _list_socket_inodes(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open."""
    inodes = set()
    with suppress(FileNotFoundError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                kind, _, inode = str(file.readlink()).partition(":")
                if kind == "socket":
                    inodes.add(int(inode[1:-1]))
    return inodes
