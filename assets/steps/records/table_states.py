"""Table sync states of a subscription, like pg_subscription_rel (section 51.54).

They are rows of the Delta table `_table_states`; only maintenance deletes some. The newest row of a table counts: the
row with the newest Delta version, since clocks of several hosts disagree. `SyncState` says which step writes which state.
A run that dies while copying leaves `d`, and the table is copied anew.
"""

import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.records import in_order, version_of
from pgsieve.resources.lake.lake import Lake


class SyncState(StrEnum):
    """The sync state of a table, as it is stored.

    `i`, `d`, `f` and `r` as in srsubstate; `e` and `x` are pgsieve's own.
    """

    #: To be copied. Set by each step that finds that the replica cannot follow: the copy, the UPDATE
    #: transformation and its schema changes, a new slot, `pgsieve resync`; with a reason where the user has
    #: to correct the table first.
    INITIALIZE = "i"
    #: Set by the copy: without an LSN when it begins, then with the snapshot's LSN, before the replica is
    #: written.
    DATA_SYNC = "d"
    #: Set by the copy once the replica has the snapshot; later slices may still be transformed without the
    #: table.
    FINISHED_COPY = "f"
    #: Set by the copy once every slice after its LSN is transformed for the table; kept through schema changes.
    READY = "r"
    #: Set with a reason by the step that fails for this table alone: copy, UPDATE transformation or apply. Nothing is
    #: replicated into it until `pgsieve resync` names it, as the reason says.
    SET_ASIDE = "e"
    #: Set by the copy where no subscribed publication has the table any more, and by `pgsieve drop`. The LSN is 0 then
    #: unless the table was ready.
    REMOVED = "x"

    @property
    def meaning(self) -> str:
        """The state in words."""
        return _MEANING[self]


_MEANING = {
    SyncState.INITIALIZE: "to be copied",
    SyncState.DATA_SYNC: "data is being copied",
    SyncState.FINISHED_COPY: "has been copied",
    SyncState.READY: "ready",
    SyncState.SET_ASIDE: "set aside",
    SyncState.REMOVED: "not replicated any more",
}

Name = tuple[str, str]

TABLE_STATES = pa.schema(
    {
        "schema": pa.string(),
        "table": pa.string(),
        "state": pa.string(),
        "lsn": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "definition": pa.string(),
        "reason": pa.string(),
    }
)


@dataclass(frozen=True)
class TableState:
    """The state of one table: its sync state, the LSN of its copy, its definition, and a reason.

    The definition is the last one of its replica. `at` is when the state was written, `version` the Delta
    version of `_table_states` that added it, -1 if it is not recorded.
    """

    schema: str
    table: str
    state: SyncState
    lsn: int = 0
    definition: Definition | None = None
    reason: str | None = None
    at: datetime | None = None
    version: int = -1

    @property
    def applies(self) -> bool:
        """Whether the table's published changes are applied, including those from before it left the publications."""
        copied = self.state == SyncState.READY or (self.state == SyncState.REMOVED and self.lsn > 0)
        return copied and self.definition is not None

    @property
    def transforms(self) -> bool:
        """Whether the table's published changes are transformed, including while its copy is not yet declared ready."""
        return self.applies or (self.state == SyncState.FINISHED_COPY and self.definition is not None)

    def with_problem(self, subscription: str, problem: str) -> "TableState":
        """The state after a problem: set aside, with the command that copies the table again.

        A table that has left the publications is copied when it comes back, anyway.
        """
        if self.state == SyncState.REMOVED:
            return replace(self, lsn=0)
        reason = copy_again(subscription, self.name, problem)
        return replace(self, state=SyncState.SET_ASIDE, reason=reason)

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table


def copy_again(subscription: str, name: Name, problem: str) -> str:
    """A problem that only a copy of the table ends, with the command that copies it."""
    table = shlex.quote(quote_qualified(*name))
    return f"{problem}; `pgsieve resync {subscription} {table}` copies the table again"


def _state(row: Mapping[str, Any]) -> TableState:
    return TableState(
        schema=row["schema"],
        table=row["table"],
        state=SyncState(row["state"]),
        lsn=row["lsn"] or 0,
        definition=Definition.from_json(row["definition"]) if row["definition"] else None,
        reason=row["reason"],
        at=row["at"],
        version=version_of(row),
    )


#: The states of a subscription's tables as they were last read, and the version that they were read from.
_read: dict[str, tuple[tuple[str, int], dict[Name, TableState]]] = {}


def newest_version(states: Iterable[TableState]) -> int:
    """The version of the newest of some states; states that are written later have later versions."""
    return max((state.version for state in states), default=-1)


