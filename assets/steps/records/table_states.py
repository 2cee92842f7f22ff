"""The sync states of a subscription's tables. They are like the rows of PostgreSQL's catalog pg_subscription_rel.

A slice is the changes from one position of the slot to another. A slice is transformed when its changes have been
decoded and filtered for the tables. The states are rows of the Delta table `_table_states`. For each table, the row
with the newest Delta version counts. The time in a row does not decide, because the clocks of several hosts may differ.
`SyncState` says which step writes which state. If a run dies during a copy, the state `d` stays, and the next run
copies the table.
"""

import shlex
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.delta.records import get_commit_version, sort_by_version
from pgsieve.resources.lake.lake import Lake


class SyncState(StrEnum):
    """The sync state of a table, as it is stored.

    `i`, `d`, `f` and `r` mean the same as in pg_subscription_rel.srsubstate; `e` and `x` are pgsieve's own.
    """

    #: The table has to be copied, because its replica cannot be brought up to date in another way. For example, its
    #: changes cannot be decoded, its columns were altered, the slot was lost, or the user has called `pgsieve resync`.
    #: The state may have a reason: what the user has to correct before the copy, or why the table is copied again.
    INITIALIZE = "i"
    #: The table is being copied. The copy sets this state twice before it writes the replica: at first without an LSN,
    #: and then with the LSN of the snapshot.
    DATA_SYNC = "d"
    #: The replica has the rows of the snapshot. The copy sets this state. But some slices after the snapshot may have
    #: been transformed without the table's changes.
    FINISHED_COPY = "f"
    #: All slices after the LSN of the copy are transformed with the table's changes. The copy and `pgsieve refilter`
    #: set this state, and schema changes keep it.
    READY = "r"
    #: A step has failed for this table alone, and has set this state with the reason. No more changes are applied to the
    #: table until the user has it copied again by `pgsieve resync`.
    SET_ASIDE = "e"
    #: No subscribed publication has the table any more, or the subscription was dropped. The copy and `pgsieve drop` set
    #: this state. Its LSN is 0, unless the table was ready before.
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

