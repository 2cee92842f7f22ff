"""Removes rows of a table in one commit: marks them as deleted, or checks that their files can be rewritten.

In: a table that delta-rs can reach, and the rows to remove. Out: one commit, once per position. Files can be
rewritten without rows (`Commits.commit`) if the table's rows are exactly the rows of its files. Rows can be
marked in deletion vectors (`deletion_vectors`) if this process can add an entry to the log. Raises OvertakenError
if the table has another version than when the rows were looked up, and UnmarkableError.
"""

import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from pgsieve.resources.lake.delta import deletion_vectors
from pgsieve.resources.lake.delta.commits import Commits, has_position, is_removable
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.log import Action, Log
from pgsieve.resources.lake.delta.records import APPLICATION, Commit, unchanged_metadata
from pgsieve.resources.lake.delta.requirements import allows_marks, allows_row_changes, is_plain
from pgsieve.resources.lake.stores.storage import is_uri

#: The characters in names of objects that delta-rs encodes twice when it opens a deletion vector, so that it does
#: not find the vector.
_ENCODED_TWICE = frozenset('~%{}^`[]"<>#|*?\\')


def has_hidden_vectors(path: str) -> bool:
    """Whether delta-rs cannot find deletion vectors of a table because of its path. Spark can."""
    return is_uri(path) and not path.startswith("file:") and not _ENCODED_TWICE.isdisjoint(path)


def can_rewrite_files(commits: Commits, path: str, columns: Collection[str]) -> bool:
    """Whether files of a table may be rewritten with fewer rows: the table is plain, and `allows_row_changes`.

    So it has exactly these columns. Only a merge would keep the values of columns that a user has added.
    """
    table = commits.table_at(path)
    return (
        is_plain(table)
        and all(map(is_removable, pa.table(table.get_add_actions())["path"].to_pylist()))
        and allows_row_changes(table, columns)
    )


def can_mark_rows(commits: Commits, path: str, columns: Collection[str]) -> bool:
    """Whether `mark_rows` may mark rows of a table: it can add log entries, and the table `allows_row_changes`.

    So the table has exactly these columns, as for `can_rewrite_files`.
    """
    return can_enable_marking(commits, path) and allows_row_changes(commits.table_at(path), columns)


def can_enable_marking(commits: Commits, path: str) -> bool:
    """Whether `enable_marking` may enable deletion vectors in a table: this process can add entries to its log."""
    if has_hidden_vectors(path):
        return False
    return Log.of(path, commits.store) is not None and allows_marks(commits.table_at(path))


def enable_marking(commits: Commits, path: str) -> None:
    """Enable deletion vectors in a table; rows and position stay. Raises UnmarkableError."""
    log, table = _log(commits, path), commits.table_at(path)
    log.files.verify_creation()
    information = _information(
        "SET TBLPROPERTIES", table.version(), unchanged_metadata(commits.position(path))
    )
    deletion_vectors.enable(log, table, information)


def markable_files(commits: Commits, path: str, names: Collection[str], base: int) -> dict[str, Action]:
    """The `add` actions of some files, by the files' names. Raises UnmarkableError if rows of the table cannot be marked."""
    log = _log(commits, path)
    log.files.verify_creation()
    return deletion_vectors.added_files(log, base, names)


def marked_files(commits: Commits, path: str, matches: Sequence[FileMatches], base: int) -> list[MarkedFile]:
    """The files that have `matches`, with their `add` actions and these rows marked as deleted, for `mark_rows`.

    Raises UnmarkableError if rows of the table cannot be marked.
    """
    return with_marks(markable_files(commits, path, {match.name for match in matches}, base), matches)


def with_marks(files: Mapping[str, Action], matches: Sequence[FileMatches]) -> list[MarkedFile]:
    """The files that have `matches`, of those of `markable_files`, with these rows marked as deleted."""
    # No row of a match is deleted already, so NumPy's union is not needed, which takes ten times as long.
    return [
        MarkedFile(files[match.name], np.sort(np.concatenate([match.deleted, match.rows])))
        for match in matches
    ]


def mark_rows(
    commits: Commits,
    path: str,
    marked: Sequence[MarkedFile],
    files: Iterable[Mapping[str, Any]],
    position: int | None,
    base: int,
) -> None:
    """Mark rows as deleted, and add files, in one commit, once per position (None: the table keeps its position).

    `files` are rows of `FILE_SCHEMA`; `base` as in `Commit`. The table must have deletion vectors enabled.
    """
    commit, now = Commit(position, base=base), time.time_ns() // 1_000_000
    added = [
        {
            "path": file["path"],
            "partitionValues": {},
            "size": file["size"],
            "modificationTime": now,
            "dataChange": True,
            "stats": file["stats"],
        }
        for file in files
    ]
    others: list[dict[str, Any]] = [{"commitInfo": _information("MERGE", base, commit.user_metadata)}]
    if position is not None:
        others.append({"txn": {"appId": APPLICATION, "version": position, "lastUpdated": now}})

    def attempt(table: DeltaTable | None) -> None:
        if table is None or has_position(path, commits.head_of(path, table), commit):
            return
        deletion_vectors.commit_marked(_log(commits, path), base, marked, added, others, now)
        _checkpoint(commits.table_at(path))

    commits.commit_with_retries(path, attempt, commit)


def _checkpoint(table: DeltaTable) -> None:
    """Create a checkpoint if it is due; delta-rs does so only after its own commits."""
    interval = int(table.metadata().configuration.get("delta.checkpointInterval", 100))
    if table.version() % interval == 0:
        table.create_checkpoint()


def _log(commits: Commits, path: str) -> Log:
    log = Log.of(path, commits.store)
    assert log is not None  # `can_mark_rows` has checked it.
    return log


def _information(operation: str, base: int, metadata: str) -> dict[str, Any]:
    """The commitInfo of a commit of this process, in delta-rs's format, with a unique identifier."""
    return {
        "timestamp": time.time_ns() // 1_000_000,
        "operation": operation,
        "operationParameters": {},
        "readVersion": base,
        "isBlindAppend": False,
        "engineInfo": "pgsieve",
        "userMetadata": metadata,
        "txnId": str(uuid.uuid4()),
    }
