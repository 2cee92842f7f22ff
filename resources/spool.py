"""Stores messages that have to wait, for example those of a transaction that has not committed yet.

In: Arrow batches, each with a number, for example the number of its transaction.
Out: the same batches.

Each number has a temporary file. The file stays in memory up to `MEMORY_BYTES`; a larger file is on disk.
PostgreSQL's apply worker stores streamed transactions in files, too (src/backend/replication/logical/worker.c).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Self

import pyarrow as pa

#: A file with more bytes than this is on disk, in the folder for temporary files (TMPDIR).
MEMORY_BYTES = 1024 * 1024

_WRITE_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class _File:
    """The messages under one number, and the writer that appends to them."""

    content: "SpooledTemporaryFile[bytes]"
    writer: pa.RecordBatchStreamWriter


class FileSpool:
    """Temporary files with the interface `pgsieve.decoding.protocol.transactions.Spool`. `close` removes them."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}

    def append(self, number: int, messages: pa.RecordBatch) -> None:
        """Add messages to those of a number. Raises OSError if the disk is full."""
        if number not in self._files:
            content = SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - closed by drop
            self._files[number] = _File(
                content, pa.ipc.new_stream(content, messages.schema, options=_WRITE_OPTIONS)
            )
        file = self._files[number]
        file.content.seek(0, os.SEEK_END)
        file.writer.write_batch(messages)

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """The messages of a number. The caller must read all of them before the next `append`."""
        file = self._files.get(number)
        if file is None:
            return
        file.content.seek(0)
        yield from pa.ipc.open_stream(file.content)

    def drop(self, number: int) -> None:
        """Remove the messages of a number, if there are any."""
        file = self._files.pop(number, None)
        if file is not None:
            file.content.close()

    def close(self) -> None:
        """Remove all messages."""
        for number in list(self._files):
            self.drop(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
