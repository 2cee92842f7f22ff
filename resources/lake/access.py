"""Checks the access to a lake before work begins, and explains errors that occur later.

In: the address of a lake, and its storage options.
Out: nothing, if the lake can be used.

Raises LakeUnavailableError, UnsafeStoreError or SparkLostError for an error that concerns the whole lake, or
Spark. Raises a `LakeError` that names the table for an error that concerns one table.
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
    describe_spark_error,
    find_illegible_file,
    find_missing_file,
    find_refusal_code,
    find_spark_failure,
    get_first_message_line,
    has_illegible_log,
    has_missing_entries,
    is_arrow_error,
    is_conflict,
    is_folder_refusal,
    list_causes,
    make_damaged_log_error,
    make_damaged_table_error,
    raise_if_executor_error,
)
from pgsieve.resources.lake.stores.objects import open_objects
from pgsieve.resources.lake.stores.storage import Storage, is_uri
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.stores.store_errors import StoreRefusal, find_store_refusal
from pgsieve.resources.lake.unsynced import UnsyncedWrites, get_unsynced_writes
from pgsieve.resources.lake.version_guard import NewerVersionError

#: Errors of Spark. PySparkException comes from Spark's own checks, and Py4JError from Java.
SPARK_ERRORS = (PySparkException, Py4JError)
_ENGINE_ERRORS = (DeltaError, OSError, pa.ArrowException, *SPARK_ERRORS)
_CONFLICT = re.compile(
    r"(?m)^(?:: )?(?:[\w.]+: )?\[DELTA_(?:CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
)


#: The bytes and the name of a trial file. The file is not empty, because a full disk may still have room for empty
#: files.
_TRIAL_BYTES, _TRIAL_NAME = bytes(64 * 1024), ".pgsieve-write-probe"

#: The lakes and servers that have passed `check_conditional_put`. The lock lets only one thread at a time check a
#: server.
_safe_stores: set[tuple[str, str]] = set()
_CHECK_LOCK = Lock()


class LakeAccess:
    """Checks that a lake can be written, and translates errors of its libraries."""

    def __init__(self, storage: Storage, *, temporary: bool = False) -> None:
        """With `temporary` the lake is not needed after this process, so its writes need not reach the disk."""
        self.uri = storage.address
        self._is_temporary = temporary
        store = Store.from_storage(storage)
        #: The files of the lake. This process and Spark's executors use them.
        self.store = replace(store, open_objects=partial(open_objects, options=store.options))
        self._storage = storage
        self._unsynced: UnsyncedWrites | None = None

    def check_writable(self) -> None:
        """Raise LakeUnavailableError if the lake is in a folder that cannot be written.

        Raise UnsafeStoreError if commits may be lost.

        In an object store no trial file is written, but `check_conditional_put` may create objects.
        """
        if not is_uri(self.uri):
            self.try_writing()
        self.check_conditional_put()

    def check_conditional_put(self, *, record: bool = True) -> None:
        """Raise UnsafeStoreError if a store with the interface of S3 may lose commits. S3 itself is not checked.

        The objects that the check creates are removed. With `record` the lake records a good result, and is not
        checked again.
        """
        endpoint = self._storage.endpoint()
        if (
            not self._storage.is_reached_by_delta_rs
            or endpoint is None
            or not self._storage.is_s3_imitation()
        ):
            return
        with _CHECK_LOCK:
            if (lake_and_server := (self.uri, endpoint)) not in _safe_stores:
                with self.translate_errors(self.uri):
                    check_conditional_put(self.uri, self.store, endpoint, record=record)
                _safe_stores.add(lake_and_server)

    def check_permitted(self) -> None:
        """Raise LakeUnavailableError if this user may not write to the lake's folder.

        This creates nothing, and sends no request to an object store.
        """
        if is_uri(self.uri):
            return
        folder = Path(self.uri).absolute()
        # Path.exists would raise PermissionError below a folder that this user may not search.
        nearest_folder = next(p for p in (folder, *folder.parents) if os.path.exists(p))  # noqa: PTH110
        if not nearest_folder.is_dir():
            raise self._make_unavailable_error(f"{nearest_folder} is not a folder")
        if not os.access(nearest_folder, os.W_OK | os.X_OK):
            raise self._make_unavailable_error(f"{os.strerror(errno.EACCES)} ({nearest_folder})")

    def try_writing(self) -> None:
        """Write a file and remove it. Raise LakeUnavailableError if this fails.

        If the lake is in a folder, this also puts a mark into the folder (see `begin_writing`). If only Spark can reach
        the lake at its URI, nothing is written.
        """
        if is_uri(self.uri):
            if self._storage.is_reached_by_delta_rs:
                with self.translate_errors(self.uri):
                    self.store.probe(self.uri, _TRIAL_NAME)
            return
        try:
            folder = Path(self.uri)
            folder.mkdir(parents=True, exist_ok=True)
            trial_file = folder / _TRIAL_NAME
            try:
                trial_file.write_bytes(_TRIAL_BYTES)
            finally:
                trial_file.unlink(missing_ok=True)
            self._unsynced = self._unsynced or get_unsynced_writes(self.uri)
        except OSError as error:
            raise self._make_unavailable_error(error.strerror or str(error)) from error

    def begin_writing(self) -> None:
        """Put a mark, a file, into the lake's folder before the first write of this process.

        After a power cut, the mark makes the next run search for half-written commits, and remove them. Raises
        LakeUnavailableError.
        """
        if not is_uri(self.uri) and self._unsynced is None and not self._is_temporary:
            self.try_writing()

    def make_durable(self) -> None:
        """Make sure that all writes so far survive a power cut. The next step relies on them and cannot be undone.

        If the lake is a folder, write its file system to disk. An object store keeps each object that it has confirmed,
        so nothing has to be done for it. Raises LakeUnavailableError.
        """
        if is_uri(self.uri) or self._is_temporary:
            return
        self.begin_writing()
        assert self._unsynced is not None
        with self.translate_errors(self.uri):
            self._unsynced.sync()

    def _make_unavailable_error(self, reason: str) -> LakeUnavailableError:
        """The error for a lake that cannot be written. It has the reason, and the free space on the disks."""
        folders = {self.uri: "lake", tempfile.gettempdir(): "temporary files"}
        free_space = [
            f"{shutil.disk_usage(folder).free / 1024**2:,.1f} MiB free for {use} ({folder})"
            for folder, use in folders.items()
            if os.path.isdir(folder)  # noqa: PTH112 - Path.is_dir would raise PermissionError
        ]
        return LakeUnavailableError(
            f'lake "{self.uri}" cannot be written: {reason}'
            + (f"; {', '.join(free_space)}" if free_space else ""),
            hint="make room, give this user the right to write there, or choose another `lake` in pgsieve.yaml; then run"
            " again: nothing is lost, a slot is confirmed only up to what the lake holds",
        )

    @contextmanager
    def translate_errors(self, path: str) -> Iterator[None]:
        """Turn the errors of the block into errors that name the table.

        If an error concerns the whole lake, name the lake.
        """
        try:
            yield
        except Exception as error:
            if not (isinstance(error, _ENGINE_ERRORS) or is_arrow_error(error)):
                raise
            self.raise_if_unavailable(error)
            if isinstance(error, SPARK_ERRORS):
                try:
                    raise_if_executor_error(error)
                except ExecutorError as executor_error:
                    if executor_error.class_name == NewerVersionError.__name__:
                        raise OvertakenError(path) from error
                    raise
            raise _make_table_error(path, error) from error

    def raise_if_unavailable(self, error: Exception) -> None:
        """Raise an error of `ERRORS_OF_NO_TABLE` if an error concerns the whole lake, or Spark."""
        if (failure := find_spark_failure(error)) is not None:
            raise failure from error
        if is_uri(self.uri) and (refusal := find_store_refusal(list_causes(error))):
            raise self._make_store_error(refusal) from error
        if (code := find_refusal_code(error)) is None:
            return
        if is_folder_refusal(code):
            self.check_writable()  # Raises if the error concerns the whole lake.
        else:
            raise self._make_unavailable_error(os.strerror(code)) from error

    def _make_store_error(self, refusal: StoreRefusal) -> LakeUnavailableError:
        """The error for a request that the lake's store has refused."""
        error_class = StoreUnavailableError if refusal.is_transient else LakeUnavailableError
        return error_class(f'lake "{self.uri}": {refusal.reason}', hint=refusal.hint)


