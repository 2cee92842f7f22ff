"""Apply to one replica table by files: many transformed changes -> its net change, in one commit, without a JVM.

In: a batch's changes in the files of the change history. Out: `Applied`. What becomes of the keys is decided by columns
(`decided_keys`); then threads of this process write the rows that come, from the row groups of the history, and once more the
replica's files of which rows go. Where that would be too much, or rows of them are marked already, rows that go are marked in
deletion vectors. `writer` does the same by Spark, also where rows move or a column was left out: the rows,
the counts and the position are the same. Raises LakeError.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.applied import Applied, Pending, merged, outcome
from pgsieve.assets.steps.apply.decided_keys import DecidedKeys, Mask, Places, keyed_events, places_of
from pgsieve.assets.steps.subscription import Definition
from pgsieve.resources.lake.delta.conforming import conformed
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.executors import Guard
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import Reader, RowGroup, joined, parted
from pgsieve.resources.lake.way import Way, is_exact

#: The keys of a batch may have so many bytes: they are held at once.
KEY_BYTES = 256 * 1024 * 1024
#: So many keys are looked at one change after the other, whether an INSERT met a row.
SUSPECTS = 100_000
#: Files of a replica are written once more without the rows that go where it is small, as a setting of the lake says, or where they
#: have up to so many times the bytes of the changes; else the rows are marked as deleted.
REWRITTEN = 4


@dataclass(frozen=True)
class ManyChanges:
    """A batch's changes as they are stored, what becomes of their keys, which are `present` in the replica, and where.

    `schema` has the columns of the rows. Without a key there are INSERTs alone, and nothing is decided. `added` is how the
    replica's log has the files in which rows are to be marked; None where the files are to be written once more.
    """

    groups: Sequence[RowGroup]
    schema: pa.Schema
    decided: DecidedKeys | None
    matches: Sequence[FileMatches]
    present: Mask
    added: Sequence[Mapping[str, Any]] | None = None


def many_changes(
    lake: Lake, path: str, log: str, definition: Definition, pending: Pending
) -> ManyChanges | None:
    """A batch's changes, where this process may apply them by files; None where Spark has to.

    `path` is the replica, `log` its transformed changes.
    """
    types, key = dict(definition.columns), definition.key
    finds_rows = bool(pending.sent("update", "delete"))
    if not lake.has_threads or lake.local is None or pending.truncated_at is not None:
        return None
    if finds_rows and (not key or pending.key_changes or pending.unchanged):
        return None
    if not is_exact(types[name] for name in key) or _may_be_of_other_key(definition, pending):
        return None
    slices = [c.slice for c in pending.slices]
    groups = lake.slice_groups(log, slices, every=True)
    if groups is None:
        return None
    with lake.refusing(log):
        rows = lake.local.arrow_schema(log).field("new").type
    schema = pa.schema([rows.field(name) for name in definition.names])
    if lake.way(path, definition.names, None, lambda: schema) is not Way.FILES:
        return None
    if not key:
        return ManyChanges(groups, schema, None, (), np.empty(0, np.bool_))
    keys = pa.schema([schema.field(name) for name in key])
    since, files = pending.standing.position or 0, dict.fromkeys(group.file for group in groups)
    with lake.refusing(log):
        events = keyed_events(lake.store, files, keys, slices, since, KEY_BYTES)
    # What was sent under another replica identity may lack columns of the key: MERGE compares such keys in its own way.
    if events is None or any(column.null_count for column in events.keys.columns):
        return None
    decided = DecidedKeys.of(events)
    if (found := _found(lake, path, definition, decided, pending)) is None:
        return None
    matches, added = found
    present = np.zeros(decided.keys.num_rows, np.bool_)
    for match in matches:
        present[match.keys] = True
    if np.count_nonzero(decided.suspect(present)) > SUSPECTS:
        return None
    return ManyChanges(groups, schema, decided, matches, present, added)


def _found(
    lake: Lake, path: str, definition: Definition, decided: DecidedKeys, pending: Pending
) -> tuple[Sequence[FileMatches], Sequence[Mapping[str, Any]] | None] | None:
    """Where the replica has rows of the keys, and how its log has those files where rows are to be marked; None for Spark."""
    assert lake.local is not None
    with lake.refusing(path):
        marks, most = lake.takes_marking(path, definition.names), REWRITTEN * pending.size
        if not marks or lake.records.size(path) <= lake.rewritten_bytes:
            most = max(most, lake.rewritten_bytes)
        elif lake.rewritten_bytes < 0:
            most = 0
        among = decided.expected, decided.absent
        matches = lake.local.matches(path, decided.keys, among, None if marks else most)
    if not matches:
        return None if matches is None else ((), None)
    if sum(match.size for match in matches) <= most and lake.takes_rewriting(path, definition.names):
        return matches, None
    added = lake.files_to_mark(path, matches, pending.standing.version) if marks else None
    return None if added is None else (matches, added)


def _may_be_of_other_key(definition: Definition, pending: Pending) -> bool:
    """Whether some changes may be of the table's former key: rows may have been equal in the present one then."""
    former = definition.former
    if former is None or former.key == definition.key_numbers:
        return False
    return (pending.standing.position or 0) < former.until


