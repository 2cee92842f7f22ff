"""Lists the entries of a Delta table's log from a version on, before each use of an open table.

In: the table's path, and access to its store. Out: entries by version, each with a stamp that differs between
entries of the same name. In a folder, and on a store that only delta-rs reaches, two files are checked. On
other object stores this takes one listing, during which other threads work. A listing may be outdated, so an
entry that the caller expects is requested by its name. Raises OSError, and DamagedTableError if an entry is
incomplete. A store never cuts off an object, so an incomplete entry there is empty.
"""

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pgsieve.resources.lake.delta.complete_entries import NO_ACTIONS, find_defect
from pgsieve.resources.lake.delta.errors import damaged_log_error
from pgsieve.resources.lake.stores.objects import Objects, objects_at
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store

#: Distinguishes entries of the same name. The last element is the entry's size in bytes.
Stamp = tuple[Hashable, ...]

_ENTRY = re.compile(r"(\d{20})\.json")


class LogEntries:
    """The log entries of one table."""

    def __init__(self, path: str, store: Store) -> None:
        self._path, self._log = path, f"{path}/_delta_log"
        self._store, self._is_uri = store, is_uri(path)
        self._folder = urlsplit(self._log).path.strip("/")
        self._objects: Objects | None = objects_at(path, store.options) if self._is_uri else None

    def since(self, version: int, newest: int) -> Mapping[int, Stamp]:
        """The stamps of the entries of `version` and of the version after `newest`, if these exist, and perhaps of others."""
        if self._objects is None:
            stamps = ((each, self.stamp(each)) for each in (version, newest + 1))
            return {each: stamp for each, stamp in stamps if stamp is not None}
        # Names are ordered by version.
        listed = self._objects.stamps(self._folder, after=_name(version - 1) if version else None)
        entries: dict[int, Stamp] = {
            int(match[1]): stamp for name, stamp in listed.items() if (match := _ENTRY.fullmatch(name))
        }
        if version not in entries and (stamp := self.stamp(version)) is not None:
            entries[version] = stamp
        return entries

    def stamp(self, version: int) -> Stamp | None:
        """The stamp of a version's entry; None if it does not exist."""
        if self._objects is not None:
            return self._objects.stamp(f"{self._folder}/{_name(version)}")
        if self._is_uri:
            return self._store.stamp(f"{self._log}/{_name(version)}")
        try:
            entry = Path(self._log, _name(version)).stat()
        except OSError:
            return None
        return entry.st_ino, entry.st_mtime_ns, entry.st_size

    def bytes_of(self, version: int) -> int | None:
        """The size in bytes of a version's entry; None if it does not exist."""
        stamp = self.stamp(version)
        return None if stamp is None else _bytes(stamp)

    def refuse_damaged(self, version: int, stamp: Stamp, entry_bytes: int | None = None) -> None:
        """Raise DamagedTableError if an entry is incomplete, or does not have `entry_bytes` bytes."""
        if not _bytes(stamp):
            defect: str | None = NO_ACTIONS
        elif entry_bytes is not None:
            defect = None if _bytes(stamp) == entry_bytes else "is another than was written"
        elif self._is_uri:
            return
        else:
            defect = find_defect(Path(self._log, _name(version)).read_bytes())
        if defect is not None:
            raise damaged_log_error(self._path, f"its entry {version} {defect}")

    def any(self) -> bool:
        """Whether an object store may have a log; always True if only delta-rs reaches the store."""
        return self._objects is None or bool(self._objects.stamps(self._folder))


def _bytes(stamp: Stamp) -> int:
    size = stamp[-1]
    assert isinstance(size, int)
    return size


def _name(version: int) -> str:
    return f"{version:020d}.json"
