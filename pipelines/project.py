"""Makes from the configuration the objects on which the steps work: sources, feeds, subscriptions, and the lake.

A feed is a replication slot with the subscriptions that read it. All subscriptions of a source with
`row_filter: pipeline` share one slot. A subscription with `row_filter: publisher` has a slot of its own. Raises
PgsieveError for options that are not supported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pgsieve.assets.lake import PgsieveLake
from pgsieve.assets.steps.operations.maintenance import Retention
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.definition import DefinedPublication, DefinedTable
from pgsieve.pipelines.config.model import Config, SourceConfig, SubscriptionConfig
from pgsieve.pipelines.connections import declared_storage, source_of, spark_engine_of
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.postgres.plugin_options import PgoutputOptions


@dataclass(frozen=True)
class Project:
    """The objects of a configuration file: feeds by name, subscriptions by name, the lake, and retention."""

    feeds: Mapping[str, Feed]
    subscriptions: Mapping[str, Subscription]
    lake: PgsieveLake
    retention: Retention
    #: The template of the replicas' names in Spark's catalog; None if they are not registered.
    names: str | None = None

    def subscriptions_of(self, feed: Feed) -> list[Subscription]:
        """The subscriptions that read the feed's slot."""
        return [s for s in self.subscriptions.values() if s.feed.name == feed.name]

    def feeds_of(self, subscriptions: Iterable[Subscription]) -> list[Feed]:
        """The feeds of these subscriptions. A feed of several subscriptions is listed once."""
        return list({s.feed.name: s.feed for s in subscriptions}.values())


def build_project(config: Config) -> Project:
    """Make the feeds and subscriptions of a configuration. Connects to nothing."""
    storage = declared_storage(config)
    feeds: dict[str, Feed] = {}
    for name, source in config.sources.items():
        subscriptions_by_name = {
            s.name: s
            for s in config.subscriptions.values()
            if s.source == name and s.row_filter == "pipeline"
        }
        if subscriptions_by_name:
            feeds[name] = _feed(name, name, source, source.slot, subscriptions_by_name)
    subscriptions = {}
    for subscription in config.subscriptions.values():
        _refuse_unsupported(subscription, storage)
        feed_name = subscription.source
        if subscription.row_filter == "publisher":
            feed_name = subscription.slot
            reader = {subscription.name: subscription}
            source = config.sources[subscription.source]
            feeds[feed_name] = _feed(feed_name, subscription.source, source, feed_name, reader, filtered=True)
        subscriptions[subscription.name] = Subscription(
            name=subscription.name,
            feed=feeds[feed_name],
            copy_data=subscription.copy_data,
            disable_on_error=subscription.disable_on_error,
            freshness=subscription.freshness,
            types=subscription.type_overrides,
            layout=subscription.layout.subscription_layout(),
            histories=subscription.history.subscription_histories(),
        )
    engine = spark_engine_of(config)
    periods = config.retention
    retention = Retention(periods.change_log, periods.changes, periods.versions)
    names = config.catalog.names if config.catalog else None
    folders = {name: subscription.layout.folder_template for name, subscription in subscriptions.items()}
    lake = PgsieveLake(uri=storage.address, engine=engine, folders=folders)
    return Project(feeds, subscriptions, lake, retention, names)


def _feed(
    name: str,
    source_name: str,
    source: SourceConfig,
    slot: str,
    subscriptions: Mapping[str, SubscriptionConfig],
    *,
    filtered: bool = False,
) -> Feed:
    """Make a feed.

    - `name`, `slot`: the names of the feed and of its slot
    - `source_name`, `source`: the database that has the slot
    - `subscriptions`: maps names to the subscriptions that read the slot
    - `filtered`: true if the publisher evaluates the row filters (`row_filter: publisher`)
    """
    definitions = {
        publication_name: DefinedPublication(
            name=publication_name,
            tables=tuple(
                DefinedTable(*t.relation, where=t.where, columns=t.columns) for t in publication.tables
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
    return Feed(
        name=name,
        source=source_of(source_name, source),
        slot=slot,
        capture=source.capture,
        filtered=filtered,
        subscriptions={name: s.publications for name, s in subscriptions.items()},
        defined={} if filtered else definitions,
        options=_pgoutput_options(source_name, list(subscriptions.values())),
        failover=any(s.failover for s in subscriptions.values()),
    )


_SHARED_OPTIONS = ("origin", "binary", "streaming", "two_phase", "failover")


def _pgoutput_options(source: str, subscriptions: Sequence[SubscriptionConfig]) -> PgoutputOptions:
    """The options of pgoutput for reading a slot. Raises PgsieveError if the slot's subscriptions need different options."""
    first_subscription = subscriptions[0]
    for subscription, option in product(subscriptions[1:], _SHARED_OPTIONS):
        if getattr(subscription, option) != getattr(first_subscription, option):
            raise PgsieveError(
                f'subscriptions "{first_subscription.name}" and "{subscription.name}" share the replication slot of source "{source}",'
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


def _refuse_unsupported(subscription: SubscriptionConfig, storage: Storage) -> None:
    """Raise PgsieveError for an option that would have no effect in this lake."""
    unsupported = {
        "two_phase: true": (
            subscription.two_phase and not storage.is_reached_by_delta_rs,
            "in a lake that only Spark reaches transactions arrive at their commit, and the replica's rows are the same",
        ),
    }
    for option, (is_requested, consequence) in unsupported.items():
        if is_requested:
            raise PgsieveError(
                f'subscription "{subscription.name}": `{option}` is not supported yet',
                hint=f"leave the option out: {consequence}",
                sqlstate="0A000",
            )
