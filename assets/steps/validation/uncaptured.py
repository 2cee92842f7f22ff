"""Finds the tables whose changes the slot does not send, because pgsieve may not alter its capture publications.

A slot is read with pgsieve's own publications, the capture publications. If another role owns them, or the server is a
standby, a table that is published later is not in them until their owner adds it. It waits, and all other tables go on.

In: a slot stream (a slot with its subscriptions), and the catalog of its publisher
Out: an error for each such table, with the SQL that the owner has to run. Before the slot is read, the states of
     these tables record that they have to be copied, so no ready table lacks changes.
"""

from collections.abc import Iterator, Mapping, Sequence

from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.assets.steps.validation.waiting import describe_waiting_reason
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.routing import CapturePublication, find_uncaptured_tables
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.capture import find_unplanned_oids, make_table_statements

_INSUFFICIENT_PRIVILEGE = "42501"


def _find_uncaptured_problems(
    slot_stream: SlotStream, subscription: str, catalog: Catalog, plan: Sequence[CapturePublication]
) -> dict[Name, PgsieveError]:
    """Find the tables of a subscription whose changes the slot does not send as planned. Map each to an error.

    `catalog` has the publications that pgsieve.yaml defines, and `plan` the capture publications that the slot needs.
    """
    capture_publications = [
        catalog.publications[name] for name in slot_stream.capture_names() if name in catalog.publications
    ]
    tables = find_uncaptured_tables(
        catalog,
        slot_stream.publications(catalog, subscription),
        capture_publications,
        plan,
        find_unplanned_oids(slot_stream.capture, plan, catalog),
    )
    return {
        (table.schema, table.name): PgsieveError(
            _make_message((table.schema, table.name)),
            hint="have their owner run: "
            + "; ".join(
                make_table_statements(slot_stream.capture, plan, catalog, catalog.server_version, table)
            ),
            sqlstate=_INSUFFICIENT_PRIVILEGE,
        )
        for table in tables
    }


def hold_back_uncaptured_tables(
    slot_stream: SlotStream, lake: Lake, catalog: Catalog, plan: Sequence[CapturePublication] | None = None
) -> None:
    """Record that the tables whose changes the slot does not send have to be copied, with the reason.

    `plan` has the capture publications that the slot needs. Without it, they are found from the catalog.
    This must be called before the slot is read. Otherwise a run could die after it has read the slot. If the owner then
    altered the publications, the table would stay ready, and lack changes. A table that is set aside because of a problem
    stays so.
    """
    catalog = slot_stream.with_defined_publications(catalog)
    # A publication may have been dropped since the subscriptions were examined.
    slot_stream = slot_stream.without_missing_publications(catalog)
    plan = slot_stream.planned_capture(catalog) if plan is None else plan
    # In most runs nothing differs, and it would take long to examine thousands of tables.
    if not find_unplanned_oids(slot_stream.capture, plan, catalog):
        return
    for subscription in slot_stream.subscriptions:
        problem_by_table = _find_uncaptured_problems(slot_stream, subscription, catalog, plan)
        if problem_by_table:
            states = TableStates(lake, subscription)
            states.append(_list_waiting_states(states.read_newest(), problem_by_table))
            lake.access.make_durable()


def _list_waiting_states(
    state_by_table: Mapping[Name, TableState], problem_by_table: Mapping[Name, PgsieveError]
) -> Iterator[TableState]:
    """Yields the states of the tables that have to wait, if they are not recorded yet."""
    for name, error in problem_by_table.items():
        state, reason = state_by_table.get(name), describe_waiting_reason(error)
        if state is None:
            yield TableState(*name, SyncState.INITIALIZE, reason=reason)
        elif state.state != SyncState.SET_ASIDE and (state.state, state.reason) != (
            SyncState.INITIALIZE,
            reason,
        ):
            yield TableState(*name, SyncState.INITIALIZE, definition=state.definition, reason=reason)


def find_held_back_tables(
    slot_stream: SlotStream, subscription: str, catalog: Catalog, states: Mapping[Name, TableState]
) -> dict[Name, PgsieveError]:
    """Find the tables that `hold_back_uncaptured_tables` has held back and that must still wait. Map each to an error.

    Other tables that are not captured yet are not in the result: pgsieve captures them when it makes the slot ready.
    """
    held_tables = {
        name
        for name, state in states.items()
        if state.state == SyncState.INITIALIZE and (state.reason or "").startswith(_make_message(name))
    }
    if not held_tables:
        return {}
    # The catalog may lack those publications of pgsieve.yaml that only other subscriptions have.
    catalog = slot_stream.with_defined_publications(catalog)
    plan = slot_stream.without_missing_publications(catalog).planned_capture(catalog)
    problem_by_table = _find_uncaptured_problems(slot_stream, subscription, catalog, plan)
    return {name: error for name, error in problem_by_table.items() if name in held_tables}


def _make_message(name: Name) -> str:
    """The beginning of the reason for which a table is held back."""
    return (
        f"the slot does not send the changes of table {quote_qualified(*name)}: pgsieve may not alter its capture"
        " publications"
    )
