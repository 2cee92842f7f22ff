"""Stores messages that have to wait: in memory or, if they are many, on disk.

In: Arrow batches under a number, such as a transaction's. Out: the same batches. Each number has a temporary
file, which stays in memory up to `MEMORY_BYTES`. PostgreSQL's apply worker also stores streamed transactions in
files (src/backend/replication/logical/worker.c).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Self

import pyarrow as pa

#: More bytes under one number go to a file in the folder for temporary files (TMPDIR).
MEMORY_BYTES = 1024 * 1024

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class _File:
    content: "SpooledTemporaryFile[bytes]"
    writer: pa.RecordBatchStreamWriter


class FileSpool:
    """A `pgsieve.decoding.protocol.transactions.Spool` of temporary files, which `close` removes."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}

    def append(self, number: int, messages: pa.RecordBatch) -> None:
        """Add messages under a number; raises OSError if the disk is full."""
        if number not in self._files:
            content = SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - closed by drop
            self._files[number] = _File(
                content, pa.ipc.new_stream(content, messages.schema, options=_OPTIONS)
            )
        file = self._files[number]
        file.content.seek(0, os.SEEK_END)
        file.writer.write_batch(messages)

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """The messages under a number. Read them all before the next `append`."""
        file = self._files.get(number)
        if file is None:
            return
        file.content.seek(0)
        yield from pa.ipc.open_stream(file.content)

    def drop(self, number: int) -> None:
        """Remove the messages under a number, if there are any."""
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
