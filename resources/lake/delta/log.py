"""Reads the log of a Delta table backwards, and adds entries that delta-rs cannot write.

In: a table in a folder or on an object store.
Out: - the actions of the log entries from a version backwards, and then the actions of the last checkpoint
     - a new entry, which is created atomically, and at most once

In a folder a hard link creates the entry. On an object store a conditional PUT creates the entry;
`conditional_put_check` has checked that the store supports it. Both fail if the name exists already. Raises OSError,
CommitFailedError if another writer was faster, and UnmarkableError.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Delta Log Entries, Checkpoints)
"""

import errno
import json
import os
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.exceptions import CommitFailedError
from pyarrow.fs import LocalFileSystem

from pgsieve.resources.lake.stores.objects import Objects, is_transient, open_objects
from pgsieve.resources.lake.stores.store import Store, join_path

#: An action of the log, or the content of an action.
Action = dict[str, Any]

#: The number of entries that are read at the same time. On an object store each read takes a request.
_PARALLEL_READS = 16
_LAST_CHECKPOINT = "_last_checkpoint"
#: Those fields of actions that are maps.
_MAP_FIELDS = frozenset({"partitionValues", "tags", "configuration", "options"})
#: The errors of os.link on file systems that have no hard links.
NO_LINK_ERRORS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}


class UnmarkableError(Exception):
    """Rows of a table cannot be marked as deleted, and rewriting their files is impossible or too much work.

    The log of the table is incomplete, or this process cannot add an entry to it, or the table does not permit it.
    """


class Files(Protocol):
    """The files of a table. Their names are relative to the table's folder. Each file is read and written as a whole."""

    def verify_creation(self) -> None:
        """Raise UnmarkableError if `create` cannot create any file in the log."""

    def read(self, name: str) -> bytes | None:
        """The bytes of a file. None if it does not exist.

        Raises OSError; on an object store it raises UnmarkableError if this process may not read the file.
        """

    def write(self, name: str, content: bytes) -> None:
        """Write a file with a name that no other file has. It is durable when this function returns."""

    def create(self, name: str, content: bytes) -> None:
        """Create a file, atomically.

        No other writer may write the same bytes (`Log.commit` says why). Raises FileExistsError if another file has this
        name.
        """


class FolderFiles:
    """The files of a table in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def verify_creation(self) -> None:
        """Raise UnmarkableError if the file system of the log's folder has no hard links."""
        file_path, link_path = (self._folder / "_delta_log" / f"_link_{uuid.uuid4()}.tmp" for _ in range(2))
        try:
            file_path.touch()
            os.link(file_path, link_path)
        except OSError as error:
            if error.errno not in NO_LINK_ERRORS:
                raise
            raise UnmarkableError(f"{self._folder}: {error.strerror}") from error
        finally:
            for created_file in (file_path, link_path):
                created_file.unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file. None if it does not exist."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file with a name that no other file has. It is on disk when this function returns."""
        with (self._folder / name).open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())

    def create(self, name: str, content: bytes) -> None:
        """Create a file atomically. Raises FileExistsError if another file has this name."""
        path = self._folder / name
        temporary_path = path.with_name(f"_commit_{uuid.uuid4()}.json.tmp")
        try:
            self.write(str(temporary_path.relative_to(self._folder)), content)
            # A link fails if the name exists. A rename would replace the other file.
            os.link(temporary_path, path)
        finally:
            temporary_path.unlink(missing_ok=True)


class StoreFiles:
    """The files of a table on an object store."""

    def __init__(self, objects: Objects, folder: str) -> None:
        self._objects, self._folder = objects, folder

    def verify_creation(self) -> None:
        """Do nothing, because `conditional_put_check` has checked the store already."""

    def read(self, name: str) -> bytes | None:
        """The bytes of a file. None if it does not exist.

        Raises UnmarkableError if the store refuses the request, and would refuse it again. This may happen because
        delta-rs, which has read the table, has other credentials.
        """
        try:
            return self._objects.read(f"{self._folder}/{name}")
        except OSError as error:
            if is_transient(error):
                raise
            raise UnmarkableError(f"{self._folder}/{name} cannot be read: {error}") from error

    def write(self, name: str, content: bytes) -> None:
        """Write a file with a name that no other file has. The store confirms it only when it is durable."""
        self._objects.write(f"{self._folder}/{name}", content)

    def create(self, name: str, content: bytes) -> None:
        """Create a file atomically. Raises FileExistsError if another file has this name."""
        self._objects.create(f"{self._folder}/{name}", content)


