"""A bad network: a TCP proxy in front of a server that cuts, delays, fragments, stalls and alters the traffic."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_PIECE = 64 * 1024


class Proxy:
    """Forwards connections to 127.0.0.1:`port`. Its behaviour can be changed at any time."""

    def __init__(self, port: int) -> None:
        self._target = port
        #: After how many bytes from the server each connection is cut; None is never.
        self.cut_after: int | None = None
        #: By how many seconds each piece is delayed, and how many bytes a piece has.
        self.delay, self.piece = 0.0, _PIECE
        #: Bytes from the server, and the bytes that arrive instead. Both have the same length and fit in one piece.
        self.alters: tuple[bytes, bytes] | None = None
        #: How many connections were cut.
        self.cuts = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.getsockname()[1])

    def stall(self) -> None:
        """Forward nothing from now on, but keep the connections open."""
        self._flowing.clear()

    def heal(self) -> None:
        """End all faults."""
        self.cut_after, self.delay, self.piece = None, 0.0, _PIECE
        self._flowing.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.heal()
        for end in list(self._open):
            _close(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the proxy was closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    _close(client)
                    continue
                self._open |= {client, server}
                for source, sink, limited in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._carry, args=(source, sink, limited), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, limited: bool) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(self.piece):
                self._flowing.wait()
                if self.delay:
                    time.sleep(self.delay)
                if limited and self.cut_after is not None and carried + len(piece) > self.cut_after:
                    sink.sendall(piece[: self.cut_after - carried])
                    self.cuts += 1
                    break
                sink.sendall(piece.replace(*self.alters) if limited and self.alters else piece)
                carried += len(piece)
        for end in (source, sink):
            _close(end)
            self._open.discard(end)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
