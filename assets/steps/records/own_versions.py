"""Finds pgsieve's record tables that were put back to an earlier version (RESTORE, a backup), so that they lack rows.

In: the cuts, which have the versions of these tables by the Delta tables' identifiers. Out: the paths of the tables
whose present version is earlier than in a cut. A table that was made anew has another identifier, and is not found.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from pgsieve.assets.steps.records.catalogs import AlteredSlices, Catalogs
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.failures import reason
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.resources.lake.delta.errors import PUT_BACK, LakeError, damaged_table_error
from pgsieve.resources.lake.lake import Lake


def feed_records(lake: Lake, feed: Feed) -> list[str]:
    """The paths of the record tables of a feed whose versions are in a cut. The slot checks the change log."""
    return [each(lake, feed).path for each in (FeedRecord, Catalogs, AlteredSlices)]


def subscription_records(lake: Lake, name: str) -> list[str]:
    """The paths of the record tables of a subscription whose versions are in a cut, besides its table states."""
    return [each(lake, name).path for each in (TransformedSlices, SubscriptionRecord)]


def present_versions(lake: Lake, subscription: Subscription) -> Mapping[str, int]:
    """The present versions of all these tables by identifier; empty if only Spark can read them."""
    paths = [*feed_records(lake, subscription.feed), *subscription_records(lake, subscription.name)]
    return dict(version for _, version in _stamps(lake, paths))


def refuse_put_back_tables(lake: Lake, paths: Iterable[str], cuts: Iterable[Cut | None]) -> None:
    """Raise DamagedTableError if a table has an earlier version than in one of the cuts."""
    for path in put_back_tables(lake, paths, cuts):
        raise damaged_table_error(path, PUT_BACK)


def put_back_tables(lake: Lake, paths: Iterable[str], cuts: Iterable[Cut | None]) -> Iterator[str]:
    """The paths of the tables with an earlier version than in one of the cuts."""
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
            reason(lake, error)  # Raises a fault of the lake itself.
    return cuts


def _stamps(lake: Lake, paths: Iterable[str]) -> Iterator[tuple[str, tuple[str, int]]]:
    """The path of each existing table, with its identifier and newest version."""
    with lake.consistent_read(*(paths := list(paths))):
        stamps = [(path, lake.records.stamp(path)) for path in paths]
    for path, stamp in stamps:
        if stamp is not None:
            yield path, (stamp[0].partition(" ")[0], stamp[1])
