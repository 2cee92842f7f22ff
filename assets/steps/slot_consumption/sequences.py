"""Records the values of published sequences, as ALTER SUBSCRIPTION … REFRESH SEQUENCES does on PostgreSQL 19.

In: a slot stream (a slot with its subscriptions), and a session of its publisher
Out: rows of the table `_sequences`, for values that have changed

A slot does not send sequences. Their values are read after the changes, so they are not behind the numbers in the
received rows.
"""

from dataclasses import replace
from typing import Any

import psycopg

from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.lake.delta.errors import LakeError, retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import translate_errors
from pgsieve.resources.postgres.sequences import PublishedSequences, SequenceValue, read_sequences


def read_received_sequences(
    connection: psycopg.Connection[Any], slot_stream: SlotStream, subscription: str
) -> tuple[SequenceValue, ...]:
    """The sequences that a subscription receives, with the values that they have on the publisher now."""
    names = slot_stream.subscriptions[subscription]
    definitions = [
        slot_stream.defined_publications[name] for name in names if name in slot_stream.defined_publications
    ]
    sequences = PublishedSequences(
        [name for name in names if name not in slot_stream.defined_publications],
        frozenset(name for definition in definitions for name in definition.sequences),
        any(definition.all_sequences for definition in definitions),
    )
    with translate_errors(slot_stream.source.name, "read the sequences"):
        return read_sequences(connection, sequences)


def refresh_sequences(connection: psycopg.Connection[Any], slot_stream: SlotStream, lake: Lake) -> None:
    """Record the values of the sequences that the stream's subscriptions receive, if they have changed.

    The values of a disabled subscription stay as they are.
    """
    for name in slot_stream.subscriptions:
        try:
            retry_after_conflict(_refresh)(connection, slot_stream, Sequences(lake, name))
        except LakeError as error:
            # This raises the error if the lake itself has failed. A damaged table is left to the run of its own
            # subscription, which reports it.
            describe_error(lake, error)


def _refresh(connection: psycopg.Connection[Any], slot_stream: SlotStream, record: Sequences) -> None:
    # The version is read before the values. If another process records newer values meanwhile, the append below fails.
    base_version = record.read_version()
    values = {
        (value.schema, value.name): value
        for value in read_received_sequences(connection, slot_stream, record.subscription)
    }
    if not (values or base_version):
        return
    recorded_values, present_values = record.read_newest(), dict[tuple[str, str], SequenceValue]()
    for name, value in values.items():
        former_value = recorded_values.get(name)
        present_values[name] = (
            replace(former_value, problem=value.problem) if former_value and value.problem else value
        )
    altered_values = [value for name, value in present_values.items() if recorded_values.get(name) != value]
    unpublished_values = [value for name, value in recorded_values.items() if name not in present_values]
    if (altered_values or unpublished_values) and SubscriptionRecord(
        record.lake, record.subscription
    ).read_state().enabled:
        record.append(altered_values, unpublished_values, base_version)
