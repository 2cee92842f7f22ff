"""The tables that `pgsieve resync` copies again, and how their columns, keys, filters and publications have changed.

In: the recorded definitions, and the publisher's catalog
Out: for each table its state, and the differences of its definition, as `former → present`

As in PostgreSQL, a run does not copy a table again after a row filter or a publication was altered. The user does so by
`pgsieve resync`, so this module finds such a table, too. Raises PgsieveError for a table that the subscription does not
replicate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.source import quote


@dataclass(frozen=True)
class ResyncTable:
    """A table to copy again: its state with the reason, and how its definition has changed since it was copied."""

    name: Name
    state: str
    changes: tuple[str, ...]


def find_tables_to_resync(
    subscription: Subscription, states: Mapping[Name, TableState], names: Sequence[Name]
) -> list[ResyncTable]:
    """Find the tables with these names. Without names, find the tables that are not ready or have another definition."""
    with subscription.slot_stream.source.connect() as connection:
        catalog = subscription.slot_stream.with_defined_publications(read_catalog(connection))
    tables = subscription.tables(catalog)
    for name in names:
        if name not in tables:
            raise PgsieveError(
                f'subscription "{subscription.name}" has no table {quote(*name)}',
                hint="its publications publish " + (", ".join(quote(*name) for name in tables) or "no table"),
                sqlstate="42P01",
            )
    tables_to_copy = []
    for name, table in tables.items():
        state = states.get(name)
        changes = describe_present_changes(subscription, state, table, catalog)
        is_needed = state is None or state.state != SyncState.READY or bool(changes)
        if name in names if names else is_needed:
            tables_to_copy.append(ResyncTable(name, _describe_state(state), changes))
    return tables_to_copy


def _describe_state(state: TableState | None) -> str:
    if state is None:
        return "not copied yet"
    return f"{state.state.meaning}: {state.reason}" if state.reason else state.state.meaning


def describe_present_changes(
    subscription: Subscription, state: TableState | None, replicated_table: ReplicatedTable, catalog: Catalog
) -> tuple[str, ...]:
    """Describe how the definition of a table has changed since it was copied, or why it cannot be replicated now."""
    try:
        return describe_changes_since_copy(state, subscription.definition(replicated_table, catalog))
    except PgsieveError as error:
        return (error.message,)


def describe_changes_since_copy(state: TableState | None, present_definition: Definition) -> tuple[str, ...]:
    """Describe how the definition of a table has changed since it was copied. Empty if the copy is not recorded."""
    if state is None or state.definition is None:
        return ()
    copied_definition = state.definition
    changes = []
    if copied_definition.published and present_definition.published:
        pairs = [
            (
                "row filter",
                _describe_filter(copied_definition.published.row_filters),
                _describe_filter(present_definition.published.row_filters),
            ),
            (
                "publications",
                ", ".join(copied_definition.published.publications),
                ", ".join(present_definition.published.publications),
            ),
        ]
        changes += [
            f"{part}: {former_value} → {present_value}"
            for part, former_value, present_value in pairs
            if former_value != present_value
        ]
    if copied_definition.columns != present_definition.columns:
        changes.append(f"columns: {_describe_columns(copied_definition, present_definition)}")
    if copied_definition.key != present_definition.key:
        changes.append(f"key: ({', '.join(copied_definition.key)}) → ({', '.join(present_definition.key)})")
    return tuple(changes)


def _describe_filter(texts: Sequence[str] | None) -> str:
    return "every row" if texts is None else " OR ".join(texts)


def _describe_columns(copied_definition: Definition, present_definition: Definition) -> str:
    former_types, present_types = dict(copied_definition.columns), dict(present_definition.columns)
    differences = [f"without {name}" for name in former_types if name not in present_types]
    differences += [f"{name} added" for name in present_types if name not in former_types]
    differences += [
        f"{name} {former_type} → {present_types[name]}"
        for name, former_type in former_types.items()
        if name in present_types and present_types[name] != former_type
    ]
    return ", ".join(differences) or "another order"