@dataclass(frozen=True)
class FilesWriter:
    """Brings the net change of many changes into one replica table, in one commit."""

    lake: Lake
    path: str
    pending: Pending
    end: int

    def apply(self, changes: ManyChanges) -> Applied:
        """Apply the changes, none of which meets a row of its key."""
        if (decided := changes.decided) is None:
            return outcome(self.lake, self.path, self.pending, self.end, inserted=self._commit(changes, None))
        present, stays = changes.present, decided.upserted | decided.updated
        kept = np.sort(decided.lasts[decided.upserted | decided.updated & present])
        expected = int(np.count_nonzero(decided.expected))
        if not expected and not len(kept):
            return outcome(self.lake, self.path, self.pending, self.end)
        self._commit(changes, kept)
        counts = {
            "inserted": np.count_nonzero(decided.upserted & ~present),
            "updated": np.count_nonzero(stays & present),
            "deleted": np.count_nonzero(~stays & present),
        }
        return merged(
            self.lake, self.path, self.pending, self.end, {k: int(n) for k, n in counts.items()}, expected
        )

    def _commit(self, changes: ManyChanges, kept: Places | None) -> int:
        """Have the files written, and commit them; how many rows they have."""
        lake, path, local = self.lake, self.path, self.lake.local
        assert local is not None
        parts = parted(changes.groups, lake.executors.number)
        whole, size = local.arrow_schema(path), lake.file_bytes(path, {})
        base, rewritten = self.pending.standing.version, changes.matches if changes.added is None else ()

        def write(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            if number < len(rewritten):
                match = rewritten[number]
                batches = lake.store.batches(joined(path, match.name), whole)
                return write_files(
                    path, whole, guard(_without(batches, match.rows)), store=lake.store, size=size
                )
            rows = self._rows(parts[number - len(rewritten)], changes.schema, kept)
            return write_files(path, changes.schema, guard(rows), store=lake.store, size=size)

        def written() -> pa.Table:
            return lake.executors.written(write, len(rewritten) + len(parts))

        if changes.added is not None:
            marked = zip(changes.matches, changes.added, strict=True)
            files = lake.commit_marked(written, path, marked, self.end, base)
        else:
            removed = {match.path: match.size for match in rewritten}
            files = lake.commit_files(written, path, changes.schema, self.end, base=base, removed=removed)
        return sum(json.loads(file["stats"])["numRecords"] for file in files)

    def _rows(
        self, groups: Sequence[RowGroup], schema: pa.Schema, kept: Places | None
    ) -> Iterator[pa.RecordBatch]:
        """The new rows of the changes at some places, which are in order; without such places of all INSERTs."""
        rows_of, store = pa.schema([("new", pa.struct(schema))]), self.lake.store
        with store.ahead(groups, (self._kept(read, kept) for _, read in store.readers(groups))) as read:
            for rows in read:
                if rows is not None:
                    yield pa.RecordBatch.from_struct_array(conformed(rows, rows_of)["new"].combine_chunks())

    def _kept(self, read: Reader, kept: Places | None) -> pa.Table | None:
        """Of a row group the new rows of the changes at some places; None where there are none."""
        slices, since = [c.slice for c in self.pending.slices], self.pending.standing.position or 0
        changes = read(["slice", "number", "commit_lsn", "operation"])
        places = places_of(changes, slices)
        if kept is None:
            inserted = np.asarray(pc.equal(changes["operation"], "insert"))
            chosen = (places >= 0) & (np.asarray(changes["commit_lsn"]) >= since) & inserted
        else:
            chosen = _is_in(places, kept)
        if not chosen.any():
            return None
        rows = read(["new"])
        return rows if chosen.all() else rows.filter(pa.array(chosen))


def _is_in(places: Places, kept: Places) -> Mask:
    """Which places are among those that are kept, in order."""
    if not len(kept):
        return np.zeros(len(places), np.bool_)
    at = np.minimum(np.searchsorted(kept, places), len(kept) - 1)
    is_in: Mask = kept[at] == places
    return is_in


def _without(batches: Iterator[pa.RecordBatch], rows: Places) -> Iterator[pa.RecordBatch]:
    """The rows of a file but for some, by their numbers."""
    gone, begin = np.sort(rows), 0
    for batch in batches:
        end = begin + batch.num_rows
        first, last = np.searchsorted(gone, (begin, end))
        stays = np.ones(batch.num_rows, np.bool_)
        stays[gone[first:last] - begin] = False
        begin = end
        if stays.any():
            yield batch if stays.all() else batch.filter(pa.array(stays))
