"""Makes the objects of a run from the configuration: sources, streams, subscriptions, and the lake.

A slot stream is a replication slot with the subscriptions that read it. All subscriptions of a source with
`row_filter: pipeline` share one slot. A subscription with `row_filter: publisher` has a slot of its own. Raises
PgsieveError for options that are not supported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from pgsieve.assets.lake import PgsieveLake
from pgsieve.assets.steps.operations.maintenance import Retention
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.definition import DefinedPublication, DefinedTable
from pgsieve.pipelines.config.model import Config, SourceConfig, SubscriptionConfig
from pgsieve.pipelines.connections import make_source, make_spark_settings, prepare_storage
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.processes import keep_freed_arrays


@dataclass(frozen=True)
class Project:
    """The objects of a configuration file: streams by name, subscriptions by name, the lake, and retention."""

    slot_streams: Mapping[str, SlotStream]
    subscriptions: Mapping[str, Subscription]
    lake: PgsieveLake
    retention: Retention
    #: The template of the replicas' names in Spark's catalog; None if they are not registered.
    names: str | None = None

    def find_subscriptions(self, slot_stream: SlotStream) -> list[Subscription]:
        """The subscriptions that read the stream's slot."""
        return [s for s in self.subscriptions.values() if s.slot_stream.name == slot_stream.name]

    def find_slot_streams(self, subscriptions: Iterable[Subscription]) -> list[SlotStream]:
        """The streams of these subscriptions. A stream of several subscriptions is listed once."""
        return list({s.slot_stream.name: s.slot_stream for s in subscriptions}.values())


def build_project(config: Config) -> Project:
    """Make the streams and subscriptions of a configuration. Connects to nothing.

    The process will run their steps, so it keeps freed arrays from now on.
    """
    keep_freed_arrays()
    storage = prepare_storage(config)
    slot_streams_by_name: dict[str, SlotStream] = {}
    for name, source in config.sources.items():
        subscriptions_by_name = {
            subscription_config.name: subscription_config
            for subscription_config in config.subscriptions.values()
            if subscription_config.source == name and subscription_config.row_filter == "pipeline"
        }
        if subscriptions_by_name:
            slot_streams_by_name[name] = _make_slot_stream(
                name, name, source, source.slot, subscriptions_by_name
            )
    subscriptions = {}
    for subscription in config.subscriptions.values():
        _refuse_unsupported_options(subscription, storage)
        slot_stream_name = subscription.source
        if subscription.row_filter == "publisher":
            slot_stream_name = subscription.slot
            subscriptions_of_slot = {subscription.name: subscription}
            source = config.sources[subscription.source]
            slot_streams_by_name[slot_stream_name] = _make_slot_stream(
                slot_stream_name,
                subscription.source,
                source,
                slot_stream_name,
                subscriptions_of_slot,
                is_filtered=True,
            )
        subscriptions[subscription.name] = Subscription(
            name=subscription.name,
            slot_stream=slot_streams_by_name[slot_stream_name],
            copy_data=subscription.copy_data,
            disable_on_error=subscription.disable_on_error,
            freshness=subscription.freshness,
            types=subscription.type_overrides,
            layout=subscription.layout.to_subscription_layout(),
            histories=subscription.history.to_history_choices(),
        )
    engine = SparkEngine(**asdict(make_spark_settings(config)))
    retention_config = config.retention
    retention = Retention(retention_config.change_log, retention_config.changes, retention_config.versions)
    name_template = config.catalog.names if config.catalog else None
    folders_by_subscription = {
        name: subscription.layout.folder_template for name, subscription in subscriptions.items()
    }
    lake = PgsieveLake(uri=storage.address, engine=engine, folders=folders_by_subscription)
    return Project(slot_streams_by_name, subscriptions, lake, retention, name_template)


def _make_slot_stream(
    name: str,
    source_name: str,
    source: SourceConfig,
    slot: str,
    subscriptions: Mapping[str, SubscriptionConfig],
    *,
    is_filtered: bool = False,
) -> SlotStream:
    """Make a stream.

    - `name`, `slot`: the names of the stream and of its slot
    - `source_name`, `source`: the database that has the slot
    - `subscriptions`: maps names to the subscriptions that read the slot
    - `is_filtered`: true if the publisher evaluates the row filters (`row_filter: publisher`)
    """
    publications_by_name = {
        publication_name: DefinedPublication(
            name=publication_name,
            tables=tuple(
                DefinedTable(*table.relation, where=table.where, columns=table.columns)
                for table in publication.tables
            ),
            operations=frozenset(publication.publish),
            via_root=publication.publish_via_partition_root,
            generated_columns=publication.publish_generated_columns[0],
            all_tables=publication.all_tables,
            excluded=publication.excluded,
            sequences=publication.published_sequences,
            all_sequences=publication.all_sequences,
        )
        for publication_name, publication in source.publications.items()
    }
    return SlotStream(
        name=name,
        source=make_source(source_name, source),
        slot=slot,
        capture=source.capture,
        filtered=is_filtered,
        subscriptions={name: subscription.publications for name, subscription in subscriptions.items()},
        defined_publications={} if is_filtered else publications_by_name,
        options=_make_pgoutput_options(source_name, list(subscriptions.values())),
        failover=any(subscription.failover for subscription in subscriptions.values()),
    )


_SHARED_OPTIONS = ("origin", "binary", "streaming", "two_phase", "failover")


def _make_pgoutput_options(source_name: str, subscriptions: Sequence[SubscriptionConfig]) -> PgoutputOptions:
    """The options of pgoutput for reading a slot. Raises PgsieveError if the slot's subscriptions need different options."""
    first_subscription = subscriptions[0]
    for subscription, option in product(subscriptions[1:], _SHARED_OPTIONS):
        if getattr(subscription, option) != getattr(first_subscription, option):
            raise PgsieveError(
                f'subscriptions "{first_subscription.name}" and "{subscription.name}" share the replication slot of source "{source_name}",'
                f" but differ in `{option}`",
                hint=f"give both the same `{option}`, or one of them a slot of its own with `row_filter: publisher`",
                sqlstate="22023",
            )
    return PgoutputOptions(
        (),
        first_subscription.binary,
        first_subscription.streaming,
        first_subscription.two_phase,
        first_subscription.origin,
    )


def _refuse_unsupported_options(subscription: SubscriptionConfig, storage: Storage) -> None:
    """Raise PgsieveError for an option that would have no effect in this lake."""
    facts_by_option = {
        "two_phase: true": (
            subscription.two_phase and not storage.is_reached_by_delta_rs,
            "in a lake that only Spark reaches, transactions arrive when they commit, and the replica's rows are the same",
        ),
    }
    for option, (is_requested, consequence) in facts_by_option.items():
        if is_requested:
            raise PgsieveError(
                f'subscription "{subscription.name}": `{option}` is not supported yet',
                hint=f"leave the option out: {consequence}",
                sqlstate="0A000",
            )
