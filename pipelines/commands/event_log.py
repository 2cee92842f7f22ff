"""Dagster's event log in SQLite, with connections that stay open.

In: an event log storage as Dagster makes it by its configuration. Out: the same, in the same files. Dagster makes an engine and a
connection for each statement, and the last one that closes a database checkpoints its log: that is most of what an event
costs. A run with changes in 200 tables has some thousand events. And each run has a database of its own, whose tables
Dagster's migrations make: here those of the first one are the pattern of the others. Raises what Dagster's storage does.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster._core.storage.event_log import EventLogStorage, SqliteEventLogStorage
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.event import listen
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import QueuePool

#: A run's own database, that of all runs, and that of events without a run; a continuous command makes many runs.
_KEPT = 3
#: So long a statement waits for another process, as with Dagster.
_BUSY_SECONDS = 30


class KeptEventLog(SqliteEventLogStorage):
    """The storage whose connections stay open; made of one of Dagster's by `connections_kept`."""

    _engines: OrderedDict[str, Engine]
    #: A run's database before its first event.
    _pattern: bytes | None
    #: Tables and columns that are there: Dagster looks at the schema with each event, and no migration takes one away.
    _there: set[tuple[str, ...]]

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._db_lock:  # So one connection a database is enough.
            engine = self._engine(shard)
            if shard not in self._initialized_dbs:
                self._make(engine, Path(self.path_for_shard(shard)))
                self._initialized_dbs.add(shard)
            with engine.connect() as connection, connection.begin():
                yield connection

    def _make(self, engine: Engine, path: Path) -> None:
        """Have a database have its tables."""
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
            except OSError:  # Somebody was faster, or a file system has no links.
                self._initdb(engine)
            finally:
                made.unlink()

    def has_table(self, table_name: str) -> bool:
        """Whether the database of all runs has a table."""
        return self._has((table_name,), lambda: super(KeptEventLog, self).has_table(table_name))

    def _has_asset_key_col_on_connection(self, conn: Connection, column_name: str) -> bool:
        has_column = super()._has_asset_key_col_on_connection
        return self._has(("asset_keys", column_name), lambda: has_column(conn, column_name))

    def _has(self, what: tuple[str, ...], look: Callable[[], bool]) -> bool:
        if what not in self._there and look():
            self._there.add(what)
        return what in self._there

    def _engine(self, shard: str) -> Engine:
        engine = self._engines.pop(shard, None)
        if engine is not None and not Path(self.path_for_shard(shard)).exists():
            engine.dispose()  # Somebody has removed the file.
            engine = None
        if engine is None:
            engine = create_engine(
                self.conn_string_for_shard(shard),
                poolclass=QueuePool,
                pool_size=1,
                connect_args={"timeout": _BUSY_SECONDS},
            )
            listen(engine, "connect", _write_soon)
        self._engines[shard] = engine
        while len(self._engines) > _KEPT:
            self._engines.popitem(last=False)[1].dispose()
        return engine

    def close(self) -> None:
        """Close the connections."""
        while self._engines:
            self._engines.popitem()[1].dispose()


def _is_made(engine: Engine) -> bool:
    """Whether a database says which migration made it: then Dagster makes nothing, after it has read all of its migrations."""
    try:
        with engine.connect() as connection:
            return bool(connection.execute(text("select version_num from alembic_version")).first())
    except OperationalError:
        return False  # Another process is about to make it.


def _write_soon(connection: DBAPIConnection, _record: object) -> None:
    """Do not wait for the disk with each event: a power cut may take the last ones, never the database (sqlite.org/wal.html)."""
    connection.cursor().execute("PRAGMA synchronous = NORMAL")


@contextmanager
def connections_kept(storage: EventLogStorage) -> Iterator[None]:
    """Let Dagster's own storage in SQLite keep its connections open in the block; others do so themselves."""
    if type(storage) is not SqliteEventLogStorage:
        yield
        return
    # Dagster makes its storages itself, and hands them to others: this one has to stay the same object.
    kept: EventLogStorage = storage
    storage.__class__ = KeptEventLog
    assert isinstance(kept, KeptEventLog)
    kept._engines, kept._pattern, kept._there = OrderedDict(), None, set()  # noqa: SLF001 - see above
    try:
        yield
    finally:
        kept.close()
        storage.__class__ = SqliteEventLogStorage
