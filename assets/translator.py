"""How replication appears in Dagster: the specs of the assets, and the names of everything else.

In: a `PgsieveAsset`, which says what an asset stands for
Out: the `AssetSpec` of the asset

A user can write a subclass of `PgsieveTranslator` to change keys, groups, tags, owners, kinds, descriptions and
automation conditions, or to add deps. Other integrations of Dagster have such translators, too. After the
translation `DagsterNames.asset_spec` adds the deps between the steps, with the translated keys.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import dagster as dg

from pgsieve.assets.encoded_names import encode_identifier
from pgsieve.assets.published import UNKNOWN_FILTER, PublishedTable
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.table_groups import GroupPath, nested_group
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.lake.delta.layout import TableName


class AssetKind(StrEnum):
    """What an asset stands for. In YAML, `translation` of a component can compare an asset's kind with these values."""

    #: A published table at the publisher. Nothing in Dagster materialises it.
    SOURCE_TABLE = "source_table"
    INITIAL_SYNC = "initial_sync"
    CHANGE_LOG = "change_log"
    TABLE_CHANGES = "table_changes"
    REPLICA = "replica"
    #: A cut of a subscription: one version of each of its replicas (the copies of its tables). Together these versions
    #: equal the publisher at one LSN.
    CUT = "cut"
    CHANGE_LOG_MAINTENANCE = "change_log_maintenance"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True)
