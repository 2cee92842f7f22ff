"""Schema changes: makes a replica follow ALTER TABLE in place, if the publisher's rows need not be read again.

In: the definitions of the tables in the catalog, and the definitions of the replicas
Out: at most one commit for each replica

If all that changes is added columns that are NULL, only metadata is changed. For other changes (a value for all rows, a
new name, a dropped column), the replica is rewritten from its own rows. If neither is possible, the state of the table says that it
has to be copied again. The position of a replica (the LSN up to which it has all changes) stays the same.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.history.commit_times import find_last_commit_time
from pgsieve.assets.steps.history.copied_rows import begin_history
from pgsieve.assets.steps.history.versions import VersionTable, describe_versions_failure
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.columns import format_ddl
from pgsieve.assets.steps.records.failures import TABLE_ERRORS
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    TableStates,
    find_newest_version,
)
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import (
    Definition,
    FormerLayout,
    PublicationRecord,
    Subscription,
    arrow_types,
    planned_sources,
)
from pgsieve.assets.steps.update_transformation.projection import Projection
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.errors import ValueNotRepresentableError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.evolution import ColumnSource, SchemaChangedError, refuse_ambiguity
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.values.types import ColumnType, convert_text
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.rewriting import RowChange, rewrite


@dataclass(frozen=True)
class SchemaChanges:
    """Adapts replicas to the definitions of a catalog.

    The WAL reached `lsn` after the catalog was read. So only changes before `lsn` can have the former definitions. A
    slice has the changes from one position of the slot to another. The slices up to `transformed_lsn` were transformed
    (decoded and filtered) with the former definitions.
    """

    subscription: Subscription
    lake: Lake
    lsn: int
    transformed_lsn: int
    log: Log

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def follow(self, catalog: Catalog) -> bool:
        """Make the ready replicas follow the definitions of the catalog. Returns True if a definition has changed.

        Raises OvertakenError if another process changes the state of a table at the same time.
        """
        table_by_name, has_changed = self.subscription.tables(catalog), False
        self._states.note_altered(
            lambda state: _is_altered(self.subscription, table_by_name.get(state.name), state)
        )
        state_by_table = self._states.read_newest()
        states_version = find_newest_version(state_by_table.values())
        for name, state in state_by_table.items():
            replicated_table = table_by_name.get(name)
            if state.state != SyncState.READY or state.definition is None or replicated_table is None:
                continue
            present_definition = self.subscription.definition(replicated_table, catalog)
            if present_definition == state.definition:
                continue
            has_changed = True
            try:
                self._follow_table(state, replicated_table, present_definition, states_version)
            except (SchemaChangedError, ValueNotRepresentableError) as error:
                reason = f'table "{replicated_table.table.qualified_name}": {error.message}; it is copied again by the next run'
                self._states.append([replace(state, state=SyncState.INITIALIZE, reason=reason)])
                continue
            self.log(
                f"{replicated_table.table.quoted_name} of {self.subscription.name} follows its table's definition"
            )
        return has_changed

    def _follow_table(
        self,
        state: TableState,
        replicated_table: ReplicatedTable,
        present_definition: Definition,
        states_version: int,
    ) -> None:
        """Make one replica follow its present definition. `states_version` is the Delta version of the states.

        Raises SchemaChangedError if the table has to be copied again.
        """
        former_definition = state.definition
        assert former_definition is not None
        projection = _make_projection(
            planned_sources(former_definition, present_definition),
            self.subscription.replica_types(replicated_table),
        )
        former_layout_of_changes = find_former_layout(
            former_definition, present_definition, self.transformed_lsn, self.lsn
        )
        new_definition = replace(
            present_definition,
            former=former_layout_of_changes,
            history=former_definition.history.with_columns(present_definition.columns),
            published=former_definition.published,
            unaltered=former_definition.unaltered,
        )
        if (
            projection.sources != _make_unchanged_sources(former_definition)
            or former_layout_of_changes.key != present_definition.key_numbers
        ):
            self._change_columns(state, new_definition, projection, states_version)
        else:
            self._replace_state(
                replace(state, definition=new_definition), lambda: self._states.read_since(states_version)
            )

    def _change_columns(
        self, state: TableState, new_definition: Definition, projection: Projection, states_version: int
    ) -> None:
        """Change the columns of a replica. Meanwhile the state of the table is "to be copied", in case this process dies.

        Another process that transforms a slice at this moment uses the former definition, or leaves the table out. A
        fence is a commit that makes such a process begin its slice again. There is a fence before the change and another
        one after it. If the other process has recorded a slice before the second fence, the table is copied again.
        """
        assert state.definition is not None
        lake, states = self.lake, self._states
        transformed_slices = TransformedSlices(lake, self.subscription.name)
        unchanged_sources, sources = _make_unchanged_sources(state.definition), projection.sources
        path, columns_ddl = (
            lake.paths.replica(self.subscription.name, *state.name),
            format_ddl(new_definition.columns),
        )
        lake.remove_impossible_feed(path, projection.schema.names)
        base_version = lake.records.version(path)
        self._replace_state(
            replace(state, state=SyncState.INITIALIZE), lambda: states.read_since(states_version)
        )
        lake.access.make_durable()
        transformed_slices.fence()
        self._refuse_unapplied_changes(state)
        only_adds_nulls = set(unchanged_sources) <= set(sources) and all(
            value.null_count for value in projection.value_by_column.values()
        )
        if only_adds_nulls:
            if sources != unchanged_sources:
                lake.add_columns(path, projection.schema, columns_ddl, base_version)
        else:
            rewrite(
                lake,
                path,
                RowChange(projection.former_columns, projection, projection.schema, columns_ddl),
                base_version,
            )
        self._follow_in_histories(state, new_definition, only_adds_nulls=only_adds_nulls)
        self._replace_state(
            replace(state, definition=new_definition),
            lambda: [n for n, s in states.read_since(states_version).items() if not s.is_being_altered],
        )
        if transformed_slices.fence() > self.transformed_lsn:
            raise SchemaChangedError("another process has transformed changes meanwhile")

    def _replace_state(self, state: TableState, find_changed_tables: Callable[[], Collection[Name]]) -> None:
        """Record a new state. Raises OvertakenError if `find_changed_tables` says that another process has changed it."""
        if self._states.append_unless_changed([state], find_changed_tables):
            raise OvertakenError(self._states.path)

    def _refuse_unapplied_changes(self, state: TableState) -> None:
        """Raise SchemaChangedError if the replica may still lack changes with the former columns and key.

        Such changes are in the change history, the Delta table of the table's changes. The table `_transformed` counts them
        by slice, but lacks a slice if a run died before it recorded the slice.
        """
        assert state.definition is not None
        lake, name = self.lake, self.subscription.name
        path = lake.paths.replica(name, *state.name)
        history_path = lake.paths.change_history(name, *state.name, state.definition.history.generation)
        position = max(state.lsn, lake.records.position(path) or 0)
        version_table = VersionTable.from_state(self.subscription, lake, state)
        if version_table is not None and lake.records.exists(version_table.path):
            position = max(state.lsn, min(position, lake.records.position(version_table.path) or 0))
        rows = lake.records.rows(TransformedSlices(lake, name).path, f"slice > {position:d}")
        if (lake.records.position(history_path) or 0) > max(self.transformed_lsn, state.lsn) or any(
            (row["schema"], row["table"]) == state.name and _has_changes(row) for row in rows
        ):
            raise SchemaChangedError("earlier changes are still to be applied")

    def _follow_in_histories(
        self, state: TableState, new_definition: Definition, *, only_adds_nulls: bool
    ) -> None:
        """Make the histories of a table follow the replica's new definition: its changes, and the versions of its rows.

        All transformed changes are in the replica.

        `only_adds_nulls` is True if the rows only got more columns, which are NULL. Otherwise, or if the change history
        begins anew, all versions of rows end, and new ones begin with the present columns. Raises SchemaChangedError if the
        versions cannot be written.
        """
        assert state.definition is not None
        subscription, lake = self.subscription, self.lake
        state_at_begin = replace(state, lsn=max(state.lsn, self.transformed_lsn), definition=new_definition)
        begins_anew = new_definition.history.generation > state.definition.history.generation
        if new_definition.history.whole and begins_anew:
            types = arrow_types(subscription, state.name, new_definition)
            time = find_last_commit_time(
                lake, subscription.name, state.name, new_definition, state_at_begin.lsn
            )
            begin_history(lake, subscription.name, state_at_begin, changes_schema(types), time)
        version_table = VersionTable.from_state(subscription, lake, state_at_begin)
        if version_table is None:
            return
        try:
            if only_adds_nulls and not begins_anew:
                version_table.add_new_columns()
            else:
                lsn = state_at_begin.lsn
                version_table.begin_anew(lsn, version_table.find_last_commit_time(lsn), skips_reached=False)
        except TABLE_ERRORS as error:
            problem = describe_versions_failure(lake, error, state.name, version_table.path)
            raise SchemaChangedError(f"the versions of its rows do not follow it: {problem}") from None


def _is_altered(
    subscription: Subscription, replicated_table: ReplicatedTable | None, state: TableState
) -> bool:
    """Whether a replica may have other rows than a new copy would have.

    This is so if its publications have changed, or if the slot leaves out changes by their origin.
    """
    publication_record = state.definition.published if state.definition else None
    return (
        subscription.slot_stream.options.origin != "any"
        or replicated_table is None
        or publication_record
        != PublicationRecord(replicated_table.row_filters, replicated_table.publications)
    )


def find_former_layout(
    followed_definition: Definition, present_definition: Definition, transformed_lsn: int, lsn: int
) -> FormerLayout:
    """Find the earliest layout that changes between `transformed_lsn` and `lsn` may have.

    A layout has the catalog's facts about the columns of a table. `followed_definition` is the one that the replica has
    had so far. Changes may have this definition's layout, or the layout before it (`former`).
    """
    earlier_layout = followed_definition.former
    if earlier_layout is None or earlier_layout.until <= transformed_lsn:
        return FormerLayout(followed_definition.layout, followed_definition.key_numbers, lsn)
    refuse_ambiguity(earlier_layout.layout, present_definition.layout)
    return replace(earlier_layout, until=lsn)


def _make_unchanged_sources(definition: Definition) -> tuple[ColumnSource, ...]:
    return tuple(ColumnSource(name, name) for name in definition.names)


def _has_changes(row: Mapping[str, Any]) -> bool:
    return any(row[kind] for kind in ("inserts", "updates", "deletes", "truncates"))


def _make_projection(sources: Sequence[ColumnSource], type_by_column: Mapping[str, ColumnType]) -> Projection:
    """Make the projection that computes the new columns from their sources."""
    schema = pa.schema([(source.column, type_by_column[source.column].arrow_type) for source in sources])
    value_by_column = {
        source.column: convert_text(
            pa.array([source.value], pa.string()), type_by_column[source.column], source.column
        )
        for source in sources
        if source.former_column is None
    }
    return Projection(sources, schema, value_by_column)
