"""How replication appears in Dagster: the asset specs of its steps and tables, and the names of everything else.

In: `PgsieveAsset`, which says what an asset stands for. Out: its `AssetSpec`. Users subclass `PgsieveTranslator`, like
the translators of other integrations, to change keys, groups, tags, owners, kinds, descriptions and automation
conditions, or to add deps. `Naming.spec` adds the deps between the steps afterwards, by the translated keys.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import dagster as dg

from pgsieve.assets.dagster_names import Name, encode_identifier
from pgsieve.assets.published import UNKNOWN_FILTER, PublishedTable
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.table_groups import GroupPath, nested_group
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls


class AssetKind(StrEnum):
    """What an asset stands for; a `translation` in YAML compares with these values."""

    #: A published table at the publisher: nothing materialises it.
    SOURCE_TABLE = "source_table"
    INITIAL_SYNC = "initial_sync"
    CHANGE_LOG = "change_log"
    TABLE_CHANGES = "table_changes"
    REPLICA = "replica"
    #: The LSN at which all replicas of a subscription agree.
    CUT = "cut"
    CHANGE_LOG_MAINTENANCE = "change_log_maintenance"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True)
class PgsieveAsset:
    """What an asset stands for, with its names.

    `name` is the subscription's name. For the change log and its maintenance it is the feed's: the source's name, or
    the slot's if a subscription has its own slot. `subscription`, `schema` and `table` are None where the asset has
    none. `row_filter` is None if it is not known, and the text `none` if there is no filter. `path` is the path of
    groups within the group of the source or subscription. `comment` is the publisher's comment on the table.
    """

    kind: AssetKind
    source: str
    name: str
    slot: str = ""
    subscription: str | None = None
    schema: str | None = None
    table: str | None = None
    publications: tuple[str, ...] = ()
    row_filter: str | None = None
    path: GroupPath = ()
    comment: str | None = None

    @property
    def key(self) -> dg.AssetKey:
        """The key that the asset has unless it is translated."""
        if self.schema is None or self.table is None:
            return dg.AssetKey([self.name, self.kind.value])
        table = encode_identifier(self.schema), encode_identifier(self.table)
        if self.kind is AssetKind.SOURCE_TABLE:
            return dg.AssetKey([self.source, "tables", *table])
        return dg.AssetKey([self.name, *table])


def feed_asset(feed: Feed, kind: AssetKind) -> PgsieveAsset:
    """The change log of a feed, or its maintenance."""
    return PgsieveAsset(kind, feed.source.name, feed.name, feed.slot)


def subscription_asset(subscription: Subscription, kind: AssetKind) -> PgsieveAsset:
    """A step of a subscription, its cut, or its maintenance."""
    feed = subscription.feed
    return PgsieveAsset(
        kind,
        feed.source.name,
        subscription.name,
        feed.slot,
        subscription.name,
        publications=feed.subscriptions[subscription.name],
    )


def replica_asset(subscription: Subscription, table: PublishedTable, path: GroupPath = ()) -> PgsieveAsset:
    """A replica; `path` and the table's comment are needed only for its spec, not for its key."""
    return PgsieveAsset(
        AssetKind.REPLICA,
        subscription.feed.source.name,
        subscription.name,
        subscription.feed.slot,
        subscription.name,
        table.schema,
        table.name,
        table.publications,
        table.row_filter,
        path,
        table.comment,
    )


def source_table_asset(
    source: str, name: Name, path: GroupPath = (), comment: str | None = None
) -> PgsieveAsset:
    """A table at the publisher; `path` and `comment` are needed only for its spec, not for its key."""
    kind = AssetKind.SOURCE_TABLE
    return PgsieveAsset(kind, source, source, schema=name[0], table=name[1], path=path, comment=comment)


#: The kinds that Dagster shows for an asset. Its materialisations name the engine that made it.
_KINDS = {
    AssetKind.SOURCE_TABLE: {"postgres", "table"},
    AssetKind.INITIAL_SYNC: {"postgres", "deltalake"},
    AssetKind.CHANGE_LOG: {"postgres", "deltalake"},
}
#: The kinds of assets that are not in the group of the steps, so that it stays small.
_TABLE_KINDS = {AssetKind.SOURCE_TABLE, AssetKind.REPLICA, AssetKind.CUT}


class PgsieveTranslator:
    """Makes the asset spec of each step and table.

    Subclass it, and change what `super().get_asset_spec` returns.

        class Mine(pgsieve.PgsieveTranslator):
            def get_asset_spec(self, data):
                return super().get_asset_spec(data).replace_attributes(owners=["team:data"])

    A spec's `deps` are added to the asset's own. No two assets may get the same key.
    """

    def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
        """The spec of an asset. Its deps are only those that a subclass adds."""
        return dg.AssetSpec(
            key=data.key,
            group_name=_group(data),
            kinds=_KINDS.get(data.kind, {"deltalake"}),
            description="\n\n".join(map(escape_controls, filter(None, [data.comment, _description(data)]))),
        )


