"""Open Delta tables of delta-rs, reused and brought to their newest version.

In: paths, and the store with its options. Out: tables at their newest version. In a folder, opening a table
costs several times as much as a commit, while two looks at files show whether an open table is still at the
newest version. On an object store, opening takes several requests in sequence, and a check takes one. So a
caller that reads several tables before it writes checks each of them only once (`Tables.consistent_read`).

Each thread has its own open tables, as delta-rs changes the table that it commits with. At the end of its
work a thread releases its tables for other threads (`Tables.release`). Raises delta-rs's errors, OSError, and
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

#: How many tables in folders a thread keeps open, and how many idle tables are kept; a table takes up to a
#: megabyte.
_MAX_OPEN_TABLES = 512
#: How many tables are checked in parallel, as each check waits for a store's answer.
_PARALLEL_CHECKS = 8


@cache
def shared_tables(options: tuple[tuple[str, str], ...]) -> "Tables":
    """The open tables of this process for a store and its options."""
    return Tables(Store(options))


@dataclass(slots=True)
class _OpenTable:
    """An open table; `answers` are the results of queries of one version."""

    table: DeltaTable
    #: A version of the table, and the stamp of its log entry.
    seen: tuple[int, Stamp]
    answers: Answers = field(default_factory=Answers)

    def follows(self, log: LogEntries) -> bool:
        """Bring the table to its newest version; False if another table is at its path now."""
        version, stamp = self.seen
        entries = log.since(version, self.table.version())
        if entries.get(version) != stamp:
            return False
        # After a commit by this object, the table already is at that version.
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
        self.seen = newest, entry
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
        #: Paths on an object store that had no table at the last check; one listing then shows whether they
        #: have one now.
        self._absent = set[str]()
        #: Counts removals: after one, another table may be at the path of an open table.
        self._removals = 0

    def exists(self, path: str) -> bool:
        """Whether a Delta table exists; its log may be unreadable."""
        if is_uri(path):
            try:
                return self.open_if_exists(path) is not None
            except DamagedTableError:
                return True
            except DeltaError as error:
                # The table exists; its readers will get the error.
                if store_refusal([error]) or not self.log_of(path).any():
                    raise
                return True
        try:
            return self._newest(path) is not None or (_has_log(path) and DeltaTable.is_deltatable(path))
        except DamagedTableError:
            return True  # The table exists; its readers will get the error.

    @contextmanager
    def consistent_read(
        self, paths: Collection[str] = (), ask: Callable[[str, DeltaTable], object] | None = None
    ) -> Iterator[None]:
        """Within the block this thread checks each table of an object store once.

        The tables at `paths` are checked now, in parallel. `ask` is called now for each existing table of
        `paths`, so that its answers are ready in the block. The block must not write to these tables, and
        later commits check its decisions again. If a check fails, the use of the table raises the error.
        Tables in a folder are always checked, as that costs little.
        """
        outer = self._checked()
        if outer is None:
            self._threads.seen = {}
        try:
            self._check_tables([path for path in dict.fromkeys(paths) if is_uri(path)], ask)
            yield
        finally:
            if outer is None:
                self._threads.seen = None

    def _check_tables(self, paths: Collection[str], ask: Callable[[str, DeltaTable], object] | None) -> None:
        """Check the tables that this block has not checked yet, in parallel threads."""
        seen, mine = self._checked(), self._own_tables()
        assert seen is not None
        paths = [path for path in paths if path not in seen]
        if len(paths) < 2:
            return  # A single table is checked when it is used.
        with self._lock:
            self._idle.update({path: mine.pop(path) for path in paths if path in mine})

        def look(path: str) -> "dict[str, _OpenTable | Exception | None]":
            try:
                table = self.open_if_exists(path)
                if ask is not None and table is not None:
                    ask(path, table)
            except Exception as error:  # noqa: BLE001 - the use of the table raises it
                return {path: error}
            opened = self._own_tables().pop(path, None)
            # An existing table that is not open yet is opened when it is used.
            return {path: opened} if opened is not None or table is None else {}

        with ThreadPoolExecutor(min(_PARALLEL_CHECKS, len(paths)), "pgsieve-look") as pool:
            for each in pool.map(look, paths):
                seen |= each
        mine |= {
            path: opened for path, opened in seen.items() if path in paths and isinstance(opened, _OpenTable)
        }

    def open_if_exists(self, path: str) -> DeltaTable | None:
        """The newest version of a table; None if it does not exist."""
        if (opened := self._newest(path)) is not None:
            return opened.table
        seen = self._checked()
        if seen is not None and path in seen:
            return None
        if not is_uri(path) and not _has_log(path):
            return None
        try:
            if path not in self._absent or self.log_of(path).any():
                return self._open_new(path)
        except TableNotFoundError:
            pass
        self._absent.add(path)
        if seen is not None:
            seen[path] = None
        return None

    def expect_creation(self, path: str) -> None:
        """Expect a table at a path that had none, as it is about to be created."""
        self._absent.discard(path)

    def open(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        opened = self._newest(path)
        return self._open_new(path) if opened is None else opened.table

    def _newest(self, path: str) -> _OpenTable | None:
        """An open table of this thread, or an idle one, at its newest version; None if there is none."""
        seen, mine = self._checked(), self._own_tables()
        if seen is not None and path in seen:
            if isinstance(outcome := seen[path], Exception):
                raise outcome
            return outcome
        opened = mine.pop(path, None)
        if opened is None:
            with self._lock:
                opened = self._idle.pop(path, None)
        if opened is None or not opened.follows(self.log_of(path)):
            return None
        mine[path] = opened
        self._record_check(path, opened)
        return opened

    def log_of(self, path: str) -> LogEntries:
        """The reader of a table's log entries."""
        return LogEntries(path, self._store)

    def _open_new(self, path: str) -> DeltaTable:
        table, mine = _read(path, self.options), self._own_tables()
        self._absent.discard(path)
        # Read the stamp now. Later it could be the stamp of another table that was made at this path.
        version = table.version()
        log = self.log_of(path)
        stamp = log.since(version, version).get(version)
        if stamp is not None:
            log.refuse_damaged(version, stamp)
            opened = mine[path] = _OpenTable(table, (version, stamp))
            self._record_check(path, opened)
            if not is_uri(path) and len(mine) > _MAX_OPEN_TABLES:
                mine.popitem(last=False)
        return table

    def release(self) -> None:
        """Release this thread's open tables for other threads; this thread must not be using one."""
        mine = self._own_tables()
        if seen := self._checked():
            seen.clear()
        with self._lock:
            self._idle.update(mine)
            while len(self._idle) > _MAX_OPEN_TABLES:
                self._idle.popitem(last=False)
        mine.clear()

    def as_of(self, path: str, version: int) -> DeltaTable:
        """A table at one version, at which it stays."""
        return _read(path, self.options, version)

    def cached_rows(
        self, path: str, table: DeltaTable, query: str, rows: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """The result of a query, which runs once per version of an open table; `query` identifies it."""
        opened = self._own_tables().get(path)
        if opened is None or opened.table is not table:
            return rows()
        return [dict(row) for row in opened.answers.of(table.version(), query, rows)]

    def record_answer(self, path: str, table: DeltaTable, query: str, rows: list[dict[str, Any]]) -> None:
        """Record the result of a query about the version that this thread has just committed."""
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
            if seen := getattr(self._threads, "seen", None):
                seen.clear()
        tables: OrderedDict[str, _OpenTable] = self._threads.tables
        return tables

    def _checked(self) -> "dict[str, _OpenTable | Exception | None] | None":
        """The results of this thread's checks in its `consistent_read`: tables, None for missing tables, errors.

        None outside of one.
        """
        self._own_tables()  # It empties the results after a removal.
        seen: dict[str, _OpenTable | Exception | None] | None = getattr(self._threads, "seen", None)
        return seen

    def _record_check(self, path: str, opened: _OpenTable) -> None:
        if is_uri(path) and (seen := self._checked()) is not None:
            seen[path] = opened


@retry(
    retry=retry_if_exception(has_missing_entries),
    wait=wait_fixed(0.2),
    stop=stop_after_attempt(3),
    reraise=True,
)
def _read(path: str, options: dict[str, str] | None, version: int | None = None) -> DeltaTable:
    """Open a table; repeat that if a listed entry is gone, as a cleanup removes entries one by one."""
    return DeltaTable(path, version=version, storage_options=options)


def _has_log(path: str) -> bool:
    return Path(path, "_delta_log").is_dir()


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The columns of a table."""
    return pa.schema(table.schema().to_arrow())
