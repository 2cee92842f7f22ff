"""Checks the access to a lake before work begins, and explains later errors.

In: a lake's address and storage options. Raises LakeUnavailableError, UnsafeStoreError or SparkLostError for an
error of the whole lake or of Spark, and a `LakeError` that names the table for an error of one table.
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

from pgsieve.resources.lake.conditional_put_check import check_conditional_put
from pgsieve.resources.lake.delta.errors import (
    ConcurrentWriteError,
    ExecutorError,
    LakeError,
    LakeUnavailableError,
    OvertakenError,
    RefusedTableError,
    StoreUnavailableError,
    causes,
    damaged_log_error,
    damaged_table_error,
    first_line,
    has_missing_entries,
    illegible_file,
    is_arrow_error,
    is_conflict,
    is_folder_refusal,
    is_illegible,
    is_spark_lost,
    missing_file,
    raise_executor_error,
    refusal_code,
    spark_lost_error,
    spark_message,
)
from pgsieve.resources.lake.stores.objects import objects_at
from pgsieve.resources.lake.stores.storage import Storage, is_uri
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.stores.store_errors import StoreRefusal, store_refusal
from pgsieve.resources.lake.unsynced import UnsyncedWrites, unsynced_writes
from pgsieve.resources.lake.version_guard import NewerVersionError

#: Spark's errors: from its own checks, and from Java.
SPARK_ERRORS = (PySparkException, Py4JError)
_ENGINE_ERRORS = (DeltaError, OSError, pa.ArrowException, *SPARK_ERRORS)
_CONFLICT = re.compile(
    r"(?m)^(?:: )?(?:[\w.]+: )?\[DELTA_(?:CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
)


#: The bytes and the name of a trial file. A full disk may still have room for an empty file.
_PROBE, _PROBE_NAME = bytes(64 * 1024), ".pgsieve-write-probe"

#: The lakes and servers that passed `check_conditional_put`. The lock lets one thread at a time check a
#: server.
_safe_stores: set[tuple[str, str]] = set()
_TRIAL_LOCK = Lock()


class LakeAccess:
    """Checks that a lake can be written, and explains its errors."""

    def __init__(self, storage: Storage, *, temporary: bool = False) -> None:
        """With `temporary` no write has to outlive this process."""
        self.uri = storage.address
        self._is_temporary = temporary
        #: The files of the lake, for this process and for executors.
        store = Store.of(storage)
        self.store = replace(store, objects=partial(objects_at, options=store.options))
        self._storage = storage
        self._unsynced: UnsyncedWrites | None = None

    def check_writable(self) -> None:
        """Raise LakeUnavailableError if a lake in a folder cannot be written, and UnsafeStoreError.

        No trial file is written to an object store. See `check_conditional_put`.
        """
        if not is_uri(self.uri):
            self.try_writing()
        self.check_conditional_put()

    def check_conditional_put(self, *, record: bool = True) -> None:
        """Raise UnsafeStoreError if a store with S3's interface may lose commits; S3 itself is not checked.

        The objects of the check are removed. With `record` the lake records a good result.
        """
        endpoint = self._storage.endpoint()
        if (
            not self._storage.is_reached_by_delta_rs
            or endpoint is None
            or not self._storage.is_s3_imitation()
        ):
            return
        with _TRIAL_LOCK:
            if (place := (self.uri, endpoint)) not in _safe_stores:
                with self.translate_errors(self.uri):
                    check_conditional_put(self.uri, self.store, endpoint, record=record)
                _safe_stores.add(place)

    def check_permitted(self) -> None:
        """Raise LakeUnavailableError if this user may not write to the lake's folder.

        Creates nothing, and sends no request to a store.
        """
        if is_uri(self.uri):
            return
        folder = Path(self.uri).absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not existing.is_dir():
            raise self._unavailable_error(f"{existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise self._unavailable_error(f"{os.strerror(errno.EACCES)} ({existing})")

    def try_writing(self) -> None:
        """Write and remove a file; raise LakeUnavailableError if the lake refuses it.

        Nothing is written to a lake at a URI that only Spark reaches.
        """
        if is_uri(self.uri):
            if self._storage.is_reached_by_delta_rs:
                with self.translate_errors(self.uri):
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
            self._unsynced = self._unsynced or unsynced_writes(self.uri)
        except OSError as error:
            raise self._unavailable_error(error.strerror or str(error)) from error

    def begin_writing(self) -> None:
        """Before the first write, mark the lake's folder, so that a run after a power cut removes half-written commits.

        Raises LakeUnavailableError.
        """
        if not is_uri(self.uri) and self._unsynced is None and not self._is_temporary:
            self.try_writing()

    def make_durable(self) -> None:
        """Make all writes so far survive a power cut, before an irreversible step that relies on them.

        In a folder the file system is written to disk. An object store keeps all objects that it has
        confirmed. Raises LakeUnavailableError.
        """
        if is_uri(self.uri) or self._is_temporary:
            return
        self.begin_writing()
        assert self._unsynced is not None
        with self.translate_errors(self.uri):
            self._unsynced.sync()

    def _unavailable_error(self, reason: str) -> LakeUnavailableError:
        """The error of a lake that cannot be written, with the reason and the free space."""
        folders = {self.uri: "lake", tempfile.gettempdir(): "temporary files"}
        free = [
            f"{shutil.disk_usage(folder).free / 1024**2:,.1f} MiB free for {use} ({folder})"
            for folder, use in folders.items()
            if Path(folder).is_dir()
        ]
        return LakeUnavailableError(
            f'lake "{self.uri}" cannot be written: {reason}' + (f"; {', '.join(free)}" if free else ""),
            hint="make room, give this user the right to write there, or choose another `lake` in pgsieve.yaml; then run"
            " again: nothing is lost, a slot is confirmed only up to what the lake holds",
        )

    @contextmanager
    def translate_errors(self, path: str) -> Iterator[None]:
        """Turn the errors of the block into errors that name the table, or the lake if the error concerns all of it."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, _ENGINE_ERRORS) or is_arrow_error(error)):
                raise
            self.refuse_unavailable(error)
            if isinstance(error, SPARK_ERRORS):
                try:
                    raise_executor_error(error)
                except ExecutorError as ours:
                    if ours.kind == NewerVersionError.__name__:
                        raise OvertakenError(path) from error
                    raise
            raise _table_error(path, error) from error

    def refuse_unavailable(self, error: Exception) -> None:
        """Raise LakeUnavailableError or SparkLostError if an error concerns the whole lake, or Spark."""
        if is_spark_lost(error):
            raise spark_lost_error() from error
        if is_uri(self.uri) and (refusal := store_refusal(causes(error))):
            raise self._store_error(refusal) from error
        if (code := refusal_code(error)) is None:
            return
        if is_folder_refusal(code):
            self.check_writable()  # Raises if the error concerns the whole lake.
        else:
            raise self._unavailable_error(os.strerror(code)) from error

    def _store_error(self, refusal: StoreRefusal) -> LakeUnavailableError:
        """The error of a refusal by the lake's store."""
        kind = StoreUnavailableError if refusal.is_transient else LakeUnavailableError
        return kind(f'lake "{self.uri}": {refusal.reason}', hint=refusal.hint)


