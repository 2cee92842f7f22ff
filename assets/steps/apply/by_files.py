"""Apply to one replica table by files: a batch's transformed changes -> its net change, in one commit.

In: a batch's changes in the files of the change history. Out: `Applied`. What becomes of the keys is decided by columns
(`pgsieve.decoding.changes.net_change`); then the executors write the rows that come, from the row groups of the history, and
once more the replica's files of which rows go. Where that would be too much, or rows of them are marked already, rows that go
are marked in deletion vectors. Raises LakeError.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.applied import Applied, Pending, merged, outcome
from pgsieve.assets.steps.apply.completion import Completion, NetRows, completions
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges, keyed_changes, places_of, stored_changes
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.net_change import Mask, NetChange, Numbers
from pgsieve.resources.lake.delta.conforming import conformed
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.executors import Guard
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import Reader, RowGroup, Store, joined, parted
from pgsieve.resources.lake.way import Way

#: The keys of a batch may have so many bytes: they are held at once. Spark brings them to this process, too, in more memory.
KEY_BYTES = 1024 * 1024 * 1024
#: Files of a replica are written once more without the rows that go where it is small, as a setting of the lake says, or where they
#: have up to so many times the bytes of the changes; else the rows are marked as deleted.
REWRITTEN = 4


@dataclass(frozen=True)
class KeyedNet:
    """What becomes of the keys of a batch: `present` in the replica, `matches` says where; `conflict` is the first one, if any.

    `added` is how the replica's log has the files in which rows are to be marked; None where they are to be written once more.
    """

    keyed: KeyedChanges
    net: NetChange
    conflict: int | None
    present: Mask
    matches: Sequence[FileMatches] = ()
    added: Sequence[Mapping[str, Any]] | None = None

    @property
    def remains(self) -> Mask:
        """Of the keys of the net change those that have a row afterwards."""
        remains: Mask = self.net.upserted | (self.net.updated & self.present[self.net.base])
        return remains


@dataclass(frozen=True)
class ManyChanges:
    """A batch's changes as they are stored; `schema` has the columns of the rows. Without a key there are INSERTs alone."""

    groups: Sequence[RowGroup]
    schema: pa.Schema
    keyed: KeyedNet | None


def many_changes(
    lake: Lake, path: str, log: str, definition: Definition, pending: Pending
) -> ManyChanges | None:
    """A batch's changes, where they are applied by files; None where Delta in Spark has to commit them.

    `path` is the replica, `log` its transformed changes.
    """
    finds_rows = bool(pending.sent("update", "delete"))
    if lake.local is None or (finds_rows and not definition.key):
        return None
    if _may_be_of_other_key(definition, pending):
        return None
    groups = lake.slice_groups(log, [c.slice for c in pending.slices], every=True)
    if groups is None:
        return None
    with lake.refusing(log):
        rows = lake.local.arrow_schema(log).field("new").type
    schema = pa.schema([rows.field(name) for name in definition.names])
    truncated = pending.truncated_at is not None
    if lake.way(path, definition.names, None, lambda: schema, overwrite=truncated) is not Way.FILES:
        return None
    if not definition.key:
        return ManyChanges(groups, schema, None)
    keys = pa.schema([schema.field(name) for name in definition.key])
    slices, since = [c.slice for c in pending.slices], pending.standing.position or 0
    with lake.refusing(log):
        files, unsent = dict.fromkeys(group.file for group in groups), sorted(pending.unchanged)
        stored = stored_changes(lake.store, files, keys, unsent)
        keyed = keyed_changes(stored, keys, unsent, slices, since, KEY_BYTES)
    net = None if keyed is None else _decided(lake, path, definition, keyed, pending)
    return None if net is None else ManyChanges(groups, schema, net)


