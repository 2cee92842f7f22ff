"""Refilters: makes the replicas of a subscription from replicas that the lake already has, without a copy.

They may be replicas of the same subscription, or of another one.

In: - a subscription that is new, or that has other publications, row filters or column lists than before
    - the present catalog, and other subscriptions of the same source
Out: - for each table, the subscription from whose replica it can be made, or the reason why there is none
     - the new replicas, which equal copies at that subscription's LSN

A replica is used only if it is certain that it has all rows of a copy (`Definition.unaltered`). Raises PgsieveError.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.checks.conformity import parse_filters
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.columns import write_ddl
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import Definition, History, Subscription
from pgsieve.decoding.changes.metadata_columns import select_living
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog, ReplicatedTable
from pgsieve.decoding.row_filters.evaluation.verdicts import compile_filters
from pgsieve.decoding.row_filters.nodes import Logical, Node
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.rewriting import RowChange


@dataclass(frozen=True)
class Refiltering:
    """The plan for a table.

    - `source`: the subscription from whose replica the table is made; None if there is none
    - `reason`: the reason why there is none
    - `rows`: the number of rows, as soon as the replica is made
    """

    name: Name
    source: str | None
    reason: str | None = None
    rows: int | None = None


@dataclass(frozen=True)
class _UsableReplica:
    """A replica that has all rows that are wanted.

    - `source`, `state`: its subscription and its state
    - `filters`: the row filters that the wanted rows match; None if all rows are wanted
    - `replicated`: the table as it is published now
    - `wanted`: the definition of the new replica
    """

    source: Subscription
    state: TableState
    filters: tuple[Node, ...] | None
    replicated: ReplicatedTable
    wanted: Definition


def applied_lsn(lake: Lake, source: Subscription) -> int:
    """The LSN before which the replicas of a subscription have all changes.

    Raises PgsieveError if there are changes that are not applied yet.
    """
    progress = ReplicaProgress(source, lake)
    transformed_lsn = progress.read_transformed_lsn()
    if progress.find_applied_lsn() < transformed_lsn:
        raise PgsieveError(
            f'subscription "{source.name}" has changes that are not applied yet',
            hint=f"`pgsieve run {source.name}` applies them, or says why not",
            sqlstate="55000",
        )
    return progress.find_complete_lsn(transformed_lsn)


@dataclass(frozen=True)
class Refilter:
    """Makes replicas of a subscription. Each is made from a replica of the first of `sources` that has all wanted rows.

    `catalog` is the present catalog, with the publications of the subscription. Each source comes with the present
    catalog that has the publications of the source.
    """

    subscription: Subscription
    sources: Sequence[tuple[Subscription, Catalog]]
    lake: Lake
    catalog: Catalog

    def plan(self, names: Sequence[Name]) -> list[Refiltering]:
        """The plans for these tables; without names, for all published tables."""
        return [plan for plan, _ in self._plans(names)]

    def make(self, names: Sequence[Name]) -> list[Refiltering]:
        """Make the replicas that can be made. Returns the plans, with the numbers of rows."""
        plans = []
        for plan, usable_replica in self._plans(names):
            plans.append(
                plan if usable_replica is None else replace(plan, rows=self._make(plan.name, usable_replica))
            )
        return plans

    def _plans(self, names: Sequence[Name]) -> Iterator[tuple[Refiltering, _UsableReplica | None]]:
        """Yields the plan for each table, and the replica from which it is made."""
        tables = self.subscription.tables(self.catalog)
        states = {source.name: TableStates(self.lake, source.name).newest() for source, _ in self.sources}
        for name in names or tables:
            reasons = []
            for source, catalog in self.sources:
                state = states[source.name].get(name)
                try:
                    usable_replica = self._find_usable(tables.get(name), source, catalog, state)
                except PgsieveError as error:
                    reasons.append(f"{source.name}: {error.message}")
                    continue
                yield Refiltering(name, source.name), usable_replica
                break
            else:
                yield Refiltering(name, None, "; ".join(reasons)), None

    def _find_usable(
        self,
        replicated: ReplicatedTable | None,
        source: Subscription,
        catalog: Catalog,
        state: TableState | None,
    ) -> _UsableReplica:
        """The replica of a source, if it certainly has all wanted rows. Raises PgsieveError with the reason if not.

        `state` is the state of the source's table.
        """
        if replicated is None:
            raise PgsieveError("the table is not published")
        if replicated.leaves:
            raise PgsieveError("a partition tree can only be copied")
        if not self.subscription.copy_data:
            raise PgsieveError("`copy_data: false` begins without rows")
        if state is None or state.state != SyncState.READY or state.definition is None:
            meaning = (state.state if state else SyncState.INITIALIZE).meaning
            raise PgsieveError(f"its replica is not ready: {meaning}")
        source_definition = state.definition
        self._refuse_unknown(source, catalog, state, source_definition, replicated.table.replica_identity)
        wanted = self.subscription.definition(replicated, self.catalog)
        if wanted.metadata:
            raise PgsieveError("metadata columns and deleted rows that are kept begin with a copy")
        if source.layout.uses_plain_names != self.subscription.layout.uses_plain_names:
            raise PgsieveError("`names` of the layouts differ, so its columns have other names")
        history_choice = self.subscription.histories.table_choice(state.name)
        if history_choice.initial or history_choice.scd2:
            raise PgsieveError("`history` begins with the rows of a copy")
        if source_definition.layout != wanted.layout:
            raise PgsieveError("its replica does not follow the table's present definition yet")
        if missing_columns := [
            column for column, _ in set(wanted.columns) - set(source_definition.table_columns)
        ]:
            raise PgsieveError(
                f"it lacks columns, or has them in another type: {', '.join(sorted(missing_columns))}"
            )
        return _UsableReplica(
            source, state, self._filters(source, replicated, source_definition), replicated, wanted
        )

    def _refuse_unknown(
        self,
        source: Subscription,
        catalog: Catalog,
        state: TableState,
        source_definition: Definition,
        identity: str,
    ) -> None:
        """Raise PgsieveError if a replica may have other rows than a copy at its LSN would have.

        `identity` is the table's present replica identity.
        """
        if source.slot_stream.filtered:
            raise PgsieveError("its publisher filters, and its publications between two runs are not known")
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
            and not set(source_definition.published.publications) <= source.slot_stream.defined.keys()
        ):
            raise PgsieveError(
                "its rows came through publications on the server, and further changes may still come through these"
            )
        if source_definition.published.row_filters is not None and identity != "f":
            self._refuse_unsent(source, state, source_definition)

    def _refuse_unsent(self, source: Subscription, state: TableState, source_definition: Definition) -> None:
        """Raise PgsieveError if an UPDATE may have become an INSERT without values that were not sent.

        A copy would have these values.
        """
        deleted_up_to = SubscriptionRecord(self.lake, source.name).read_state().deleted_up_to
        path = self.lake.paths.change_history(source.name, *state.name, source_definition.history.generation)
        if deleted_up_to is None or deleted_up_to > state.lsn or source_definition.history.generation:
            raise PgsieveError(
                "it is no longer known whether UPDATEs became INSERTs without their unchanged values"
            )
        if not self.lake.records.exists(path):
            return
        condition = f"commit_lsn >= {state.lsn:d} and operation = 'insert' and cardinality(unchanged) > 0"
        if self.lake.column_bound("min", path, "commit_lsn", condition) is not None:
            raise PgsieveError("some UPDATEs became INSERTs without values that were not sent")

    def _filters(
        self, source: Subscription, replicated: ReplicatedTable, source_definition: Definition
    ) -> tuple[Node, ...] | None:
        """The row filters that wanted rows match.

        Raises PgsieveError if a wanted row may not match the replica's own filters.
        """
        wanted_filters, present_filters = (
            replicated.row_filters,
            source_definition.published.row_filters if source_definition.published else None,
        )
        if wanted_filters is None and present_filters is None:
            return None
        if wanted_filters is None:
            raise PgsieveError("its row filter left out rows that are wanted")
        replicated = _with_columns_of(source, replicated, source_definition)
        trees = tuple(row_filter.tree for row_filter in parse_filters(source, replicated, wanted_filters))
        if present_filters is not None:
            conditions = [
                set(_conjuncts(row_filter.tree))
                for row_filter in parse_filters(source, replicated, present_filters)
            ]
            for tree in trees:
                if not any(each <= set(_conjuncts(tree)) for each in conditions):
                    raise PgsieveError("it is not certain that all wanted rows pass its row filter")
        return trees

    def _make(self, name: Name, usable_replica: _UsableReplica) -> int:
        """Make a replica; returns its number of rows. If this process dies meanwhile, the next run copies the table."""
        lake, target = self.lake, self.subscription.name
        lsn = applied_lsn(lake, usable_replica.source)
        states, record = TableStates(lake, target), TransformedSlices(lake, target)
        self._refuse_gap(lsn)
        former_state = states.newest().get(name)
        replicated, wanted = usable_replica.replicated, usable_replica.wanted
        history = former_state.definition.history if former_state and former_state.definition else History()
        new_definition = replace(wanted, history=history.with_columns(wanted.columns), unaltered=True)
        path, source = (lake.paths.replica(each, *name) for each in (target, usable_replica.source.name))
        former_version = lake.records.head(source)
        head = former_version if path == source else lake.records.head(path)
        unfinished_reason = "filtering it again did not end; the next run copies it"
        states.append([TableState(*name, SyncState.INITIALIZE, reason=unfinished_reason)])
        lake.access.make_durable()
        record.fence()
        source_definition = usable_replica.state.definition or new_definition
        replicated_before = _with_columns_of(usable_replica.source, replicated, source_definition)
        selection = _RowSelection(
            usable_replica.filters,
            replicated_before.columns,
            _arrow_schema(usable_replica.source, replicated_before),
            _arrow_schema(self.subscription, _with_columns_of(self.subscription, replicated, new_definition)),
            source_definition.deleted_column,
        )
        lake.rewrite(
            source,
            RowChange(selection.names, selection, selection.schema, write_ddl(new_definition.columns)),
            head.version if head.version >= 0 else None,
            target_path=path,
            position=lsn if (head.position or 0) < lsn else None,
        )
        if path != source and lake.records.head(source) != former_version:
            raise OvertakenError(source)
        states.append([TableState(*name, SyncState.READY, lsn, new_definition)])
        if record.fence() > lsn:
            states.append([TableState(*name, SyncState.INITIALIZE, reason=unfinished_reason)])
            raise OvertakenError(record.path)
        return lake.count_rows(path)

    def _refuse_gap(self, lsn: int) -> None:
        """Raise PgsieveError if the table would not get all changes from the LSN on.

        Either the slot does not have them, or slices after the LSN were already transformed without the table.
        """
        slot_stream, name = self.subscription.slot_stream, self.subscription.name
        slot_begin = ChangeLog(self.lake, slot_stream).position()
        if slot_begin is None or slot_begin > lsn or TransformedSlices(self.lake, name).position() > lsn:
            raise PgsieveError(
                f'subscription "{name}": its slot begins, or was read, beyond {format_lsn(lsn)}, the LSN of the replica',
                hint="`pgsieve run` reads the other subscription on; or `pgsieve run` of this one copies its tables",
                sqlstate="55000",
            )


@dataclass(frozen=True)
class _RowSelection:
    """Selects the rows that match one of the filters, and the columns of `schema` from those of `read`.

    `published` are the publisher's names of the columns of `read`, which the filters use. Rows that are marked by the
    column `deleted` are left out.
    """

    filters: tuple[Node, ...] | None
    published: tuple[str, ...]
    read: pa.Schema
    schema: pa.Schema
    deleted: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of all columns that have to be read."""
        return [*self.read.names, *([] if self.deleted is None else [self.deleted])]

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The selected rows of a batch."""
        rows = select_living(batch, self.read, self.deleted)
        if self.filters is not None:
            renamed_batch = rows.rename_columns(self.published)
            rows = rows.filter(pc.fill_null(compile_filters(*self.filters)(renamed_batch), False))
        return rows.select(self.schema.names)


def _with_columns_of(
    subscription: Subscription, replicated: ReplicatedTable, definition: Definition
) -> ReplicatedTable:
    """The table with only the columns that a replica of this definition has."""
    column_names = subscription.published_names(replicated.table)
    return replace(replicated, columns=tuple(column_names[name] for name, _ in definition.table_columns))


def _arrow_schema(subscription: Subscription, replicated: ReplicatedTable) -> pa.Schema:
    """The columns of a table's replica as an Arrow schema."""
    types = subscription.column_types(replicated)
    return pa.schema([(subscription.replica_name(name), kind.arrow_type) for name, kind in types.items()])


def _conjuncts(tree: Node) -> Iterator[Node]:
    """Yields the conditions that are joined by AND at the top of a tree."""
    if isinstance(tree, Logical) and tree.connective == "AND":
        for operand in tree.operands:
            yield from _conjuncts(operand)
    else:
        yield tree