def _table_error(path: str, error: Exception) -> LakeError:
    """The error of one table."""
    by_spark = isinstance(error, SPARK_ERRORS)
    if is_conflict(error) or (by_spark and _CONFLICT.search(str(error))):
        return ConcurrentWriteError(
            f'Delta table "{path}": other writers commit to it faster than pgsieve does',
            hint="end the other writers; `pgsieve run` goes on from the last commit",
        )
    if file := missing_file(error):
        return damaged_table_error(path, f'its file "{file}" is missing')
    if has_missing_entries(error):
        return damaged_table_error(path, "its log lacks an entry or a checkpoint")
    file = illegible_file(error)
    if is_illegible(error):
        problem = first_line(error) if file is None else "its checkpoint is not a complete Parquet file"
        return damaged_log_error(path, problem)
    if file is not None:
        subject = f'its file "{file}"' if file else "one of its files"
        return damaged_table_error(path, f"{subject} cannot be read: it is not a complete Parquet file")
    message = spark_message(error) if by_spark else first_line(error)
    if is_arrow_error(error):
        message = message.partition(":")[0]  # After the colon the message shows a cell.
    if (code := refusal_code(error)) is not None:
        message = os.strerror(code)
    log = "see Spark's log, above or of its server; " if by_spark else ""
    return RefusedTableError(
        f'Delta table "{path}": {message}', hint=f"{log}`pgsieve run` goes on from the last commit"
    )
