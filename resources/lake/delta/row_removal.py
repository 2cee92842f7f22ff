"""Removes rows of a table in one commit: by rewriting their files without them, or by marking them as deleted.

In: a table that delta-rs can reach, and the rows to remove. Out: one commit, once per position. Files can be
rewritten (`Commits.commit`) if the table's rows are exactly those of its files. Rows can be marked in
deletion vectors (`deletion_vectors`) if this process can add an entry to the log. Raises OverrunError if the
table has another version than the one in which the rows were looked up, and UnmarkableError.
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
from pgsieve.resources.lake.delta.log import Log
from pgsieve.resources.lake.delta.records import APPLICATION, Commit, unchanged_metadata
from pgsieve.resources.lake.delta.requirements import allows_marks, allows_row_changes, is_plain
from pgsieve.resources.lake.stores.storage import is_uri

#: Characters of names in object stores that delta-rs encodes once more where it looks for a deletion vector: it finds none.
_ENCODED_AGAIN = frozenset('~%{}^`[]"<>#|*?\\')


def has_hidden_vectors(path: str) -> bool:
    """Whether delta-rs finds no deletion vector of a table because of its path; Spark finds them."""
    return is_uri(path) and not path.startswith("file:") and not _ENCODED_AGAIN.isdisjoint(path)


def can_rewrite_files(commits: Commits, path: str, columns: Collection[str]) -> bool:
    """Whether files of a table may be rewritten with fewer rows: the table is plain, and requires no more of writers.

    It must have only these `columns`, because columns that a user has added keep their values only in a
    merge.
    """
    table = commits.table_at(path)
    return (
        is_plain(table)
        and all(map(is_removable, pa.table(table.get_add_actions())["path"].to_pylist()))
        and allows_row_changes(table, columns)
    )


def can_mark_rows(commits: Commits, path: str, columns: Collection[str]) -> bool:
    """Whether `mark_rows` may mark rows of a table: this process can add log entries, and no more is required of writers.

    The table must have only these `columns`, as for `can_rewrite_files`.
    """
    return can_enable_marking(commits, path) and allows_row_changes(commits.table_at(path), columns)


def can_enable_marking(commits: Commits, path: str) -> bool:
    """Whether `enable_marking` may enable deletion vectors in a table, to whose log this process can add entries."""
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


def marked_files(commits: Commits, path: str, matches: Sequence[FileMatches], base: int) -> list[MarkedFile]:
    """The files that have `matches`, with their `add` actions and these rows marked as deleted, for `mark_rows`.

    Raises UnmarkableError if rows of the table cannot be marked.
    """
    log = _log(commits, path)
    log.files.verify_creation()
    added = deletion_vectors.added_files(log, base, {match.name for match in matches})
    # No row of a match is deleted already. NumPy's union, which looks for equal ones, takes ten times as long.
    return [
        MarkedFile(added[match.name], np.sort(np.concatenate([match.deleted, match.rows])))
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
    """Mark rows as deleted, and add files, in one commit, once per position.

    None leaves the position as it is. `base` as in `Commit`. The table must have deletion vectors enabled.
    """
    commit, now = Commit(position, base=base), time.time_ns() // 1_000_000
    new = [
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
        deletion_vectors.commit_marked(_log(commits, path), base, marked, new, others, now)
        _checkpoint(commits.table_at(path))

    commits.commit_with_retries(path, attempt, commit)


def _checkpoint(table: DeltaTable) -> None:
    """Make a checkpoint, as delta-rs does after its own commits."""
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
