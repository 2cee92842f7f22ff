"""`pgsieve run --explain`: says what a run would do for each table, which engine would write it, and why.

An engine is what writes a table: this process, its threads, or Spark.

In: the configuration
Out: an `Explanation`. Nothing is changed.

Raises PgsieveError if a source does not answer, or if a subscription cannot be replicated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa

from pgsieve.assets.steps.initial_sync.copy import find_tables_without_copy
from pgsieve.assets.steps.initial_sync.readiness import find_unfollowed_change
from pgsieve.assets.steps.initial_sync.rows import ReplicaColumn, make_replica_schema
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.validation.waiting import describe_waiting_reason, make_subscription_catalog
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.pipelines.commands.explanation import ExplainedTable, Explanation
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.committers import FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.slot import read_slot_state
from pgsieve.resources.postgres.snapshot import read_table_bytes
from pgsieve.resources.work import DRIVER

_SPARK, _THREADS = "Spark", "threads"


def explain(config: Config, subscription_configs: Sequence[SubscriptionConfig]) -> Explanation:
    """Explain what a run of these subscriptions would do."""
    project = build_project(config)
    lake = project.lake.open()
    waiting_bytes_by_slot_stream = dict[str, int | None]()
    explained_tables = list[ExplainedTable]()
    engine = _SPARK if project.lake.engine.threads is None else _THREADS
    for subscription in (
        project.subscriptions[subscription_config.name] for subscription_config in subscription_configs
    ):
        slot_stream = subscription.slot_stream
        with slot_stream.source.connect() as connection:
            catalog = make_subscription_catalog(connection, subscription, read_catalog(connection))
            explained_tables += _TableExplainer(subscription, lake, engine).explain_tables(
                connection, catalog
            )
            slot = read_slot_state(connection, slot_stream.slot)
            waiting_bytes_by_slot_stream[slot_stream.name] = slot.lag_bytes if slot else None
    return Explanation(tuple(explained_tables), waiting_bytes_by_slot_stream, lake.policy.small_bytes)


@dataclass(frozen=True)
class _TableExplainer:
    """Explains what a run would do for the tables of one subscription.

    `engine` is the engine that writes a table if it is too large for this process.
    """

    subscription: Subscription
    lake: Lake
    engine: str

    def explain_tables(
        self, connection: psycopg.Connection[Any], catalog: Catalog
    ) -> Iterator[ExplainedTable]:
        """Explain what a run would do for each table."""
        subscription = self.subscription
        tables, states = subscription.tables(catalog), TableStates(self.lake, subscription.name).read_newest()
        tables_to_copy, problems_by_name = find_tables_without_copy(
            connection, subscription, catalog, tables, states
        )
        bytes_by_name = read_table_bytes(connection, list(tables_to_copy))
        for name, replicated_table in sorted(tables.items()):
            state = states.get(name)
            if state is not None and state.state == SyncState.SET_ASIDE:
                meaning, reason = SyncState.SET_ASIDE.meaning, state.reason or ""
                yield ExplainedTable(subscription.name, *name, meaning, reason)
            elif name in problems_by_name:
                yield ExplainedTable(
                    subscription.name, *name, "wait", describe_waiting_reason(problems_by_name[name])
                )
            elif name in tables_to_copy:
                change = find_unfollowed_change(state, subscription.definition(replicated_table, catalog))
                copy_reason = _describe_copy_reason(state, change)
                yield self._explain_copy(name, replicated_table, bytes_by_name[name], copy_reason)
            else:
                yield self._explain_apply(name, replicated_table)

    def _explain_copy(
        self, name: Name, replicated_table: ReplicatedTable, size_bytes: int, copy_reason: str
    ) -> ExplainedTable:
        """Explain a copy. `size_bytes` is the size of the table in bytes, and `copy_reason` says why it is copied."""
        schema = self._make_replica_schema(replicated_table)
        path = self.lake.paths.replica(self.subscription.name, *name)
        committer, commit_reason = self.lake.policy.choose_committer_with_reason(
            path, schema.names, size_bytes, lambda: schema, overwrite=True
        )
        match committer:
            case SparkCommitter():
                engine, commit_clause = _SPARK, f"Delta in Spark commits it: {commit_reason}"
            case InProcessCommitter() | FileCommitter():
                engine = DRIVER if self.lake.policy.is_small(size_bytes) else self.engine
                commit_clause = "this process commits it"
        return ExplainedTable(
            self.subscription.name,
            *name,
            "copy",
            f"{copy_reason}; {commit_clause}",
            size_bytes,
            few=engine,
            many=engine,
        )

    def _explain_apply(self, name: Name, replicated_table: ReplicatedTable) -> ExplainedTable:
        """Explain how changes are applied: which engine writes the table if there are few changes, and if there are many.

        The answer comes from the same policy that a run uses.
        """
        schema, policy = self._make_replica_schema(replicated_table), self.lake.policy
        path = self.lake.paths.replica(self.subscription.name, *name)
        types_by_column = self.subscription.column_types(replicated_table)
        key_types = [types_by_column[column].spark_type for column in replicated_table.key]
        committer, reason = policy.choose_apply_committer(path, schema, 0, key_types=key_types)
        match committer:
            case FileCommitter():
                engines = DRIVER, self.engine
            case InProcessCommitter():
                engines = DRIVER if key_types else _SPARK, _SPARK
            case SparkCommitter():
                engines = _SPARK, _SPARK
        return self._make_apply_entry(name, reason, *engines)

    def _make_apply_entry(
        self, name: Name, reason: str, engine_for_few: str, engine_for_many: str
    ) -> ExplainedTable:
        return ExplainedTable(
            self.subscription.name, *name, "apply", reason, few=engine_for_few, many=engine_for_many
        )

    def _make_replica_schema(self, replicated_table: ReplicatedTable) -> pa.Schema:
        types = self.subscription.replica_types(replicated_table)
        return make_replica_schema([ReplicaColumn(name, column_type) for name, column_type in types.items()])


def _describe_copy_reason(state: TableState | None, change: str | None) -> str:
    """Why a run copies a table, by its recorded state and the change that its replica cannot follow."""
    if state is None:
        return "it has no replica yet"
    return state.reason or change or state.state.meaning
