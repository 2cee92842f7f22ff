"""Starts Spark while a command still imports its modules, where much waits in the sources.

In: the configuration and the selected subscriptions. Out: a session that starts beside, in a thread; the run
finds it by the same settings. A start that is in vain costs time and memory, and changes nothing. Raises
nothing: what fails here fails again in the run, which reports it.
"""

import logging
from collections.abc import Sequence
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
        if limit < 0 or any(_expected_bytes(config, each) > limit for each in selected):
            SparkExecutors(lambda: engine.session, engine.cores).prepare()
    except Exception as error:  # noqa: BLE001 - the run meets it again, and reports it.
        _LOGGER.debug("Spark does not start early: %s", type(error).__name__)


def _slot_of(config: Config, subscription: SubscriptionConfig) -> str:
    own = subscription.row_filter == "publisher"
    return subscription.slot if own else config.sources[subscription.source].slot


def _expected_bytes(config: Config, subscription: SubscriptionConfig) -> int:
    """About how many bytes a table of a subscription will get."""
    source = config.sources[subscription.source]
    defined = [source.publications[name] for name in subscription.publications if name in source.publications]
    tables = [table.relation for publication in defined for table in publication.tables]
    with source_of(subscription.source, source).connect() as connection:
        return expected_bytes(connection, _slot_of(config, subscription), subscription.publications, tables)
