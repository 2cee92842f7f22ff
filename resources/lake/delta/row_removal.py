"""Removes rows of a table in one commit: marks them as deleted, or tells whether their files can be rewritten.

In: a table that delta-rs can reach, and the rows to remove.
Out: one commit, which is made only once per position.

Files can be rewritten without the rows (`Commits.commit`) if the rows of the table are exactly the rows of its
files. Rows can be marked in deletion vectors (`deletion_vectors`) if this process can add an entry to the table's
log. Raises UnmarkableError, and OvertakenError if the table has another version than when the rows were found.
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

#: The characters in names of objects that delta-rs encodes twice when it opens a deletion vector. It then does not
#: find the vector.
_ENCODED_TWICE = frozenset('~%{}^`[]"<>#|*?\\')


def has_hidden_vectors(path: str) -> bool:
    """True if delta-rs cannot find deletion vectors of a table because of the table's path. Spark can find them."""
    return is_uri(path) and not path.startswith("file:") and not _ENCODED_TWICE.isdisjoint(path)


def can_rewrite_files(commits: Commits, path: str, columns: Collection[str]) -> bool:
    """True if files of a table may be rewritten with fewer rows: the table is plain, and `allows_row_changes`.

    So the table must have exactly these columns. If a user has added columns, only a MERGE would keep their
    values.
    """
    table = commits.table_at(path)
    return (
        is_plain(table)
        and all(map(is_removable, pa.table(table.get_add_actions())["path"].to_pylist()))
        and allows_row_changes(table, columns)
    )


def can_mark_rows(commits: Commits, path: str, columns: Collection[str]) -> bool:
    """True if `mark_rows` may mark rows of a table: it can add log entries, and the table `allows_row_changes`.

    So the table must have exactly these columns, as for `can_rewrite_files`.
    """
    return can_enable_marking(commits, path) and allows_row_changes(commits.table_at(path), columns)


def can_enable_marking(commits: Commits, path: str) -> bool:
    """True if `enable_marking` may enable deletion vectors in a table, and this process can add entries to its log."""
    if has_hidden_vectors(path):
        return False
    return Log.of(path, commits.store) is not None and allows_marks(commits.table_at(path))


def enable_marking(commits: Commits, path: str) -> None:
    """Enable deletion vectors in a table. Its rows and its position stay as they are. Raises UnmarkableError."""
    log, table = _log(commits, path), commits.table_at(path)
    log.files.verify_creation()
    information = _information(
        "SET TBLPROPERTIES", table.version(), unchanged_metadata(commits.position(path))
    )
    deletion_vectors.enable(log, table, information)


def markable_files(commits: Commits, path: str, names: Collection[str], base: int) -> dict[str, Action]:
    """Maps the names of some files to their `add` actions. Raises UnmarkableError if rows of the table cannot be marked."""
    log = _log(commits, path)
    log.files.verify_creation()
    return deletion_vectors.added_files(log, base, names)


def marked_files(commits: Commits, path: str, matches: Sequence[FileMatches], base: int) -> list[MarkedFile]:
    """The files that contain `matches`, with their `add` actions, and with these rows marked as deleted, for `mark_rows`.

    Raises UnmarkableError if rows of the table cannot be marked.
    """
    return with_marks(markable_files(commits, path, {match.name for match in matches}, base), matches)


def with_marks(files: Mapping[str, Action], matches: Sequence[FileMatches]) -> list[MarkedFile]:
    """The files that contain `matches`, with these rows marked as deleted. `files` is a result of `markable_files`."""
    # The rows of a match are not deleted yet, so no row occurs twice. NumPy's union would take ten times as long.
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
    """Mark rows as deleted, and add files, in one commit. It is made only once per position.

    - `files`: rows of `FILE_SCHEMA`
    - `position`: None if the table keeps its position
    - `base`: has the same meaning as in `Commit`

    The table must have deletion vectors enabled.
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
    """Create a checkpoint if the table is due for one. delta-rs creates checkpoints only after its own commits."""
    interval = int(table.metadata().configuration.get("delta.checkpointInterval", 100))
    if table.version() % interval == 0:
        table.create_checkpoint()


def _log(commits: Commits, path: str) -> Log:
    """The log of a table to which this process can add entries."""
    log = Log.of(path, commits.store)
    assert log is not None  # `can_mark_rows` has checked it.
    return log


def _information(operation: str, base: int, metadata: str) -> dict[str, Any]:
    """The commitInfo of a commit that this process makes itself. It is in delta-rs's format, and has a unique identifier."""
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
