"""Tries the access to a lake before work begins, and explains later errors.

In: a lake's address and storage options. Out: nothing, or errors: LakeUnavailableError, UnsafeStoreError or
SparkLostError if the whole lake is concerned, and a `LakeError` that names the table if one table is.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

import pyarrow as pa
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from pgsieve.resources.lake.delta.errors import (
    ConcurrentWriteError,
    ExecutorError,
    LakeError,
    LakeUnavailableError,
    OverrunError,
    RefusedTableError,
    StoreUnavailableError,
    causes,
    damaged,
    damaged_log,
    first_line,
    illegible_file,
    is_arrows,
    is_conflict,
    is_illegible,
    is_lost,
    lacks_entries,
    missing_file,
    of_one_folder,
    raise_ours,
    refusal,
    spark_lost,
    spark_message,
)
from pgsieve.resources.lake.kept_commits import check_commits_are_kept
from pgsieve.resources.lake.overrun import NewerVersionError
from pgsieve.resources.lake.stores.objects import objects_at
from pgsieve.resources.lake.stores.storage import Storage, is_uri
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.stores.store_errors import StoreRefusal, store_refusal
from pgsieve.resources.lake.unsynced import Unsynced, unsynced

#: Spark's errors: from its own checks, and from Java.
SPARK_ERRORS = (PySparkException, Py4JError)
_ENGINE_ERRORS = (DeltaError, OSError, pa.ArrowException, *SPARK_ERRORS)
_CONFLICT = re.compile(
    r"(?m)^(?:: )?(?:[\w.]+: )?\[DELTA_(?:CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
)


#: The bytes of a trial file. An empty file would not do: a full disk may still have room for it.
_PROBE, _PROBE_NAME = bytes(64 * 1024), ".pgsieve-write-probe"

#: The lakes and servers that passed `check_commits_are_kept`. The lock lets one thread at a time try a
#: server.
_safe: set[tuple[str, str]] = set()
_TRYING = Lock()


class LakeAccess:
    """Checks that a lake can be written, and explains its errors."""

    def __init__(self, storage: Storage, *, temporary: bool = False) -> None:
        """`temporary`: no write has to outlive this process."""
        self.uri = storage.address
        self._is_temporary = temporary
        #: The files of the lake, for this process and for executors.
        store = Store.of(storage)
        self.store = replace(store, objects=partial(objects_at, options=store.options))
        self._storage = storage
        self._unsynced: Unsynced | None = None

    def check_writable(self) -> None:
        """Raise LakeUnavailableError if a local lake cannot be written.

        No trial file is written to a remote lake. Raises UnsafeStoreError if a store with S3's interface may
        lose commits.
        """
        if not is_uri(self.uri):
            self.try_writing()
        self.check_commits_are_kept()

    def check_commits_are_kept(self, *, record: bool = True) -> None:
        """Raise UnsafeStoreError if a store with S3's interface may lose commits; S3 itself is not tried.

        The objects of the trial are removed. With `record` the lake records the result.
        """
        endpoint = self._storage.endpoint()
        if not self._storage.by_delta_rs or endpoint is None or not self._storage.imitates_s3():
            return
        with _TRYING:
            if (place := (self.uri, endpoint)) not in _safe:
                with self.refusing(self.uri):
                    check_commits_are_kept(self.uri, self.store, endpoint, record=record)
                _safe.add(place)

    def check_permitted(self) -> None:
        """Raise LakeUnavailableError if this user may not write to the lake's folder.

        Creates nothing, and sends no request to a store.
        """
        if is_uri(self.uri):
            return
        folder = Path(self.uri).absolute()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        if not existing.is_dir():
            raise self._unavailable(f"{existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise self._unavailable(f"{os.strerror(errno.EACCES)} ({existing})")

    def try_writing(self) -> None:
        """Write and remove a file; raise LakeUnavailableError if the lake refuses it.

        A lake that only Spark writes is not tried.
        """
        if is_uri(self.uri):
            if self._storage.by_delta_rs:
                with self.refusing(self.uri):
                    self.store.probe(self.uri, _PROBE_NAME)
            return
        try:
            folder = Path(self.uri)
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / _PROBE_NAME
            try:
                probe.write_bytes(_PROBE)
            finally:
                probe.unlink(missing_ok=True)
            self._unsynced = self._unsynced or unsynced(self.uri)
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from error

    def begin_writing(self) -> None:
        """Mark a folder as being written, before the first write.

        The mark lets a run after a power cut remove half-written commits. Raises LakeUnavailableError.
        """
        if not is_uri(self.uri) and self._unsynced is None and not self._is_temporary:
            self.try_writing()

    def make_durable(self) -> None:
        """Make all writes so far survive a power cut.

        It is called before an irreversible step that relies on them. An object store keeps what it has
        confirmed. For a folder, the file system is written to disk. Raises LakeUnavailableError.
        """
        if is_uri(self.uri) or self._is_temporary:
            return
        self.begin_writing()
        assert self._unsynced is not None
        with self.refusing(self.uri):
            self._unsynced.synchronise()

    def _unavailable(self, refused: str) -> LakeUnavailableError:
        """The error of a lake that cannot be written, with the reason and the free space."""
        folders = {self.uri: "lake", tempfile.gettempdir(): "temporary files"}
        free = [
            f"{shutil.disk_usage(folder).free / 1024**2:,.1f} MiB free for {use} ({folder})"
            for folder, use in folders.items()
            if Path(folder).is_dir()
        ]
        return LakeUnavailableError(
            f'lake "{self.uri}" cannot be written: {refused}' + (f"; {', '.join(free)}" if free else ""),
            hint="make room, give this user the right to write there, or choose another `lake` in pgsieve.yaml; then run"
            " again: nothing is lost, a slot is confirmed only up to what the lake holds",
        )

    @contextmanager
    def refusing(self, path: str) -> Iterator[None]:
        """Turn the errors of the block into errors that name the table, or the lake if all of it is concerned."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, _ENGINE_ERRORS) or is_arrows(error)):
                raise
            self.refuse_unavailable(error)
            if isinstance(error, SPARK_ERRORS):
                try:
                    raise_ours(error)
                except ExecutorError as ours:
                    if ours.kind == NewerVersionError.__name__:
                        raise OverrunError(path) from error
                    raise
            raise _named(path, error) from error

    def refuse_unavailable(self, error: Exception) -> None:
        """Raise LakeUnavailableError or SparkLostError if an error concerns the whole lake or Spark."""
        if is_lost(error):
            raise spark_lost() from error
        if is_uri(self.uri) and (refused := store_refusal(causes(error))):
            raise self._refused(refused) from error
        if (code := refusal(error)) is None:
            return
        if of_one_folder(code):
            self.check_writable()  # Raises if the whole lake is concerned.
        else:
            raise self._unavailable(os.strerror(code)) from error

    def _refused(self, refused: StoreRefusal) -> LakeUnavailableError:
        """The error that names the lake, the reason of its store, and the remedy."""
        kind = StoreUnavailableError if refused.passes else LakeUnavailableError
        return kind(f'lake "{self.uri}": {refused.what}', hint=refused.hint)


