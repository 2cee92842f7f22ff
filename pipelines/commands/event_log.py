"""Dagster's event log in SQLite, made faster by connections that stay open.

In: Dagster's own event log storage. Out: the same storage, with the same files. Raises its errors.

Dagster opens a connection for each statement. When the last connection closes, SQLite checkpoints its log,
which is most of the cost of an event; a run with changes in 200 tables has some thousand events. Here the
connections stay open, and the events that plan a run's steps are stored in one transaction. Dagster also
creates a database for each run by its migrations. Here only the first run does so; later runs copy its file.
Many steps read the records of the same inputs. Here they are read again only after a change.
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

#: The largest number of open databases: one for all runs, one for events without a run, and the newest run's
#: own.
_KEPT = 3
#: How long a statement waits for another process, as in Dagster.
_BUSY_SECONDS = 30
#: Dagster's environment variable for the number of events in a batch, and the value for it.
_BATCH, _BATCH_EVENTS = "DAGSTER_EVENT_BATCH_SIZE", "1000"


class KeptEventLog(SqliteEventLogStorage):
    """An event log storage whose connections stay open.

    `connections_kept` makes it from Dagster's storage.
    """

    #: One connection for each database.
    _open: OrderedDict[str, Connection]
    _turn: RLock
    #: The connections of a batch, each in a transaction.
    _batch: dict[str, Connection]
    #: The file of a run's database without events, which later runs copy.
    _pattern: bytes | None
    #: Tables, columns and migrations that exist. Dagster looks for them with each event, and never removes
    #: one.
    _existing: set[tuple[str, ...]]
    #: Records of assets (None: there is none) as they were after these changes to the database of all runs: a
    #: number that other processes' commits change (sqlite.org/pragma.html#pragma_data_version), and how many
    #: rows this one has changed.
    _records: dict[dg.AssetKey, AssetRecord | None]
    _changes: tuple[int, int]

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._turn:  # The lock makes one connection per database enough.
            if (connection := self._batch.get(shard)) is not None:
                yield connection
                return
            with (connection := self._connection(shard)).begin():
                yield connection

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events in one transaction of each database; if this fails, Dagster stores them one by one."""
        with self._turn, ExitStack() as stack:
            stack.callback(self._batch.clear)
            for shard in {INDEX_SHARD_NAME, *(event.run_id for event in events)}:
                self._batch[shard] = stack.enter_context(self._connect(shard))
            super().store_event_batch(events)

    def store_event(self, event: EventLogEntry) -> None:
        """Store an event; the record of its asset is read again."""
        with self._turn:
            before = self._own_changes()
            super().store_event(event)
            if event.dagster_event is not None and event.dagster_event.asset_key is not None:
                self._records.pop(event.dagster_event.asset_key, None)
            if before == self._changes[1]:
                self._changes = self._changes[0], self._own_changes()

    def get_asset_records(self, asset_keys: Sequence[dg.AssetKey] | None = None) -> Sequence[AssetRecord]:
        """The records of assets, which are read only where something may have changed since."""
        if asset_keys is None:
            return super().get_asset_records()
        with self._turn:
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
        connection = self._open.get(INDEX_SHARD_NAME)
        driver: Any = connection and connection.connection.driver_connection
        return driver.total_changes if driver else 0

    def _make(self, engine: Engine, path: Path) -> None:
        """Create a database's tables."""
        if path.exists():
            if not _is_made(engine):
                self._initdb(engine)
        elif self._pattern is None:
            self._initdb(engine)
            engine.dispose()  # Closing moves all pages from SQLite's log into the one file.
            self._pattern = path.read_bytes()
        else:
            made = path.with_suffix(".making")
            made.write_bytes(self._pattern)
            try:
                path.hardlink_to(made)
            except OSError:  # Another process has created the file, or the file system has no hard links.
                self._initdb(engine)
            finally:
                made.unlink()

    def has_table(self, table_name: str) -> bool:
        """Whether the database of all runs has a table."""
        return self._has((table_name,), lambda: super(KeptEventLog, self).has_table(table_name))

    def _has_asset_key_col_on_connection(self, conn: Connection, column_name: str) -> bool:
        has_column = super()._has_asset_key_col_on_connection
        return self._has(("asset_keys", column_name), lambda: has_column(conn, column_name))

    def has_secondary_index(self, name: str) -> bool:
        """Whether a data migration was applied to the database of all runs."""
        return self._has(("migration", name), lambda: super(KeptEventLog, self).has_secondary_index(name))

    def _has(self, entry: tuple[str, ...], look: Callable[[], bool]) -> bool:
        if entry not in self._existing and look():
            self._existing.add(entry)
        return entry in self._existing

    def _connection(self, shard: str) -> Connection:
        connection, path = self._open.pop(shard, None), self.path_for_shard(shard)
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
            listen(engine, "connect", _write_soon)
            if shard not in self._initialized_dbs:
                self._make(engine, Path(path))
                self._initialized_dbs.add(shard)
            connection = engine.connect()
            if shard == INDEX_SHARD_NAME:
                self._records = {}  # A new connection counts anew.
        self._open[shard] = connection
        while len(self._open) > _KEPT:
            _close(self._open.popitem(last=False)[1])
        return connection

    def close(self) -> None:
        """Close the connections."""
        while self._open:
            _close(self._open.popitem()[1])


def _close(connection: Connection) -> None:
    connection.close()
    connection.engine.dispose()


def _is_made(engine: Engine) -> bool:
    """Whether a database's migrations were applied; otherwise Dagster has to read and apply all of them."""
    try:
        with engine.connect() as connection:
            return bool(connection.execute(text("select version_num from alembic_version")).first())
    except OperationalError:
        return False  # Another process is about to create it.


def _write_soon(connection: DBAPIConnection, _record: object) -> None:
    """Do not wait for the disk after each event.

    A power cut may lose the last events, but does not damage the database (sqlite.org/wal.html).
    """
    connection.cursor().execute("PRAGMA synchronous = NORMAL")


@contextmanager
def connections_kept(storage: EventLogStorage) -> Iterator[None]:
    """Within the block, keep the connections of Dagster's storage in SQLite open.

    Other storages stay as they are.
    """
    if type(storage) is not SqliteEventLogStorage:
        yield
        return
    # Dagster has passed this object on already, so its class is changed instead of the object.
    kept: EventLogStorage = storage
    storage.__class__ = KeptEventLog
    assert isinstance(kept, KeptEventLog)
    kept._open, kept._turn, kept._batch = OrderedDict(), RLock(), {}  # noqa: SLF001 - see above
    kept._pattern, kept._existing = None, set()  # noqa: SLF001
    kept._records, kept._changes = {}, (0, 0)  # noqa: SLF001
    ours = _BATCH not in os.environ
    os.environ.setdefault(_BATCH, _BATCH_EVENTS)
    try:
        yield
    finally:
        kept.close()
        if ours:
            del os.environ[_BATCH]
        storage.__class__ = SqliteEventLogStorage
