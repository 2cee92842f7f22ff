"""Transactions that the slot sends at their PREPARE: whether it does, and what waits after a run that died.

In: the feed and the state of its slot. Out: the feed's table `prepared` beside the change log again.
"""

from collections.abc import Sequence

from pgsieve.assets.steps.records.prepared import Prepared
from pgsieve.assets.steps.slot_consumption.appending import at_once
from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.slot import (
    SlotState,
    peek_query,
    read_messages,
    refusing_slot,
)
from pgsieve.resources.spool import FileSpool


def keeps_prepared(feed: Feed, state: SlotState) -> bool:
    """Whether the slot sends transactions at their PREPARE; once it does, it does so for ever."""
    return feed.options.two_phase or state.two_phase


def recover_prepared(feed: Feed, lake: Lake, publications: Sequence[str], version: int, durable: int) -> None:
    """Read again what waits, where a run died between the commit of its changes and that of what waits."""
    if Prepared(lake, feed).position() == durable:
        return
    query = peek_query(feed.slot, durable, at_once(feed, publications), version)
    with refusing_slot(feed.source.name, feed.slot, "read"), FileSpool() as spool:
        assembler = TransactionAssembler(spool)
        waiting = Prepared(lake, feed).restore(assembler)
        for messages in read_messages(feed.source.executor_conninfo(), query):
            for _ in assembler.assemble(messages.column("data")):
                pass  # the change log holds these already
        Prepared(lake, feed).save(assembler, durable, waiting)