def _decided(
    lake: Lake, path: str, definition: Definition, keyed: KeyedChanges, pending: Pending
) -> KeyedNet | None:
    """What becomes of the keys; None where the replica's rows of them can be neither written without nor marked."""
    found = _found(lake, path, definition, keyed, pending)
    if found is None:
        return None
    matches, added = found
    before = np.zeros(keyed.keys.num_rows + 1, np.bool_)
    for match in matches:
        before[match.keys] = True
    net, conflict = keyed.net(before)
    if pending.truncated_at is not None:
        return KeyedNet(keyed, net, conflict, np.zeros_like(before))
    # A key that only a lost move would have had keeps its row.
    concerned = np.zeros_like(before)
    concerned[net.keys] = True
    pairs = [
        (match.of_keys(concerned), None if added is None else added[number])
        for number, match in enumerate(matches)
        if concerned[match.keys].any()
    ]
    return KeyedNet(
        keyed,
        net,
        conflict,
        before,
        [match for match, _ in pairs],
        None if added is None else [entry for _, entry in pairs if entry is not None],
    )


def _found(
    lake: Lake, path: str, definition: Definition, keyed: KeyedChanges, pending: Pending
) -> tuple[Sequence[FileMatches], Sequence[Mapping[str, Any]] | None] | None:
    """Where the replica has rows of the keys, and how its log has those files where rows are to be marked; None for neither."""
    assert lake.local is not None
    with lake.refusing(path):
        marks, most = lake.takes_marking(path, definition.names), REWRITTEN * pending.size
        if not marks or lake.records.size(path) <= lake.rewritten_bytes:
            most = max(most, lake.rewritten_bytes)
        elif lake.rewritten_bytes < 0:
            most = 0
        matches = lake.local.matches(path, keyed.keys, keyed.lookups, None if marks else most)
    if not matches:
        return None if matches is None else ((), None)
    if pending.truncated_at is not None:
        return matches, None
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
    """Brings the net change of a batch into one replica table, in one commit."""

    lake: Lake
    path: str
    pending: Pending
    end: int

    def apply(self, changes: ManyChanges) -> Applied:
        """Apply the changes, none of which meets a row of its key."""
        lake, path, pending, end = self.lake, self.path, self.pending, self.end
        if (keyed := changes.keyed) is None:
            return outcome(lake, path, pending, end, inserted=self._commit(changes, None))
        net, remains, present = keyed.net, keyed.remains, keyed.present[keyed.net.keys]
        expected = int(np.count_nonzero(net.expected))
        truncated = pending.truncated_at is not None
        if not (expected or remains.any() or truncated):
            return outcome(lake, path, pending, end)
        self._commit(changes, keyed)
        if truncated:
            return outcome(lake, path, pending, end, inserted=int(np.count_nonzero(remains)))
        counts = {
            "inserted": np.count_nonzero(remains & ~present),
            "updated": np.count_nonzero(remains & present),
            "deleted": np.count_nonzero(~remains & present),
        }
        return merged(lake, path, pending, end, {k: int(n) for k, n in counts.items()}, expected)

    def _commit(self, changes: ManyChanges, keyed: KeyedNet | None) -> int:
        """Have the files written, and commit them; how many rows they have."""
        lake, path, local = self.lake, self.path, self.lake.local
        assert local is not None
        base, matches = self.pending.standing.version, keyed.matches if keyed is not None else ()
        added = keyed.added if keyed is not None else None
        rewritten = matches if added is None else ()
        whole, size = local.arrow_schema(path), lake.file_bytes(path, {})
        runner = lake.runner(self.pending.size)

        def written() -> pa.Table:
            files, again = [], rewritten
            for chosen in self._chosen(changes, keyed):
                parts = parted(changes.groups, runner.number)
                task = _Task(lake.store, path, changes.schema, whole, size, again, parts, chosen)
                files.append(runner.written(task, len(again) + len(parts)))
                again = ()
            return pa.concat_tables(files)

        if added is not None:
            files = lake.commit_marked(written, path, zip(matches, added, strict=True), self.end, base)
        else:
            files = lake.commit_files(
                written,
                path,
                changes.schema,
                self.end,
                base=base,
                overwrite=self.pending.truncated_at is not None,
                removed={match.path: match.size for match in rewritten},
            )
        return sum(json.loads(file["stats"])["numRecords"] for file in files)

    def _chosen(self, changes: ManyChanges, keyed: KeyedNet | None) -> Iterator["_Chosen"]:
        """Which changes have the rows that come; more than once where rows lack more values than are held at once."""
        slices, since = [c.slice for c in self.pending.slices], self.pending.standing.position or 0
        if keyed is None:
            yield _Chosen(slices, since, after=self.pending.truncated_at)
            return
        net, places = keyed.net, keyed.keyed.places[keyed.keyed.effective :]
        at = np.flatnonzero(keyed.remains)
        at = at[np.argsort(net.last[at])]
        rows = NetRows(
            places[net.last[at]],
            {name: np.where(sent[at] < 0, -1, places[sent[at]]) for name, sent in net.sent.items()},
            np.where(net.updated[at], net.base[at], -1),
        )
        read = self.lake.store, self.path, changes.groups, slices, keyed.matches
        for kept, completed in completions(*read, rows, changes.schema):
            yield _Chosen(slices, since, kept, completed)


