"""Decides how to delete rows of a Delta table: rewrite their files without them, or mark them.

In: the rows, file by file, and the bytes of the changes that delete them. Out: `DeletedRows`. Raises
LakeError.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.lake import Lake

#: Files are rewritten if the table is small, by a setting of the lake, or if the files have at most this many
#: times the bytes of the changes. Otherwise the rows are marked as deleted.
MAX_REWRITE_RATIO = 4


@dataclass(frozen=True)
class DeletedRows:
    """Deleted rows of a table, file by file. They are to be marked, or else their files are to be rewritten."""

    matches: Sequence[FileMatches] = ()
    marked: bool = False

    @property
    def nbytes(self) -> int:
        """The memory of the arrays, in bytes."""
        return sum(each.nbytes for m in self.matches for each in (m.rows, m.keys, m.deleted))

    @property
    def rewritten(self) -> Sequence[FileMatches]:
        """The files to rewrite."""
        return () if self.marked else self.matches


@dataclass(frozen=True)
class RowDeletion:
    """Decides how to delete rows of a table with these columns, for changes of `size` bytes.

    In tables of more than `limit` bytes no file is rewritten; None means the limit of replicas.
    """

    lake: Lake
    committer: FileCommitter
    path: str
    columns: Collection[str]
    size: int
    limit: int | None = None

    def of(self, matches: Sequence[FileMatches]) -> DeletedRows | None:
        """The decision for these rows; None if they can be neither rewritten nor marked."""
        if not matches:
            return DeletedRows()
        is_small = sum(match.size for match in matches) <= self.max_rewritten_bytes
        if is_small and self.committer.can_rewrite_files(self.path, self.columns):
            return DeletedRows(matches)
        return DeletedRows(matches, marked=True) if self.can_mark_rows else None

    @cached_property
    def can_mark_rows(self) -> bool:
        """Whether rows of the table may be marked."""
        return self.committer.can_mark_rows(self.path, self.columns)

    @cached_property
    def max_rewritten_bytes(self) -> int:
        """The largest number of bytes of files to rewrite."""
        by_ratio, limit = MAX_REWRITE_RATIO * self.size, self.lake.policy.rewritten_bytes
        small_table = limit if self.limit is None else min(limit, self.limit)
        if not self.can_mark_rows or self.lake.records.size(self.path) <= small_table:
            return max(by_ratio, limit)
        return 0 if limit < 0 or self.limit is not None else by_ratio