class Log:
    """The log of a table, and the files in the folder of the table."""

    def __init__(self, path: str, store: Store, files: Files) -> None:
        self.path, self._store, self.files = path, store, files

    @classmethod
    def open(cls, path: str, store: Store) -> "Log | None":
        """The log of a table. None if this process cannot add entries to it."""
        file_system, inner_path = store.find_file_system(path)
        if isinstance(file_system, LocalFileSystem):
            return cls(path, store, FolderFiles(Path(inner_path)))
        objects = open_objects(path, store.options)
        return None if objects is None else cls(path, store, StoreFiles(objects, inner_path))

    def commit(self, version: int, actions: Iterable[Action]) -> None:
        """Create the log entry of a version, atomically. Raises CommitFailedError if this version exists already.

        One of the actions must have a unique identifier, so that no other writer creates an entry with the same bytes:
        if an object store reports an error, but has such an entry, the entry counts as created by this call.
        """
        # The txn action, which has the table's position (an LSN), comes last. If it is there, the entry was not cut off
        # (`complete_entries`).
        ordered_actions = sorted(actions, key=lambda action: "txn" in action)
        lines = (json.dumps(action, separators=(",", ":")) + "\n" for action in ordered_actions)
        try:
            self.files.create(_make_entry_name(version), "".join(lines).encode())
        except FileExistsError:
            raise CommitFailedError(
                f"version {version} of {self.path} was committed by another writer"
            ) from None

    def read_backwards(
        self, version: int, action_kind: str, fields: Collection[str] | None
    ) -> Iterator[Iterable[Action]]:
        """Yield the actions of one kind, entry by entry, from `version` backwards; at last those of the checkpoint.

        The checkpoint is the last one up to `version`. Its actions have only `fields`; None means all fields. Raises
        UnmarkableError if the checkpoint or an entry after it is missing.
        """
        checkpoint_version = self._find_last_checkpoint(version)
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            # Read only a few entries at a time, because the caller may stop before the last one.
            for begin in range(version, checkpoint_version, -_PARALLEL_READS):
                entry_versions = range(begin, max(begin - _PARALLEL_READS, checkpoint_version), -1)
                for entry_version, entry in zip(
                    entry_versions, pool.map(self._read_entry, entry_versions), strict=True
                ):
                    if entry is None:
                        raise UnmarkableError(f"version {entry_version} is missing in the log of {self.path}")
                    yield [action[action_kind] for action in entry if action_kind in action]
        if checkpoint_version >= 0:
            yield self._read_checkpoint_actions(checkpoint_version, action_kind, fields)

    def _read_entry(self, version: int) -> Sequence[Action] | None:
        """The actions of the log entry of a version. None if there is no such entry."""
        content = self.files.read(_make_entry_name(version))
        return (
            None if content is None else [json.loads(line) for line in content.splitlines() if line.strip()]
        )

    def _find_last_checkpoint(self, version: int) -> int:
        """The version of the last checkpoint, if it is a single file in the classic format, and not after `version`.

        Otherwise -1. In that case all entries are read, which is possible if none of them was removed.
        """
        try:
            last_checkpoint = json.loads(self.files.read(f"_delta_log/{_LAST_CHECKPOINT}") or b"{}")
        except ValueError:
            return -1
        checkpoint_version = int(last_checkpoint.get("version", -1))
        is_classic = not (last_checkpoint.get("parts") or last_checkpoint.get("v2Checkpoint"))
        return checkpoint_version if is_classic and checkpoint_version <= version else -1

    def _read_checkpoint_actions(
        self, version: int, action_kind: str, fields: Collection[str] | None
    ) -> Iterator[Action]:
        """The actions of one kind in the checkpoint of a version, with some fields."""
        file_system, inner_path = self._store.find_file_system(
            join_path(self.path, f"_delta_log/{version:020}.checkpoint.parquet")
        )
        try:
            stream = file_system.open_input_file(inner_path)
        except FileNotFoundError:
            raise UnmarkableError(f"checkpoint {version} is missing in the log of {self.path}") from None
        with stream, pq.ParquetFile(stream) as file:
            names = [field.name for field in file.schema_arrow.field(action_kind).type]
            columns = [f"{action_kind}.{name}" for name in names if fields is None or name in fields]
            for batch in file.iter_batches(columns=columns):
                actions = batch.column(action_kind)
                yield from map(_to_json_action, actions.filter(pc.is_valid(actions)).to_pylist())


def _make_entry_name(version: int) -> str:
    """The name of the log entry of a version, relative to the table's folder."""
    return f"_delta_log/{version:020}.json"


def _to_json_action(action: Mapping[str, Any]) -> Action:
    """An action of a checkpoint in the format of log entries: maps are objects, and NULLs are left out."""
    json_action = {key: value for key, value in action.items() if value is not None}
    for key, value in json_action.items():
        if key in _MAP_FIELDS:
            json_action[key] = dict(value)
        elif isinstance(value, dict):
            json_action[key] = {
                inner_key: dict(inner_value) if inner_key in _MAP_FIELDS else inner_value
                for inner_key, inner_value in value.items()
                if inner_value is not None
            }
    return json_action
