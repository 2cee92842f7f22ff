"""Decides how rows of a Delta table are deleted: by rewriting their files without them, or by marking them.

In: the rows, file by file, and the bytes of the changes that delete them. Out: `DeletedRows`. Raises
LakeError.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from pgsieve.resources.lake.committers import ByFiles
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.lake import Lake

#: Files are rewritten without deleted rows if the table is small, by a setting of the lake, or if they have
#: at most this many times the bytes of the changes. Otherwise the rows are marked as deleted.
REWRITTEN = 4


@dataclass(frozen=True)
class DeletedRows:
    """Deleted rows of a table, file by file. They are `marked`, or otherwise their files are rewritten."""

    matches: Sequence[FileMatches] = ()
    marked: bool = False

    @property
    def nbytes(self) -> int:
        """The memory of the arrays, in bytes."""
        return sum(each.nbytes for m in self.matches for each in (m.rows, m.keys, m.deleted))

    @property
    def rewritten(self) -> Sequence[FileMatches]:
        """The files that are rewritten."""
        return () if self.marked else self.matches


@dataclass(frozen=True)
class RowDeletion:
    """Decides how rows of a table with these columns are deleted, for changes of `size` bytes.

    In tables larger than `limit` no file is rewritten; None: as in replicas.
    """

    lake: Lake
    committer: ByFiles
    path: str
    columns: Collection[str]
    size: int
    limit: int | None = None

    def of(self, matches: Sequence[FileMatches]) -> DeletedRows | None:
        """How these rows are deleted; None if they can be deleted in neither way."""
        if not matches:
            return DeletedRows()
        is_little = sum(match.size for match in matches) <= self.most
        if is_little and self.committer.takes_rewriting(self.path, self.columns):
            return DeletedRows(matches)
        return DeletedRows(matches, marked=True) if self.takes_marks else None

    @cached_property
    def takes_marks(self) -> bool:
        """Whether rows may be marked."""
        return self.committer.takes_marking(self.path, self.columns)

    @cached_property
    def most(self) -> int:
        """The largest number of bytes of files to rewrite."""
        most, limit = REWRITTEN * self.size, self.lake.policy.rewritten_bytes
        least = limit if self.limit is None else min(limit, self.limit)
        if not self.takes_marks or self.lake.records.size(self.path) <= least:
            return max(most, limit)
        return 0 if limit < 0 or self.limit is not None else most
