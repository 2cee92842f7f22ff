"""Reuses open Delta tables of delta-rs, and updates them to their newest version.

In: paths, and the store with its options. Out: tables at their newest version. In a folder, opening a table
costs several times as much as a commit. Two files show whether an open table is at the newest version. On an
object store, opening takes several requests in sequence, and a check takes one. So a caller that reads several
tables before it writes checks each of them only once (`Tables.consistent_read`).

Each thread has its own open tables, as delta-rs changes a table when it commits. At the end of its work a thread
releases its tables for other threads (`Tables.release`). Raises delta-rs's errors, OSError, and
DamagedTableError if the newest entry of a log is incomplete.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_fixed

from pgsieve.resources.lake.delta.answers import Answers
from pgsieve.resources.lake.delta.errors import DamagedTableError, has_missing_entries
from pgsieve.resources.lake.delta.log_entries import LogEntries, Stamp
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.stores.store_errors import store_refusal

#: How many tables in folders a thread has open at most, and how many idle ones there are at most. A table takes
#: up to a megabyte.
_MAX_OPEN_TABLES = 512
#: How many tables of a store are checked in parallel.
_PARALLEL_CHECKS = 8


@cache
def shared_tables(options: tuple[tuple[str, str], ...]) -> "Tables":
    """The open tables of this process in a store with these options."""
    return Tables(Store(options))


@dataclass(slots=True)
class _OpenTable:
    """An open table, and cached results of queries of its version."""

    table: DeltaTable
    #: A version of the table that was checked, and the stamp of its log entry.
    checked: tuple[int, Stamp]
    answers: Answers = field(default_factory=Answers)

    def update(self, log: LogEntries) -> bool:
        """Update the table to its newest version; return False if another table is at its path now."""
        version, stamp = self.checked
        entries = log.since(version, self.table.version())
        if entries.get(version) != stamp:
            return False
        # After a commit by delta-rs, the table already is at the version of that commit.
        if self.table.version() + 1 in entries:
            try:
                self.table.update_incremental()
            except DeltaError:
                return False
        newest = self.table.version()
        entry = entries[newest] if newest in entries else log.stamp(newest)
        if entry is None:
            return False
        if newest != version:
            log.refuse_damaged(newest, entry)
        self.checked = newest, entry
        return True


class Tables:
    """The tables of a lake."""

    def __init__(self, store: Store) -> None:
        self.options = dict(store.options) or None
        self._store = store
        self._threads = threading.local()
        self._lock = threading.Lock()
        #: Tables that no thread uses.
        self._idle = OrderedDict[str, _OpenTable]()
        #: Paths on an object store without a table at the last check. For these, one listing shows whether there
        #: is a table now.
        self._absent = set[str]()
        #: The number of removals. After one, another table may be at the path of an open table.
        self._removals = 0

    def exists(self, path: str) -> bool:
        """Whether a Delta table exists; its log may be unreadable."""
        if is_uri(path):
            try:
                return self.open_if_exists(path) is not None
            except DamagedTableError:
                return True
            except DeltaError as error:
                # The table exists, and its readers will get the error.
                if store_refusal([error]) or not self.log_of(path).any():
                    raise
                return True
        try:
            return self._newest(path) is not None or (_has_log(path) and DeltaTable.is_deltatable(path))
        except DamagedTableError:
            return True  # The table exists, and its readers will get the error.

    @contextmanager
    def consistent_read(
        self, paths: Collection[str] = (), prepare: Callable[[str, DeltaTable], object] | None = None
    ) -> Iterator[None]:
        """Within the block this thread checks each table of an object store once.

        At the beginning the tables at `paths` are checked in parallel, and `prepare` is called for each that
        exists, so that results of queries are cached. The block must not write to these tables, and later
        commits must check its decisions again. If a check fails, the use of the table raises the error. Tables
        in a folder are checked at each use, as that costs little.
        """
        outer = self._check_results()
        if outer is None:
            self._threads.checked = {}
        try:
            self._check_tables([path for path in dict.fromkeys(paths) if is_uri(path)], prepare)
            yield
        finally:
            if outer is None:
                self._threads.checked = None

    def _check_tables(
        self, paths: Collection[str], prepare: Callable[[str, DeltaTable], object] | None
    ) -> None:
        """Check the tables that this block has not checked yet, in parallel threads."""
        checked, own = self._check_results(), self._own_tables()
        assert checked is not None
        paths = [path for path in paths if path not in checked]
        if len(paths) < 2:
            return  # A single table is checked when it is used.
        with self._lock:
            self._idle.update({path: own.pop(path) for path in paths if path in own})

        def check(path: str) -> "dict[str, _OpenTable | Exception | None]":
            try:
                table = self.open_if_exists(path)
                if prepare is not None and table is not None:
                    prepare(path, table)
            except Exception as error:  # noqa: BLE001 - the use of the table raises it
                return {path: error}
            opened = self._own_tables().pop(path, None)
            # An existing table that is not open yet will be opened when it is used.
            return {path: opened} if opened is not None or table is None else {}

        with ThreadPoolExecutor(min(_PARALLEL_CHECKS, len(paths)), "pgsieve-check") as pool:
            for each in pool.map(check, paths):
                checked |= each
        own |= {
            path: opened
            for path, opened in checked.items()
            if path in paths and isinstance(opened, _OpenTable)
        }

    def open_if_exists(self, path: str) -> DeltaTable | None:
        """The newest version of a table; None if it does not exist."""
        if (opened := self._newest(path)) is not None:
            return opened.table
        checked = self._check_results()
        if checked is not None and path in checked:
            return None
        if not is_uri(path) and not _has_log(path):
            return None
        try:
            if path not in self._absent or self.log_of(path).any():
                return self._open_new(path)
        except TableNotFoundError:
            pass
        self._absent.add(path)
        if checked is not None:
            checked[path] = None
        return None

    def expect_creation(self, path: str) -> None:
        """Note that a table is about to be created at a path that may have had none."""
        self._absent.discard(path)

    def open(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        opened = self._newest(path)
        return self._open_new(path) if opened is None else opened.table

    def _newest(self, path: str) -> _OpenTable | None:
        """An open table of this thread, or an idle one, at its newest version; None if there is none."""
        checked, own = self._check_results(), self._own_tables()
        if checked is not None and path in checked:
            if isinstance(outcome := checked[path], Exception):
                raise outcome
            return outcome
        opened = own.pop(path, None)
        if opened is None:
            with self._lock:
                opened = self._idle.pop(path, None)
        if opened is None or not opened.update(self.log_of(path)):
            return None
        own[path] = opened
        self._record_check(path, opened)
        return opened

    def log_of(self, path: str) -> LogEntries:
        """The reader of a table's log entries."""
        return LogEntries(path, self._store)

    def _open_new(self, path: str) -> DeltaTable:
        table, own = _load(path, self.options), self._own_tables()
        self._absent.discard(path)
        # The stamp is read now: later it could be the stamp of another table that was created at this path.
        version = table.version()
        log = self.log_of(path)
        stamp = log.since(version, version).get(version)
        if stamp is not None:
            log.refuse_damaged(version, stamp)
            opened = own[path] = _OpenTable(table, (version, stamp))
            self._record_check(path, opened)
            if not is_uri(path) and len(own) > _MAX_OPEN_TABLES:
                own.popitem(last=False)
        return table

    def release(self) -> None:
        """Release this thread's open tables for other threads; this thread must not be using one."""
        own = self._own_tables()
        if checked := self._check_results():
            checked.clear()
        with self._lock:
            self._idle.update(own)
            while len(self._idle) > _MAX_OPEN_TABLES:
                self._idle.popitem(last=False)
        own.clear()

    def as_of(self, path: str, version: int) -> DeltaTable:
        """A table at one version, which is not updated later."""
        return _load(path, self.options, version)

    def cached_rows(
        self, path: str, table: DeltaTable, query: str, rows: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """The result of a query, computed by `rows` once per version of an open table; `query` identifies it."""
        opened = self._own_tables().get(path)
        if opened is None or opened.table is not table:
            return rows()
        return [dict(row) for row in opened.answers.of(table.version(), query, rows)]

    def record_answer(self, path: str, table: DeltaTable, query: str, rows: list[dict[str, Any]]) -> None:
        """Cache the result of a query of the version that this thread has just committed."""
        opened = self._own_tables().get(path)
        if opened is not None and opened.table is table:
            opened.answers.record_answer(table.version(), query, rows)

    def forget(self) -> None:
        """Forget all open tables, as some have been removed."""
        with self._lock:
            self._removals += 1
            self._idle.clear()

    def _own_tables(self) -> OrderedDict[str, _OpenTable]:
        """The open tables of this thread."""
        if getattr(self._threads, "removals", None) != self._removals:
            self._threads.tables, self._threads.removals = OrderedDict[str, _OpenTable](), self._removals
            if checked := getattr(self._threads, "checked", None):
                checked.clear()
        tables: OrderedDict[str, _OpenTable] = self._threads.tables
        return tables

    def _check_results(self) -> "dict[str, _OpenTable | Exception | None] | None":
        """The results of checks in this thread's `consistent_read`, by path: a table, None for no table, or an error.

        None outside of a `consistent_read`.
        """
        self._own_tables()  # This empties the results after a removal.
        checked: dict[str, _OpenTable | Exception | None] | None = getattr(self._threads, "checked", None)
        return checked

    def _record_check(self, path: str, opened: _OpenTable) -> None:
        if is_uri(path) and (checked := self._check_results()) is not None:
            checked[path] = opened


@retry(
    retry=retry_if_exception(has_missing_entries),
    wait=wait_fixed(0.2),
    stop=stop_after_attempt(3),
    reraise=True,
)
def _load(path: str, options: dict[str, str] | None, version: int | None = None) -> DeltaTable:
    """Open a table; repeat that if a listed log entry is gone, as a cleanup removes entries one by one."""
    return DeltaTable(path, version=version, storage_options=options)


def _has_log(path: str) -> bool:
    return Path(path, "_delta_log").is_dir()


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The columns of a table."""
    return pa.schema(table.schema().to_arrow())
