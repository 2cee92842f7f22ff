"""Finds the tables whose changes the slot does not send, because the capture publications are not as planned.

A slot is read with pgsieve's own publications, the capture publications. If another role owns them, or the server is a
standby, a table that is published later is not in them until their owner adds it. It waits, and all other tables go on.
A table also waits if the root of its partition tree has to leave a capture publication, but is locked. If another role takes
a table out of the capture publications for some time, it is copied again.

In: a slot stream (a slot with its subscriptions), and the catalog of its publisher
Out: an error for each such table, with the cause and what has to be done. Before the slot is read, the states of
     these tables record that they have to be copied, so no ready table lacks changes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum

from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.assets.steps.validation.waiting import describe_waiting_reason
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, Table
from pgsieve.decoding.publications.routing import CapturePublication, find_uncaptured_tables
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.capture import find_unplanned_oids, make_table_statements
from pgsieve.resources.postgres.errors import LOCK_TIMEOUT_SQLSTATE


class _Cause(StrEnum):
    """Why the capture publications are not as planned for a table, as a part of the message."""

    PRIVILEGE = "pgsieve may not alter its capture publications"
    LOCK = "another session locks a table that has to leave a capture publication"
    REMOVAL = "it was taken out of a capture publication for some time"


#: The SQLSTATE for each cause.
_SQLSTATES = {_Cause.PRIVILEGE: "42501", _Cause.LOCK: LOCK_TIMEOUT_SQLSTATE, _Cause.REMOVAL: None}


def _find_uncaptured_problems(
    slot_stream: SlotStream,
    subscription: str,
    catalog: Catalog,
    plan: Sequence[CapturePublication],
    find_cause: Callable[[Table], _Cause],
) -> dict[Name, PgsieveError]:
    """Find the tables of a subscription whose changes the slot does not send as planned. Map each to an error.

    `catalog` has the publications that pgsieve.yaml defines, and `plan` the capture publications that the slot needs.
    """

    def make_error(table: Table) -> PgsieveError:
        cause, hint = find_cause(table), None
        if cause == _Cause.PRIVILEGE:
            statements = make_table_statements(
                slot_stream.capture, plan, catalog, catalog.server_version, table
            )
            hint = f"have their owner run: {'; '.join(statements)}"
        elif cause == _Cause.LOCK:
            hint = "each run tries again"
        message = _make_message((table.schema, table.name), cause)
        return PgsieveError(message, hint=hint, sqlstate=_SQLSTATES[cause])

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
    return {(table.schema, table.name): make_error(table) for table in tables}


def hold_back_uncaptured_tables(
    slot_stream: SlotStream,
    lake: Lake,
    catalog: Catalog,
    plan: Sequence[CapturePublication] | None = None,
    locked_oids: Collection[int] = (),
    *,
    removed_oids: Collection[int] = (),
) -> None:
    """Record that the tables whose changes the slot does not send have to be copied, with the reason.

    - `plan`: the capture publications that the slot needs. Without it, they are found from the catalog.
    - `locked_oids`: the tables that could not leave the capture publications, because another session locks them
    - `removed_oids`: the tables that were taken out of the capture publications for some time

    This must be called before the slot is read. Otherwise a run could die after it has read the slot. If the owner then
    altered the publications, the table would stay ready, and lack changes. A table that is set aside because of a problem
    stays so.
    """
    catalog = slot_stream.with_defined_publications(catalog)
    # A publication may have been dropped since the subscriptions were examined.
    slot_stream = slot_stream.without_missing_publications(catalog)
    plan = slot_stream.planned_capture(catalog) if plan is None else plan
    # In most runs the publications are as planned. Then thousands of tables need not be examined, which would take long.
    if not find_unplanned_oids(slot_stream.capture, plan, catalog):
        return

    def find_cause(table: Table) -> _Cause:
        tree_oids = {table.oid, *table.ancestors, *table.leaves}
        if not tree_oids.isdisjoint(removed_oids):
            return _Cause.REMOVAL
        return _Cause.PRIVILEGE if tree_oids.isdisjoint(locked_oids) else _Cause.LOCK

    for subscription in slot_stream.subscriptions:
        problem_by_table = _find_uncaptured_problems(slot_stream, subscription, catalog, plan, find_cause)
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
    cause_by_table = {
        name: cause
        for name, state in states.items()
        for cause in _Cause
        if state.state == SyncState.INITIALIZE and (state.reason or "").startswith(_make_message(name, cause))
    }
    if not cause_by_table:
        return {}
    # The catalog may lack those publications of pgsieve.yaml that only other subscriptions have.
    catalog = slot_stream.with_defined_publications(catalog)
    plan = slot_stream.without_missing_publications(catalog).planned_capture(catalog)
    problem_by_table = _find_uncaptured_problems(
        slot_stream,
        subscription,
        catalog,
        plan,
        lambda table: cause_by_table.get((table.schema, table.name), _Cause.PRIVILEGE),
    )
    return {name: error for name, error in problem_by_table.items() if name in cause_by_table}


def _make_message(name: Name, cause: _Cause) -> str:
    """The beginning of the reason for which a table is held back."""
    return f"the slot does not send the changes of table {quote_qualified(*name)}: {cause}"
