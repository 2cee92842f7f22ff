"""Makes Dagster's event log in SQLite faster, mostly by keeping its database connections open.

In: Dagster's own event log storage
Out: the same storage object, with the same files, and with the methods of `CachedEventLog`

Dagster opens and closes a connection for each statement. When the last connection to a database is closed, SQLite
checkpoints its log, and the checkpoint is most of the cost of an event. A run with changes in 200 tables has some
thousand events. Three changes make it faster:

- Connections stay open, and the events that plan the steps of a run are stored in one transaction.
- Each run has its own database. Dagster's migrations create only the database of the first run. For later runs, its file
  is copied.
- Many steps read the records of the same assets. A record is read again only after a change.
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

#: The largest number of databases that are open at the same time: the one with the index of all runs, the one with
#: events that belong to no run, and the database of the newest run.
_MAX_OPEN_DATABASES = 3
#: How long a statement waits for the lock of another process. The value is the same as in Dagster.
_LOCK_SECONDS = 30
#: The environment variable by which Dagster learns how many events to store at once, and the value for it.
_BATCH_VARIABLE, _EVENTS_PER_BATCH = "DAGSTER_EVENT_BATCH_SIZE", "1000"


class CachedEventLog(SqliteEventLogStorage):
    """An event log storage whose connections stay open. `cache_event_log` makes it from Dagster's storage."""

    #: Maps the name of each database (`shard`: the id of a run, or the name of the index) to its open connection.
    _connections: OrderedDict[str, Connection]
    _lock: RLock
    #: While a batch of events is being stored: maps each database to its connection, which is in a transaction.
    _batch_connections: dict[str, Connection]
    #: The contents of the database file of a run that has no events yet. Later runs copy it.
    _empty_database: bytes | None
    #: The tables, columns and migrations that are known to exist. Dagster looks for them at each event. It never removes
    #: one, so what was found once need not be looked for again.
    _existing_entries: set[tuple[str, ...]]
    #: Maps assets to their records as they were read last; None if an asset has no record.
    #:
    #: `_database_state` identifies the state of the database at that time. It has SQLite's `data_version`, a number that
    #: changes when another process commits (sqlite.org/pragma.html#pragma_data_version), and the number of rows that
    #: this process has changed.
    _records_by_key: dict[dg.AssetKey, AssetRecord | None]
    _database_state: tuple[int, int]

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._lock:  # All threads use the same connection to a database.
            if (connection := self._batch_connections.get(shard)) is not None:
                yield connection
                return
            with (connection := self._open_connection(shard)).begin():
                yield connection

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events in one transaction for each database. If that fails, Dagster stores them one by one."""
        with self._lock, ExitStack() as stack:
            stack.callback(self._batch_connections.clear)
            for shard in {INDEX_SHARD_NAME, *(event.run_id for event in events)}:
                self._batch_connections[shard] = stack.enter_context(self._connect(shard))
            super().store_event_batch(events)

    def store_event(self, event: EventLogEntry) -> None:
        """Store an event, and forget the record of the event's asset."""
        with self._lock:
            change_count = self._count_own_changes()
            super().store_event(event)
            if event.dagster_event is not None and event.dagster_event.asset_key is not None:
                self._records_by_key.pop(event.dagster_event.asset_key, None)
            if change_count == self._database_state[1]:
                self._database_state = self._database_state[0], self._count_own_changes()

    def get_asset_records(self, asset_keys: Sequence[dg.AssetKey] | None = None) -> Sequence[AssetRecord]:
        """The records of assets. A record that was read before is read again only if it may have changed."""
        if asset_keys is None:
            return super().get_asset_records()
        with self._lock:
            with self._connect(INDEX_SHARD_NAME) as connection:
                data_version = connection.exec_driver_sql("PRAGMA data_version").scalar_one()
            if (database_state := (data_version, self._count_own_changes())) != self._database_state:
                self._records_by_key, self._database_state = {}, database_state
            unique_keys = dict.fromkeys(asset_keys)
            if unread_keys := [key for key in unique_keys if key not in self._records_by_key]:
                records = super().get_asset_records(unread_keys)
                self._records_by_key.update(dict.fromkeys(unread_keys))
                self._records_by_key.update((record.asset_entry.asset_key, record) for record in records)
            return [record for key in unique_keys if (record := self._records_by_key[key]) is not None]

    def _count_own_changes(self) -> int:
        """The number of rows of the index database that this process has changed (sqlite.org/c3ref/total_changes.html)."""
        connection = self._connections.get(INDEX_SHARD_NAME)
        sqlite_connection: Any = connection and connection.connection.driver_connection
        return sqlite_connection.total_changes if sqlite_connection else 0

    def _make_database(self, engine: Engine, path: Path) -> None:
        """Create a database with Dagster's tables, unless it exists already."""
        if path.exists():
            if not _is_migrated(engine):
                self._initdb(engine)
        elif self._empty_database is None:
            self._initdb(engine)
            # When the last connection is closed, SQLite moves all pages from its log into the file of the database.
            engine.dispose()
            self._empty_database = path.read_bytes()
        else:
            copy_path = path.with_suffix(".making")
            copy_path.write_bytes(self._empty_database)
            try:
                path.hardlink_to(copy_path)
            except OSError:  # Another process has created the file, or the file system has no hard links.
                self._initdb(engine)
            finally:
                copy_path.unlink()

    def has_table(self, table_name: str) -> bool:
        """True if the index database has a table."""
        return self._has_entry((table_name,), lambda: super(CachedEventLog, self).has_table(table_name))

    def _has_asset_key_col_on_connection(self, conn: Connection, column_name: str) -> bool:
        has_column = super()._has_asset_key_col_on_connection
        return self._has_entry(("asset_keys", column_name), lambda: has_column(conn, column_name))

    def has_secondary_index(self, name: str) -> bool:
        """True if a data migration was applied to the index database."""
        return self._has_entry(
            ("migration", name), lambda: super(CachedEventLog, self).has_secondary_index(name)
        )

    def _has_entry(self, entry: tuple[str, ...], exists: Callable[[], bool]) -> bool:
        """True if `entry` is known to exist. If it is not known, `exists` is called, and the answer is kept if it is true."""
        if entry not in self._existing_entries and exists():
            self._existing_entries.add(entry)
        return entry in self._existing_entries

    def _open_connection(self, shard: str) -> Connection:
        """The open connection to a database. Opens it, and creates the database, if necessary."""
        connection, path = self._connections.pop(shard, None), self.path_for_shard(shard)
        if connection is not None and not os.path.exists(path):  # noqa: PTH110 - faster, and called for each event
            _close(connection)  # The run was deleted, and its file with it.
            connection = None
        if connection is None:
            engine = create_engine(
                self.conn_string_for_shard(shard),
                poolclass=QueuePool,
                pool_size=1,
                connect_args={"timeout": _LOCK_SECONDS},
            )
            listen(engine, "connect", _relax_sync)
            if shard not in self._initialized_dbs:
                self._make_database(engine, Path(path))
                self._initialized_dbs.add(shard)
            connection = engine.connect()
            if shard == INDEX_SHARD_NAME:
                # A new connection counts its changes from 0. So `_database_state` can no longer tell whether the records are
                # still valid.
                self._records_by_key = {}
        self._connections[shard] = connection
        while len(self._connections) > _MAX_OPEN_DATABASES:
            _close(self._connections.popitem(last=False)[1])
        return connection

    def close(self) -> None:
        """Close all connections."""
        while self._connections:
            _close(self._connections.popitem()[1])


