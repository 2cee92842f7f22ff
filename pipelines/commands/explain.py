"""`pgsieve run --explain`: says what a run would do for each table, which engine would write it, and why.

In: the configuration
Out: an `Explanation`. Nothing is changed.

Raises PgsieveError if a source does not answer, or if a subscription cannot be replicated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa

from pgsieve.assets.steps.initial_sync.copy import lacking_copy
from pgsieve.assets.steps.initial_sync.rows import ReplicaColumn, replica_schema
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.validation.waiting import sound_catalog, waiting_reason
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable
from pgsieve.pipelines.commands.explanation import ExplainedTable, Explanation
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.committers import FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.slot import slot_state
from pgsieve.resources.postgres.snapshot import read_table_bytes
from pgsieve.resources.work import DRIVER

_SPARK, _THREADS = "Spark", "threads"


def explain(config: Config, selected: Sequence[SubscriptionConfig]) -> Explanation:
    """Explain what a run of these subscriptions would do."""
    project = build_project(config)
    lake, waiting, tables = project.lake.open(), dict[str, int | None](), list[ExplainedTable]()
    engine = _SPARK if project.lake.engine.threads is None else _THREADS
    for subscription in (project.subscriptions[each.name] for each in selected):
        feed = subscription.feed
        with feed.source.connect() as connection:
            catalog = sound_catalog(connection, subscription, read_catalog(connection))
            tables += _TableExplainer(subscription, lake, engine).tables(connection, catalog)
            state = slot_state(connection, feed.slot)
            waiting[feed.name] = state.lag_bytes if state else None
    return Explanation(tuple(tables), waiting, lake.policy.small_bytes)


@dataclass(frozen=True)
class _TableExplainer:
    """Explains what a run would do for the tables of one subscription.

    `engine` is the engine that writes a table if it is too large for this process.
    """

    subscription: Subscription
    lake: Lake
    engine: str

    def tables(self, connection: psycopg.Connection[Any], catalog: Catalog) -> Iterator[ExplainedTable]:
        """Explain what a run would do for each table."""
        subscription = self.subscription
        tables, states = subscription.tables(catalog), TableStates(self.lake, subscription.name).newest()
        tables_to_copy, problems = lacking_copy(connection, subscription, catalog, tables, states)
        sizes = read_table_bytes(connection, list(tables_to_copy))
        for name, replicated in sorted(tables.items()):
            state = states.get(name)
            if state is not None and state.state == SyncState.SET_ASIDE:
                meaning, reason = SyncState.SET_ASIDE.meaning, state.reason or ""
                yield ExplainedTable(subscription.name, *name, meaning, reason)
            elif name in problems:
                yield ExplainedTable(subscription.name, *name, "wait", waiting_reason(problems[name]))
            elif name in tables_to_copy:
                yield self._explain_copy(name, replicated, sizes[name], state)
            else:
                yield self._explain_apply(name, replicated)

    def _explain_copy(
        self, name: Name, replicated: ReplicatedTable, size: int, state: TableState | None
    ) -> ExplainedTable:
        """Explain a copy. `size` is the size of the table in bytes, and `state` its recorded state, if it has one."""
        schema, path = self._schema(replicated), self.lake.paths.replica(self.subscription.name, *name)
        copy_reason = (state.reason or state.state.meaning) if state else "it has no replica yet"
        committer, commit_reason = self.lake.policy.choose_committer_with_reason(
            path, schema.names, size, lambda: schema, overwrite=True
        )
        match committer:
            case SparkCommitter():
                engine, commit_clause = _SPARK, f"Delta in Spark commits it: {commit_reason}"
            case InProcessCommitter() | FileCommitter():
                engine, commit_clause = (
                    DRIVER if self.lake.policy.is_small(size) else self.engine,
                    "this process commits it",
                )
        return ExplainedTable(
            self.subscription.name,
            *name,
            "copy",
            f"{copy_reason}; {commit_clause}",
            size,
            few=engine,
            many=engine,
        )

    def _explain_apply(self, name: Name, replicated: ReplicatedTable) -> ExplainedTable:
        """Explain how changes are applied: which engine writes the table if there are few changes, and if there are many.

        The answer comes from the same policy that a run uses.
        """
        schema, policy = self._schema(replicated), self.lake.policy
        path = self.lake.paths.replica(self.subscription.name, *name)
        types = self.subscription.column_types(replicated)
        if policy.choose_file_committer(path, schema) is not None:
            reason = "its files are written anew, and this process commits them"
            return self._apply_entry(name, reason, DRIVER, self.engine)
        key = [types[column].spark_type for column in replicated.key]
        _, files_reason = policy.choose_committer_with_reason(path, schema.names, None, lambda: schema)
        _, merge_reason = policy.choose_committer_with_reason(path, schema.names, 0, key=key)
        if key and policy.choose_in_process_committer(path, schema.names, 0, key=key) is not None:
            return self._apply_entry(
                name, f"rows are merged, as the table takes no files: {files_reason}", DRIVER, _SPARK
            )
        return self._apply_entry(
            name, f"Delta in Spark merges rows: {merge_reason if key else files_reason}", _SPARK, _SPARK
        )

    def _apply_entry(self, name: Name, because: str, few: str, many: str) -> ExplainedTable:
        return ExplainedTable(self.subscription.name, *name, "apply", because, few=few, many=many)

    def _schema(self, replicated: ReplicatedTable) -> pa.Schema:
        types = self.subscription.replica_types(replicated)
        return replica_schema([ReplicaColumn(name, kind) for name, kind in types.items()])
