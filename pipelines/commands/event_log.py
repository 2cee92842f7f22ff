"""Makes Dagster's event log in SQLite faster, mostly by keeping its database connections open.

In: Dagster's own event log storage
Out: the same storage object, with the same files, and with the methods of `CachedEventLog`

Dagster opens and closes a connection for each statement. When the last connection to a database is closed, SQLite
checkpoints its log, and the checkpoint is most of the cost of an event. A run with changes in 200 tables has some
thousand events. Four changes make it faster:

- Connections stay open. Events that Dagster reports right after each other are stored in one transaction, and so are
  the events that announce what a run plans to materialize.
- Each run has its own database. Dagster's migrations create only the database of the first run. Before it has events, it
  is copied. Each later run gets this copy.
- Many steps read the records of the same assets. A record is read again only after a change. A materialization that this
  process has stored is not parsed again.
- A materialization is converted to JSON only once. All events share one INSERT statement, which is compiled once.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import dagster as dg
from dagster._core.event_api import AssetRecordsFilter, EventLogRecord, EventRecordsResult
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import EventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.base import AssetRecord
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME
from dagster._serdes import deserialize_value
from dagster._time import datetime_from_timestamp
from sqlalchemy import Connection, CursorResult, Engine, create_engine, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.event import listen
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import QueuePool

#: The largest number of databases that are open at the same time. One has the index of all runs, another the events that
#: belong to no run, and the third the events of the newest run.
_MAX_OPEN_DATABASES = 3
#: How long a statement waits for the lock of another process. The value is the same as in Dagster.
_LOCK_SECONDS = 30
#: The environment variable by which Dagster learns how many events to store together, and the value for it.
_BATCH_VARIABLE, _EVENTS_PER_BATCH = "DAGSTER_EVENT_BATCH_SIZE", "1000"
#: The largest number of materializations that are kept in memory.
_MAX_KEPT_MATERIALIZATIONS = 500
#: Dagster reports another event right after an event of these types. The event of an output is followed by the
#: materialization or the check result, and the success of a step by the start of the next step or the end of the run.
_FOLLOWED_TYPES = {dg.DagsterEventType.STEP_OUTPUT, dg.DagsterEventType.STEP_SUCCESS}
#: The types of the events by which a step reports something. None stands for a line of the log.
_REPORT_TYPES = {
    None,
    dg.DagsterEventType.ASSET_MATERIALIZATION,
    dg.DagsterEventType.ASSET_CHECK_EVALUATION,
}
_INSERT = SqlEventLogStorageTable.insert()


class _NotInsertedError(Exception):
    """An event could not be inserted, so nothing was committed. The cause of this exception is the error of the insert."""


@dataclass(frozen=True)
class _RowInsert:
    """A statement that inserts a row. All such statements execute `_INSERT`, which SQLAlchemy compiles once."""

    row: Mapping[str, Any]

    def _execute_on_connection(self, connection: Connection, *_: object) -> CursorResult[Any]:
        return connection.execute(_INSERT, self.row)


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
    #: Events that wait for the event that Dagster reports right after them, to be stored with it. Before anything is read,
    #: they are stored anyway.
    _unstored_events: list[EventLogEntry]
    #: True if the work of the steps is done already, and they only report it. See `store_reports_together`.
    _is_work_done: bool
    #: Maps assets to their records as they were read last; None if an asset has no record.
    #:
    #: `_database_state` identifies the state of the database at that time by two numbers. One is SQLite's `data_version`,
    #: which changes when another process commits (sqlite.org/pragma.html#pragma_data_version). The other is the number of
    #: rows that this process has changed.
    _records_by_key: dict[dg.AssetKey, AssetRecord | None]
    _database_state: tuple[int, int]
    #: The observations of assets that were read last. They, too, are valid only while the database is in
    #: `_database_state`.
    _observations: dict[tuple[dg.AssetKey, int, bool], EventRecordsResult]
    #: The last materializations that this process has stored, as JSON and parsed.
    _own_materializations: dict[dg.AssetKey, tuple[str, EventLogRecord]]
    #: The event that is being stored, as JSON.
    _event_json: str

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._lock:  # All threads use the same connection to a database.
            if (connection := self._batch_connections.get(shard)) is not None:
                yield connection
                return
            self._store_unstored_events()
            with (connection := self._open_connection(shard)).begin():
                yield connection

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events in one transaction for each database. If that fails, Dagster stores them one by one."""
        with self._lock:
            self._store_unstored_events()
            self._store_together(events)

    def store_event(self, event: EventLogEntry) -> None:
        """Store an event, together with those before it that are not stored yet.

        If Dagster reports another event right after it, it is stored with that event.
        """
        with self._lock:
            self._unstored_events.append(event)
            if not self._is_followed(event):
                self._store_unstored_events()

    def _is_followed(self, event: EventLogEntry) -> bool:
        """True if Dagster reports another event right after an event."""
        event_type = event.dagster_event and event.dagster_event.event_type
        return bool(event.run_id and event.step_key) and (
            event_type in _FOLLOWED_TYPES or (self._is_work_done and event_type in _REPORT_TYPES)
        )

    def _store_unstored_events(self) -> None:
        """Store the events that are not stored yet: in one transaction for each database, or if that fails, one by one."""
        events, self._unstored_events = self._unstored_events, []
        if not events:
            return
        try:
            self._store_together(events)
        except _NotInsertedError:
            self._store_one_by_one(events)

    def _store_one_by_one(self, events: Sequence[EventLogEntry]) -> None:
        """Store each event in a transaction of its own. Raises the first error after the last event."""
        errors = []
        for event in events:
            try:
                self._store_together([event])
            except _NotInsertedError as error:
                errors.append(error.__cause__ or error)
        if errors:
            raise errors[0]

    def _store_together(self, events: Sequence[EventLogEntry]) -> None:
        """Store events in one transaction for each database, and forget the records of the events' assets.

        Raises _NotInsertedError if an event cannot be inserted. After any other error, some databases may have the events.
        """
        change_count = self._count_own_changes()
        try:
            with ExitStack() as stack:
                stack.callback(self._batch_connections.clear)
                batch_connections = {
                    shard: stack.enter_context(self._connect(shard))
                    for shard in {INDEX_SHARD_NAME, *(event.run_id for event in events)}
                }
                self._batch_connections.update(batch_connections)
                try:
                    for event in events:
                        self._insert_event(event)
                except Exception as error:
                    raise _NotInsertedError(str(error)) from error
                except (
                    BaseException
                ):  # An interrupt. The transaction is rolled back, so the events remain to be stored.
                    self._unstored_events[:0] = events
                    raise
        except BaseException:
            self._forget_all()
            raise
        if change_count == self._database_state[1]:
            self._database_state = self._database_state[0], self._count_own_changes()

    def _insert_event(self, event: EventLogEntry) -> None:
        super().store_event(event)
        dagster_event = event.dagster_event
        if dagster_event is not None and dagster_event.asset_key is not None:
            self._records_by_key.pop(dagster_event.asset_key, None)
            if dagster_event.event_type == dg.DagsterEventType.ASSET_OBSERVATION:
                self._observations.clear()

    def prepare_insert_event(self, event: EventLogEntry) -> Any:
        """A statement that inserts an event."""
        row = self._event_to_row(event)
        self._event_json = row["event"]
        return _RowInsert(row)

    def _get_asset_entry_values(
        self, event: EventLogEntry, event_id: int, has_asset_key_index_cols: bool
    ) -> dict[str, Any]:
        """Return the values that an event changes in an asset's record, by column. They include the materialization, as JSON."""
        assert event.dagster_event is not None
        if not event.dagster_event.is_step_materialization:
            return super()._get_asset_entry_values(event, event_id, has_asset_key_index_cols)
        assert event.dagster_event.asset_key is not None
        if len(self._own_materializations) >= _MAX_KEPT_MATERIALIZATIONS:
            self._own_materializations.clear()
        record_json = f'{{"__class__": "EventLogRecord", "event_log_entry": {self._event_json}, "storage_id": {event_id}}}'
        self._own_materializations[event.dagster_event.asset_key] = (
            record_json,
            EventLogRecord(event_id, event),
        )
        values = {"last_materialization": record_json, "last_run_id": event.run_id}
        if not has_asset_key_index_cols:
            return values
        return {**values, "last_materialization_timestamp": datetime_from_timestamp(event.timestamp)}

    def get_asset_records(self, asset_keys: Sequence[dg.AssetKey] | None = None) -> Sequence[AssetRecord]:
        """The records of assets. A record that was read before is read again only if it may have changed."""
        if asset_keys is None:
            return super().get_asset_records()
        with self._lock:
            self._forget_if_changed()
            unique_keys = dict.fromkeys(asset_keys)
            if unread_keys := [key for key in unique_keys if key not in self._records_by_key]:
                records = super().get_asset_records(unread_keys)
                self._records_by_key.update(dict.fromkeys(unread_keys))
                self._records_by_key.update((record.asset_entry.asset_key, record) for record in records)
            return [record for key in unique_keys if (record := self._records_by_key[key]) is not None]

    def _get_latest_materialization_records(
        self, raw_asset_rows: Sequence[Mapping[str, Any]]
    ) -> Mapping[dg.AssetKey, EventLogRecord | None]:
        """Return the last materialization of each asset, from rows of the table of assets.

        Dagster's own method also queries the events each time. It needs that for materializations in an old format, and
        for assets that were wiped. Here that method gets only the rows that may need the query.
        """
        records, other_rows = dict[dg.AssetKey, EventLogRecord | None](), []
        for row in raw_asset_rows:
            key, record_json = dg.AssetKey.from_db_string(row["asset_key"]), row["last_materialization"]
            record: NamedTuple | None = None
            if key is not None and record_json and not row["asset_details"]:
                own_json, record = self._own_materializations.get(key, (None, None))
                if own_json != record_json:
                    record = deserialize_value(record_json, NamedTuple)
            if key is not None and isinstance(record, EventLogRecord):
                records[key] = record
            else:
                other_rows.append(row)
        return (
            {**records, **super()._get_latest_materialization_records(other_rows)} if other_rows else records
        )

    def fetch_observations(
        self,
        records_filter: dg.AssetKey | AssetRecordsFilter,
        limit: int,
        cursor: str | None = None,
        ascending: bool = False,
    ) -> EventRecordsResult:
        """The observations of an asset. Each step reads the observations of those inputs that were never materialized."""
        if not isinstance(records_filter, dg.AssetKey) or cursor is not None:
            return super().fetch_observations(records_filter, limit, cursor, ascending)
        with self._lock:
            self._forget_if_changed()
            request = (records_filter, limit, ascending)
            if request not in self._observations:
                self._observations[request] = super().fetch_observations(
                    records_filter, limit, None, ascending
                )
            return self._observations[request]

    def _forget_if_changed(self) -> None:
        """Store the events that are not stored yet, and forget what was read if the database has changed since then.

        Changes by `_store_together` do not count, because it forgets the changed records itself.
        """
        with self._connect(INDEX_SHARD_NAME) as connection:
            data_version = connection.exec_driver_sql("PRAGMA data_version").scalar_one()
        if (database_state := (data_version, self._count_own_changes())) != self._database_state:
            self._forget_all()
            self._database_state = database_state

    def _forget_all(self) -> None:
        """Forget what was read."""
        self._records_by_key, self._observations = {}, {}

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
                self._forget_all()
        self._connections[shard] = connection
        while len(self._connections) > _MAX_OPEN_DATABASES:
            _close(self._connections.popitem(last=False)[1])
        return connection

    def close(self) -> None:
        """Store the events that are not stored yet, and close all connections."""
        self._store_unstored_events()
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
    # Other parts of Dagster already hold this object, and would not use another one. So the class of this object is replaced.
    cached_storage: EventLogStorage = storage
    storage.__class__ = CachedEventLog
    assert isinstance(cached_storage, CachedEventLog)
    cached_storage._connections = OrderedDict()  # noqa: SLF001 - see above
    cached_storage._lock = RLock()  # noqa: SLF001
    cached_storage._batch_connections = {}  # noqa: SLF001
    cached_storage._empty_database, cached_storage._existing_entries = None, set()  # noqa: SLF001
    cached_storage._unstored_events, cached_storage._is_work_done = [], False  # noqa: SLF001
    cached_storage._database_state, cached_storage._own_materializations = (0, 0), {}  # noqa: SLF001
    cached_storage._forget_all()  # noqa: SLF001
    is_variable_unset = _BATCH_VARIABLE not in os.environ
    os.environ.setdefault(_BATCH_VARIABLE, _EVENTS_PER_BATCH)
    try:
        yield
    finally:
        try:
            cached_storage.close()
        finally:
            if is_variable_unset:
                del os.environ[_BATCH_VARIABLE]
            storage.__class__ = SqliteEventLogStorage


@contextmanager
def store_reports_together(storage: EventLogStorage) -> Iterator[None]:
    """Within the block, steps only report work that was done before, so their events follow each other quickly.

    The events of a step are stored together, at the latest when the next step begins.
    """
    if not isinstance(storage, CachedEventLog):
        yield
        return
    storage._is_work_done = True  # noqa: SLF001 - of the same module
    try:
        yield
    finally:
        storage._is_work_done = False  # noqa: SLF001
