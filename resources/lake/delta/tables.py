"""Delta tables as delta-rs opens them: held open, and brought up to date where they are not the newest version.

In: paths, and the store with its options. Out: tables at their newest version. In a folder opening a table costs several
times what a commit costs, and two looks at its log tell whether one that is open is still the newest. On an object store
opening it takes several requests, one after the other, and bringing it up to date one or two. Each thread has tables of its
own, as delta-rs changes the one that it commits with; one that has finished with its work leaves them to others
(`Tables.lend`). Raises what delta-rs does.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store

#: So many tables of folders a thread holds open, and so many wait for a thread: one takes up to a megabyte.
_HELD = 128

#: What tells a file from another one of its name.
Stamp = tuple[int, int, int]


@cache
def shared_tables(options: tuple[tuple[str, str], ...]) -> "Tables":
    """The tables that all of this process hold open which reach a store by the same options."""
    return Tables(Store(options))


@dataclass(slots=True)
class _Held:
    """A table that is held open; `answers` are what has been read of a version."""

    table: DeltaTable
    #: In a folder: a version that it had, and the log's entry of that.
    seen: tuple[int, Stamp] | None = None
    answers: tuple[int, dict[str, list[dict[str, Any]]]] = field(default_factory=lambda: (-1, {}))

    def follows(self, path: str) -> bool:
        """Bring the table to its newest version; False where the folder is not that table's any more."""
        if self.seen is None:
            self.table.update_incremental()
            return True
        version, stamp = self.seen
        if _stamp(path, version) != stamp:
            return False
        # What was committed with it, it has already.
        if _stamp(path, self.table.version() + 1) is not None:
            try:
                self.table.update_incremental()
            except DeltaError:
                return False
        return self.table.version() == version or self.is_seen(path)

    def is_seen(self, path: str) -> bool:
        """Remember the log's entry of the version; False where there is none."""
        version = self.table.version()
        stamp = _stamp(path, version)
        self.seen = None if stamp is None else (version, stamp)
        return stamp is not None


class Tables:
    """The tables of a lake."""

    def __init__(self, store: Store) -> None:
        self.options = dict(store.options) or None
        self._threads = threading.local()
        self._lock = threading.Lock()
        #: Tables that no thread works with.
        self._idle = OrderedDict[str, _Held]()
        #: Counts what was removed: a table that was opened before may be another one.
        self._removals = 0

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""
        if is_uri(path):
            return self.open_if_any(path) is not None
        return Path(path, "_delta_log").is_dir() and DeltaTable.is_deltatable(path)

    def open_if_any(self, path: str) -> DeltaTable | None:
        """The newest version of a table; None where there is none."""
        if (held := self._held(path)) is not None:
            return held.table
        if not is_uri(path):
            return self._opened(path) if self.exists(path) else None
        try:
            return self._opened(path)
        except TableNotFoundError:
            return None

    def open(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        held = self._held(path)
        return self._opened(path) if held is None else held.table

    def _held(self, path: str) -> _Held | None:
        """One that this thread holds open, or nobody, at its newest version; None where there is none."""
        mine = self._mine()
        held = mine.pop(path, None)
        if held is None:
            with self._lock:
                held = self._idle.pop(path, None)
        if held is None or not held.follows(path):
            return None
        mine[path] = held
        return held

    def _opened(self, path: str) -> DeltaTable:
        held, mine = _Held(DeltaTable(path, storage_options=self.options)), self._mine()
        if is_uri(path) or held.is_seen(path):
            mine[path] = held
            if not is_uri(path) and len(mine) > _HELD:
                mine.popitem(last=False)
        return held.table

    def lend(self) -> None:
        """Leave what this thread holds open to whoever asks next: it works with none of them at the moment."""
        mine = self._mine()
        with self._lock:
            self._idle.update(mine)
            while len(self._idle) > _HELD:
                self._idle.popitem(last=False)
        mine.clear()

    def as_of(self, path: str, version: int) -> DeltaTable:
        """One version of a table, which stays at it."""
        return DeltaTable(path, version=version, storage_options=self.options)

    def remembered(
        self, path: str, table: DeltaTable, query: str, rows: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """What a query of a small table gives, by a text that says which: it is asked once for each version of a table that is held open."""
        held = self._mine().get(path)
        if held is None or held.table is not table:
            return rows()
        version, answers = held.answers
        if version != table.version():
            answers = {}
            held.answers = table.version(), answers
        if query not in answers:
            answers[query] = rows()
        return [dict(row) for row in answers[query]]

    def forget(self) -> None:
        """Open all tables anew: some have been removed."""
        with self._lock:
            self._removals += 1
            self._idle.clear()

    def _mine(self) -> OrderedDict[str, _Held]:
        """The tables that this thread holds open."""
        if getattr(self._threads, "removals", None) != self._removals:
            self._threads.tables, self._threads.removals = OrderedDict[str, _Held](), self._removals
        tables: OrderedDict[str, _Held] = self._threads.tables
        return tables


def _stamp(path: str, version: int) -> Stamp | None:
    """The log's entry of a version; None where there is none."""
    try:
        entry = Path(path, "_delta_log", f"{version:020d}.json").stat()
    except OSError:
        return None
    return entry.st_ino, entry.st_mtime_ns, entry.st_size
