"""Dagster's event log in SQLite, made faster by connections that stay open.

In: Dagster's own event log storage. Out: the same storage, with the same files. Raises its errors.

Dagster opens a connection for each statement. When the last connection closes, SQLite checkpoints its log,
which is most of the cost of an event; a run with changes in 200 tables has some thousand events. Three changes
make it faster:

- Connections stay open, and the events that plan a run's steps are stored in one transaction.
- Only the first run creates its database by Dagster's migrations; later runs copy the file.
- Many steps read the records of the same inputs; they are read again only after a change.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import dagster as dg
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import EventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.base import AssetRecord
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.event import listen
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import QueuePool

#: The largest number of open databases: of all runs, of events without a run, and of the newest run.
_MAX_OPEN = 3
#: How long a statement waits for another process, as in Dagster.
_BUSY_SECONDS = 30
#: Dagster's environment variable for the number of events in a batch, and the value for it.
_BATCH_VARIABLE, _BATCH_EVENTS = "DAGSTER_EVENT_BATCH_SIZE", "1000"


class CachedEventLog(SqliteEventLogStorage):
    """An event log storage whose connections stay open; `cache_event_log` makes it from Dagster's storage."""

    #: The open connections, one for each database.
    _connections: OrderedDict[str, Connection]
    _lock: RLock
    #: The connections of a batch, each in a transaction.
    _batch_connections: dict[str, Connection]
    #: The contents of a run's database file without events, which later runs copy.
    _template: bytes | None
    #: Tables, columns and migrations that exist. Dagster looks for them at each event, and never removes any.
    _existing: set[tuple[str, ...]]
    #: The records of assets (None: an asset has none), and the state of the database of all runs to which they
    #: belong: `data_version`, which the commits of other processes change
    #: (sqlite.org/pragma.html#pragma_data_version), and the number of rows that this process has changed.
    _records: dict[dg.AssetKey, AssetRecord | None]
    _changes: tuple[int, int]

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._lock:  # Threads share the one connection of a database.
            if (connection := self._batch_connections.get(shard)) is not None:
                yield connection
                return
            with (connection := self._connection(shard)).begin():
                yield connection

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events in one transaction of each database; if this fails, Dagster stores them one by one."""
        with self._lock, ExitStack() as stack:
            stack.callback(self._batch_connections.clear)
            for shard in {INDEX_SHARD_NAME, *(event.run_id for event in events)}:
                self._batch_connections[shard] = stack.enter_context(self._connect(shard))
            super().store_event_batch(events)

    def store_event(self, event: EventLogEntry) -> None:
        """Store an event, and forget the record of its asset."""
        with self._lock:
            before = self._own_changes()
            super().store_event(event)
            if event.dagster_event is not None and event.dagster_event.asset_key is not None:
                self._records.pop(event.dagster_event.asset_key, None)
            if before == self._changes[1]:
                self._changes = self._changes[0], self._own_changes()

    def get_asset_records(self, asset_keys: Sequence[dg.AssetKey] | None = None) -> Sequence[AssetRecord]:
        """The records of assets; one is read again only if it may have changed."""
        if asset_keys is None:
            return super().get_asset_records()
        with self._lock:
            with self._connect(INDEX_SHARD_NAME) as connection:
                number = connection.exec_driver_sql("PRAGMA data_version").scalar_one()
            if (changes := (number, self._own_changes())) != self._changes:
                self._records, self._changes = {}, changes
            wanted = dict.fromkeys(asset_keys)
            if unread := [key for key in wanted if key not in self._records]:
                records = super().get_asset_records(unread)
                self._records.update(dict.fromkeys(unread))
                self._records.update((record.asset_entry.asset_key, record) for record in records)
            return [record for key in wanted if (record := self._records[key]) is not None]

    def _own_changes(self) -> int:
        """The number of rows that this process has changed (sqlite.org/c3ref/total_changes.html)."""
        connection = self._connections.get(INDEX_SHARD_NAME)
        driver: Any = connection and connection.connection.driver_connection
        return driver.total_changes if driver else 0

    def _make_database(self, engine: Engine, path: Path) -> None:
        """Create a database's tables."""
        if path.exists():
            if not _is_migrated(engine):
                self._initdb(engine)
        elif self._template is None:
            self._initdb(engine)
            engine.dispose()  # Closing moves all pages from SQLite's log into the one file.
            self._template = path.read_bytes()
        else:
            copy = path.with_suffix(".making")
            copy.write_bytes(self._template)
            try:
                path.hardlink_to(copy)
            except OSError:  # Another process has created the file, or the file system has no hard links.
                self._initdb(engine)
            finally:
                copy.unlink()

    def has_table(self, parse_table_name: str) -> bool:
        """Whether the database of all runs has a table."""
        return self._has((parse_table_name,), lambda: super(CachedEventLog, self).has_table(parse_table_name))

    def _has_asset_key_col_on_connection(self, conn: Connection, column_name: str) -> bool:
        has_column = super()._has_asset_key_col_on_connection
        return self._has(("asset_keys", column_name), lambda: has_column(conn, column_name))

    def has_secondary_index(self, name: str) -> bool:
        """Whether a data migration was applied to the database of all runs."""
        return self._has(("migration", name), lambda: super(CachedEventLog, self).has_secondary_index(name))

    def _has(self, entry: tuple[str, ...], exists: Callable[[], bool]) -> bool:
        if entry not in self._existing and exists():
            self._existing.add(entry)
        return entry in self._existing

    def _connection(self, shard: str) -> Connection:
        connection, path = self._connections.pop(shard, None), self.path_for_shard(shard)
        if connection is not None and not os.path.exists(path):  # noqa: PTH110 - faster, and called for each event
            _close(connection)  # The file has been removed.
            connection = None
        if connection is None:
            engine = create_engine(
                self.conn_string_for_shard(shard),
                poolclass=QueuePool,
                pool_size=1,
                connect_args={"timeout": _BUSY_SECONDS},
            )
            listen(engine, "connect", _relax_sync)
            if shard not in self._initialized_dbs:
                self._make_database(engine, Path(path))
                self._initialized_dbs.add(shard)
            connection = engine.connect()
            if shard == INDEX_SHARD_NAME:
                self._records = {}  # A new connection counts its changes from 0.
        self._connections[shard] = connection
        while len(self._connections) > _MAX_OPEN:
            _close(self._connections.popitem(last=False)[1])
        return connection

    def close(self) -> None:
        """Close the connections."""
        while self._connections:
            _close(self._connections.popitem()[1])


