"""Lists and reads the log entries of a Delta table. The list shows whether an open table is at its newest version.

In: the path of the table, and its store.
Out: maps versions to stamps, from a version on. If an entry is replaced by another one with the same name, the stamp
     differs. And the actions of an entry.

In a folder, and on a store that only delta-rs can reach, only two entries are looked up, by name: that of the version at
the last check, and the one after the open table's version. On other object stores one request lists the entries. A
listing may be outdated. So if an entry must exist and is not listed, it is requested by its name. Raises OSError, and
DamagedTableError if an entry is incomplete, or has another size than expected. An object store never stores a part of
an object, so there only an empty entry counts as incomplete.
"""

import json
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pgsieve.resources.lake.delta.complete_entries import NO_ACTIONS, find_defect
from pgsieve.resources.lake.delta.errors import make_damaged_log_error
from pgsieve.resources.lake.stores.objects import Objects, open_objects
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store

#: Distinguishes a log entry from an earlier entry with the same name. The last element is the size of the entry in bytes.
Stamp = tuple[Hashable, ...]

_ENTRY = re.compile(r"(\d{20})\.json")


class LogEntries:
    """The log entries of one table."""

    def __init__(self, path: str, store: Store) -> None:
        self._path, self._log_path = path, f"{path}/_delta_log"
        self._store, self._is_uri = store, is_uri(path)
        self._folder = urlsplit(self._log_path).path.strip("/")
        self._objects: Objects | None = open_objects(path, store.options) if self._is_uri else None

    def read_stamps_since(self, version: int, newest_version: int) -> Mapping[int, Stamp]:
        """The stamps of the entries of `version`, and of the version after `newest_version`, if these entries exist.

        The result may contain other entries, too.
        """
        if self._objects is None:
            stamps = ((number, self.read_stamp(number)) for number in (version, newest_version + 1))
            return {number: stamp for number, stamp in stamps if stamp is not None}
        # The order of the names is the order of the versions.
        stamps_by_name = self._objects.list_stamps(
            self._folder, after_name=_make_entry_name(version - 1) if version else None
        )
        stamp_by_version: dict[int, Stamp] = {
            int(match[1]): stamp
            for name, stamp in stamps_by_name.items()
            if (match := _ENTRY.fullmatch(name))
        }
        if version not in stamp_by_version and (stamp := self.read_stamp(version)) is not None:
            stamp_by_version[version] = stamp
        return stamp_by_version

    def read_stamp(self, version: int) -> Stamp | None:
        """The stamp of the entry of a version. None if the entry does not exist."""
        if self._objects is not None:
            return self._objects.read_stamp(f"{self._folder}/{_make_entry_name(version)}")
        if self._is_uri:
            return self._store.read_stamp(f"{self._log_path}/{_make_entry_name(version)}")
        try:
            entry = Path(self._log_path, _make_entry_name(version)).stat()
        except OSError:
            return None
        return entry.st_ino, entry.st_mtime_ns, entry.st_size

    def entry_bytes(self, version: int) -> int | None:
        """The size in bytes of the entry of a version. None if the entry does not exist."""
        stamp = self.read_stamp(version)
        return None if stamp is None else _read_stamp_bytes(stamp)

    def read_actions(self, version: int) -> list[Mapping[str, Any]]:
        """The actions of the entry of a version. Empty if the entry does not exist."""
        file_system, inner_path = self._store.find_file_system(
            f"{self._log_path}/{_make_entry_name(version)}"
        )
        try:
            with file_system.open_input_stream(inner_path) as stream:
                return [json.loads(line) for line in stream.read().splitlines() if line.strip()]
        except FileNotFoundError:
            return []

    def raise_if_damaged(self, version: int, stamp: Stamp, entry_bytes: int | None = None) -> None:
        """Raise DamagedTableError if an entry is incomplete, or if its size is not `entry_bytes`."""
        if not _read_stamp_bytes(stamp):
            defect: str | None = NO_ACTIONS
        elif entry_bytes is not None:
            defect = None if _read_stamp_bytes(stamp) == entry_bytes else "has another size than was written"
        elif self._is_uri:
            return
        else:
            defect = find_defect(Path(self._log_path, _make_entry_name(version)).read_bytes())
        if defect is not None:
            raise make_damaged_log_error(self._path, f"its entry {version} {defect}")

    def has_entries(self) -> bool:
        """True if the table may have a log on the object store. Always true if only delta-rs can reach the store."""
        return self._objects is None or bool(self._objects.list_stamps(self._folder))


def _read_stamp_bytes(stamp: Stamp) -> int:
    """The size in bytes of the entry with this stamp."""
    size = stamp[-1]
    assert isinstance(size, int)
    return size


def _make_entry_name(version: int) -> str:
    """The name of the log entry of a version."""
    return f"{version:020d}.json"