def _make_table_error(path: str, error: Exception) -> LakeError:
    """The error of pgsieve for an error of a library that concerns one table."""
    is_spark_error = isinstance(error, SPARK_ERRORS)
    if is_conflict(error) or (is_spark_error and _CONFLICT.search(str(error))):
        return ConcurrentWriteError(
            f'Delta table "{path}": other writers commit to it faster than pgsieve does',
            hint="end the other writers; `pgsieve run` goes on from the last commit",
        )
    if file := find_missing_file(error):
        return make_damaged_table_error(path, f'its file "{file}" is missing')
    if has_missing_entries(error):
        return make_damaged_table_error(path, "its log lacks an entry or a checkpoint")
    file = find_illegible_file(error)
    if has_illegible_log(error):
        problem = (
            get_first_message_line(error) if file is None else "its checkpoint is not a complete Parquet file"
        )
        return make_damaged_log_error(path, problem)
    if file is not None:
        subject = f'its file "{file}"' if file else "one of its files"
        return make_damaged_table_error(path, f"{subject} cannot be read: it is not a complete Parquet file")
    message = describe_spark_error(error) if is_spark_error else get_first_message_line(error)
    if is_arrow_error(error):
        message = message.partition(":")[0]  # The part after the colon shows a value of a row.
    if (code := find_refusal_code(error)) is not None:
        message = os.strerror(code)
    log_hint = "see Spark's log, above or of its server; " if is_spark_error else ""
    return RefusedTableError(
        f'Delta table "{path}": {message}', hint=f"{log_hint}`pgsieve run` goes on from the last commit"
    )
