"""Starts Spark while a command is still importing its modules, if the sources have much data for it.

In: the configuration and the selected subscriptions
Out: a Spark session, which a thread starts. The run finds the session by its settings.

If the run does not need Spark after all, the start has cost time and memory, but nothing else. Errors are not raised,
because the run meets the same error, and reports it.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Thread

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.connections import declared_storage, source_of, spark_engine_of
from pgsieve.resources.lake.executors import SparkExecutors
from pgsieve.resources.lake.resource import make_lake_settings
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.postgres.expected_bytes import estimate_bytes

_LOGGER = logging.getLogger(__name__)


def start_early(config: Config, selected: Sequence[SubscriptionConfig]) -> None:
    """Start Spark if the run of these subscriptions will probably need it. Does not wait until it has started."""
    with suppress(PgsieveError):
        storage, engine = declared_storage(config), spark_engine_of(config)
        if engine.starts_own_session and not (storage.is_reached_by_delta_rs and engine.threads):
            limit = make_lake_settings(engine).small_bytes if storage.is_reached_by_delta_rs else -1
            Thread(
                target=_start, args=(config, selected, engine, limit), name="pgsieve-early-start", daemon=True
            ).start()


def _start(config: Config, selected: Sequence[SubscriptionConfig], engine: SparkEngine, limit: int) -> None:
    """Start Spark if a table will get more than `limit` bytes, the limit up to which this process writes a table itself."""
    try:
        if limit < 0 or any(expected > limit for expected in _expected_bytes(config, selected, limit)):
            SparkExecutors(lambda: engine.session, engine.cores).prepare()
    except Exception as error:  # noqa: BLE001 - the run meets it again, and reports it.
        _LOGGER.debug("Spark does not start early: %s", type(error).__name__)


def _expected_bytes(config: Config, selected: Sequence[SubscriptionConfig], limit: int) -> Iterator[int]:
    """Yields for each slot about how many bytes its largest table will get."""
    subscriptions_by_slot = defaultdict(list)
    for subscription in selected:
        subscriptions_by_slot[subscription.source, _slot_of(config, subscription)].append(subscription)
    for (name, slot), subscriptions in subscriptions_by_slot.items():
        source = config.sources[name]
        publications = {
            publication_name
            for subscription in subscriptions
            for publication_name in subscription.publications
        }
        tables = {
            table.relation
            for publication_name in publications & source.publications.keys()
            for table in source.publications[publication_name].tables
        }
        with source_of(name, source).connect() as connection:
            yield estimate_bytes(connection, slot, publications, tables, limit)


def _slot_of(config: Config, subscription: SubscriptionConfig) -> str:
    has_own_slot = subscription.row_filter == "publisher"
    return subscription.slot if has_own_slot else config.sources[subscription.source].slot
