"""Refilters: makes the replicas of a subscription from replicas that the lake already has, without a copy.

The existing replicas may belong to the same subscription, or to another one.

In: - a subscription that is new, or that has other publications, row filters or column lists than before
    - the present catalog, and other subscriptions of the same source
Out: - for each table, the subscription from whose replica it can be made, and the LSN from which on it would get
       changes; or the reason why there is none
     - the new replicas. Each has the same rows as a copy at the LSN of the replica from which it is made

A replica is used only if it is certain that it has all rows that a copy would have. Raises PgsieveError.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.checks.conformity import parse_filters
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.columns import format_ddl
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import (
    REFILTER_REASON,
    Name,
    SyncState,
    TableState,
    TableStates,
    list_history_paths,
)
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import Definition, History, Subscription
from pgsieve.decoding.changes.metadata_columns import keep_living_rows
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.row_filters.evaluation.verdicts import compile_filters
from pgsieve.decoding.row_filters.nodes import Logical, Node
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.rewriting import RowChange, rewrite
from pgsieve.resources.work import name_jobs


@dataclass(frozen=True)
class RefilterPlan:
    """The plan for a table.

    - `source`: the subscription from whose replica the table is made; None if there is none
    - `reason`: the reason why there is none
    - `lsn`: the LSN at which the replica has the rows of a copy, and from which on it gets changes. Before the replica is
      made, it is the LSN that `make_replicas` would use now; None if that is unknown
    - `rows`: the number of rows, as soon as the replica is made
    """

    name: Name
    source: str | None
    reason: str | None = None
    lsn: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class _UsableReplica:
    """A replica of another subscription, or an earlier one of the same subscription, that has all wanted rows.

    - `source`, `state`: its subscription and its state
    - `filters`: the row filters that the wanted rows match; None if all rows are wanted
    - `replicated_table`: the table as it is published now
    - `wanted_definition`: the definition of the new replica
    """

    source: Subscription
    state: TableState
    filters: tuple[Node, ...] | None
    replicated_table: ReplicatedTable
    wanted_definition: Definition


def find_applied_lsn(lake: Lake, source: Subscription, state_lsn: int) -> int:
    """Find the LSN before which a replica of a subscription has all changes. `state_lsn` is the LSN of its state.

    A replica that was just made may be ahead of the changes that were decoded and filtered: it has all changes before the
    LSN of its state. Raises PgsieveError if there are changes that are not applied yet.
    """
    progress = ReplicaProgress(source, lake)
    transformed_lsn = progress.read_transformed_lsn()
    if progress.find_applied_lsn() < transformed_lsn:
        raise PgsieveError(
            f'subscription "{source.name}" has changes that are not applied yet',
            hint=f"`pgsieve run {source.name}` applies them, or says why not",
            sqlstate="55000",
        )
    return max(state_lsn, progress.find_complete_lsn(transformed_lsn))


@dataclass(frozen=True)
class Refilter:
    """Makes replicas of a subscription. Each is made from a replica of the first of `sources` that has all wanted rows.

    `catalog` is the publisher's present catalog, with the publications of the subscription. Each source comes with the
    same catalog, but with the publications of the source. `present_lsn` is the LSN at which the publisher's WAL ended
    then; it may be None if no plan has to name an LSN.
    """

    subscription: Subscription
    sources: Sequence[tuple[Subscription, Catalog]]
    lake: Lake
    catalog: Catalog
    present_lsn: int | None = None

    def plan(self, names: Sequence[Name]) -> list[RefilterPlan]:
        """The plans for these tables; without names, for all published tables."""
        return [plan for plan, _ in self._plan_tables(names, cache(self._find_planned_lsn))]

    def make_replicas(self, names: Sequence[Name]) -> list[RefilterPlan]:
        """Make the replicas that can be made. Returns the plans, with the LSNs and the numbers of rows.

        The caller has applied all changes to the replicas of the other subscriptions.
        """
        plans = []
        for plan, usable_replica in self._plan_tables(names, lambda *_: None):
            if usable_replica is None:
                plans.append(plan)
                continue
            lsn, rows = self._make_named_replica(plan.name, usable_replica)
            plans.append(replace(plan, lsn=lsn, rows=rows))
        return plans

    def _find_planned_lsn(self, source_name: str, state_lsn: int) -> int | None:
        """Find the LSN that a replica would have that is made from a replica of a subscription.

        `state_lsn` is the LSN of the existing replica's state.

        All changes are applied to the replicas of another subscription first, but none to those of this subscription,
        because its present publications would decide them. Raises PgsieveError if the replicas cannot be made at that LSN.
        """
        lsn = (
            find_applied_lsn(self.lake, self.subscription, state_lsn)
            if source_name == self.subscription.name
            else self.present_lsn
        )
        if lsn is not None:
            self._refuse_gap(lsn)
        return lsn

    def _plan_tables(
        self, names: Sequence[Name], find_lsn: Callable[[str, int], int | None]
    ) -> Iterator[tuple[RefilterPlan, _UsableReplica | None]]:
        """Yields the plan for each table, and the replica from which it is made.

        `find_lsn` gets a subscription and the LSN of a state, and returns the LSN of a replica that is made from that replica.
        """
        tables = self.subscription.tables(self.catalog)
        states_by_source = {
            source.name: TableStates(self.lake, source.name).read_newest() for source, _ in self.sources
        }
        for name in names or tables:
            reasons = []
            for source, catalog in self.sources:
                state = states_by_source[source.name].get(name)
                try:
                    usable_replica = self._find_usable_replica(tables.get(name), source, catalog, state)
                    lsn = find_lsn(source.name, usable_replica.state.lsn)
                except PgsieveError as error:
                    reasons.append(f"{source.name}: {error.message}")
                    continue
                yield RefilterPlan(name, source.name, lsn=lsn), usable_replica
                break
            else:
                yield RefilterPlan(name, None, "; ".join(reasons)), None

    def _find_usable_replica(
        self,
        replicated_table: ReplicatedTable | None,
        source: Subscription,
        catalog: Catalog,
        state: TableState | None,
    ) -> _UsableReplica:
        """Return the replica of a source if it certainly has all wanted rows; otherwise raise PgsieveError.

        The error says why not. `state` is the state of the source's table.
        """
        if replicated_table is None:
            raise PgsieveError("the table is not published")
        if replicated_table.leaves:
            raise PgsieveError("a partition tree can only be copied")
        if not self.subscription.copy_data:
            raise PgsieveError("with `copy_data: false` the new replica begins without rows")
        if state is None or state.state != SyncState.READY or state.definition is None:
            meaning = (state.state if state else SyncState.INITIALIZE).meaning
            raise PgsieveError(f"its replica is not ready: {meaning}")
        source_definition = state.definition
        self._refuse_unknown_rows(source, catalog, state, source_definition)
        wanted_definition = self.subscription.definition(replicated_table, self.catalog)
        if wanted_definition.metadata:
            raise PgsieveError("metadata columns and `deletes: soft` can only begin with a copy")
        if source.layout.uses_plain_names != self.subscription.layout.uses_plain_names:
            raise PgsieveError("`names` of the layouts differ, so its columns have other names")
        history_choice = self.subscription.histories.find_choice(state.name)
        if history_choice.initial or history_choice.scd2:
            raise PgsieveError("a `history` can only begin with a copy")
        if source_definition.layout != wanted_definition.layout:
            raise PgsieveError("its replica does not follow the table's present definition yet")
        if missing_columns := [
            column for column, _ in set(wanted_definition.columns) - set(source_definition.table_columns)
        ]:
            raise PgsieveError(
                f"it lacks columns, or has them in another type: {', '.join(sorted(missing_columns))}"
            )
        return _UsableReplica(
            source,
            state,
            self._find_filters(source, replicated_table, source_definition),
            replicated_table,
            wanted_definition,
        )

    def _refuse_unknown_rows(
        self, source: Subscription, catalog: Catalog, state: TableState, source_definition: Definition
    ) -> None:
        """Raise PgsieveError if a replica may have other rows than a copy at its LSN would have."""
        if source.slot_stream.filtered:
            raise PgsieveError(
                "its mode is `publisher`: the publisher filters its rows, and may have had other row filters between two runs"
            )
        if not source_definition.unaltered or source_definition.published is None:
            raise PgsieveError(
                "since its copy its publications were altered, or a transaction was skipped; or an earlier pgsieve copied it"
            )
        publications = [catalog.publications.get(name) for name in source_definition.published.publications]
        if not all(
            publication is not None and publication.operations == frozenset(OPERATIONS)
            for publication in publications
        ):
            raise PgsieveError("not all of its publications publish all operations")
        if (
            source.name == self.subscription.name
            and not set(source_definition.published.publications)
            <= source.slot_stream.defined_publications.keys()
        ):
            raise PgsieveError(
                "its publications are those of the server, not of pgsieve.yaml, so it may still get changes that they send"
            )
        if source_definition.published.row_filters is not None:
            self._refuse_unsent_values(source, state)

    def _refuse_unsent_values(self, source: Subscription, state: TableState) -> None:
        """Raise PgsieveError if an UPDATE may have become an INSERT that lacks values.

        This happens if an UPDATE moves a row into the row filter, and does not send an unchanged TOAST value. A copy
        would have this value. The present replica identity proves nothing: it may have been another one at that UPDATE.
        """
        deleted_up_to = SubscriptionRecord(self.lake, source.name).read_state().deleted_up_to
        if deleted_up_to is None or deleted_up_to > state.lsn:
            raise PgsieveError(
                "it is no longer known whether UPDATEs became INSERTs that lack unchanged values"
            )
        condition = f"commit_lsn >= {state.lsn:d} and operation = 'insert' and cardinality(unchanged) > 0"
        for path in list_history_paths(self.lake.paths.change_history, source.name, {state.name: state}):
            if (
                self.lake.records.exists(path)
                and self.lake.find_column_bound("min", path, "commit_lsn", condition) is not None
            ):
                raise PgsieveError("some UPDATEs became INSERTs without values that were not sent")

    def _find_filters(
        self, source: Subscription, replicated_table: ReplicatedTable, source_definition: Definition
    ) -> tuple[Node, ...] | None:
        """Find the row filters that the wanted rows match.

        Raises PgsieveError if the replica's own filters may have left out a wanted row.
        """
        wanted_filters, present_filters = (
            replicated_table.row_filters,
            source_definition.published.row_filters if source_definition.published else None,
        )
        if wanted_filters is None and present_filters is None:
            return None
        if wanted_filters is None:
            raise PgsieveError("its row filter left out rows that are wanted")
        replicated_table = _select_columns(source, replicated_table, source_definition)
        trees = tuple(
            row_filter.tree for row_filter in parse_filters(source, replicated_table, wanted_filters)
        )
        if present_filters is not None:
            condition_sets = [
                set(_split_conjuncts(row_filter.tree))
                for row_filter in parse_filters(source, replicated_table, present_filters)
            ]
            for tree in trees:
                if not any(condition_set <= set(_split_conjuncts(tree)) for condition_set in condition_sets):
                    raise PgsieveError("it is not certain that all wanted rows pass its row filter")
        return trees

    def _make_named_replica(self, name: Name, usable_replica: _UsableReplica) -> tuple[int, int]:
        """Make a replica (`_make_replica`). Spark's jobs have the name of the table."""
        with name_jobs(self.subscription.name, f"refilter of {quote_qualified(*name)}"):
            return self._make_replica(name, usable_replica)

    def _make_replica(self, name: Name, usable_replica: _UsableReplica) -> tuple[int, int]:
        """Make a replica; returns its LSN and its number of rows. If this process dies, the next run copies the table.

        Raises OvertakenError if another process has decoded and filtered changes meanwhile, or has recorded that
        the source's or the new table has to be copied. This happens, for example, if the server cannot send a
        transaction that changes the table.
        """
        lake, source = self.lake, usable_replica.source
        states, record = (
            TableStates(lake, self.subscription.name),
            TransformedSlices(lake, self.subscription.name),
        )
        # The state and the versions are read before the LSN, so that whatever is written in between is noticed.
        former_state = (
            usable_replica.state
            if source.name == self.subscription.name
            else states.read_newest().get(name, TableState(*name, SyncState.INITIALIZE))
        )
        source_head, target_head = (
            lake.records.head(lake.paths.replica(subscription_name, *name))
            for subscription_name in (source.name, self.subscription.name)
        )
        lsn = find_applied_lsn(lake, source, usable_replica.state.lsn)
        self._refuse_gap(lsn)
        definition = usable_replica.wanted_definition
        history = former_state.definition.history if former_state.definition else History()
        new_definition = replace(definition, history=history.with_columns(definition.columns), unaltered=True)
        unfinished_state = TableState(
            *name, SyncState.INITIALIZE, lsn, reason=REFILTER_REASON, version=former_state.version
        )
        if states.append_unless_changed([unfinished_state]):
            raise OvertakenError(states.path)
        lake.access.make_durable()
        record.fence()
        path = self._write_rows(usable_replica, new_definition, lsn, source_head, target_head)
        if source.name != self.subscription.name:
            source_states = TableStates(lake, source.name)
            if name in source_states.read_since(usable_replica.state.version):
                raise OvertakenError(source_states.path)
        if states.append_unless_changed(
            [TableState(*name, SyncState.READY, lsn, new_definition)],
            lambda: [
                changed_name
                for changed_name, state in states.read_since(former_state.version).items()
                if not (state.is_being_altered and state.lsn == lsn)
            ],
        ):
            raise OvertakenError(states.path)
        if record.fence() > lsn:
            states.append([TableState(*name, SyncState.INITIALIZE, reason=REFILTER_REASON)])
            raise OvertakenError(record.path)
        return lsn, lake.count_rows(path)

    def _write_rows(
        self,
        usable_replica: _UsableReplica,
        new_definition: Definition,
        lsn: int,
        source_head: TableHead,
        target_head: TableHead,
    ) -> str:
        """Write the wanted rows of a usable replica into the new replica, at an LSN. Returns the path of the new replica.

        `source_head` and `target_head` are the versions of both replicas from before the LSN was found.
        """
        lake, source = self.lake, usable_replica.source
        target_path, source_path = (
            lake.paths.replica(subscription_name, *usable_replica.state.name)
            for subscription_name in (self.subscription.name, source.name)
        )
        source_definition = usable_replica.state.definition or new_definition
        source_table = _select_columns(source, usable_replica.replicated_table, source_definition)
        target_table = _select_columns(self.subscription, usable_replica.replicated_table, new_definition)
        selection = _WantedRows(
            usable_replica.filters,
            source_table.columns,
            _make_arrow_schema(source, source_table),
            _make_arrow_schema(self.subscription, target_table),
            source_definition.deleted_column,
        )
        rewrite(
            lake,
            source_path,
            RowChange(
                selection.column_names, selection, selection.wanted_schema, format_ddl(new_definition.columns)
            ),
            target_head.version if target_head.version >= 0 else None,
            target_path=target_path,
            position=lsn if (target_head.position or 0) < lsn else None,
        )
        if target_path != source_path and lake.records.head(source_path) != source_head:
            raise OvertakenError(source_path)
        return target_path

    def _refuse_gap(self, lsn: int) -> None:
        """Raise PgsieveError if the table would not get all changes from the LSN on.

        Either the slot does not have them, or changes after the LSN were already decoded and filtered without the
        table.
        """
        slot_stream, name = self.subscription.slot_stream, self.subscription.name
        slot_begin = ChangeLog(self.lake, slot_stream).read_position()
        if slot_begin is None or slot_begin > lsn or TransformedSlices(self.lake, name).read_position() > lsn:
            raise PgsieveError(
                f'subscription "{name}": its slot begins, or was read, beyond the LSN {format_lsn(lsn)} of the existing replica',
                hint="`pgsieve run` of the other subscription advances this LSN; or `pgsieve run` of this one copies its tables",
                sqlstate="55000",
            )


