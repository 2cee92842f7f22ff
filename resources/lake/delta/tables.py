"""Delta tables as delta-rs opens them: held open while they are the newest version, or brought up to date.

In: paths, and the store with its options. Out: tables at their newest version. In a folder opening a table takes
milliseconds, and two looks at its log tell whether one that is open is still the newest. On an object store opening it takes
several requests, one after the other, and bringing it up to date one or two. Each thread has tables of its own: delta-rs
changes the one that it commits with. Raises what delta-rs does.
"""

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store

#: So many tables of folders a thread holds open: a step asks for the same few again and again, then for others.
_HELD = 4

#: What tells a file from another one of its name.
Stamp = tuple[int, int, int]


@cache
def shared_tables(options: tuple[tuple[str, str], ...]) -> "Tables":
    """The tables that all of this process hold open which reach a store by the same options."""
    return Tables(Store(options))


class Tables:
    """The tables of a lake."""

    def __init__(self, store: Store) -> None:
        self.options = dict(store.options) or None
        self._open = threading.local()
        #: Counts what was removed: a table that was opened before may be another one.
        self._removals = 0

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""
        if is_uri(path):
            return self.open_if_any(path) is not None
        return Path(path, "_delta_log").is_dir() and DeltaTable.is_deltatable(path)

    def open_if_any(self, path: str) -> DeltaTable | None:
        """The newest version of a table; None where there is none."""
        if not is_uri(path):
            return self._in_folder(path) if self.exists(path) else None
        try:
            return self.open(path)
        except TableNotFoundError:
            return None

    def open(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        if not is_uri(path):
            return self._in_folder(path)
        tables = self._mine()
        if (table := tables.get(path)) is None:
            tables[path] = table = DeltaTable(path, storage_options=self.options)
        else:
            table.update_incremental()
        return table

    def _in_folder(self, path: str) -> DeltaTable:
        folders: dict[str, tuple[DeltaTable, Stamp]] = self._open.__dict__.setdefault("folders", {})
        if path in folders:
            table, stamp = folders.pop(path)
            version = table.version()
            if stamp == _stamp(path, version) and _stamp(path, version + 1) is None:
                folders[path] = table, stamp
                return table
        table = DeltaTable(path)
        if newest := _stamp(path, table.version()):
            while len(folders) >= _HELD:
                folders.pop(next(iter(folders)))
            folders[path] = table, newest
        return table

    def as_of(self, path: str, version: int) -> DeltaTable:
        """One version of a table, which stays at it."""
        return DeltaTable(path, version=version, storage_options=self.options)

    def remembered(
        self, path: str, table: DeltaTable, query: str, rows: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """What a query of a small table gives: on an object store it is asked once for each version of the table."""
        if not is_uri(path):
            return rows()
        version, answers = self._answers().get(path, (None, {}))
        if version != table.version():
            answers = {}
            self._answers()[path] = (table.version(), answers)
        if query not in answers:
            answers[query] = rows()
        return [dict(row) for row in answers[query]]

    def forget(self) -> None:
        """Open all tables anew: some have been removed."""
        self._removals += 1

    def _mine(self) -> dict[str, DeltaTable]:
        """The tables that this thread holds open."""
        if getattr(self._open, "removals", None) != self._removals:
            self._open.tables, self._open.answers, self._open.removals = {}, {}, self._removals
        tables: dict[str, DeltaTable] = self._open.tables
        return tables

    def _answers(self) -> dict[str, tuple[int, dict[str, list[dict[str, Any]]]]]:
        """What this thread has read, by table: its version, and the rows by query."""
        self._mine()
        answers: dict[str, tuple[int, dict[str, list[dict[str, Any]]]]] = self._open.answers
        return answers


def _stamp(path: str, version: int) -> Stamp | None:
    """The log's entry of a version; None where there is none."""
    try:
        entry = Path(path, "_delta_log", f"{version:020d}.json").stat()
    except OSError:
        return None
    return entry.st_ino, entry.st_mtime_ns, entry.st_size
