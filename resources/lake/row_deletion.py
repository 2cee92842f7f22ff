"""Decides how to delete rows of a Delta table: by rewriting their files, or by marking the rows as deleted.

In: - the rows to delete, file by file
    - the size of the changes that delete them, in bytes
Out: `DeletedRows`.

Raises LakeError, and UnmarkableError if rows can be deleted in neither way.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.lake import Lake

#: Files are rewritten if the table is small (a setting of the lake says how small), or if the files together have
#: at most this many times the bytes of the changes. Otherwise the rows are marked as deleted.
MAX_REWRITE_RATIO = 4


@dataclass(frozen=True)
class DeletedRows:
    """Rows to delete from a table, file by file.

    If `are_marked`, they are to be marked as deleted; otherwise their files are to be rewritten.
    """

    matches: Sequence[FileMatches] = ()
    are_marked: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the arrays take."""
        return sum(
            numbers.nbytes
            for match in self.matches
            for numbers in (match.row_numbers, match.key_indices, match.deleted_row_numbers)
        )

    @property
    def rewritten_files(self) -> Sequence[FileMatches]:
        """The files to rewrite. Empty if the rows are to be marked."""
        return () if self.are_marked else self.matches


@dataclass(frozen=True)
class RowDeletion:
    """Decides how to delete rows of the table at `path`, which has `columns`. `change_bytes` are the bytes of the changes.

    With `max_table_bytes`, no file of a larger table is rewritten if its rows can be marked. None means no such limit.
    `writes_feed` says whether the caller also writes the table's change data feed, if it has one.
    """

    lake: Lake
    committer: FileCommitter
    path: str
    columns: Collection[str]
    change_bytes: int
    max_table_bytes: int | None = None
    writes_feed: bool = False

    def decide(self, matches: Sequence[FileMatches]) -> DeletedRows:
        """The decision for these rows. Raises UnmarkableError if they can be deleted in neither way."""
        if not matches:
            return DeletedRows()
        is_small = sum(match.size_bytes for match in matches) <= self.max_rewritten_bytes
        if is_small and self.committer.can_rewrite_files(
            self.path, self.columns, writes_feed=self.writes_feed
        ):
            return DeletedRows(matches)
        if not self.can_mark_rows:
            raise UnmarkableError("rows can neither be marked as deleted, nor their files be rewritten")
        return DeletedRows(matches, are_marked=True)

    def enable_marking(self) -> bool:
        """Enable deletion vectors if deleted rows are marked, however few they are. Returns True if this was a commit.

        Raises UnmarkableError.
        """
        return (
            not self.max_rewritten_bytes and self.can_mark_rows and self.committer.enable_marking(self.path)
        )

    @cached_property
    def can_mark_rows(self) -> bool:
        """True if rows of the table may be marked as deleted."""
        return self.committer.can_mark_rows(self.path, self.columns, writes_feed=self.writes_feed)

    @cached_property
    def max_rewritten_bytes(self) -> int:
        """Files of at most this many bytes together are rewritten; otherwise rows are marked (`Policy.rewritten_bytes`)."""
        bytes_by_ratio, lake_limit = MAX_REWRITE_RATIO * self.change_bytes, self.lake.policy.rewritten_bytes
        small_table_bytes = (
            lake_limit if self.max_table_bytes is None else min(lake_limit, self.max_table_bytes)
        )
        if not self.can_mark_rows or self.lake.records.size_bytes(self.path) <= small_table_bytes:
            return max(bytes_by_ratio, lake_limit)
        return 0 if lake_limit < 0 or self.max_table_bytes is not None else bytes_by_ratio
