"""The sync states of a subscription's tables, like PostgreSQL's catalog pg_subscription_rel.

They are rows of the Delta table `_table_states`. The row of a table with the newest Delta version counts, since clocks
of several hosts may disagree. `SyncState` says which step writes which state. If a run dies during a copy, the state
`d` stays, and the next run copies the table.
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
from pgsieve.resources.lake.delta.records import by_version, version_of
from pgsieve.resources.lake.lake import Lake


class SyncState(StrEnum):
    """The sync state of a table, as it is stored.

    `i`, `d`, `f` and `r` as in pg_subscription_rel.srsubstate; `e` and `x` are pgsieve's own.
    """

    #: To be copied. Set by the copy, the UPDATE transformation, schema changes, a new slot, `pgsieve resync`: whenever
    #: the replica cannot be brought up to date otherwise. With a reason if the user has to correct the table first.
    INITIALIZE = "i"
    #: Set by the copy, twice before it writes the replica: first without an LSN, then with the snapshot's LSN.
    DATA_SYNC = "d"
    #: Set by the copy when the replica has the snapshot. Slices after it may still be transformed without the table.
    FINISHED_COPY = "f"
    #: Set by the copy when all slices after its LSN are transformed with the table. Schema changes keep it.
    READY = "r"
    #: Set with a reason by the step that fails for this table alone: copy, UPDATE transformation or apply. Nothing is
    #: replicated into the table until the user names it in `pgsieve resync`.
    SET_ASIDE = "e"
    #: Set by the copy if no subscribed publication has the table any more, and by `pgsieve drop`. The LSN is 0 then,
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
    """The state of one table: its sync state, the LSN of its copy, the definition of its replica, and a reason.

    `at` is the time at which the state was written. `version` is the Delta version of `_table_states` that added it, -1
    if it is not written yet.
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
        """Whether changes are applied to the table; also after it left the publications, for changes from before that."""
        has_copy = self.state == SyncState.READY or (self.state == SyncState.REMOVED and self.lsn > 0)
        return has_copy and self.definition is not None

    @property
    def transforms(self) -> bool:
        """Whether changes of the table are transformed; also if its copy is finished and it is not ready yet."""
        return self.applies or (self.state == SyncState.FINISHED_COPY and self.definition is not None)

    def with_problem(self, subscription: str, problem: str) -> "TableState":
        """The state after a problem: set aside, with the command that copies the table again.

        A table that has left the publications is not set aside: it is copied anyway when it is published again.
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
    """A problem that only a copy of the table solves, with the command that copies it."""
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


#: The states as they were last read, by the path of `_table_states`, with the identifier and version of that table.
_CACHE: dict[str, tuple[tuple[str, int], dict[Name, TableState]]] = {}


def newest_version(states: Iterable[TableState]) -> int:
    """The version of the newest of some states; -1 without states."""
    return max((state.version for state in states), default=-1)


def history_paths(
    path_of: Callable[[str, str, str, int], str], subscription: str, tables: Mapping[Name, TableState]
) -> Iterator[str]:
    """The paths of all generations of tables' histories; some may not exist.

    `path_of` makes a path from subscription, schema, table and generation: of change histories, or of versions of rows.
    """
    for name, state in tables.items():
        newest_generation = state.definition.history.generation if state.definition else 0
        yield from (path_of(subscription, *name, generation) for generation in range(newest_generation + 1))


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
        """The newest state of each table of the subscription; read from the lake only if `_table_states` has changed."""
        with self.lake.consistent_read():
            # The version is read before the rows, so that rows written in between are read again next time.
            stamp = self.lake.records.stamp(self.path)
            if stamp is None:
                return self._states()
            read = _CACHE.get(self.path)
            if read is None or read[0] != stamp:
                read = _CACHE[self.path] = stamp, self._states()
            return dict(read[1])

    def _states(self) -> dict[Name, TableState]:
        return {name: _state(rows[-1]) for name, rows in self._kept().items()}

    def all(self) -> dict[Name, list[TableState]]:
        """All recorded states of each table that maintenance has not deleted, oldest first."""
        return {name: [_state(row) for row in rows] for name, rows in self._kept().items()}

    def _kept(self) -> dict[Name, list[Mapping[str, Any]]]:
        """The rows of each table, oldest first; a row without a definition gets the one of the row before."""
        of_tables: dict[Name, list[Mapping[str, Any]]] = {}
        for row in by_version(self.lake.records.rows(self.path)):
            rows = of_tables.setdefault((row["schema"], row["table"]), [])
            rows.append(
                {**row, "definition": row["definition"] or (rows[-1]["definition"] if rows else None)}
            )
        return of_tables

    def note_altered(self, altered: Callable[[TableState], bool] = lambda _: True) -> None:
        """Record that replicas may have other rows than a copy: `Definition.unaltered` becomes False.

        Raises OvertakenError if another process has written a state meanwhile.
        """
        states = self.newest()
        altered_states = [
            replace(state, definition=replace(state.definition, unaltered=False))
            for state in states.values()
            if state.definition is not None and state.definition.unaltered and altered(state)
        ]
        if altered_states:
            self.append(altered_states, newest_version(states.values()))

    def is_in_use(self) -> bool:
        """Whether the subscription has run, and was not dropped since."""
        return any(state.state != SyncState.REMOVED for state in self.newest().values())

    def leave_to_next_copy(self, names: Iterable[Name], reason: str | None = None) -> None:
        """Mark tables as to be copied, so that the next run copies them."""
        states = self.newest()
        definitions = {name: states[name].definition if name in states else None for name in names}
        self.append(
            [
                TableState(*n, SyncState.INITIALIZE, definition=d, reason=reason)
                for n, d in definitions.items()
            ]
        )

    def may_have_replicas(self) -> bool:
        """Whether a copy of some table was begun since the subscription was last dropped."""
        return any(
            state.lsn > 0
            if state.state == SyncState.REMOVED
            else state.state != SyncState.INITIALIZE or state.definition is not None
            for state in self.newest().values()
        )

    def counting_versions(self, moments: Iterable[int]) -> set[int]:
        """The Delta versions of the rows that count: for each table the newest row, and the newest with a definition.

        The rows that counted at each of `moments` count, too. These are earlier Delta versions of `_table_states`.
        """
        versions: dict[Name, tuple[list[int], list[int]]] = {}
        for row in by_version(self.lake.records.rows(self.path)):
            every, versions_with_definition = versions.setdefault((row["schema"], row["table"]), ([], []))
            every.append(version_of(row))
            if row["definition"]:
                versions_with_definition.append(version_of(row))
        ascending = [numbers for number_lists in versions.values() for numbers in number_lists if numbers]
        limits = {*moments, *(numbers[-1] for numbers in ascending)}
        return {
            numbers[moment - 1]
            for limit in limits
            for numbers in ascending
            if (moment := bisect_right(numbers, limit))
        }

    def append(self, states: Iterable[TableState], base: int | None = None) -> None:
        """Append states in one commit; of several states of a table only the last one is written.

        If a state says that a table is copied, the lake is made durable first. Raises OvertakenError if the version of
        `_table_states` is not `base`.
        """
        newest_states, time = {state.name: state for state in states}.values(), datetime.now(UTC)
        rows = [
            {
                "schema": s.schema,
                "table": s.table,
                "state": s.state.value,
                "lsn": s.lsn,
                "at": time,
                "definition": s.definition.to_json() if s.definition else None,
                "reason": s.reason,
            }
            for s in newest_states
        ]
        if any(state.transforms for state in newest_states):
            self.lake.access.make_durable()
        if rows:
            self.lake.records.append_versioned(self.path, pa.Table.from_pylist(rows, TABLE_STATES), base=base)
