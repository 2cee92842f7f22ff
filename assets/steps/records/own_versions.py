"""The versions of pgsieve's own tables when a cut was made: a table with an earlier version now was put back.

A table that was put back lacks rows. In: a subscription and its cuts. Out: versions by table identifier; the
tables that are earlier than a cut says. A table that was made anew has another identifier, and is not among
them.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from pgsieve.assets.steps.records.catalogs import AlteredSlices, Catalogs
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.failures import reason
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.transformed import Transformed
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.resources.lake.delta.errors import PUT_BACK, LakeError, damaged
from pgsieve.resources.lake.lake import Lake


def of_feed(lake: Lake, feed: Feed) -> list[str]:
    """The tables of a feed that a cut records; the change log is checked by the slot."""
    return [each(lake, feed).path for each in (FeedRecord, Catalogs, AlteredSlices)]


def of_subscription(lake: Lake, name: str) -> list[str]:
    """The tables of a subscription that a cut records, besides its table states."""
    return [each(lake, name).path for each in (Transformed, SubscriptionRecord)]


def present_versions(lake: Lake, subscription: Subscription) -> Mapping[str, int]:
    """The versions of all these tables; empty where only Spark can read them."""
    paths = [*of_feed(lake, subscription.feed), *of_subscription(lake, subscription.name)]
    return dict(version for _, version in _stamps(lake, paths))


def refuse_put_back(lake: Lake, paths: Iterable[str], cuts: Iterable[Cut | None]) -> None:
    """Raise DamagedTableError where a table is earlier than one of the cuts says."""
    for path in put_back(lake, paths, cuts):
        raise damaged(path, PUT_BACK)


def put_back(lake: Lake, paths: Iterable[str], cuts: Iterable[Cut | None]) -> Iterator[str]:
    """The tables that are earlier than one of the cuts says."""
    versions: dict[str, int] = {}
    for table, version in chain.from_iterable(cut.records.items() for cut in cuts if cut is not None):
        versions[table] = max(version, versions.get(table, 0))
    for path, (table, version) in _stamps(lake, paths) if versions else ():
        if version < versions.get(table, 0):
            yield path


def newest_cuts(lake: Lake, feed: Feed) -> list[Cut | None]:
    """The newest cut of each subscription of a feed, except subscriptions whose cuts cannot be read."""
    cuts = list[Cut | None]()
    for name in feed.subscriptions:
        try:
            cuts.append(Cuts(lake, name).last())
        except LakeError as error:
            reason(lake, error)  # Raises where the lake itself fails.
    return cuts


def _stamps(lake: Lake, paths: Iterable[str]) -> Iterator[tuple[str, tuple[str, int]]]:
    """The identifier and newest version of tables."""
    with lake.consistent_read(*(paths := list(paths))):
        stamps = [(path, lake.records.stamp(path)) for path in paths]
    for path, stamp in stamps:
        if stamp is not None:
            yield path, (stamp[0].partition(" ")[0], stamp[1])
