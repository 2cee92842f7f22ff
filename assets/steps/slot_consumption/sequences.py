"""Records the values of published sequences, as ALTER SUBSCRIPTION … REFRESH SEQUENCES does on PostgreSQL 19.

In: a feed, and a session of its publisher. Out: rows of `_sequences` for values that have changed. A slot sends no
sequences. Their values are read after the changes, so that they are never behind rows that took numbers from them.
"""

from dataclasses import replace
from typing import Any

import psycopg

from pgsieve.assets.steps.records.failures import reason
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.subscription import Feed
from pgsieve.resources.lake.delta.errors import LakeError, retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import translate_errors
from pgsieve.resources.postgres.sequences import PublishedSequences, SequenceValue, read_sequences


def received_sequences(
    connection: psycopg.Connection[Any], feed: Feed, subscription: str
) -> tuple[SequenceValue, ...]:
    """The sequences that a subscription receives, with their present values on the publisher."""
    names = feed.subscriptions[subscription]
    configured = [feed.defined[name] for name in names if name in feed.defined]
    sequences = PublishedSequences(
        [name for name in names if name not in feed.defined],
        frozenset(name for defined in configured for name in defined.sequences),
        any(defined.all_sequences for defined in configured),
    )
    with translate_errors(feed.source.name, "read the sequences"):
        return read_sequences(connection, sequences)


def refresh_sequences(connection: psycopg.Connection[Any], feed: Feed, lake: Lake) -> None:
    """Record the changed values of sequences that the feed's subscriptions receive.

    The values of a disabled subscription stay.
    """
    for name in feed.subscriptions:
        try:
            retry_after_conflict(_refresh)(connection, feed, Sequences(lake, name))
        except LakeError as error:
            # Raises a fault of the lake itself. A damaged table is reported by its own subscription.
            reason(lake, error)


def _refresh(connection: psycopg.Connection[Any], feed: Feed, record: Sequences) -> None:
    # Read before the values: if another process records newer values meanwhile, this append fails.
    base = record.version()
    values = {(v.schema, v.name): v for v in received_sequences(connection, feed, record.subscription)}
    if not (values or base):
        return
    recorded_values, present = record.newest(), dict[tuple[str, str], SequenceValue]()
    for name, value in values.items():
        former_value = recorded_values.get(name)
        present[name] = (
            replace(former_value, problem=value.problem) if former_value and value.problem else value
        )
    altered = [value for name, value in present.items() if recorded_values.get(name) != value]
    unpublished = [value for name, value in recorded_values.items() if name not in present]
    if (altered or unpublished) and SubscriptionRecord(record.lake, record.subscription).state().enabled:
        record.append(altered, unpublished, base)
