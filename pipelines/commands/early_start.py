"""Starts Spark while a command is still importing its modules, if the command will have much data to write.

In: the configuration and the selected subscriptions
Out: a Spark session, which a thread starts. The run uses the same session, because a process has only one.

If the run does not need Spark after all, the start has cost time and memory, but nothing else. Errors are not raised,
because the run meets the same error, and reports it.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Event, Thread

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.connections import make_source, make_spark_settings, prepare_storage
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.spark_settings import SparkSettings
from pgsieve.resources.postgres.expected_bytes import estimate_bytes

#: The caller waits at most this long until it is decided. The publisher answers in a few hundredths of a second.
_DECISION_SECONDS = 0.3

_logger = logging.getLogger(__name__)


def start_early(config: Config, subscription_configs: Sequence[SubscriptionConfig]) -> None:
    """Start Spark if the run of these subscriptions will probably need it. Does not wait until it has started.

    The caller imports modules next, during which another thread hardly gets Python's global lock. So this function
    gives the thread a moment to ask the publisher and to start the JVM.
    """
    with suppress(PgsieveError):
        storage, settings = prepare_storage(config), make_spark_settings(config)
        if settings.starts_own_session and not (storage.is_reached_by_delta_rs and settings.threads):
            max_bytes = settings.small_bytes if storage.is_reached_by_delta_rs else -1
            is_decided = Event()
            Thread(
                target=_start_for_large_tables,
                args=(config, subscription_configs, settings, max_bytes, is_decided),
                name="pgsieve-early-start",
                daemon=True,
            ).start()
            is_decided.wait(_DECISION_SECONDS)


def _start_for_large_tables(
    config: Config,
    subscription_configs: Sequence[SubscriptionConfig],
    settings: SparkSettings,
    max_bytes: int,
    is_decided: Event,
) -> None:
    """Start Spark if a table will get more than `max_bytes` bytes. Up to this limit this process writes a table itself.

    A negative limit always starts Spark. Sets `is_decided` when the JVM is starting, or will not be started.
    """
    try:
        if max_bytes < 0 or any(
            table_bytes > max_bytes
            for table_bytes in _estimate_bytes_by_slot(config, subscription_configs, max_bytes)
        ):
            # The JVM starts while this thread imports the modules of the session.
            settings.fetch_jars()
            jvm.prepare(settings.settings)
            is_decided.set()
            _start_session(settings)
    except Exception as error:  # noqa: BLE001 - the run meets it again, and reports it.
        _logger.debug("Spark does not start early: %s", type(error).__name__)
    finally:
        is_decided.set()


def _start_session(settings: SparkSettings) -> None:
    """Start the session and its first job."""
    from pgsieve.resources.lake.runners import SparkRunner
    from pgsieve.resources.lake.session import SparkEngine

    engine = SparkEngine(**asdict(settings))
    SparkRunner(lambda: engine.session, engine.cores).prepare()


def _estimate_bytes_by_slot(
    config: Config, subscription_configs: Sequence[SubscriptionConfig], max_bytes: int
) -> Iterator[int]:
    """For each slot, yield an estimate of the bytes that the table with the most changes will get."""
    subscriptions_by_slot = defaultdict(list)
    for subscription_config in subscription_configs:
        subscriptions_by_slot[subscription_config.source, _find_slot(config, subscription_config)].append(
            subscription_config
        )
    for (source_name, slot), subscriptions_of_slot in subscriptions_by_slot.items():
        source = config.sources[source_name]
        publications = {
            publication_name
            for subscription_config in subscriptions_of_slot
            for publication_name in subscription_config.publications
        }
        tables = {
            table.relation
            for publication_name in publications & source.publications.keys()
            for table in source.publications[publication_name].tables
        }
        with make_source(source_name, source).connect() as connection:
            yield estimate_bytes(connection, slot, publications, tables, max_bytes)


def _find_slot(config: Config, subscription_config: SubscriptionConfig) -> str:
    has_own_slot = subscription_config.row_filter == "publisher"
    return subscription_config.slot if has_own_slot else config.sources[subscription_config.source].slot
