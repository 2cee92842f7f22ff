"""Open Delta tables of delta-rs, reused and brought to their newest version.

In: paths, and the store with its options. Out: tables at their newest version. In a folder, opening a table
costs several times as much as a commit, and two looks at its log show whether an open one is still the
newest. On an object store, opening takes several requests in sequence, and a check takes one. So a caller
that asks several questions before it writes asks all of them of one moment there (`Tables.consistent_read`). Each
thread has its own tables, as delta-rs changes the table that it commits with. A thread that has finished
releases them for others (`Tables.release`). Raises delta-rs's errors, OSError, and DamagedTableError where the
newest entry of a log is incomplete.
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
from pgsieve.resources.lake.delta.errors import DamagedTableError, lacks_entries
from pgsieve.resources.lake.delta.log_entries import LogEntries, Stamp
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.stores.store_errors import store_refusal

#: This many tables of folders a thread keeps open, and this many wait for a thread: one takes up to a
#: megabyte.
_HELD = 512
#: This many tables are checked in parallel: each check waits for answers.
_LOOKS = 8


@cache
def shared_tables(options: tuple[tuple[str, str], ...]) -> "Tables":
    """The open tables of this process for a store and its options."""
    return Tables(Store(options))


@dataclass(slots=True)
class _OpenTable:
    """An open table; `answers` are the results of queries of one version."""

    table: DeltaTable
    #: A version of the table, and the log's entry of it.
    seen: tuple[int, Stamp]
    answers: Answers = field(default_factory=Answers)

    def follows(self, log: LogEntries) -> bool:
        """Bring the table to its newest version; False where another table is at its path now."""
        version, stamp = self.seen
        entries = log.since(version, self.table.version())
        if entries.get(version) != stamp:
            return False
        # After a commit by this table it has the version already.
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
        #: Paths without a table on an object store: one check finds that there still is none.
        self._absent = set[str]()
        #: Counts removals: a table that was opened before may be another one.
        self._removals = 0

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table; its log may be unreadable."""
        if is_uri(path):
            try:
                return self.open_if_any(path) is not None
            except DamagedTableError:
                return True
            except DeltaError as error:
                # A reader of the table gets the error of the log.
                if store_refusal([error]) or not self.log_of(path).any():
                    raise
                return True
        try:
            return self._newest(path) is not None or (_has_log(path) and DeltaTable.is_deltatable(path))
        except DamagedTableError:
            return True  # As below.

    @contextmanager
    def consistent_read(
        self, paths: Collection[str] = (), ask: Callable[[str, DeltaTable], object] | None = None
    ) -> Iterator[None]:
        """Within the block this thread checks a table of an object store once: those of `paths` now, in parallel.

        `ask` is called for each existing table at once, so that its answers are ready in the block.

        So a plan made within the block is of one moment, and a commit afterwards checks again. Nothing is
        written within the block. In a folder, where a check costs nothing, there is no difference. A failed
        check raises when the table is used.
        """
        outer = self._seen()
        if outer is None:
            self._threads.seen = {}
        try:
            self._look_at([path for path in dict.fromkeys(paths) if is_uri(path)], ask)
            yield
        finally:
            if outer is None:
                self._threads.seen = None

    def _look_at(self, paths: Collection[str], ask: Callable[[str, DeltaTable], object] | None) -> None:
        """Check tables that were not checked in this moment, each in a thread of its own."""
        seen, mine = self._seen(), self._mine()
        assert seen is not None
        paths = [path for path in paths if path not in seen]
        if len(paths) < 2:
            return  # It is checked when it is used.
        with self._lock:
            self._idle.update({path: mine.pop(path) for path in paths if path in mine})

        def look(path: str) -> "dict[str, _OpenTable | Exception | None]":
            try:
                table = self.open_if_any(path)
                if ask is not None and table is not None:
                    ask(path, table)
            except Exception as error:  # noqa: BLE001 - of whoever asks for the table
                return {path: error}
            opened = self._mine().pop(path, None)
            # An existing table that is not open yet is opened when it is used.
            return {path: opened} if opened is not None or table is None else {}

        with ThreadPoolExecutor(min(_LOOKS, len(paths)), "pgsieve-look") as pool:
            for each in pool.map(look, paths):
                seen |= each
        mine |= {
            path: opened for path, opened in seen.items() if path in paths and isinstance(opened, _OpenTable)
        }

    def open_if_any(self, path: str) -> DeltaTable | None:
        """The newest version of a table; None where there is none."""
        if (opened := self._newest(path)) is not None:
            return opened.table
        seen = self._seen()
        if seen is not None and path in seen:
            return None
        if not is_uri(path) and not _has_log(path):
            return None
        try:
            if path not in self._absent or self.log_of(path).any():
                return self._opened(path)
        except TableNotFoundError:
            pass
        self._absent.add(path)
        if seen is not None:
            seen[path] = None
        return None

    def expect(self, path: str) -> None:
        """Expect a table at a path where there was none."""
        self._absent.discard(path)

    def open(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        opened = self._newest(path)
        return self._opened(path) if opened is None else opened.table

    def _newest(self, path: str) -> _OpenTable | None:
        """An open table of this thread, or of none, at its newest version; None where there is none."""
        seen, mine = self._seen(), self._mine()
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
        self._note(path, opened)
        return opened

    def log_of(self, path: str) -> LogEntries:
        """The reader of a table's log entries."""
        return LogEntries(path, self._store)

    def _opened(self, path: str) -> DeltaTable:
        table, mine = _read(path, self.options), self._mine()
        self._absent.discard(path)
        # Read at once: a table made anew before its next use would be taken for this one.
        version = table.version()
        log = self.log_of(path)
        stamp = log.since(version, version).get(version)
        if stamp is not None:
            log.refuse_damaged(version, stamp)
            opened = mine[path] = _OpenTable(table, (version, stamp))
            self._note(path, opened)
            if not is_uri(path) and len(mine) > _HELD:
                mine.popitem(last=False)
        return table

    def release(self) -> None:
        """Release this thread's open tables for other threads: it uses none of them at the moment."""
        mine = self._mine()
        if seen := self._seen():
            seen.clear()
        with self._lock:
            self._idle.update(mine)
            while len(self._idle) > _HELD:
                self._idle.popitem(last=False)
        mine.clear()

    def as_of(self, path: str, version: int) -> DeltaTable:
        """A table at one version, at which it stays."""
        return _read(path, self.options, version)

    def remembered(
        self, path: str, table: DeltaTable, query: str, rows: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """The result of a query of a small table, which runs once per version of an open table; `query` identifies it."""
        opened = self._mine().get(path)
        if opened is None or opened.table is not table:
            return rows()
        return [dict(row) for row in opened.answers.of(table.version(), query, rows)]

    def learn(self, path: str, table: DeltaTable, query: str, rows: list[dict[str, Any]]) -> None:
        """Record the result of a query for a version that this thread has committed with a table."""
        opened = self._mine().get(path)
        if opened is not None and opened.table is table:
            opened.answers.learn(table.version(), query, rows)

    def forget(self) -> None:
        """Open all tables anew: some have been removed."""
        with self._lock:
            self._removals += 1
            self._idle.clear()

    def _mine(self) -> OrderedDict[str, _OpenTable]:
        """The open tables of this thread."""
        if getattr(self._threads, "removals", None) != self._removals:
            self._threads.tables, self._threads.removals = OrderedDict[str, _OpenTable](), self._removals
            if seen := getattr(self._threads, "seen", None):
                seen.clear()
        tables: OrderedDict[str, _OpenTable] = self._threads.tables
        return tables

    def _seen(self) -> "dict[str, _OpenTable | Exception | None] | None":
        """The results of this thread's checks in its present moment: tables, None without one, errors.

        None outside a moment.
        """
        self._mine()  # A removed table does not exist any more.
        seen: dict[str, _OpenTable | Exception | None] | None = getattr(self._threads, "seen", None)
        return seen

    def _note(self, path: str, opened: _OpenTable) -> None:
        if is_uri(path) and (seen := self._seen()) is not None:
            seen[path] = opened


@retry(
    retry=retry_if_exception(lacks_entries), wait=wait_fixed(0.2), stop=stop_after_attempt(3), reraise=True
)
def _read(path: str, options: dict[str, str] | None, version: int | None = None) -> DeltaTable:
    """A table from its log; repeated where a listed entry is gone, as a cleanup removes entries one by one."""
    return DeltaTable(path, version=version, storage_options=options)


def _has_log(path: str) -> bool:
    return Path(path, "_delta_log").is_dir()


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The columns of a table."""
    return pa.schema(table.schema().to_arrow())
