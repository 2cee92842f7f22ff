"""Delta tables as delta-rs opens them: held open, and brought up to date where they are not the newest version.

In: paths, and the store with its options. Out: tables at their newest version. In a folder opening a table costs several
times what a commit costs, and two looks at its log tell whether one that is open is still the newest. On an object store
opening it takes several requests, one after the other, and to learn whether one is the newest takes one, as to know it again does. So who asks several things
before it writes asks them of one moment there (`Tables.one_moment`). Each thread has tables of its own, as delta-rs changes the one that
it commits with; one that has finished with its work leaves them to others (`Tables.lend`). Raises what delta-rs does, OSError, and
DamagedTableError where the newest entry of a log is not whole.
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

#: So many tables of folders a thread holds open, and so many wait for a thread: one takes up to a megabyte.
_HELD = 512
#: So many tables are looked at side by side: each look waits for answers.
_LOOKS = 8


@cache
def shared_tables(options: tuple[tuple[str, str], ...]) -> "Tables":
    """The tables that all of this process hold open which reach a store by the same options."""
    return Tables(Store(options))


@dataclass(slots=True)
class _Held:
    """A table that is held open; `answers` are what has been read of a version."""

    table: DeltaTable
    #: A version that it had, and the log's entry of that.
    seen: tuple[int, Stamp]
    answers: Answers = field(default_factory=Answers)

    def follows(self, log: LogEntries) -> bool:
        """Bring the table to its newest version; False where what is at its path is not that table any more."""
        version, stamp = self.seen
        entries = log.since(version, self.table.version())
        if entries.get(version) != stamp:
            return False
        # What was committed with it, it has already.
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
        #: Tables that no thread works with.
        self._idle = OrderedDict[str, _Held]()
        #: Where there was no table on an object store, so that one look is enough to learn that there still is none.
        self._absent = set[str]()
        #: Counts what was removed: a table that was opened before may be another one.
        self._removals = 0

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table, which may have a log that cannot be read."""
        if is_uri(path):
            try:
                return self.open_if_any(path) is not None
            except DamagedTableError:
                return True
            except DeltaError as error:
                # What is wrong with the log hears who reads it.
                if store_refusal([error]) or not self.log_of(path).any():
                    raise
                return True
        try:
            return self._held(path) is not None or (_has_log(path) and DeltaTable.is_deltatable(path))
        except DamagedTableError:
            return True  # As below.

    @contextmanager
    def one_moment(
        self, paths: Collection[str] = (), ask: Callable[[str, DeltaTable], object] | None = None
    ) -> Iterator[None]:
        """Within the block this thread looks at a table of an object store once: at those of `paths` now, side by side.

        What `ask` asks a table that is there is asked then, too, for whoever asks it in the block.

        So what is planned within it is of one moment, and whoever commits afterwards looks again. Nothing is written within
        the block. In a folder, where a look costs nothing, there is no difference. A look that fails raises when it is asked for.
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
        """Look at tables that were not looked at in this moment, each in a thread of its own."""
        seen, mine = self._seen(), self._mine()
        assert seen is not None
        paths = [path for path in paths if path not in seen]
        if len(paths) < 2:
            return  # It is looked at where it is asked for.
        with self._lock:
            self._idle.update({path: mine.pop(path) for path in paths if path in mine})

        def look(path: str) -> "dict[str, _Held | Exception | None]":
            try:
                table = self.open_if_any(path)
                if ask is not None and table is not None:
                    ask(path, table)
            except Exception as error:  # noqa: BLE001 - of whoever asks for the table
                return {path: error}
            held = self._mine().pop(path, None)
            # One that is there and is not held is opened by whoever asks for it.
            return {path: held} if held is not None or table is None else {}

        with ThreadPoolExecutor(min(_LOOKS, len(paths)), "pgsieve-look") as pool:
            for each in pool.map(look, paths):
                seen |= each
        mine |= {path: held for path, held in seen.items() if path in paths and isinstance(held, _Held)}

    def open_if_any(self, path: str) -> DeltaTable | None:
        """The newest version of a table; None where there is none."""
        if (held := self._held(path)) is not None:
            return held.table
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
        """Know that a table is about to be made where there was none."""
        self._absent.discard(path)

    def open(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        held = self._held(path)
        return self._opened(path) if held is None else held.table

    def _held(self, path: str) -> _Held | None:
        """One that this thread holds open, or nobody, at its newest version; None where there is none."""
        seen, mine = self._seen(), self._mine()
        if seen is not None and path in seen:
            if isinstance(known := seen[path], Exception):
                raise known
            return known
        held = mine.pop(path, None)
        if held is None:
            with self._lock:
                held = self._idle.pop(path, None)
        if held is None or not held.follows(self.log_of(path)):
            return None
        mine[path] = held
        self._note(path, held)
        return held

    def log_of(self, path: str) -> LogEntries:
        """What looks at the log of a table."""
        return LogEntries(path, self._store)

    def _opened(self, path: str) -> DeltaTable:
        table, mine = _read(path, self.options), self._mine()
        self._absent.discard(path)
        # At once: a table that is made anew before it is used again would be taken for this one.
        version = table.version()
        log = self.log_of(path)
        stamp = log.since(version, version).get(version)
        if stamp is not None:
            log.refuse_damaged(version, stamp)
            held = mine[path] = _Held(table, (version, stamp))
            self._note(path, held)
            if not is_uri(path) and len(mine) > _HELD:
                mine.popitem(last=False)
        return table

    def lend(self) -> None:
        """Leave what this thread holds open to whoever asks next: it works with none of them at the moment."""
        mine = self._mine()
        if seen := self._seen():
            seen.clear()
        with self._lock:
            self._idle.update(mine)
            while len(self._idle) > _HELD:
                self._idle.popitem(last=False)
        mine.clear()

    def as_of(self, path: str, version: int) -> DeltaTable:
        """One version of a table, which stays at it."""
        return _read(path, self.options, version)

    def remembered(
        self, path: str, table: DeltaTable, query: str, rows: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """What a query of a small table gives, by a text that says which: it is asked once for each version of a table that is held open."""
        held = self._mine().get(path)
        if held is None or held.table is not table:
            return rows()
        return [dict(row) for row in held.answers.of(table.version(), query, rows)]

    def learn(self, path: str, table: DeltaTable, query: str, rows: list[dict[str, Any]]) -> None:
        """Know what a query gives of a version that this thread has committed with a table."""
        held = self._mine().get(path)
        if held is not None and held.table is table:
            held.answers.learn(table.version(), query, rows)

    def forget(self) -> None:
        """Open all tables anew: some have been removed."""
        with self._lock:
            self._removals += 1
            self._idle.clear()

    def _mine(self) -> OrderedDict[str, _Held]:
        """The tables that this thread holds open."""
        if getattr(self._threads, "removals", None) != self._removals:
            self._threads.tables, self._threads.removals = OrderedDict[str, _Held](), self._removals
            if seen := getattr(self._threads, "seen", None):
                seen.clear()
        tables: OrderedDict[str, _Held] = self._threads.tables
        return tables

    def _seen(self) -> "dict[str, _Held | Exception | None] | None":
        """What this thread has seen in the moment that it is in: tables, none at a path, errors; None where it is in none."""
        self._mine()  # What was removed is not there any more.
        seen: dict[str, _Held | Exception | None] | None = getattr(self._threads, "seen", None)
        return seen

    def _note(self, path: str, held: _Held) -> None:
        if is_uri(path) and (seen := self._seen()) is not None:
            seen[path] = held


@retry(
    retry=retry_if_exception(lacks_entries), wait=wait_fixed(0.2), stop=stop_after_attempt(3), reraise=True
)
def _read(path: str, options: dict[str, str] | None, version: int | None = None) -> DeltaTable:
    """A table as its log tells, again where an entry that was listed is gone: who cleans up a log removes one after the other."""
    return DeltaTable(path, version=version, storage_options=options)


def _has_log(path: str) -> bool:
    return Path(path, "_delta_log").is_dir()


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The columns of a table."""
    return pa.schema(table.schema().to_arrow())
