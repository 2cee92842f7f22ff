"""Keeps Delta tables of delta-rs open, and updates them to their newest version before each use.

In: the paths of tables, and a store with its options.
Out: tables at their newest version.

Opening a table again for each use would be slow. In a folder, opening a table takes several times as long as a
commit. To find out whether an open table is at its newest version, it suffices to look at two files. On an object
store, opening a table takes several requests, one after the other, and a check takes one request. So a caller that
reads several tables before it writes checks each of them only once (`Tables.consistent_read`).

Each thread has its own open tables, because delta-rs changes the object of a table when it commits. When the work of a
thread ends, it releases its tables for other threads (`Tables.release_tables`). All threads share the cached results of
queries, except those for versions that a thread has just committed. Raises OSError, errors of delta-rs, and
DamagedTableError if the newest log entry of a table is incomplete.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
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

from pgsieve.resources.lake.delta.errors import DamagedTableError, has_missing_entries
from pgsieve.resources.lake.delta.log_entries import LogEntries, Stamp
from pgsieve.resources.lake.delta.query_cache import QueryCache
from pgsieve.resources.lake.stores.column_names import ColumnNames, StoredColumn
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store, join_path
from pgsieve.resources.lake.stores.store_errors import find_store_refusal

#: The largest number of each of these: tables in folders that a thread has open, idle tables, and tables with cached
#: results. A table takes up to a megabyte of memory.
_MAX_OPEN_TABLES = 512
#: The number of tables on an object store that are checked at the same time.
_PARALLEL_CHECKS = 8


@cache
def share_tables(options: tuple[tuple[str, str], ...]) -> "Tables":
    """The open tables in a store with these options. All users in this process share them."""
    return Tables(Store(options))


@dataclass(slots=True)
class _OpenTable:
    """A table that is open, and the cached results of queries of it.

    - `last_check`: the version of the table at the last check, and the stamp of the log entry of this version. A stamp
      distinguishes an entry from an earlier entry with the same name.
    - `shared_results`: the results for versions that a check has found. All threads share them.
    - `own_results`: the results for versions that this thread has committed since the last check
    """

    table: DeltaTable
    last_check: tuple[int, Stamp]
    shared_results: QueryCache
    own_results: QueryCache = field(default_factory=QueryCache)

    def cached_results(self) -> tuple[QueryCache, Hashable]:
        """The cache for the table's present version, and what identifies this version in the cache."""
        version = self.table.version()
        if version == self.last_check[0]:
            return self.shared_results, self.last_check
        return self.own_results, version

    def update(self, log_entries: LogEntries) -> bool:
        """Update the table to its newest version.

        Return False if the table must be opened again, for example because another table is at its path now.
        """
        version, stamp = self.last_check
        stamp_by_version = log_entries.read_stamps_since(version, self.table.version())
        if stamp_by_version.get(version) != stamp:
            return False
        # If this thread has committed by delta-rs, the table is at the version of this commit already.
        if self.table.version() + 1 in stamp_by_version:
            try:
                self.table.update_incremental()
            except DeltaError:
                return False
        newest_version = self.table.version()
        newest_stamp = (
            stamp_by_version[newest_version]
            if newest_version in stamp_by_version
            else log_entries.read_stamp(newest_version)
        )
        if newest_stamp is None:
            return False
        if newest_version != version:
            log_entries.raise_if_damaged(newest_version, newest_stamp)
        self.last_check = newest_version, newest_stamp
        return True