@dataclass(frozen=True)
class _WantedRows:
    """Selects rows that match one of the filters, and the columns of `wanted_schema`, from rows of `source_schema`.

    `publisher_names` are the publisher's names of the columns of `source_schema`; the filters use these names. Rows that
    the column `deleted_column` marks as deleted are left out.
    """

    filters: tuple[Node, ...] | None
    publisher_names: tuple[str, ...]
    source_schema: pa.Schema
    wanted_schema: pa.Schema
    deleted_column: str | None = None

    @property
    def column_names(self) -> list[str]:
        """The names of all columns that have to be read."""
        return [*self.source_schema.names, *([] if self.deleted_column is None else [self.deleted_column])]

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the selected rows of a batch."""
        rows = keep_living_rows(batch, self.source_schema, self.deleted_column)
        if self.filters is not None:
            renamed_batch = rows.rename_columns(self.publisher_names)
            rows = rows.filter(pc.fill_null(compile_filters(*self.filters)(renamed_batch), False))
        return rows.select(self.wanted_schema.names)


def _select_columns(
    subscription: Subscription, replicated_table: ReplicatedTable, definition: Definition
) -> ReplicatedTable:
    """Return the table with only the columns that a replica of this definition has."""
    column_names = subscription.published_names(replicated_table.table)
    return replace(
        replicated_table, columns=tuple(column_names[name] for name, _ in definition.table_columns)
    )


def _make_arrow_schema(subscription: Subscription, replicated_table: ReplicatedTable) -> pa.Schema:
    """Make an Arrow schema of the columns of a table's replica."""
    types = subscription.column_types(replicated_table)
    return pa.schema(
        [(subscription.replica_name(name), column_type.arrow_type) for name, column_type in types.items()]
    )


def _split_conjuncts(tree: Node) -> Iterator[Node]:
    """Yields the conditions that are joined by AND at the top of a filter's tree."""
    if isinstance(tree, Logical) and tree.connective == "AND":
        for operand in tree.operands:
            yield from _split_conjuncts(operand)
    else:
        yield tree
