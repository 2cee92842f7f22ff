"""A replica with a key never holds it twice: a batch's first change that meets a row of its key, before it is applied.

In: a batch's transformed changes of one table, its replica. Out: nothing, or KeyConflictError as PostgreSQL's conflicts
insert_exists and update_exists (section 29.8, CheckAndReportConflict() in src/backend/executor/execReplication.c). All
changes of the batch count, also those that a later one or a TRUNCATE undoes: where batches end makes no difference.

A small batch of a local lake is looked through in this process, any other one by Spark. Both read only the keys, and of
the replica only the files whose statistics allow for one of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.applied import Pending
from pgsieve.assets.steps.apply.conflicting_rows import conflicts, keys_of, lookups
from pgsieve.assets.steps.apply.decided_keys import DELETE, INSERT, DecidedKeys, Mask
from pgsieve.assets.steps.records.columns import order
from pgsieve.assets.steps.records.failures import in_transaction
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.values.replica_output import shown
from pgsieve.resources.lake.delta.conforming import field_of
from pgsieve.resources.lake.delta.key_lookup import Key, bounds_of, files_within, key_values
from pgsieve.resources.lake.delta.records import quoted
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.way import Way

INSERT_EXISTS, UPDATE_EXISTS = "insert_exists", "update_exists"

#: Types whose bounds Spark can be asked for by literals, and those with bounds in Delta's statistics besides.
_LITERAL = {"tinyint", "smallint", "int", "bigint", "string"}
_BOUNDED = {*_LITERAL, "date", "timestamp", "timestamp_ntz"}
_CHANGE = ["commit_lsn", "ordinal", "operation", "old", "new"]


class KeyConflictError(PgsieveError):
    """A change of the publisher's whose key the replica has already; `conflict` is PostgreSQL's name for it.

    `key` maps its columns to their values as PostgreSQL prints them.
    """

    def __init__(
        self, table: tuple[str, str], conflict: str, key: Mapping[str, str], commit_lsn: int
    ) -> None:
        columns, values = ", ".join(key), ", ".join(key.values())
        problem = (
            f'conflict detected on relation "{".".join(table)}": conflict={conflict}:'
            f" Key already exists in the replica, Key ({columns})=({values})"
        )
        super().__init__(
            in_transaction(problem, commit_lsn),
            hint=f"`pgsieve resync SUBSCRIPTION {quote_qualified(*table)}` copies the table again",
            sqlstate="23505",
        )
        self.conflict = conflict
        self.commit_lsn = commit_lsn


@dataclass(frozen=True, slots=True)
class Event:
    """Where a row begins or ends: an INSERT has no `old`, a DELETE no `new`, a move has both, a TRUNCATE neither.

    `change` is its place among the changes.
    """

    change: int
    old: Key | None = None
    new: Key | None = None


def first_conflict(events: Iterable[Event], present: Iterable[Key]) -> Event | None:
    """The first event that meets a row of its key, where the rows before have the keys `present`.

    A move that finds no row does nothing.
    """
    exists = dict.fromkeys(present, True)
    for event in events:
        if event.old is None and event.new is None:
            exists = {}
        if event.old is not None:
            finds_row = exists.get(event.old, False)
            exists[event.old] = False
            if not finds_row:
                continue
        if event.new is not None:
            if exists.get(event.new):
                return event
            exists[event.new] = True
    return None


def looked_up(events: Iterable[Event]) -> Iterator[tuple[int, str]]:
    """Where the keys are that decide by whether the rows before have them: a change and its side, `old` or `new`.

    A key that an INSERT follows a DELETE of, or whatever comes after a TRUNCATE, needs no look.
    """
    seen: set[Key] = set()
    for event in events:
        if event.old is None and event.new is None:
            return
        for side, key in (("old", event.old), ("new", event.new)):
            if key is not None and key not in seen:
                seen.add(key)
                if event.new is not None:
                    yield event.change, side


@dataclass(frozen=True)
class ConflictSearch:
    """The look for a batch's first conflict: `path` is the replica, `log` its transformed changes.

    A table without a key has no conflicts. Where another run has applied the changes meanwhile, they meet their own
    rows: the write is then left out by its position.
    """

    lake: Lake
    path: str
    log: str
    definition: Definition
    pending: Pending

    def refuse(self, few: pa.Table | None = None) -> None:
        """Raise KeyConflictError where there is a conflict; `few` are the changes, where they have been read."""
        if not self._may_be:
            return
        with self._not_applied():
            changes = self._small(few)
            if changes is None:
                with self.lake.refusing(self.path):
                    self._by_spark()
            elif changes.num_rows:
                self._locally(changes)

    @property
    def is_decided(self) -> bool:
        """Whether `refuse_decided` can look, as what becomes of each key says whether it has to be absent before."""
        pending, types = self.pending, dict(self.definition.columns)
        simple = not (pending.key_changes or pending.truncated_at or self._other_key_until)
        return simple and all(types[k] in _LITERAL or types[k] not in _BOUNDED for k in self.definition.key)

    @property
    def metrics(self) -> list[Column]:
        """What `refuse_decided` has to know of all keys, as aggregates of `decided_changes`."""
        names = self._bounded
        absent = F.col("absent")
        return [
            F.max("begins").alias("begins"),
            F.count(F.when(absent, 1)).alias("absent"),
            *(F.min(F.when(absent, F.col(n))).alias(f"min_{n}") for n in names),
            *(F.max(F.when(absent, F.col(n))).alias(f"max_{n}") for n in names),
        ]

    def refuse_decided(self, decided: DataFrame, seen: Mapping[str, Any]) -> None:
        """The same, from what becomes of each key (`decided_changes`) and the `metrics` of it: nothing is read twice."""
        if not self._may_be:
            return
        with self._not_applied(), self.lake.refusing(self.path):
            values = {name: pa.array([seen[f"min_{name}"], seen[f"max_{name}"]]) for name in self._bounded}
            base = self.lake.current(self.path)
            if self._meets(decided, base, seen["begins"] or 0, seen["absent"], values):
                self._by_spark()

    def refuse_many(self, decided: DecidedKeys, present: Mask) -> None:
        """The same, from what becomes of each key in this process, and which keys the replica has."""
        suspect = decided.suspect(present)
        if not suspect.any():
            return
        with self._not_applied():
            keys, operations, commit_lsns = decided.events_of(suspect)
            events = (
                Event(change, new=key) if operation == INSERT else Event(change, old=key)
                for change, (key, operation) in enumerate(
                    zip(key_values(keys.columns), operations, strict=True)
                )
                if operation in {INSERT, DELETE}
            )
            before = set(key_values(decided.keys.filter(pa.array(suspect & present)).columns))
            if event := first_conflict(events, before):
                row = keys.slice(event.change, 1)
                raise self._error(INSERT_EXISTS, row, int(commit_lsns[event.change]))

    @property
    def _may_be(self) -> bool:
        return bool(self.definition.key and (self.pending.sent("insert") or self.pending.key_changes))

    @contextmanager
    def _not_applied(self) -> Iterator[None]:
        try:
            yield
        except KeyConflictError:
            # Read after the rows: what is not applied now was not when they were read.
            if (self.lake.records.position(self.path) or 0) < self._slices[0]:
                raise

    @property
    def _slices(self) -> Sequence[int]:
        return [c.slice for c in self.pending.slices]

    @property
    def _since(self) -> int:
        """What is before it has been copied; a slice that was transformed for an older copy may have it, too."""
        return self.pending.standing.position or 0

    @property
    def _other_key_until(self) -> int:
        """Up to which LSN changes may be of a former key: rows may have been equal in the present one then."""
        former = self.definition.former
        return former.until if former and former.key != self.definition.key_numbers else 0

    def _error(self, conflict: str, row: pa.Table, commit_lsn: int) -> KeyConflictError:
        """The error of a row whose first columns are the key's."""
        values = (shown(column)[0] for column in row.columns)
        named = dict(zip(self.definition.key, values, strict=False))
        return KeyConflictError(self.pending.name, conflict, named, commit_lsn)

    # in this process

    def _small(self, few: pa.Table | None) -> pa.Table | None:
        """The changes, where they are few and their keys are equal in Arrow just where they are in PostgreSQL."""
        lake, types = self.lake, dict(self.definition.columns)
        key = self.definition.key
        way = lake.way(self.path, self.definition.names, self.pending.size, key=[types[name] for name in key])
        if way is not Way.IN_PROCESS:
            return None
        changes = few
        if changes is None:
            changes = lake.slice_rows(self.log, self._slices, self.pending.size, columns=_CHANGE, every=True)
        if changes is None:
            return None
        return _flat(changes.filter(pc.greater_equal(changes["commit_lsn"], self._since)), key)

    def _locally(self, changes: pa.Table) -> None:
        """Look one change after the other, after those keys of the replica that matter."""
        if changes["commit_lsn"][0].as_py() < self._other_key_until:
            return
        key = self.definition.key
        inserted = pc.all(pc.equal(changes["operation"], "insert")).as_py()
        new = _keys(changes, "new", key)
        if inserted and new.group_by(key).aggregate([]).num_rows == new.num_rows:
            wanted = new
        else:
            places = list(looked_up(_events(changes, key)))
            sides = {
                side: pa.array([at for at, named in places if named == side], pa.int64())
                for side in ("old", "new")
            }
            wanted = pa.concat_tables(_keys(changes, side, key).take(at) for side, at in sides.items())
        with self.lake.refusing(self.path):
            local = self.lake.local
            assert local is not None
            present = local.present_keys(self.path, wanted)
        if wanted is new and not present:
            return
        event = first_conflict(_events(changes, key), present)
        if event is not None:
            conflict = INSERT_EXISTS if event.old is None else UPDATE_EXISTS
            row = new.slice(event.change, 1)
            raise self._error(conflict, row, changes["commit_lsn"][event.change].as_py())

    # by Spark

    def _by_spark(self) -> None:
        """Look for what is cheap to see at first: in nearly every batch no key begins twice, and no file has one."""
        key, slices = self.definition.key, self._slices
        rows = self.lake.slices_of(self.log, slices, every=True)
        rows = rows.where(F.col("commit_lsn") >= self._since)
        until = self._other_key_until
        if until and rows.where(F.col("commit_lsn") < until).limit(1).count():
            return
        changes = keys_of(rows.where("operation <> 'truncate'"), key)
        for number, between in enumerate(self._between_truncates(rows)):
            part, base = changes.where(between), self.lake.current(self.path) if number == 0 else None
            if not self._may_conflict(part, base):
                continue
            moves = bool(self.pending.key_changes)
            met = conflicts(part, base, key, slices, moves=moves).orderBy("place").limit(1).toArrow()
            if met.num_rows:
                conflict = INSERT_EXISTS if met["inserted"][0].as_py() else UPDATE_EXISTS
                raise self._error(conflict, met, met["commit_lsn"][0].as_py())

    def _between_truncates(self, rows: DataFrame) -> Iterator[Column]:
        """What is before, between and after the TRUNCATEs."""
        truncates: list[tuple[int, int]] = []
        if self.pending.truncated_at:
            table = rows.where("operation = 'truncate'").select("commit_lsn", "ordinal").toArrow()
            truncates = sorted(set(zip(*(table[c].to_pylist() for c in table.column_names), strict=True)))
        at = [F.struct(*(F.lit(n).cast("bigint") for n in place)) for place in truncates]
        for begin, end in zip([None, *at], [*at, None], strict=True):
            between = F.lit(True) if begin is None else order() > begin
            yield between if end is None else between & (order() < end)

    def _may_conflict(self, changes: DataFrame, base: DataFrame | None) -> bool:
        """Whether some conflict cannot be ruled out by what is cheap to see."""
        kept = lookups(changes, self.definition.key, self._slices)
        seen = kept.agg(*self.metrics).toArrow()
        values = {
            n: pa.chunked_array([*seen[f"min_{n}"].chunks, *seen[f"max_{n}"].chunks]) for n in self._bounded
        }
        return self._meets(kept, base, seen["begins"][0].as_py() or 0, seen["absent"][0].as_py(), values)

    @property
    def _bounded(self) -> list[str]:
        """The key columns k0, k1, ... that have bounds."""
        types = dict(self.definition.columns)
        return [f"k{i}" for i, k in enumerate(self.definition.key) if types[k] in _BOUNDED]

    def _meets(
        self,
        kept: DataFrame,
        base: DataFrame | None,
        begins: int,
        absent: int,
        bounds: Mapping[str, pa.Array | pa.ChunkedArray],
    ) -> bool:
        """Whether a key begins more than once, or one that has to be absent from the rows before is not.

        `begins` is how often a key begins at most, `absent` how many have to be, `bounds` those of these.
        """
        if begins > 1:
            return True
        if base is None or not absent:
            return False
        key, types = self.definition.key, dict(self.definition.columns)
        columns = {f"k{i}": name for i, name in enumerate(key)}
        named = pa.table({columns[n]: values for n, values in bounds.items()})
        local = self.lake.local if self.lake.is_reached(self.path, self.definition.names) else None
        if local and not files_within(local.table_at(self.path), bounds_of(named)):
            return False
        near = base.select(*(F.col(quoted(k)).alias(n) for n, k in columns.items()))
        for name, values in bounds.items():
            if types[columns[name]] in _LITERAL:
                near = near.where(F.col(name).between(*(F.lit(value) for value in values.to_pylist())))
        return bool(kept.where("absent").join(near, list(columns), "left_semi").limit(1).count())


