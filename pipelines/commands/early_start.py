"""Starts Spark while a command imports its modules, if the sources have many bytes for it.

In: the configuration and the selected subscriptions. Out: a session, which a thread starts; the run finds it
by its settings. A needless start costs time and memory, and changes nothing. Raises nothing: the run meets
the same error, and reports it.
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
from pgsieve.resources.lake.resource import settings_of
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.postgres.expected_bytes import expected_bytes

_LOGGER = logging.getLogger(__name__)


def start_early(config: Config, selected: Sequence[SubscriptionConfig]) -> None:
    """Start Spark, without waiting, if the run of these subscriptions will probably need it."""
    with suppress(PgsieveError):
        storage, engine = declared_storage(config), spark_engine_of(config)
        if engine.starts_own_session and not (storage.is_reached_by_delta_rs and engine.threads):
            limit = settings_of(engine).small_bytes if storage.is_reached_by_delta_rs else -1
            Thread(
                target=_start, args=(config, selected, engine, limit), name="pgsieve-early-start", daemon=True
            ).start()


def _start(config: Config, selected: Sequence[SubscriptionConfig], engine: SparkEngine, limit: int) -> None:
    """Start Spark if a table will get more bytes than the small limit."""
    try:
        if limit < 0 or any(expected > limit for expected in _expected_bytes(config, selected, limit)):
            SparkExecutors(lambda: engine.session, engine.cores).prepare()
    except Exception as error:  # noqa: BLE001 - the run meets it again, and reports it.
        _LOGGER.debug("Spark does not start early: %s", type(error).__name__)


def _expected_bytes(config: Config, selected: Sequence[SubscriptionConfig], limit: int) -> Iterator[int]:
    """About how many bytes the largest table of each slot will get."""
    readers = defaultdict(list)
    for subscription in selected:
        readers[subscription.source, _slot_of(config, subscription)].append(subscription)
    for (name, slot), subscriptions in readers.items():
        source = config.sources[name]
        publications = {each for subscription in subscriptions for each in subscription.publications}
        tables = {
            table.relation
            for each in publications & source.publications.keys()
            for table in source.publications[each].tables
        }
        with source_of(name, source).connect() as connection:
            yield expected_bytes(connection, slot, publications, tables, limit)


def _slot_of(config: Config, subscription: SubscriptionConfig) -> str:
    has_own_slot = subscription.row_filter == "publisher"
    return subscription.slot if has_own_slot else config.sources[subscription.source].slot
