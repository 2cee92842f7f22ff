"""Finds pgsieve's own tables (record tables) that were put back to an earlier version, and so have lost rows.

A table is put back by RESTORE, or by restoring files from a backup. A stream is a slot with the subscriptions that read
it.

In: cuts, which record the versions that these tables had. A cut names a version of each replica of a subscription;
    together these versions equal the publisher at one LSN.
Out: the paths of the tables that now have an earlier version than in a cut

In a cut the tables are named by the identifiers of Delta tables. If a table was created anew, it has another
identifier, so it is not taken for one that was put back.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from pgsieve.assets.steps.records.catalogs import AlteredSlices, Catalogs
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.resources.lake.delta.errors import PUT_BACK_PROBLEM, LakeError, make_damaged_table_error
from pgsieve.resources.lake.lake import Lake


def list_slot_stream_records(lake: Lake, slot_stream: SlotStream) -> list[str]:
    """List the paths of those record tables of a stream whose versions are in a cut.

    The change log (the slot's messages) is not among them. Its position is compared with that of the slot instead.
    """
    return [table(lake, slot_stream).path for table in (SlotStreamRecord, Catalogs, AlteredSlices)]


def list_subscription_records(lake: Lake, name: str) -> list[str]:
    """List the paths of those record tables of a subscription whose versions are in a cut, except `_table_states`.

    The version of `_table_states` is in a column of its own in the cut.
    """
    return [table(lake, name).path for table in (TransformedSlices, SubscriptionRecord)]


def read_present_versions(lake: Lake, subscription: Subscription) -> Mapping[str, int]:
    """Maps the identifiers of the record tables that a cut names to their present versions.

    Tables are left out if they have no stamp (an identifier with a version, `Records.stamp`), for example because only
    Spark Connect reaches the lake.
    """
    paths = [
        *list_slot_stream_records(lake, subscription.slot_stream),
        *list_subscription_records(lake, subscription.name),
    ]
    return dict(version for _, version in _read_stamps(lake, paths))


def refuse_put_back_tables(lake: Lake, paths: Iterable[str], cuts: Iterable[Cut | None]) -> None:
    """Raise DamagedTableError if a table has an earlier version than in one of the cuts."""
    for path in find_put_back_tables(lake, paths, cuts):
        raise make_damaged_table_error(path, PUT_BACK_PROBLEM)


def find_put_back_tables(lake: Lake, paths: Iterable[str], cuts: Iterable[Cut | None]) -> Iterator[str]:
    """Yields the paths of the tables that have an earlier version than in one of the cuts."""
    version_by_identifier: dict[str, int] = {}
    for identifier, version in chain.from_iterable(cut.records.items() for cut in cuts if cut is not None):
        version_by_identifier[identifier] = max(version, version_by_identifier.get(identifier, 0))
    for path, (identifier, version) in _read_stamps(lake, paths) if version_by_identifier else ():
        if version < version_by_identifier.get(identifier, 0):
            yield path


def read_newest_cuts(lake: Lake, slot_stream: SlotStream) -> list[Cut | None]:
    """The newest cut of each subscription of a stream. Subscriptions whose cuts cannot be read are left out."""
    cuts = list[Cut | None]()
    for name in slot_stream.subscriptions:
        try:
            cuts.append(Cuts(lake, name).read_last())
        except LakeError as error:
            # `describe_error` raises the error if the lake itself has failed, not only this table.
            describe_error(lake, error)
    return cuts


def _read_stamps(lake: Lake, paths: Iterable[str]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yields the path of each table that exists, with its identifier and its newest version.

    Tables without a stamp are left out.
    """
    with lake.consistent_read(*(paths := list(paths))):
        stamps = [(path, lake.records.stamp(path)) for path in paths]
    for path, stamp in stamps:
        if stamp is not None:
            yield path, (stamp[0].partition(" ")[0], stamp[1])
