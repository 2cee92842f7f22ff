"""Presents the objects of a store as files to pyarrow.

In: paths within a bucket or container.
Out: the handler of a pyarrow file system.

This handler releases Python's global lock during requests. delta-rs has a handler of its own, but that one keeps
the lock while it opens a file, so all other threads wait for the store's answer. That one also writes each file in
parts, which takes at least three requests. Raises OSError with the store's message, as `Objects` does.

https://arrow.apache.org/docs/python/generated/pyarrow.fs.FileSystemHandler.html
"""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from pgsieve.resources.lake.stores.objects import Objects


class ObjectFiles(DeltaStorageHandler):
    """The objects of a bucket as files. Operations on several objects are inherited from delta-rs's handler."""

    def __init__(self, root: str, options: Mapping[str, str], objects: Objects) -> None:
        super().__init__(root, dict(options))
        self._objects = objects

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open an object to read it from any position. Raises FileNotFoundError."""
        return pa.PythonFile(_ObjectReader(self._objects, path), mode="r")

    def open_input_stream(self, path: str) -> pa.PythonFile:
        """Open an object to read it from its beginning. Raises FileNotFoundError."""
        return self.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Mapping[str, str] | None = None) -> pa.PythonFile:
        """Open a new object to write it. When the stream is closed, it replaces an older object of the same name."""
        del metadata
        return pa.PythonFile(self._objects.open_writer(path), mode="w")

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Information about these paths. For a file it takes one request; delta-rs's handler would need two."""
        return [
            self._make_file_info(path) or super(ObjectFiles, self).get_file_info([path])[0] for path in paths
        ]

    def _make_file_info(self, path: str) -> pafs.FileInfo | None:
        stamp = self._objects.read_stamp(path)
        if stamp is None:
            return None
        _, time_written, size = stamp
        return pafs.FileInfo(path, pafs.FileType.File, mtime=time_written, size=size)


class _ObjectReader:
    """An object as a Python file object, from which pyarrow reads."""

    closed = False

    def __init__(self, objects: Objects, path: str) -> None:
        self._objects, self._path = objects, path
        self._first_bytes, self._size = objects.read_beginning(path)
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        start = self._position
        end = self._size if size < 0 else min(start + size, self._size)
        self._position = max(start, end)
        if end <= len(self._first_bytes) or start >= end:
            return self._first_bytes[start:end]
        return self._objects.read_part(self._path, start, end)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self.closed = True