#: The reason in the state of a table while `pgsieve refilter` makes its replica.
REFILTER_REASON = "filtering it again did not end; the next run copies it"

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
    """The state of one table.

    - `state`: its sync state
    - `lsn`: the LSN of its copy
    - `definition`: the definition of its replica (columns, key and others)
    - `reason`: the reason for the state, if there is one
    - `at`: the time at which the state was written
    - `version`: the Delta version of `_table_states` that has added the state; -1 if it is not written yet
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
    def is_applied(self) -> bool:
        """True if changes are applied to the table.

        Also true after the table has left the publications, because its earlier changes may still arrive.
        """
        has_copy = self.state == SyncState.READY or (self.state == SyncState.REMOVED and self.lsn > 0)
        return has_copy and self.definition is not None

    @property
    def announces_copy(self) -> bool:
        """True if the state names the snapshot of a copy. The replica may have the rows of this snapshot already.

        If it has them, and the run died before it made the table ready, the next run makes the table ready.
        """
        return self.state in {SyncState.DATA_SYNC, SyncState.FINISHED_COPY} and self.lsn > 0

    @property
    def is_being_altered(self) -> bool:
        """True while the replica gets other columns, or is filtered again. Then the table becomes ready without a copy."""
        return self.state == SyncState.INITIALIZE and self.reason in {None, REFILTER_REASON} and self.lsn > 0

    @property
    def needs_all_changes(self) -> bool:
        """True if the table needs the changes after its LSN: it is ready, or could become so without a copy."""
        return self.state == SyncState.READY or self.announces_copy

    @property
    def is_transformed(self) -> bool:
        """True if changes of the table are transformed. This is so as soon as its copy is finished, before it is ready."""
        return self.is_applied or (self.state == SyncState.FINISHED_COPY and self.definition is not None)

    def with_problem(self, subscription: str, problem: str) -> "TableState":
        """The state after a problem: set aside, with a reason that names the command that copies the table again.

        A table that has left the publications is not set aside. If it is published again, it is copied anyway.
        """
        if self.state == SyncState.REMOVED:
            return replace(self, lsn=0)
        reason = add_copy_command(subscription, self.name, problem)
        return replace(self, state=SyncState.SET_ASIDE, reason=reason)

    @property
    def name(self) -> Name:
        """The schema and the name of the table."""
        return self.schema, self.table


def add_copy_command(subscription: str, name: Name, problem: str) -> str:
    """Add to a problem the command that copies the table again, since only a copy can solve the problem."""
    table = shlex.quote(quote_qualified(*name))
    return f"{problem}; `pgsieve resync {subscription} {table}` copies the table again"


def _parse_state(row: Mapping[str, Any]) -> TableState:
    return TableState(
        schema=row["schema"],
        table=row["table"],
        state=SyncState(row["state"]),
        lsn=row["lsn"] or 0,
        definition=Definition.from_json(row["definition"]) if row["definition"] else None,
        reason=row["reason"],
        at=row["at"],
        version=get_commit_version(row),
    )


#: Maps the path of a table `_table_states` to a stamp of its version (`Records.stamp`), and to the states that were read
#: at that version.
_STATES_BY_PATH: dict[str, tuple[tuple[str, int], dict[Name, TableState]]] = {}


def find_newest_version(states: Iterable[TableState]) -> int:
    """The Delta version of the newest of these states; -1 if there are none."""
    return max((state.version for state in states), default=-1)


def list_history_paths(
    make_path: Callable[[str, str, str, int], str], subscription: str, tables: Mapping[Name, TableState]
) -> Iterator[str]:
    """Yields the paths of all histories (of changes, or of versions of rows) that tables may have. Some may not exist.

    If a history begins anew, it gets a new generation, which has another path. `make_path` makes the path of a change
    history, or of a table of versions, from a subscription, a schema, a table and a generation.
    """
    for name, state in tables.items():
        newest_generation = state.definition.history.generation if state.definition else 0
        yield from (make_path(subscription, *name, generation) for generation in range(newest_generation + 1))


@dataclass(frozen=True)
class TableStates:
    """The table `_table_states` of one subscription. `SyncState` says which step writes which state."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.table_states(self.subscription)

    def read_version(self) -> int:
        """The present Delta version of `_table_states`, as a `base_version` for `append`; 0 if there is no table yet.

        It may be above the versions of all states, because maintenance compacts the table.
        """
        return max(self.lake.records.head(self.path).version, 0)

    def read_newest(self) -> dict[Name, TableState]:
        """Maps each table of the subscription to its newest state.

        The states are read again only if `_table_states` has changed, or if finding that out would take as long as
        reading them.
        """
        with self.lake.consistent_read():
            # The version is read before the rows. If rows are written in between, the recorded version is too old, and
            # the next call reads the rows again. In the other order, these rows would be missed.
            stamp = self.lake.records.stamp(self.path)
            if stamp is None:
                return self._read_states()
            cached_states = _STATES_BY_PATH.get(self.path)
            if cached_states is None or cached_states[0] != stamp:
                cached_states = _STATES_BY_PATH[self.path] = stamp, self._read_states()
            return dict(cached_states[1])

    def read_since(self, version: int) -> dict[Name, TableState]:
        """Maps each table with a state that was written after a Delta version of `_table_states` to its newest state.

        Only the states since then are read, so this is fast with many tables. With -1, all states are read, also from a
        table without the column `version`, which an earlier pgsieve has written.
        """
        where = f"version > {version:d}" if version >= 0 else "true"
        rows = sort_by_version(self.lake.records.rows(self.path, where))
        return {
            (row["schema"], row["table"]): _parse_state(row)
            for row in rows
            if get_commit_version(row) > version
        }

    def _read_states(self) -> dict[Name, TableState]:
        return {name: _parse_state(rows[-1]) for name, rows in self._read_rows_by_table().items()}

    def read_all(self) -> dict[Name, list[TableState]]:
        """Maps each table to all of its recorded states that maintenance has not deleted, the oldest first."""
        return {
            name: [_parse_state(row) for row in rows] for name, rows in self._read_rows_by_table().items()
        }

    def _read_rows_by_table(self) -> dict[Name, list[Mapping[str, Any]]]:
        """Maps each table to its rows, the oldest first.

        A row without a definition gets the definition of the row before it.
        """
        rows_by_table: dict[Name, list[Mapping[str, Any]]] = {}
        for row in sort_by_version(self.lake.records.rows(self.path)):
            rows = rows_by_table.setdefault((row["schema"], row["table"]), [])
            rows.append(
                {**row, "definition": row["definition"] or (rows[-1]["definition"] if rows else None)}
            )
        return rows_by_table

    def note_altered(self, is_altered: Callable[[TableState], bool] = lambda _: True) -> None:
        """Record that replicas may have other rows than a new copy: `Definition.unaltered` becomes false.

        `is_altered` says for which tables this is so. Raises OvertakenError if another process has written a state in the
        meantime.
        """
        base_version, states = self.read_version(), self.read_newest()
        altered_states = [
            replace(state, definition=replace(state.definition, unaltered=False))
            for state in states.values()
            if state.definition is not None and state.definition.unaltered and is_altered(state)
        ]
        if altered_states:
            self.append(altered_states, base_version)

    def is_in_use(self) -> bool:
        """True if the subscription has run, and was not dropped since then."""
        return any(state.state != SyncState.REMOVED for state in self.read_newest().values())

    def leave_to_next_copy(self, names: Iterable[Name], reason: str | None = None) -> None:
        """Record that tables have to be copied, so that the next run copies them."""
        states = self.read_newest()
        definitions = {name: states[name].definition if name in states else None for name in names}
        self.append(
            [
                TableState(*name, SyncState.INITIALIZE, definition=definition, reason=reason)
                for name, definition in definitions.items()
            ]
        )

    def may_have_replicas(self) -> bool:
        """True if a copy of a table has begun since the subscription was last dropped."""
        return any(
            state.lsn > 0
            if state.state == SyncState.REMOVED
            else state.state != SyncState.INITIALIZE or state.definition is not None
            for state in self.read_newest().values()
        )

    def find_counting_versions(self, kept_versions: Iterable[int]) -> set[int]:
        """Find the Delta versions of the rows that count: each table's newest row, and its newest row with a definition.

        `kept_versions` are earlier Delta versions of `_table_states`. Rows that were the newest at one of these
        versions count, too.
        """
        versions_by_table: dict[Name, tuple[list[int], list[int]]] = {}
        for row in sort_by_version(self.lake.records.rows(self.path)):
            all_versions, versions_with_definition = versions_by_table.setdefault(
                (row["schema"], row["table"]), ([], [])
            )
            all_versions.append(get_commit_version(row))
            if row["definition"]:
                versions_with_definition.append(get_commit_version(row))
        version_lists = [
            ascending_versions
            for table_lists in versions_by_table.values()
            for ascending_versions in table_lists
            if ascending_versions
        ]
        limits = {*kept_versions, *(ascending_versions[-1] for ascending_versions in version_lists)}
        return {
            ascending_versions[index - 1]
            for limit in limits
            for ascending_versions in version_lists
            if (index := bisect_right(ascending_versions, limit))
        }

    def append_unless_changed(
        self,
        states: Collection[TableState],
        find_changed_tables: Callable[[], Collection[Name]] | None = None,
    ) -> set[Name]:
        """Append states that were made from earlier states of the same tables. Returns the tables that are left out.

        A table is left out if another process has written another state of it meanwhile. For example, the process that reads
        the slot does this if the server cannot send a change of the table. `find_changed_tables` finds the tables to
        leave out. By default, they are the tables that have a later state than the one from which the new state was
        made.
        """
        if not states:
            return set()
        version_by_table = {state.name: state.version for state in states}

        def find_tables_with_later_states() -> Collection[Name]:
            later_states = self.read_since(min(version_by_table.values()))
            return [
                name
                for name, state in later_states.items()
                if state.version > version_by_table.get(name, state.version)
            ]

        def attempt() -> set[Name]:
            # The version is read before the states. If a state is written in between, the append fails.
            base_version = self.read_version()
            changed_tables = version_by_table.keys() & set(
                (find_changed_tables or find_tables_with_later_states)()
            )
            self.append([state for state in states if state.name not in changed_tables], base_version)
            return changed_tables

        return retry_after_conflict(attempt)()

    def append(self, states: Iterable[TableState], base_version: int | None = None) -> None:
        """Append states in one commit. If there are several states of a table, only the last one is written.

        If a state says that a table is copied, the lake is synced to disk before. Raises OvertakenError if `base_version` is
        not the present version of `_table_states`.
        """
        newest_states, time = {state.name: state for state in states}.values(), datetime.now(UTC)
        rows = [
            {
                "schema": state.schema,
                "table": state.table,
                "state": state.state.value,
                "lsn": state.lsn,
                "at": time,
                "definition": state.definition.to_json() if state.definition else None,
                "reason": state.reason,
            }
            for state in newest_states
        ]
        if any(state.is_transformed for state in newest_states):
            self.lake.access.make_durable()
        if rows:
            self.lake.records.append_versioned(
                self.path, pa.Table.from_pylist(rows, TABLE_STATES), expected_version=base_version
            )
