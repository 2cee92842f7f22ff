"""Two-phase transactions: whether a slot sends them at PREPARE, and how prepared transactions are recovered after a crash.

In: the slot stream (a slot with its subscriptions), and the state of the slot
Out: the stream's table `prepared`, up to the position of the change log (the table of the slot's messages)
"""

from collections.abc import Sequence

from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.slot_consumption.appending import make_peek_options
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.peeks import peek_query, read_messages
from pgsieve.resources.postgres.slot import SlotState, translate_slot_errors
from pgsieve.resources.spool import FileSpool


def is_two_phase(slot_stream: SlotStream, state: SlotState) -> bool:
    """True if the slot sends transactions at their PREPARE. pgsieve never switches this off."""
    return slot_stream.options.two_phase or state.has_two_phase


def recover_prepared_transactions(
    slot_stream: SlotStream, lake: Lake, publications: Sequence[str], version: int, durable_lsn: int
) -> None:
    """Read prepared transactions again, if a run died between its commits of the change log and of `prepared`."""
    if PreparedTransactions(lake, slot_stream).read_position() == durable_lsn:
        return
    query = peek_query(slot_stream.slot, durable_lsn, make_peek_options(slot_stream, publications), version)
    with translate_slot_errors(slot_stream.source.name, slot_stream.slot, "read"), FileSpool() as spool:
        assembler = TransactionAssembler(spool)
        prepared_transactions = PreparedTransactions(lake, slot_stream).restore(assembler)
        for messages in read_messages(slot_stream.source.make_executor_conninfo(), query):
            for _ in assembler.assemble(messages.column("data")):
                pass  # The change log has these messages. `prepared` lacks only what the assembler keeps.
        PreparedTransactions(lake, slot_stream).save(assembler, durable_lsn, prepared_transactions)