class PgsieveAsset:
    """What an asset stands for, with its names.

    - `name`: the first part of the key. It is the name of the subscription, or for a table at the publisher the name of
      the source. For the change log and its maintenance it is the name of their slot stream (a slot with its
      subscriptions).
    - `subscription`, `schema`, `table`: None if the asset does not belong to one
    - `row_filter`: the row filter as text, or the text `none` if the table has no filter; None if this is unknown
    - `path`: the names of nested groups, the outermost first, within the group of the source or subscription
    - `comment`: the publisher's comment on the table
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
        """The key that the asset has, unless a translator changes it."""
        if self.schema is None or self.table is None:
            return dg.AssetKey([self.name, self.kind.value])
        table = encode_identifier(self.schema), encode_identifier(self.table)
        if self.kind is AssetKind.SOURCE_TABLE:
            return dg.AssetKey([self.source, "tables", *table])
        return dg.AssetKey([self.name, *table])


def slot_stream_asset(slot_stream: SlotStream, kind: AssetKind) -> PgsieveAsset:
    """The change log of a slot stream (a slot with its subscriptions), or the maintenance of the change log."""
    return PgsieveAsset(kind, slot_stream.source.name, slot_stream.name, slot_stream.slot)


def subscription_asset(subscription: Subscription, kind: AssetKind) -> PgsieveAsset:
    """A step of a subscription, its cut, or its maintenance."""
    slot_stream = subscription.slot_stream
    return PgsieveAsset(
        kind,
        slot_stream.source.name,
        subscription.name,
        slot_stream.slot,
        subscription.name,
        publications=slot_stream.subscriptions[subscription.name],
    )


def replica_asset(subscription: Subscription, table: PublishedTable, path: GroupPath = ()) -> PgsieveAsset:
    """A replica. `path` and the comment on the table are needed only for the spec of the asset, not for its key."""
    return PgsieveAsset(
        AssetKind.REPLICA,
        subscription.slot_stream.source.name,
        subscription.name,
        subscription.slot_stream.slot,
        subscription.name,
        table.schema,
        table.name,
        table.publications,
        table.row_filter,
        path,
        table.comment,
    )


def source_table_asset(
    source: str, name: TableName, path: GroupPath = (), comment: str | None = None
) -> PgsieveAsset:
    """A table at the publisher. `path` and `comment` are needed only for the spec of the asset, not for its key."""
    kind = AssetKind.SOURCE_TABLE
    return PgsieveAsset(kind, source, source, schema=name[0], table=name[1], path=path, comment=comment)


#: Maps pgsieve's kinds of assets to Dagster's `kinds`, which its pages show. All other assets have only the kind
#: `deltalake`. An engine such as Spark is not among the kinds: each materialization names the engine that made it.
_DAGSTER_KINDS = {
    AssetKind.SOURCE_TABLE: {"postgres", "table"},
    AssetKind.INITIAL_SYNC: {"postgres", "deltalake"},
    AssetKind.CHANGE_LOG: {"postgres", "deltalake"},
}
#: These assets are not in the group of the steps, so that this group stays small.
_KINDS_WITH_OWN_GROUP = {AssetKind.SOURCE_TABLE, AssetKind.REPLICA, AssetKind.CUT}


class PgsieveTranslator:
    """Makes the asset spec of each step and table.

    To change the specs, write a subclass that changes what `super().get_asset_spec` returns:

        class Mine(pgsieve.PgsieveTranslator):
            def get_asset_spec(self, data):
                return super().get_asset_spec(data).replace_attributes(owners=["team:data"])

    The `deps` of the returned spec are added to those that the asset has anyway. No two assets may get the same key.
    """

    def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
        """Make the spec of an asset. It has no deps, except those that a subclass adds."""
        return dg.AssetSpec(
            key=data.key,
            group_name=_choose_group(data),
            kinds=_DAGSTER_KINDS.get(data.kind, {"deltalake"}),
            description="\n\n".join(
                map(escape_controls, filter(None, [data.comment, _describe_asset(data)]))
            ),
        )


def _choose_group(asset: PgsieveAsset) -> str:
    """The group of an asset."""
    if asset.kind not in _KINDS_WITH_OWN_GROUP:
        return f"{asset.source}_replication"
    return nested_group(asset.source if asset.kind is AssetKind.SOURCE_TABLE else asset.name, asset.path)


def _describe_asset(asset: PgsieveAsset) -> str:
    """The description of an asset."""
    match asset.kind:
        case AssetKind.SOURCE_TABLE:
            return f"{_quote_table_name(asset)} of source {asset.source}."
        case AssetKind.INITIAL_SYNC:
            return (
                f"Copies the published tables of {', '.join(asset.publications)}"
                " at one snapshot, row filters evaluated by the publisher. A backfill copies the chosen tables again."
            )
        case AssetKind.CHANGE_LOG:
            return (
                f"The messages of replication slot {asset.slot}, appended in whole transactions;"
                " the slot is confirmed only after they are durable."
            )
        case AssetKind.TABLE_CHANGES:
            return "The changes of each table after row filters and the UPDATE transformation."
        case AssetKind.REPLICA:
            return (
                f"Replica of {_quote_table_name(asset)}. Publications: {', '.join(asset.publications)}."
                f" Row filter: {asset.row_filter or UNKNOWN_FILTER}"
            )
        case AssetKind.CUT:
            return (
                "An LSN at which all replicas agree, with their Delta versions. Materialised by each run that has"
                " brought every table up to date; its data version changes only with the replicas."
            )
        case AssetKind.CHANGE_LOG_MAINTENANCE:
            return (
                "Deletes from the change log old slices that every subscription has applied, compacts it,"
                " and removes the files of old versions."
            )
        case AssetKind.MAINTENANCE:
            return (
                "Deletes old applied changes from the change history, and old cuts. An hour later, deletes the versions"
                " that only these cuts name. Compacts the tables."
            )


def _quote_table_name(asset: PgsieveAsset) -> str:
    assert asset.schema is not None
    assert asset.table is not None
    return quote_qualified(asset.schema, asset.table)


@dataclass(frozen=True)
class DagsterNames:
    """The names of everything that pgsieve defines in Dagster.

    The names of jobs, schedules, sensors and ops begin with `prefix`. If it is empty, only the resources have a prefix,
    which is `pgsieve`. Raises PgsieveError if Dagster does not allow the prefix in names, or if a translator gives two
    assets the same key.
    """

    prefix: str = ""
    translator: PgsieveTranslator = field(default_factory=PgsieveTranslator)
    _spec_by_asset: dict[PgsieveAsset, dg.AssetSpec] = field(default_factory=dict, repr=False, compare=False)
    _asset_by_key: dict[dg.AssetKey, PgsieveAsset] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]*", self.prefix):
            raise PgsieveError(
                f"prefix {self.prefix!r} cannot begin a name in Dagster",
                hint="use letters, digits and underscores",
                sqlstate="42602",
            )

    @property
    def lake_resource_key(self) -> str:
        """The key of the resource that opens the lake."""
        return f"{self.prefix or 'pgsieve'}_lake"

    @property
    def spark_resource_key(self) -> str:
        """The key of the resource that has the Spark session of the steps."""
        return f"{self.prefix or 'pgsieve'}_spark"

    @property
    def resource_keys(self) -> set[str]:
        """The keys of the resources that each step needs."""
        return {self.lake_resource_key, self.spark_resource_key}

    def prefixed_name(self, name: str) -> str:
        """The name of a job, a schedule, a sensor or an op."""
        return f"{self.prefix}_{name}" if self.prefix else name

    def asset_spec(self, asset: PgsieveAsset, deps: Iterable[dg.AssetKey] = ()) -> dg.AssetSpec:
        """The translated spec of an asset, with its deps added to those of the translator."""
        spec = self._translate(asset)
        dep_keys = {dep.asset_key for dep in spec.deps}
        return spec.replace_attributes(deps=[*spec.deps, *(key for key in deps if key not in dep_keys)])

    def asset_key(self, asset: PgsieveAsset) -> dg.AssetKey:
        """The translated key of an asset."""
        return self._translate(asset).key

    def _translate(self, asset: PgsieveAsset) -> dg.AssetSpec:
        """The spec that the translator makes of an asset. The translator is asked only once for each asset."""
        if (spec := self._spec_by_asset.get(asset)) is None:
            spec = self._spec_by_asset[asset] = self.translator.get_asset_spec(asset)
            first_asset = self._asset_by_key.setdefault(spec.key, asset)
            if first_asset.key != asset.key:
                raise PgsieveError(
                    f"the translation gives {asset.key.to_user_string()} and {first_asset.key.to_user_string()} one key,"
                    f" {spec.key.to_user_string()}",
                    hint="give the two assets different keys: put a `key_prefix` before one",
                    sqlstate="42710",
                )
        return spec