def _close(connection: Connection) -> None:
    connection.close()
    connection.engine.dispose()


def _is_migrated(engine: Engine) -> bool:
    """True if Dagster's migrations were applied to a database. If not, Dagster has to read and apply all of them."""
    try:
        with engine.connect() as connection:
            return bool(connection.execute(text("select version_num from alembic_version")).first())
    except OperationalError:
        return False  # Another process is creating the tables at this moment.


def _relax_sync(connection: DBAPIConnection, _record: object) -> None:
    """Let SQLite not wait for the disk at each commit.

    A power cut may lose the last events, but it does not damage the database (sqlite.org/wal.html).
    """
    connection.cursor().execute("PRAGMA synchronous = NORMAL")


@contextmanager
def cache_event_log(storage: EventLogStorage) -> Iterator[None]:
    """Within the block, Dagster's storage is a `CachedEventLog`, if it is in SQLite."""
    if type(storage) is not SqliteEventLogStorage:
        yield
        return
    # Other parts of Dagster already hold this object, so another object would not be used. Its class is replaced.
    cached_storage: EventLogStorage = storage
    storage.__class__ = CachedEventLog
    assert isinstance(cached_storage, CachedEventLog)
    cached_storage._connections = OrderedDict()  # noqa: SLF001 - see above
    cached_storage._lock = RLock()  # noqa: SLF001
    cached_storage._batch_connections = {}  # noqa: SLF001
    cached_storage._empty_database, cached_storage._existing_entries = None, set()  # noqa: SLF001
    cached_storage._records_by_key, cached_storage._database_state = {}, (0, 0)  # noqa: SLF001
    is_variable_unset = _BATCH_VARIABLE not in os.environ
    os.environ.setdefault(_BATCH_VARIABLE, _EVENTS_PER_BATCH)
    try:
        yield
    finally:
        cached_storage.close()
        if is_variable_unset:
            del os.environ[_BATCH_VARIABLE]
        storage.__class__ = SqliteEventLogStorage