@dataclass(frozen=True)
class _Chosen:
    """Changes whose rows come: those at the places `kept`, in order, or all INSERTs since an LSN, and after a TRUNCATE.

    `completed` are values of columns that these changes left out.
    """

    slices: Sequence[int]
    since: int
    kept: Numbers | None = None
    completed: Sequence[Completion] = ()
    after: tuple[int, int] | None = None

    def rows(self, read: Reader, kind: pa.DataType) -> pa.RecordBatch | None:
        """Of a row group the new rows of these changes; None where there are none. `kind` is the rows' type."""
        changes = read(["slice", "number", "commit_lsn", "ordinal", "operation"])
        places = places_of(changes, self.slices)
        chosen = self._inserted(changes, places) if self.kept is None else is_in(places, self.kept)
        if not chosen.any():
            return None
        rows = read(["new"])
        rows = rows if chosen.all() else rows.filter(pa.array(chosen))
        batch = pa.RecordBatch.from_struct_array(
            conformed(rows, pa.schema([("new", kind)]))["new"].combine_chunks()
        )
        for completion in self.completed:
            batch = completion.of(batch, places[chosen])
        return batch

    def _inserted(self, changes: pa.Table, places: Numbers) -> Mask:
        lsns, inserted = np.asarray(changes["commit_lsn"]), pc.equal(changes["operation"], "insert")
        chosen: Mask = (places >= 0) & (lsns >= self.since) & np.asarray(inserted)
        if self.after is not None:
            lsn, ordinal = self.after
            chosen &= (lsns > lsn) | ((lsns == lsn) & (np.asarray(changes["ordinal"]) > ordinal))
        return chosen


@dataclass(frozen=True)
class _Task:
    """Writes the files of a batch, part by part: first the replica's files without the rows that go, then rows that come."""

    store: Store
    path: str
    schema: pa.Schema
    whole: pa.Schema
    size: int
    rewritten: Sequence[FileMatches]
    parts: Sequence[Sequence[RowGroup]]
    chosen: _Chosen

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write one part; yields a row (`WRITTEN`) a file."""
        if number < len(self.rewritten):
            match = self.rewritten[number]
            batches = self.store.batches(joined(self.path, match.name), self.whole)
            rows, schema = _without(batches, match.rows), self.whole
        else:
            rows, schema = self._rows(self.parts[number - len(self.rewritten)]), self.schema
        return write_files(self.path, schema, guard(rows), store=self.store, size=self.size)

    def _rows(self, groups: Sequence[RowGroup]) -> Iterator[pa.RecordBatch]:
        kind, store = pa.struct(self.schema), self.store
        with store.ahead(groups, (self.chosen.rows(read, kind) for _, read in store.readers(groups))) as read:
            yield from (rows for rows in read if rows is not None)


def is_in(places: Numbers, kept: Numbers) -> Mask:
    """Which places are among those that are kept, in order."""
    if not len(kept):
        return np.zeros(len(places), np.bool_)
    at = np.minimum(np.searchsorted(kept, places), len(kept) - 1)
    found: Mask = kept[at] == places
    return found


def _without(batches: Iterator[pa.RecordBatch], rows: Numbers) -> Iterator[pa.RecordBatch]:
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