def _close(connection: Connection) -> None:
    connection.close()
    connection.engine.dispose()


def _is_migrated(engine: Engine) -> bool:
    """Whether a database's migrations were applied; otherwise Dagster has to read and apply all of them."""
    try:
        with engine.connect() as connection:
            return bool(connection.execute(text("select version_num from alembic_version")).first())
    except OperationalError:
        return False  # Another process is about to create it.


def _relax_sync(connection: DBAPIConnection, _record: object) -> None:
    """Do not wait for the disk at each commit.

    A power cut may lose the last events, but does not damage the database (sqlite.org/wal.html).
    """
    connection.cursor().execute("PRAGMA synchronous = NORMAL")


@contextmanager
def cache_event_log(storage: EventLogStorage) -> Iterator[None]:
    """Within the block, make Dagster's storage a `CachedEventLog`, if it is in SQLite."""
    if type(storage) is not SqliteEventLogStorage:
        yield
        return
    # Other parts of Dagster have this object already, so its class is replaced.
    cached: EventLogStorage = storage
    storage.__class__ = CachedEventLog
    assert isinstance(cached, CachedEventLog)
    cached._connections, cached._lock, cached._batch_connections = OrderedDict(), RLock(), {}  # noqa: SLF001 - see above
    cached._template, cached._existing = None, set()  # noqa: SLF001
    cached._records, cached._changes = {}, (0, 0)  # noqa: SLF001
    is_ours = _BATCH_VARIABLE not in os.environ
    os.environ.setdefault(_BATCH_VARIABLE, _BATCH_EVENTS)
    try:
        yield
    finally:
        cached.close()
        if is_ours:
            del os.environ[_BATCH_VARIABLE]
        storage.__class__ = SqliteEventLogStorage