def _group(data: PgsieveAsset) -> str:
    if data.kind not in _TABLE_KINDS:
        return f"{data.source}_replication"
    return nested_group(data.source if data.kind is AssetKind.SOURCE_TABLE else data.name, data.path)


def _description(data: PgsieveAsset) -> str:
    match data.kind:
        case AssetKind.SOURCE_TABLE:
            return f"{_qualified_name(data)} of source {data.source}."
        case AssetKind.INITIAL_SYNC:
            return (
                f"Copies the published tables of {', '.join(data.publications)}"
                " at one snapshot, row filters evaluated by the publisher. A backfill copies the chosen tables again."
            )
        case AssetKind.CHANGE_LOG:
            return (
                f"The messages of replication slot {data.slot}, appended whole transaction by transaction;"
                " the slot is confirmed only after they are durable."
            )
        case AssetKind.TABLE_CHANGES:
            return "The changes of each table after row filters and the UPDATE transformation."
        case AssetKind.REPLICA:
            return (
                f"Replica of {_qualified_name(data)}. Publications: {', '.join(data.publications)}."
                f" Row filter: {data.row_filter or UNKNOWN_FILTER}"
            )
        case AssetKind.CUT:
            return (
                "An LSN at which all replicas agree, with their Delta versions. Materialised by each increment that"
                " has brought every table up to date; its data version changes only with the replicas."
            )
        case AssetKind.CHANGE_LOG_MAINTENANCE:
            return (
                "Deletes old slices that every subscription has applied from the change log, compacts it,"
                " and removes the files of old versions."
            )
        case AssetKind.MAINTENANCE:
            return (
                "Deletes old applied changes from the change history, and old cuts before the versions that they"
                " name; compacts the tables."
            )


def _qualified_name(data: PgsieveAsset) -> str:
    assert data.schema is not None
    assert data.table is not None
    return quote_qualified(data.schema, data.table)


@dataclass(frozen=True)
class Naming:
    """The names of everything that pgsieve defines in Dagster. Names of jobs, schedules, sensors, ops begin with `prefix`.

    If it is empty, only resources have a prefix, `pgsieve`. Raises PgsieveError for a prefix that is invalid in
    Dagster's names, and if a translator gives two assets the same key.
    """

    prefix: str = ""
    translator: PgsieveTranslator = field(default_factory=PgsieveTranslator)
    _specs: dict[PgsieveAsset, dg.AssetSpec] = field(default_factory=dict, repr=False, compare=False)
    _keys: dict[dg.AssetKey, PgsieveAsset] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]*", self.prefix):
            raise PgsieveError(
                f"prefix {self.prefix!r} cannot begin a name in Dagster",
                hint="use letters, digits and underscores",
                sqlstate="42602",
            )

    @property
    def lake(self) -> str:
        """The key of the lake's resource."""
        return f"{self.prefix or 'pgsieve'}_lake"

    @property
    def spark(self) -> str:
        """The key of the resource that has the steps' Spark session."""
        return f"{self.prefix or 'pgsieve'}_spark"

    @property
    def resources(self) -> set[str]:
        """The resources of each step: the lake, and its Spark."""
        return {self.lake, self.spark}

    def name(self, own: str) -> str:
        """The name of a job, a schedule, a sensor or an op."""
        return f"{self.prefix}_{own}" if self.prefix else own

    def spec(self, data: PgsieveAsset, deps: Iterable[dg.AssetKey] = ()) -> dg.AssetSpec:
        """The translated spec of an asset, with its own deps added."""
        spec = self._translate(data)
        dep_keys = {dep.asset_key for dep in spec.deps}
        return spec.replace_attributes(deps=[*spec.deps, *(key for key in deps if key not in dep_keys)])

    def key(self, data: PgsieveAsset) -> dg.AssetKey:
        """The translated key of an asset."""
        return self._translate(data).key

    def _translate(self, data: PgsieveAsset) -> dg.AssetSpec:
        """The translator's spec of an asset; the translator is asked once."""
        if (spec := self._specs.get(data)) is None:
            spec = self._specs[data] = self.translator.get_asset_spec(data)
            first_data = self._keys.setdefault(spec.key, data)
            if first_data.key != data.key:
                raise PgsieveError(
                    f"the translation gives {data.key.to_user_string()} and {first_data.key.to_user_string()} one key,"
                    f" {spec.key.to_user_string()}",
                    hint="give the two assets different keys: put a `key_prefix` before one",
                    sqlstate="42710",
                )
        return spec
