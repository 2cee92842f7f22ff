"""`pgsieve resync`: copies tables again, and brings the subscription up to date.

In: the configuration, a subscription, and tables as `schema.table`
Out: a `ResyncReport`. Raises PgsieveError if a table cannot be copied.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from pgsieve.assets.steps.operations.damaged_records import remove_damaged_records
from pgsieve.assets.steps.operations.resync import find_tables_to_resync
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.slot_consumption.sequences import refresh_sequences
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher, replace_lost_slot
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.pipelines.commands.failures import Failures
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.commands.materializer import Materializer
from pgsieve.pipelines.commands.results import Progress, ResyncedTable, ResyncReport
from pgsieve.pipelines.commands.run import run_slot_stream
from pgsieve.pipelines.commands.run import take_over as take_slots_over
from pgsieve.pipelines.config.identifiers import parse_table_name
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.postgres.slot import read_slot_state


def resync(
    config: Config,
    subscription_config: SubscriptionConfig,
    tables: Sequence[str],
    progress: Progress,
    *,
    take_over: bool = False,
) -> ResyncReport:
    """Copy the named tables again; without names, all tables that need it.

    Without names, this also replaces a lost slot, and damaged ones of pgsieve's own tables. If another lake may have
    read the slot, this lake takes it only if `take_over` is true.
    """
    if take_over:
        take_slots_over(config, [subscription_config])
    project = build_project(config)
    subscription, lake = project.subscriptions[subscription_config.name], project.lake.open()
    slot_stream, chosen_names = subscription.slot_stream, [parse_table_name(text) for text in tables]
    slot_stream.source.check_ready()
    lake.access.check_writable()
    with slot_stream.source.connect() as connection, ExitStack() as stack:
        if not chosen_names:
            # The check reads one of pgsieve's own tables, which may be damaged. The next step replaces damaged ones.
            stack.enter_context(suppress(LakeError))
        refuse_other_publisher(connection, slot_stream, lake)
    damaged_records = [] if chosen_names else remove_damaged_records(subscription, lake)
    SubscriptionRecord(lake, subscription.name).require_enabled()
    slot_loss = None if chosen_names else replace_lost_slot(slot_stream, lake, take_over=take_over)
    states = TableStates(lake, subscription.name)
    tables_to_copy = find_tables_to_resync(subscription, states.read_newest(), chosen_names)
    names_to_copy = [table_to_copy.name for table_to_copy in tables_to_copy]
    resynced_tables = tuple(
        ResyncedTable(*table_to_copy.name, table_to_copy.state, table_to_copy.changes)
        for table_to_copy in tables_to_copy
    )
    summary, is_slot_followed = None, False
    if names_to_copy and (is_slot_followed := _is_slot_in_use(slot_stream)):
        states.leave_to_next_copy(names_to_copy)
    elif names_to_copy:
        # Without this record, a run would complete a former copy that was killed after its commit, and not copy again.
        states.leave_to_next_copy(names_to_copy)
        with open_instance(config) as instance:
            materializer = Materializer(project, subscription, instance, progress)
            materializer.copy(names_to_copy)
            failures = Failures()
            run_slot_stream(slot_stream, [materializer], failures)
            for failure in failures.group_by_error():
                raise failure.error
            summary = materializer.summarize()
    else:
        with slot_stream.source.connect() as connection:
            refresh_sequences(connection, slot_stream, lake)
    return ResyncReport(
        subscription.name,
        resynced_tables,
        slot_loss.message if slot_loss else None,
        summary,
        is_slot_followed,
        tuple(damaged_records),
    )


def _is_slot_in_use(slot_stream: SlotStream) -> bool:
    """True if another process reads the slot."""
    with slot_stream.source.connect() as connection:
        slot = read_slot_state(connection, slot_stream.slot)
    return slot is not None and slot.is_active