def _named(path: str, error: Exception) -> LakeError:
    """The error of a table."""
    by_spark = isinstance(error, SPARK_ERRORS)
    if is_conflict(error) or (by_spark and _CONFLICT.search(str(error))):
        return ConcurrentWriteError(
            f'Delta table "{path}": other writers commit to it faster than pgsieve does',
            hint="end the other writers; `pgsieve run` goes on from the last commit",
        )
    if file := missing_file(error):
        return damaged(path, f'its file "{file}" is missing')
    if lacks_entries(error):
        return damaged(path, "its log lacks an entry or a checkpoint")
    file = illegible_file(error)
    if is_illegible(error):
        problem = first_line(error) if file is None else "its checkpoint is not a complete Parquet file"
        return damaged_log(path, problem)
    if file is not None:
        named = f'its file "{file}"' if file else "one of its files"
        return damaged(path, f"{named} cannot be read: it is not a complete Parquet file")
    message = spark_message(error) if by_spark else first_line(error)
    if is_arrows(error):
        message = message.partition(":")[0]  # The rest of the message shows a cell.
    if (code := refusal(error)) is not None:
        message = os.strerror(code)
    log = "see Spark's log, above or of its server; " if by_spark else ""
    return RefusedTableError(
        f'Delta table "{path}": {message}', hint=f"{log}`pgsieve run` goes on from the last commit"
    )