class Tables:
    """The open tables of a lake."""

    def __init__(self, store: Store) -> None:
        self.options = dict(store.options) or None
        self._store = store
        self._thread_state = threading.local()
        self._lock = threading.Lock()
        #: The open tables that no thread is using.
        self._idle_tables = OrderedDict[str, _OpenTable]()
        #: The cached results of queries, by path.
        self._shared_results = OrderedDict[str, QueryCache]()
        #: The paths on an object store where the last check found no table. For these paths, one listing shows whether
        #: there is a table now.
        self._absent_paths = set[str]()
        #: How often tables were removed. After a removal, another table may be at the path of an open table.
        self._removal_count = 0

    def exists(self, path: str) -> bool:
        """True if a Delta table exists. Its log may be illegible."""
        if is_uri(path):
            try:
                return self.open_if_exists(path) is not None
            except DamagedTableError:
                return True
            except DeltaError as error:
                # The table exists, and its readers will get the error.
                if find_store_refusal([error]) or not self.log_entries(path).has_entries():
                    raise
                return True
        try:
            return self._update_open_table(path) is not None or (
                _has_log(path) and DeltaTable.is_deltatable(path)
            )
        except DamagedTableError:
            return True  # The table exists, and its readers will get the error.

    @contextmanager
    def consistent_read(
        self, paths: Collection[str] = (), prepare: Callable[[str, DeltaTable], object] | None = None
    ) -> Iterator[None]:
        """Within the block this thread checks each table of an object store only once.

        At the start of the block, the tables at `paths` are checked in parallel. `prepare` is called for each table that
        exists, to cache the results of queries. The block must not write to these tables. Another process may write to
        them, so a later commit must check again what was read here. If the check of a table fails, the error is raised
        when the table is used. Tables in a folder are checked each time they are used, because this takes little time.
        """
        is_nested = self._find_check_results() is not None
        if not is_nested:
            self._thread_state.checked = {}
        try:
            self._check_tables([path for path in dict.fromkeys(paths) if is_uri(path)], prepare)
            yield
        finally:
            if not is_nested:
                self._thread_state.checked = None

    def _check_tables(
        self, paths: Collection[str], prepare: Callable[[str, DeltaTable], object] | None
    ) -> None:
        """Check those tables that this block has not checked yet, in parallel threads."""
        check_results, own_tables = self._find_check_results(), self._own_tables()
        assert check_results is not None
        paths = [path for path in paths if path not in check_results]
        if len(paths) < 2:
            return  # A single table is checked later, when it is used.
        with self._lock:
            self._idle_tables.update({path: own_tables.pop(path) for path in paths if path in own_tables})

        def check(path: str) -> "dict[str, _OpenTable | Exception | None]":
            try:
                table = self.open_if_exists(path)
                if prepare is not None and table is not None:
                    prepare(path, table)
            except Exception as error:  # noqa: BLE001 - the use of the table raises it
                return {path: error}
            open_table = self._own_tables().pop(path, None)
            # An existing table that is not open yet will be opened when it is used.
            return {path: open_table} if open_table is not None or table is None else {}

        with ThreadPoolExecutor(min(_PARALLEL_CHECKS, len(paths)), "pgsieve-check") as pool:
            for table_results in pool.map(check, paths):
                check_results |= table_results
        own_tables |= {
            path: open_table
            for path, open_table in check_results.items()
            if path in paths and isinstance(open_table, _OpenTable)
        }

    def open_if_exists(self, path: str) -> DeltaTable | None:
        """The newest version of a table. None if the table does not exist."""
        if (open_table := self._update_open_table(path)) is not None:
            return open_table.table
        check_results = self._find_check_results()
        if check_results is not None and path in check_results:
            return None
        if not is_uri(path) and not _has_log(path):
            return None
        try:
            if path not in self._absent_paths or self.log_entries(path).has_entries():
                return self._open_new(path)
        except TableNotFoundError:
            pass
        self._absent_paths.add(path)
        if check_results is not None:
            check_results[path] = None
        return None

    def expect_creation(self, path: str) -> None:
        """Forget that the last check found no table at a path, because a table is about to be created there."""
        self._absent_paths.discard(path)

    def open(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        open_table = self._update_open_table(path)
        return self._open_new(path) if open_table is None else open_table.table

    def _update_open_table(self, path: str) -> _OpenTable | None:
        """An open table of this thread, or an idle table, at its newest version. None if the table is not open."""
        check_results, own_tables = self._find_check_results(), self._own_tables()
        if check_results is not None and path in check_results:
            if isinstance(outcome := check_results[path], Exception):
                raise outcome
            return outcome
        open_table = own_tables.pop(path, None)
        if open_table is None:
            with self._lock:
                open_table = self._idle_tables.pop(path, None)
        if open_table is None or not open_table.update(self.log_entries(path)):
            return None
        own_tables[path] = open_table
        self._record_check(path, open_table)
        return open_table

    def log_entries(self, path: str) -> LogEntries:
        """The reader of the log entries of a table."""
        return LogEntries(path, self._store)

    def _open_new(self, path: str) -> DeltaTable:
        table, own_tables = _load_table(path, self.options), self._own_tables()
        self._absent_paths.discard(path)
        # Read the stamp now. Later it could be the stamp of another table that was created at this path.
        version = table.version()
        log_entries = self.log_entries(path)
        stamp = log_entries.read_stamps_since(version, version).get(version)
        if stamp is not None:
            log_entries.raise_if_damaged(version, stamp)
            open_table = own_tables[path] = _OpenTable(table, (version, stamp), self._results_of(path))
            self._record_check(path, open_table)
            if not is_uri(path) and len(own_tables) > _MAX_OPEN_TABLES:
                own_tables.popitem(last=False)
        return table

    def _results_of(self, path: str) -> QueryCache:
        """The cached results of queries of a table, for all threads."""
        with self._lock:
            results = self._shared_results.pop(path, None) or QueryCache()
            self._shared_results[path] = results
            while len(self._shared_results) > _MAX_OPEN_TABLES:
                self._shared_results.popitem(last=False)
        return results

    def release_tables(self) -> None:
        """Let other threads use the tables that this thread has open. This thread must not be using one of them."""
        own_tables = self._own_tables()
        if check_results := self._find_check_results():
            check_results.clear()
        with self._lock:
            self._idle_tables.update(own_tables)
            while len(self._idle_tables) > _MAX_OPEN_TABLES:
                self._idle_tables.popitem(last=False)
        own_tables.clear()

    def open_version(self, path: str, version: int) -> DeltaTable:
        """A table at one of its versions. It does not change when the table gets a new version."""
        return _load_table(path, self.options, version)

    def cached_rows(
        self, path: str, table: DeltaTable, query_name: str, run_query: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """The result of a query. `run_query` computes it once per version of an open table; `query_name` identifies it."""
        open_table = self._own_tables().get(path)
        if open_table is None or open_table.table is not table:
            return run_query()
        results, version = open_table.cached_results()
        return [dict(row) for row in results.get(version, query_name, run_query)]

    def cache_rows(self, path: str, table: DeltaTable, query_name: str, rows: list[dict[str, Any]]) -> None:
        """Cache the result of a query for the version that this thread has just committed."""
        open_table = self._own_tables().get(path)
        if open_table is not None and open_table.table is table:
            results, version = open_table.cached_results()
            results.store(version, query_name, rows)

    def forget_all(self) -> None:
        """Forget all open tables, because some tables have been removed."""
        with self._lock:
            self._removal_count += 1
            self._idle_tables.clear()

    def _own_tables(self) -> OrderedDict[str, _OpenTable]:
        """The tables that this thread has open, by path."""
        if getattr(self._thread_state, "removals", None) != self._removal_count:
            self._thread_state.tables, self._thread_state.removals = (
                OrderedDict[str, _OpenTable](),
                self._removal_count,
            )
            if check_results := getattr(self._thread_state, "checked", None):
                check_results.clear()
        tables: OrderedDict[str, _OpenTable] = self._thread_state.tables
        return tables

    def _find_check_results(self) -> "dict[str, _OpenTable | Exception | None] | None":
        """Maps the paths that this thread's `consistent_read` has checked to a table, None (no table), or an error.

        None if this thread is not within a `consistent_read`.
        """
        self._own_tables()  # If tables have been removed, this call empties the results.
        check_results: dict[str, _OpenTable | Exception | None] | None = getattr(
            self._thread_state, "checked", None
        )
        return check_results

    def _record_check(self, path: str, open_table: _OpenTable) -> None:
        """Within a `consistent_read`, remember that this table was checked."""
        if is_uri(path) and (check_results := self._find_check_results()) is not None:
            check_results[path] = open_table


@retry(
    retry=retry_if_exception(has_missing_entries),
    wait=wait_fixed(0.2),
    stop=stop_after_attempt(3),
    reraise=True,
)
def _load_table(path: str, options: dict[str, str] | None, version: int | None = None) -> DeltaTable:
    """Open a table. Try again if a log entry was removed after it was listed: a cleanup removes entries one by one."""
    return DeltaTable(path, version=version, storage_options=options)


def _has_log(path: str) -> bool:
    """True if there is a Delta log in this folder."""
    return Path(path, "_delta_log").is_dir()


def find_column_names(table: DeltaTable, path: str) -> ColumnNames | None:
    """The names of a table's columns in its files; None if Delta does not map them. `path` is the path of the table."""
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") == "none":
        return None
    columns = dict[str, StoredColumn]()
    for table_field in table.schema().fields:
        metadata = table_field.metadata or {}
        name = str(metadata["delta.columnMapping.physicalName"])
        columns[table_field.name] = StoredColumn(name, int(metadata["delta.columnMapping.id"]))
    return ColumnNames(join_path(path, "_")[:-1], columns)


def make_arrow_schema(table: DeltaTable) -> pa.Schema:
    """The columns of a table, as an Arrow schema."""
    return pa.schema(table.schema().to_arrow())
