"""Dagster's event log in SQLite, with connections that stay open.

In: an event log storage as Dagster makes it by its configuration. Out: the same, in the same files. Dagster
makes an engine and a connection for each statement. The last connection that closes checkpoints the
database's log, which is most of the cost of an event. A run with changes in 200 tables has some thousand
events; those that plan its steps are stored in one transaction. Each run has a database of its own, whose
tables Dagster's migrations create; here the others copy the first run's. Raises the errors of Dagster's
storage.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock

from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import EventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.event import listen
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import QueuePool

#: Open databases at most: one for all runs, one for events without a run, and the newest run's own.
_KEPT = 3
#: How long a statement waits for another process, as in Dagster.
_BUSY_SECONDS = 30
#: Dagster's settings of an event's batch: its size, and the upper limit.
_BATCH, _BATCH_EVENTS = "DAGSTER_EVENT_BATCH_SIZE", "1000"


class KeptEventLog(SqliteEventLogStorage):
    """The storage whose connections stay open; `connections_kept` makes it from Dagster's own."""

    #: One connection for each database.
    _open: OrderedDict[str, Connection]
    _turn: RLock
    #: The connections of a batch, each in a transaction.
    _batch: dict[str, Connection]
    #: A run's database before its first event.
    _pattern: bytes | None
    #: Existing tables, columns and migrations: Dagster looks for them with each event, and none is removed.
    _there: set[tuple[str, ...]]

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._turn:  # So one connection per database is enough.
            if (connection := self._batch.get(shard)) is not None:
                yield connection
                return
            with (connection := self._connection(shard)).begin():
                yield connection

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store some events in one transaction of each database.

        Where it fails, Dagster stores them one by one.
        """
        with self._turn, ExitStack() as stack:
            stack.callback(self._batch.clear)
            for shard in {INDEX_SHARD_NAME, *(event.run_id for event in events)}:
                self._batch[shard] = stack.enter_context(self._connect(shard))
            super().store_event_batch(events)

    def _make(self, engine: Engine, path: Path) -> None:
        """Create a database's tables."""
        if path.exists():
            if not _is_made(engine):
                self._initdb(engine)
        elif self._pattern is None:
            self._initdb(engine)
            engine.dispose()  # Then all of it is in one file.
            self._pattern = path.read_bytes()
        else:
            made = path.with_suffix(".making")
            made.write_bytes(self._pattern)
            try:
                path.hardlink_to(made)
            except OSError:  # Another process was faster, or the file system has no links.
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

    def _has(self, what: tuple[str, ...], look: Callable[[], bool]) -> bool:
        if what not in self._there and look():
            self._there.add(what)
        return what in self._there

    def _connection(self, shard: str) -> Connection:
        connection, path = self._open.pop(shard, None), self.path_for_shard(shard)
        if connection is not None and not os.path.exists(path):  # noqa: PTH110 - asked for each event
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
    """Whether a database records its migration: otherwise Dagster reads all of its migrations, and applies them."""
    try:
        with engine.connect() as connection:
            return bool(connection.execute(text("select version_num from alembic_version")).first())
    except OperationalError:
        return False  # Another process is about to create it.


def _write_soon(connection: DBAPIConnection, _record: object) -> None:
    """Do not wait for the disk with each event: a power cut may lose the last ones, never the database (sqlite.org/wal.html)."""
    connection.cursor().execute("PRAGMA synchronous = NORMAL")


@contextmanager
def connections_kept(storage: EventLogStorage) -> Iterator[None]:
    """Let Dagster's own storage in SQLite keep its connections open in the block.

    Other storages do so themselves.
    """
    if type(storage) is not SqliteEventLogStorage:
        yield
        return
    # Dagster makes its storages itself, and passes them to others: this one has to stay the same object.
    kept: EventLogStorage = storage
    storage.__class__ = KeptEventLog
    assert isinstance(kept, KeptEventLog)
    kept._open, kept._turn, kept._batch = OrderedDict(), RLock(), {}  # noqa: SLF001 - see above
    kept._pattern, kept._there = None, set()  # noqa: SLF001
    ours = _BATCH not in os.environ
    os.environ.setdefault(_BATCH, _BATCH_EVENTS)
    try:
        yield
    finally:
        kept.close()
        if ours:
            del os.environ[_BATCH]
        storage.__class__ = SqliteEventLogStorage
