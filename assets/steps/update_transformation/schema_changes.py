"""Schema changes: makes a replica follow ALTER TABLE in place, if the publisher's rows need not be read again.

In: the definitions of the tables in the catalog, and the definitions of the replicas
Out: at most one commit for each replica

If columns were added that are NULL, only metadata is changed. For other changes (a value for all rows, a new name, a
dropped column), the replica is rewritten from its own rows. If a table cannot be followed in place, its state says that
it has to be copied again. The position of a replica stays the same, because its rows are still those of the same LSN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.history.copied_rows import begin_history
from pgsieve.assets.steps.history.versions import VersionTable, versions_failure
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.columns import write_ddl
from pgsieve.assets.steps.records.failures import TABLE_ERRORS
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates, newest_version
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
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable
from pgsieve.decoding.publications.evolution import ColumnSource, SchemaChangedError, refuse_ambiguity
from pgsieve.decoding.values.types import ColumnType, convert_text
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.rewriting import RowChange


@dataclass(frozen=True)
class SchemaChanges:
    """Makes replicas follow the definitions of a catalog that was read before `lsn`.

    Slices (changes from one position of the slot to another) up to `transformed` were transformed with the former
    definitions.
    """

    subscription: Subscription
    lake: Lake
    lsn: int
    transformed: int
    log: Log

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def follow(self, catalog: Catalog) -> bool:
        """Make the ready replicas follow the definitions of the catalog. Returns true if a definition has changed.

        Raises OvertakenError if another process changes the state of a table at the same time.
        """
        tables, has_changed = self.subscription.tables(catalog), False
        self._states.note_altered(lambda state: _is_altered(self.subscription, tables.get(state.name), state))
        states = self._states.newest()
        version = newest_version(states.values())
        for name, state in states.items():
            replicated = tables.get(name)
            if state.state != SyncState.READY or state.definition is None or replicated is None:
                continue
            present_definition = self.subscription.definition(replicated, catalog)
            if present_definition == state.definition:
                continue
            has_changed = True
            try:
                self._follow(state, replicated, present_definition, version)
            except (SchemaChangedError, ValueNotRepresentableError) as error:
                reason = f'table "{replicated.table.qualified_name}": {error.message}; it is copied again by the next run'
                self._states.append([replace(state, state=SyncState.INITIALIZE, reason=reason)])
                continue
            self.log(
                f"{replicated.table.qualified_name} of {self.subscription.name} follows its table's definition"
            )
        return has_changed

    def _follow(
        self, state: TableState, replicated: ReplicatedTable, present_definition: Definition, version: int
    ) -> None:
        """Make one replica follow its present definition. `version` is the version of `_table_states` with `state`.

        Raises SchemaChangedError if the table has to be copied again.
        """
        former_definition = state.definition
        assert former_definition is not None
        projection = _projection(
            planned_sources(former_definition, present_definition),
            self.subscription.replica_types(replicated),
        )
        former_layout_of_changes = former_layout(
            former_definition, present_definition, self.transformed, self.lsn
        )
        new_definition = replace(
            present_definition,
            former=former_layout_of_changes,
            history=former_definition.history.with_columns(present_definition.columns),
            published=former_definition.published,
            unaltered=former_definition.unaltered,
        )
        if (
            projection.sources != _unchanged(former_definition)
            or former_layout_of_changes.key != present_definition.key_numbers
        ):
            self._evolve(state, new_definition, projection, version)
        else:
            self._refuse_changed_state(state, version)
            self._states.append([replace(state, definition=new_definition)])

    def _evolve(
        self, state: TableState, new_definition: Definition, projection: Projection, version: int
    ) -> None:
        """Change the columns of a replica. In case this process dies, the state of the table is "to be copied" meanwhile.

        Another process that transforms a slice at this moment uses the former definition, or leaves the table out. A
        fence before the change, and another one after it, make that process begin its slice again. If it has recorded a
        slice before the second fence, the table is copied again.
        """
        assert state.definition is not None
        lake, states, record = self.lake, self._states, TransformedSlices(self.lake, self.subscription.name)
        unchanged_sources, sources = _unchanged(state.definition), projection.sources
        path, schema = (
            lake.paths.replica(self.subscription.name, *state.name),
            write_ddl(new_definition.columns),
        )
        base = lake.records.version(path)
        self._refuse_changed_state(state, version)
        states.append([replace(state, state=SyncState.INITIALIZE)])
        lake.access.make_durable()
        record.fence()
        self._refuse_unapplied(state)
        is_added = set(unchanged_sources) <= set(sources) and all(
            value.null_count for value in projection.value_by_column.values()
        )
        if is_added:
            if sources != unchanged_sources:
                lake.add_columns(path, projection.schema, schema, base)
        else:
            lake.rewrite(
                path, RowChange(projection.former_columns, projection, projection.schema, schema), base
            )
        self._follow_in_histories(state, new_definition, is_added=is_added)
        states.append([replace(state, definition=new_definition)])
        if record.fence() > self.transformed:
            raise SchemaChangedError("another process has transformed changes meanwhile")

    def _refuse_changed_state(self, state: TableState, version: int) -> None:
        """Raise OvertakenError if another process has changed the state of the table since `version`."""
        if state.name in self._states.changed_since(version):
            raise OvertakenError(self._states.path)

    def _refuse_unapplied(self, state: TableState) -> None:
        """Raise SchemaChangedError if the replica may not have all changes with the former columns and key yet.

        Such changes may be recorded in `_transformed`. If a run died before it recorded the slice, they are only in the
        change history.
        """
        assert state.definition is not None
        lake, name = self.lake, self.subscription.name
        path = lake.paths.replica(name, *state.name)
        history = lake.paths.change_history(name, *state.name, state.definition.history.generation)
        position = max(state.lsn, lake.records.position(path) or 0)
        versions = VersionTable.from_state(self.subscription, lake, state)
        if versions is not None and lake.records.exists(versions.path):
            position = max(state.lsn, min(position, lake.records.position(versions.path) or 0))
        rows = lake.records.rows(TransformedSlices(lake, name).path, f"slice > {position:d}")
        if (lake.records.position(history) or 0) > max(self.transformed, state.lsn) or any(
            (row["schema"], row["table"]) == state.name and _has_changes(row) for row in rows
        ):
            raise SchemaChangedError("earlier changes are still to be applied")

    def _follow_in_histories(self, state: TableState, new_definition: Definition, *, is_added: bool) -> None:
        """Make the histories of rows follow the new definition of a replica. All transformed changes are in the replica.

        `is_added` is true if the rows only got more columns, which are NULL. Otherwise the versions of rows end, and
        begin again with the present columns.
        """
        assert state.definition is not None
        subscription, lake = self.subscription, self.lake
        state_at_begin = replace(state, lsn=max(state.lsn, self.transformed), definition=new_definition)
        time, is_anew = (
            datetime.now(UTC),
            new_definition.history.generation > state.definition.history.generation,
        )
        if new_definition.history.whole and is_anew:
            types = arrow_types(subscription, state.name, new_definition)
            begin_history(lake, subscription.name, state_at_begin, changes_schema(types), time)
        versions = VersionTable.from_state(subscription, lake, state_at_begin)
        if versions is None:
            return
        try:
            if is_added and not is_anew:
                versions.follow_columns()
            else:
                versions.begin_anew(state_at_begin.lsn, time, skips_reached=False)
        except TABLE_ERRORS as error:
            problem = versions_failure(lake, error, state.name, versions.path)
            raise SchemaChangedError(f"the versions of its rows do not follow it: {problem}") from None


def _is_altered(subscription: Subscription, replicated: ReplicatedTable | None, state: TableState) -> bool:
    """True if a replica may have other rows than a new copy would have.

    This is so if its publications have changed, or if changes are left out because of their origin.
    """
    record = state.definition.published if state.definition else None
    return (
        subscription.slot_stream.options.origin != "any"
        or replicated is None
        or record != PublicationRecord(replicated.row_filters, replicated.publications)
    )


def former_layout(
    followed_definition: Definition, present: Definition, transformed: int, lsn: int
) -> FormerLayout:
    """The former layout that changes before `lsn` may have.

    It is the layout of `followed_definition`. If changes may have an even earlier layout, it is that one.
    """
    earlier_layout = followed_definition.former
    if earlier_layout is None or earlier_layout.until <= transformed:
        return FormerLayout(followed_definition.layout, followed_definition.key_numbers, lsn)
    refuse_ambiguity(earlier_layout.layout, present.layout)
    return replace(earlier_layout, until=lsn)


def _unchanged(definition: Definition) -> tuple[ColumnSource, ...]:
    return tuple(ColumnSource(name, name) for name in definition.names)


def _has_changes(row: Mapping[str, Any]) -> bool:
    return any(row[kind] for kind in ("inserts", "updates", "deletes", "truncates"))


def _projection(sources: Sequence[ColumnSource], types: Mapping[str, ColumnType]) -> Projection:
    """Make the projection that computes the new columns from their sources."""
    schema = pa.schema([(source.column, types[source.column].arrow_type) for source in sources])
    added_values = {
        source.column: convert_text(
            pa.array([source.value], pa.string()), types[source.column], source.column
        )
        for source in sources
        if source.former_column is None
    }
    return Projection(sources, schema, added_values)
