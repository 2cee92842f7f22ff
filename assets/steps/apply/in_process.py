"""Apply to one replica table in this process: few transformed changes -> its net change, in one commit by delta-rs.

In: a batch's changes as an Arrow table in their order. Out: `Applied`. `writer` does the same by Spark, with any number of
changes: the rows, the counts and the position are the same. Raises LakeError.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.applied import Applied, Pending, merged, outcome
from pgsieve.assets.steps.apply.exact_rows import RowChanges, kept_but, replayed
from pgsieve.assets.steps.apply.key_histories import KeyedChange, NetChange, net_changes
from pgsieve.assets.steps.subscription import Definition
from pgsieve.resources.lake.delta.conforming import field_of
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.key_lookup import Key, key_values
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.row_removal import replace_rows
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.way import Way

#: A replica of a key may have so many times the bytes that may pass through this process.
MERGED = 4


def few_changes(lake: Lake, path: str, log: str, definition: Definition, pending: Pending) -> pa.Table | None:
    """A batch's changes in their order, where this process may apply them; None where Spark has to.

    `path` is the replica, `log` its transformed changes.
    """
    finds_rows = bool(pending.sent("update", "delete"))
    truncated = pending.truncated_at is not None
    types = dict(definition.columns)
    key = [types[name] for name in definition.key] if finds_rows else []
    replica_size = lake.records.size(path) if finds_rows and not truncated else 0
    # A MERGE needs less memory for a replica than changes need for as many bytes; without a key all rows come here.
    size = max(pending.size, replica_size // MERGED) if definition.key else pending.size + replica_size
    if lake.way(path, definition.names, size, overwrite=truncated, key=key) is not Way.IN_PROCESS:
        return None
    if finds_rows and not definition.key and not lake.takes_rewriting(path, definition.names):
        return None
    return lake.slice_rows(log, [c.slice for c in pending.slices], pending.size, every=True)


@dataclass(frozen=True)
class FewChangesWriter:
    """Brings the net change of few changes into one replica table, in one commit."""

    lake: Lake
    path: str
    definition: Definition
    pending: Pending
    end: int

    @property
    def local(self) -> LocalRecords:
        """The tables that this process reaches."""
        assert self.lake.local is not None
        return self.lake.local

    def apply(self, changes: pa.Table) -> Applied:
        """Apply the changes that are not before a TRUNCATE: append what is surely new, else merge."""
        changes = self._effective(changes)
        if not self.pending.sent("update", "delete"):
            return self._append(_rows(changes, "new", self.definition.names), changes.num_rows)
        return self._keyed(changes) if self.definition.key else self._keyless(changes)

    def _effective(self, changes: pa.Table) -> pa.Table:
        # A slice may have been transformed for an older copy: it has changes that a later one, amid it, has copied.
        since = pc.greater_equal(changes["commit_lsn"], self.pending.standing.position or 0)
        changes = changes.filter(pc.and_(since, pc.not_equal(changes["operation"], "truncate")))
        if self.pending.truncated_at:
            lsn, ordinal = self.pending.truncated_at
            later = pc.and_(pc.equal(changes["commit_lsn"], lsn), pc.greater(changes["ordinal"], ordinal))
            changes = changes.filter(pc.or_(pc.greater(changes["commit_lsn"], lsn), later))
        return changes

    # with a key

    def _keyed(self, changes: pa.Table) -> Applied:
        key, columns = self.definition.key, self.definition.names
        merge = Merge.flat(key, columns, self.pending.unchanged)
        keyed = list(_keyed_changes(changes, key))
        net = net_changes(keyed, self._present(keyed, changes), merge.unknown)
        source = self._source(changes, net, merge)
        expected = pc.sum(source["expected"]).as_py() or 0
        if expected and not self.pending.truncated_at:
            counts = self.local.merge(self.path, source, merge, self.end, self.pending.standing.version)
            return merged(self.lake, self.path, self.pending, self.end, counts, expected)
        upserts = source.filter(pc.equal(source["action"], "upsert"))
        return self._append(
            pa.table({name: upserts[merge.values[name]] for name in columns}), upserts.num_rows
        )

    def _present(self, changes: Sequence[KeyedChange], rows: pa.Table) -> set[Key]:
        """The keys that moves begin with and the replica has."""
        moves = [place for place, change in enumerate(changes) if change.is_move]
        if not moves or self.pending.truncated_at:
            return set()
        return self.local.present_keys(self.path, _rows(rows, "old", self.definition.key).take(moves))

    def _source(self, changes: pa.Table, net: Mapping[Key, NetChange], merge: Merge) -> pa.Table:
        """The net change as the source of a MERGE."""
        key, columns, count = self.definition.key, self.definition.names, changes.num_rows
        new, old = (_rows(changes, side, columns) for side in ("new", "old"))
        # What a row that comes from another key was not sent, it takes along from the replica.
        moved = {k: c.base for k, c in net.items() if c.action == "update" and c.base and c.base != k}
        lacking = {k: base for k, base in moved.items() if net[k].sent.keys() < merge.unknown.keys()}
        base = self._replica_rows(set(lacking.values()), old)
        at = {k: 2 * count + number for number, k in enumerate(key_values([base[n] for n in key]))}
        rows = pa.concat_tables([new, old, base])

        def taken(name: str, places: Iterable[int | None]) -> pa.ChunkedArray:
            return rows[name].take(pa.array(places, pa.int64()))

        def place(k: Key, name: str) -> int | None:
            if name not in merge.unknown:
                return net[k].last
            kept = at.get(lacking[k]) if k in lacking else None
            return None if net[k].action == "delete" else net[k].sent.get(name, kept)

        named = [place + (count if side == "old" else 0) for place, side in (c.named for c in net.values())]
        actions = ["upsert" if k in moved else c.action for k, c in net.items()]
        return pa.table(
            {
                **{k: taken(name, named) for name, k in merge.key.items()},
                **{v: taken(name, (place(k, name) for k in net)) for name, v in merge.values.items()},
                **{
                    u: [
                        a == "update" and name not in c.sent
                        for a, c in zip(actions, net.values(), strict=True)
                    ]
                    for name, u in merge.unknown.items()
                },
                "action": actions,
                "expected": [c.expected for c in net.values()],
            }
        )

    def _replica_rows(self, keys: Collection[Key], rows: pa.Table) -> pa.Table:
        """The replica's rows of some keys, each of which is the key of one of `rows`."""
        if not keys:
            return rows.schema.empty_table()
        wanted = [k in keys for k in key_values([rows[name] for name in self.definition.key])]
        named = rows.select(self.definition.key).filter(pa.array(wanted))
        return self.local.rows_of(self.path, named, rows.schema)

    # without a key

    def _keyless(self, changes: pa.Table) -> Applied:
        """Apply to a multiset of rows: each change touches exactly one of several equal rows."""
        old, new = (_rows(changes, side, self.definition.names) for side in ("old", "new"))
        is_there = (pc.is_valid(changes[side]).to_pylist() for side in ("old", "new"))
        by_row = RowChanges.of(old, new, *is_there)
        before = [0] * len(by_row.numbers)
        if not self.pending.truncated_at:
            for batch in self.local.plain_batches(self.path, new.schema):
                for _, number in by_row.numbered(batch):
                    before[number] += 1
        after, missing = replayed(by_row.changes, before)
        come = by_row.repeated([now - then for now, then in zip(after, before, strict=True)])
        going = [then - now for now, then in zip(after, before, strict=True)]
        gone = sum(count for count in going if count > 0)
        if not gone:
            return replace(self._append(come, come.num_rows), missing=missing)
        replace_rows(
            self.local, self.path, kept_but(by_row, going), come, self.end, base=self.pending.standing.version
        )
        return outcome(
            self.lake,
            self.path,
            self.pending,
            self.end,
            inserted=come.num_rows,
            deleted=gone,
            missing=missing,
        )

    def _append(self, rows: pa.Table, count: int) -> Applied:
        truncated = self.pending.truncated_at is not None
        if count or truncated:
            self.local.write(
                self.path, rows, self.end, overwrite=truncated, base=self.pending.standing.version
            )
        return outcome(self.lake, self.path, self.pending, self.end, inserted=count)


def _rows(changes: pa.Table, side: str, columns: Sequence[str]) -> pa.Table:
    """The rows of one side; NULL in all columns where a change has none."""
    return pa.table({name: field_of(changes[side], name) for name in columns})


def _keyed_changes(changes: pa.Table, key: Sequence[str]) -> Iterator[KeyedChange]:
    sides = [
        [
            k if there else None
            for k, there in zip(key_values(_rows(changes, side, key).columns), is_there, strict=True)
        ]
        for side in ("old", "new")
        for is_there in [pc.is_valid(changes[side]).to_pylist()]
    ]
    for operation, old, new, unsent in zip(
        changes["operation"].to_pylist(), *sides, changes["unchanged"].to_pylist(), strict=True
    ):
        yield KeyedChange(operation, old, new, unsent or ())