def _flat(changes: pa.Table, key: Sequence[str]) -> pa.Table:
    """The changes with their fields side by side: whether they have an `old` and a `new` row, and the keys of these."""
    flat = {name: changes[name] for name in _CHANGE[:3]}
    for side in ("old", "new"):
        flat[side] = pc.is_valid(changes[side])
        flat |= {f"{side}.{k}": field_of(changes[side], k) for k in key}
    return pa.table(flat)


def _keys(changes: pa.Table, side: str, key: Sequence[str]) -> pa.Table:
    return pa.table({k: changes[f"{side}.{k}"] for k in key})


def _events(changes: pa.Table, key: Sequence[str]) -> Iterator[Event]:
    """Where rows begin and end; an UPDATE that stays with its key does neither."""
    old, new = (key_values(_keys(changes, side, key).columns) for side in ("old", "new"))
    operations, has_old = changes["operation"].to_pylist(), changes["old"].to_pylist()
    for change, (operation, is_sent, before, after) in enumerate(
        zip(operations, has_old, old, new, strict=True)
    ):
        if operation == "insert":
            yield Event(change, new=after)
        elif operation == "delete":
            yield Event(change, old=before)
        elif operation == "truncate":
            yield Event(change)
        elif is_sent and before != after:
            yield Event(change, before, after)
