"""The tables that `resync` copies again, and how their definitions have changed since they were copied.

In: the recorded definitions and the publisher's catalog. Out: for each table its state, and its differences
as `then → now`. As in PostgreSQL, altering a row filter or publication does not copy a table by itself: its rows
stay. Raises PgsieveError for a table that the subscription does not replicate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.decoding.errors import PgsieveError, UnsupportedTypeError
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.source import quote


@dataclass(frozen=True)
class ResyncTable:
    """A table to copy again: its state with the reason, and the changes of its definition since it was copied."""

    name: Name
    state: str
    changes: tuple[str, ...]


def tables_to_resync(
    subscription: Subscription, states: Mapping[Name, TableState], names: Sequence[Name]
) -> list[ResyncTable]:
    """The named tables; without names, the tables that are not ready, or whose definition changed since their copy."""
    with subscription.feed.source.connect() as connection:
        catalog = subscription.feed.with_defined_publications(read_catalog(connection))
    tables = subscription.tables(catalog)
    for name in names:
        if name not in tables:
            raise PgsieveError(
                f'subscription "{subscription.name}" has no table {quote(*name)}',
                hint="its publications publish " + (", ".join(quote(*name) for name in tables) or "no table"),
                sqlstate="42P01",
            )
    to_copy = []
    for name, table in tables.items():
        state = states.get(name)
        changes = present_changes(subscription, state, table, catalog)
        needed = state is None or state.state != SyncState.READY or bool(changes)
        if name in names if names else needed:
            to_copy.append(ResyncTable(name, _state_text(state), changes))
    return to_copy


def _state_text(state: TableState | None) -> str:
    if state is None:
        return "not copied yet"
    return f"{state.state.meaning}: {state.reason}" if state.reason else state.state.meaning


def present_changes(
    subscription: Subscription, state: TableState | None, replicated: ReplicatedTable, catalog: Catalog
) -> tuple[str, ...]:
    """The changes of a table's definition since it was copied; the reason if the table cannot be replicated now."""
    try:
        return changes_since_copy(state, subscription.definition(replicated, catalog))
    except UnsupportedTypeError as error:
        return (error.message,)


def changes_since_copy(state: TableState | None, now: Definition) -> tuple[str, ...]:
    """The changes of a table's definition since it was copied, as texts; empty if the copy is not recorded."""
    if state is None or state.definition is None:
        return ()
    then = state.definition
    changes = []
    if then.published and now.published:
        pairs = [
            ("row filter", _filter(then.published.row_filters), _filter(now.published.row_filters)),
            ("publications", ", ".join(then.published.publications), ", ".join(now.published.publications)),
        ]
        changes += [f"{what}: {before} → {after}" for what, before, after in pairs if before != after]
    if then.columns != now.columns:
        changes.append(f"columns: {_columns(then, now)}")
    if then.key != now.key:
        changes.append(f"key: ({', '.join(then.key)}) → ({', '.join(now.key)})")
    return tuple(changes)


def _filter(texts: Sequence[str] | None) -> str:
    return "every row" if texts is None else " OR ".join(texts)


def _columns(then: Definition, now: Definition) -> str:
    before, after = dict(then.columns), dict(now.columns)
    differences = [f"without {name}" for name in before if name not in after]
    differences += [f"{name} added" for name in after if name not in before]
    differences += [f"{n} {t} → {after[n]}" for n, t in before.items() if n in after and after[n] != t]
    return ", ".join(differences) or "another order"
