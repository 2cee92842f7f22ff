"""Finds the commit time for a history that begins anew although its table is not copied.

In: the histories that a table has in the lake: its changes, and the versions of its rows (`history: scd2`). Out: the time
of the table's last commit before an LSN.

A history that begins anew at an LSN begins with the replica's rows, which have all changes committed before this LSN.
Their time must not be before the last of these commits, nor after the next commit. The time of the run would be too
late: the run may apply changes that were committed long before it.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.versions import VALID_FROM, VALID_FROM_LSN, VALID_TO, VALID_TO_LSN
from pgsieve.resources.lake.lake import Lake


def find_last_commit_time(
    lake: Lake, subscription: str, name: Name, definition: Definition, lsn: int
) -> datetime:
    """Find the time of the last commit of a table's changes before an LSN.

    If its histories have no such commit, return the time of the table's copy, or if this is unknown, the present time.
    Raises LakeError.
    """
    copy_record = definition.published
    times = list(_find_times(lake, subscription, name, definition, lsn))
    if not times and copy_record is not None and copy_record.time is not None:
        times = [copy_record.time]
    return max(times, default=datetime.now(UTC)).astimezone(UTC)


def _find_times(
    lake: Lake, subscription: str, name: Name, definition: Definition, lsn: int
) -> Iterator[datetime]:
    """Find the greatest time before an LSN in each history: the present one, and the former one if it was begun anew."""
    newest_generation, paths = definition.history.generation, lake.paths
    for generation in range(max(newest_generation - 1, 0), newest_generation + 1):
        changes_path = paths.change_history(subscription, *name, generation)
        versions_path = paths.row_versions(subscription, *name, generation)
        for path, column, lsn_column in (
            (changes_path, "commit_time", "commit_lsn"),
            (versions_path, VALID_FROM, VALID_FROM_LSN),
            (versions_path, VALID_TO, VALID_TO_LSN),
        ):
            if lake.records.exists(path):
                time = lake.find_column_bound("max", path, column, f"{lsn_column} < {lsn:d}")
                if time is not None:
                    yield time