def histories(
    of: Callable[[str, str, str, int], str], subscription: str, tables: Mapping[Name, TableState]
) -> Iterator[str]:
    """The paths of all generations of tables' change histories, or of the versions of their rows; some may not exist yet."""
    for name, state in tables.items():
        newest = state.definition.history.generation if state.definition else 0
        yield from (of(subscription, *name, generation) for generation in range(newest + 1))


@dataclass(frozen=True)
class TableStates:
    """The table `_table_states` of one subscription. `SyncState` says which step appends which state."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.table_states(self.subscription)

    def newest(self) -> dict[Name, TableState]:
        """The newest state of each table of the subscription.

        They are read again only where the table has another version: a step asks several times, and they
        rarely change.
        """
        with self.lake.consistent_read():
            # Read first: a row that is written meanwhile has a later version, and is read again.
            stamp = self.lake.records.stamp(self.path)
            if stamp is None:
                return self._states()
            read = _read.get(self.path)
            if read is None or read[0] != stamp:
                read = _read[self.path] = stamp, self._states()
            return dict(read[1])

    def _states(self) -> dict[Name, TableState]:
        return {name: _state(rows[-1]) for name, rows in self._kept().items()}

    def kept(self) -> dict[Name, list[TableState]]:
        """The recorded states of each table, oldest first: the newest one, and the states at the cuts that are kept."""
        return {name: [_state(row) for row in rows] for name, rows in self._kept().items()}

    def _kept(self) -> dict[Name, list[Mapping[str, Any]]]:
        """The rows of each table, oldest first; a row without a definition gets the definition of the row before."""
        kept: dict[Name, list[Mapping[str, Any]]] = {}
        for row in in_order(self.lake.records.rows(self.path)):
            rows = kept.setdefault((row["schema"], row["table"]), [])
            rows.append(
                {**row, "definition": row["definition"] or (rows[-1]["definition"] if rows else None)}
            )
        return kept

    def note_altered(self, altered: Callable[[TableState], bool] = lambda _: True) -> None:
        """Record that replicas may have other rows than a copy would: see `Definition.unaltered`.

        Raises OverrunError where another process has written a state meanwhile.
        """
        states = self.newest()
        noted = [
            replace(state, definition=replace(state.definition, unaltered=False))
            for state in states.values()
            if state.definition is not None and state.definition.unaltered and altered(state)
        ]
        if noted:
            self.append(noted, newest_version(states.values()))

    def is_in_use(self) -> bool:
        """Whether the subscription has run, and was not dropped since."""
        return any(state.state != SyncState.REMOVED for state in self.newest().values())

    def leave_to_next_copy(self, names: Iterable[Name], reason: str | None = None) -> None:
        """Have the next process that reads the slot copy these tables, after the next slice."""
        states = self.newest()
        definitions = {name: states[name].definition if name in states else None for name in names}
        self.append(
            [
                TableState(*n, SyncState.INITIALIZE, definition=d, reason=reason)
                for n, d in definitions.items()
            ]
        )

    def may_have_replicas(self) -> bool:
        """Whether a copy of some table was begun, and the subscription was not dropped since."""
        return any(
            state.lsn > 0
            if state.state == SyncState.REMOVED
            else state.state != SyncState.INITIALIZE or state.definition is not None
            for state in self.newest().values()
        )

    def counting_versions(self, moments: Iterable[int]) -> set[int]:
        """The versions of the rows that count: for each table the newest, and the newest with a definition.

        They count now, and as of each of `moments`, which are versions of the newest row at that time.
        """
        versions: dict[Name, tuple[list[int], list[int]]] = {}
        for row in in_order(self.lake.records.rows(self.path)):
            every, defined = versions.setdefault((row["schema"], row["table"]), ([], []))
            every.append(version_of(row))
            if row["definition"]:
                defined.append(version_of(row))
        ascending = [numbers for both in versions.values() for numbers in both if numbers]
        limits = {*moments, *(numbers[-1] for numbers in ascending)}
        return {
            numbers[at - 1]
            for limit in limits
            for numbers in ascending
            if (at := bisect_right(numbers, limit))
        }

    def append(self, states: Iterable[TableState], base: int | None = None) -> None:
        """Append states, all in one commit; of several states of a table the last one counts.

        Replicas that count as copied are made durable first. Raises OverrunError if the table's version is not `base`.
        """
        newest, now = {state.name: state for state in states}.values(), datetime.now(UTC)
        rows = [
            {
                "schema": s.schema,
                "table": s.table,
                "state": s.state.value,
                "lsn": s.lsn,
                "at": now,
                "definition": s.definition.to_json() if s.definition else None,
                "reason": s.reason,
            }
            for s in newest
        ]
        if any(state.transforms for state in newest):
            self.lake.access.make_durable()
        if rows:
            self.lake.records.append_versioned(self.path, pa.Table.from_pylist(rows, TABLE_STATES), base=base)
