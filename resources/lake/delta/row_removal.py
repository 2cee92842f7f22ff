"""Marks rows of a Delta table as deleted, in one commit. Also finds out in which ways the rows can be removed.

In: a table that delta-rs can reach, and the rows to remove.
Out: one commit. It has a position, the LSN up to which the table then has all changes. A second commit with this
    position is not made.

Files can be rewritten without the rows (`Commits.commit`) if the rows of the table are exactly the rows of its
files. Rows can be marked in deletion vectors (`deletion_vectors`) if this process can add an entry to the table's
log. Raises UnmarkableError if rows cannot be marked, and OvertakenError if the table has another version than when the
rows were found.
"""

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from pgsieve.resources.lake.delta import deletion_vectors
from pgsieve.resources.lake.delta.change_data import is_change_file, make_change_action
from pgsieve.resources.lake.delta.commits import Commits, has_position, is_removable
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.log import Action, Log
from pgsieve.resources.lake.delta.records import APPLICATION_ID, Commit, make_unchanged_position_metadata
from pgsieve.resources.lake.delta.requirements import (
    can_change_rows,
    can_have_vectors,
    has_change_feed,
    has_plain_rows,
)
from pgsieve.resources.lake.stores.storage import is_uri

#: If the path of an object has one of these characters, delta-rs encodes it twice when it opens a deletion vector, and
#: does not find the vector.
_ENCODED_TWICE = frozenset('~%{}^`[]"<>#|*?\\')


def has_hidden_vectors(path: str) -> bool:
    """True if delta-rs cannot find deletion vectors of a table because of the table's path. Spark can find them."""
    return is_uri(path) and not path.startswith("file:") and not _ENCODED_TWICE.isdisjoint(path)


def can_rewrite_files(
    commits: Commits, path: str, columns: Collection[str], *, writes_feed: bool = False
) -> bool:
    """True if files of a table may be rewritten with fewer rows.

    The rows of the table must be exactly those of its files (`requirements.has_plain_rows`), and
    `requirements.can_change_rows` must be true. For this the table must have exactly the columns `columns`: if a user has
    added columns, only a MERGE keeps their values in updated rows. A table with a change data feed also needs a log to which
    this process can add entries.
    """
    table = commits.open_table(path)
    return (
        has_plain_rows(table)
        and all(map(is_removable, pa.table(table.get_add_actions())["path"].to_pylist()))
        and can_change_rows(table, columns, writes_feed=writes_feed)
        and (not has_change_feed(table) or Log.open(path, commits.store) is not None)
    )


def can_mark_rows(
    commits: Commits, path: str, columns: Collection[str], *, writes_feed: bool = False
) -> bool:
    """True if `mark_rows` may mark rows of a table.

    This process must be able to add entries to the table's log. `requirements.can_change_rows` must be true, as for
    `can_rewrite_files`.
    """
    return can_enable_marking(commits, path) and can_change_rows(
        commits.open_table(path), columns, writes_feed=writes_feed
    )


def can_enable_marking(commits: Commits, path: str) -> bool:
    """True if `enable_marking` may enable deletion vectors in a table, and this process can add entries to its log."""
    if has_hidden_vectors(path):
        return False
    return Log.open(path, commits.store) is not None and can_have_vectors(commits.open_table(path))


def enable_marking(commits: Commits, path: str) -> None:
    """Enable deletion vectors in a table. Its rows and its position stay as they are. Raises UnmarkableError."""
    log, table = _open_log(commits, path), commits.open_table(path)
    log.files.verify_creation()
    commit_info = _make_commit_info(
        "SET TBLPROPERTIES", table.version(), make_unchanged_position_metadata(commits.position(path))
    )
    deletion_vectors.enable_vectors(log, table, commit_info)


def find_markable_files(
    commits: Commits, path: str, names: Collection[str], expected_version: int
) -> dict[str, Action]:
    """Maps the names of some files to their `add` actions. Raises UnmarkableError if rows of the table cannot be marked."""
    log = _open_log(commits, path)
    log.files.verify_creation()
    return deletion_vectors.find_add_actions(log, expected_version, names)


def make_marked_files(files: Mapping[str, Action], matches: Sequence[FileMatches]) -> list[MarkedFile]:
    """Make a `MarkedFile` of each file that contains `matches`.

    Its deleted rows are these rows and those marked before.

    `files` is a result of `find_markable_files`.
    """
    # The rows of a match are not deleted yet. So no row is in both arrays, and no union is needed, which would take ten
    # times as long. Both arrays are sorted, and the stable kind of sort only merges them.
    return [
        MarkedFile(
            files[match.name],
            np.sort(np.concatenate([match.deleted_row_numbers, match.row_numbers]), kind="stable"),
        )
        for match in matches
    ]


def mark_rows(
    commits: Commits,
    path: str,
    marked_files: Sequence[MarkedFile],
    files: Sequence[Mapping[str, Any]],
    position: int | None,
    expected_version: int,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Mark rows as deleted, and add files, in one commit. It is made only once per position.

    - `files`: a row (`parquet_files.FILE_SCHEMA`) for each file to add, also if it belongs to the change data feed
    - `position`: None if the table keeps its position
    - `metadata`: is added to the user metadata of the commit
    - `expected_version`: the version of the table from which the change was computed. If the table has another version,
      OvertakenError is raised.

    The table must have deletion vectors enabled, unless all rows of each marked file are deleted.
    """
    commit, now_ms = (
        Commit(position, expected_version=expected_version, metadata=metadata),
        time.time_ns() // 1_000_000,
    )
    add_actions = [
        {
            "path": file["path"],
            "partitionValues": {},
            "size": file["size"],
            "modificationTime": now_ms,
            "dataChange": True,
            "stats": file["stats"],
        }
        for file in files
        if not is_change_file(file)
    ]
    other_actions: list[dict[str, Any]] = [
        {"commitInfo": _make_commit_info("MERGE", expected_version, commit.user_metadata)},
        *(make_change_action(file) for file in files if is_change_file(file)),
    ]
    if position is not None:
        other_actions.append({"txn": {"appId": APPLICATION_ID, "version": position, "lastUpdated": now_ms}})

    def attempt(table: DeltaTable | None) -> None:
        if table is None or has_position(path, commits.read_head(path, table), commit):
            return
        deletion_vectors.commit_marked_files(
            _open_log(commits, path), expected_version, marked_files, add_actions, other_actions, now_ms
        )
        _write_checkpoint(commits.open_table(path))

    commits.commit_with_retries(path, attempt, commit)


def _write_checkpoint(table: DeltaTable) -> None:
    """Create a checkpoint if the table is due for one. delta-rs creates checkpoints only after its own commits."""
    interval = int(table.metadata().configuration.get("delta.checkpointInterval", 100))
    if table.version() % interval == 0:
        table.create_checkpoint()


def _open_log(commits: Commits, path: str) -> Log:
    """The log of a table to which this process can add entries."""
    log = Log.open(path, commits.store)
    assert log is not None  # `can_enable_marking` has checked it.
    return log


def _make_commit_info(operation: str, read_version: int, metadata: str) -> dict[str, Any]:
    """The commitInfo of a commit that this process makes itself. It is in delta-rs's format, and has a unique identifier."""
    return {
        "timestamp": time.time_ns() // 1_000_000,
        "operation": operation,
        "operationParameters": {},
        "readVersion": read_version,
        "isBlindAppend": False,
        "engineInfo": "pgsieve",
        "userMetadata": metadata,
        "txnId": str(uuid.uuid4()),
    }
