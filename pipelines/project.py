"""The configuration as what the steps work on: sources, feeds, subscriptions, and the lake.

A source's subscriptions with `row_filter: pipeline` share its slot; each with `row_filter: publisher` has its
own. Raises PgsieveError for options whose behaviour is not built.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from assets.steps.subscription import DefinedPublication, DefinedTable, Feed, Subscription
from decoding.errors import PgsieveError
from pipelines.config import Config, SourceConfig, SubscriptionConfig
from resources.delta import LakeResource
from resources.postgres import Source
from resources.spark import SparkEngine


@dataclass(frozen=True)
class Project:
    """Everything a configuration file declares."""

    feeds: Mapping[str, Feed]
    subscriptions: Mapping[str, Subscription]
    lake: LakeResource

    def reading(self, feed: Feed) -> list[Subscription]:
        """The subscriptions that read a feed."""
        return [s for s in self.subscriptions.values() if s.feed.name == feed.name]

    def feeds_of(self, subscriptions: Iterable[Subscription]) -> list[Feed]:
        """The feeds of some subscriptions, each once."""
        return list({s.feed.name: s.feed for s in subscriptions}.values())


def project(config: Config) -> Project:
    """The feeds and subscriptions of a configuration."""
    feeds: dict[str, Feed] = {}
    for name, source in config.sources.items():
        sharing = {
            s.name: s.publications
            for s in config.subscriptions.values()
            if s.source == name and s.row_filter == "pipeline"
        }
        if sharing:
            feeds[name] = _feed(name, name, source, source.slot, sharing)
    subscriptions = {}
    for subscription in config.subscriptions.values():
        _refuse_unbuilt(subscription)
        owner = subscription.source
        if subscription.row_filter == "publisher":
            owner = subscription.slot
            publications = {subscription.name: subscription.publications}
            feeds[owner] = _feed(
                owner,
                subscription.source,
                config.sources[subscription.source],
                owner,
                publications,
                filtered=True,
            )
        subscriptions[subscription.name] = Subscription(
            name=subscription.name,
            feed=feeds[owner],
            copy_data=subscription.copy_data,
            types=subscription.type_overrides,
        )
    engine = SparkEngine(master=config.spark.master, spark_config=config.spark.conf)
    return Project(feeds, subscriptions, LakeResource(uri=config.lake, engine=engine))


def _feed(
    name: str,
    source_name: str,
    source: SourceConfig,
    slot: str,
    subscriptions: Mapping[str, tuple[str, ...]],
    *,
    filtered: bool = False,
) -> Feed:
    defined = {
        publication_name: DefinedPublication(
            name=publication_name,
            tables=tuple(
                DefinedTable(*t.relation, where=t.where, columns=t.columns) for t in publication.tables
            ),
            operations=frozenset(publication.publish),
            via_root=publication.publish_via_partition_root,
        )
        for publication_name, publication in source.publications.items()
    }
    return Feed(
        name=name,
        source=Source(source_name, source.conninfo.get_secret_value()),
        slot=slot,
        capture=source.capture,
        filtered=filtered,
        subscriptions=dict(subscriptions),
        defined={} if filtered else defined,
    )


def _refuse_unbuilt(subscription: SubscriptionConfig) -> None:
    """Refuse an option rather than take it and do nothing."""
    unbuilt = {
        "origin: none": subscription.origin == "none",
        "binary: true": subscription.binary,
        "two_phase: true": subscription.two_phase,
        "disable_on_error: true": subscription.disable_on_error,
    }
    for option, asked in unbuilt.items():
        if asked:
            raise PgsieveError(
                f'subscription "{subscription.name}": `{option}` is not supported yet',
                hint="leave the option out: the replica's rows are the same but for what it asks",
                sqlstate="0A000",
            )
