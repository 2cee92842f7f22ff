"""Restores the replicas of a subscription as they were at an LSN, in another folder.

In: a lake, an LSN, and the path or URI of an empty folder
Out: Delta tables at `<folder>/<subscription>/<schema>/<table>`. No run can update them, because a slot cannot go back
to their LSN.

Raises MomentError, and in that case leaves no files. Until the restore is complete, the folder has a subfolder `_pgsieve`.
So this stays if the process is killed.
"""

from pathlib import Path

from pgsieve.assets.steps.moments.bases import find_bases
from pgsieve.assets.steps.moments.moment import Moment, MomentError
from pgsieve.assets.steps.moments.reading import TableVersion, clone_up_to
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.paths import OWN_FOLDER
from pgsieve.resources.lake.stores.storage import is_uri


def restore_tables(moment: Moment, folder: str) -> list[TableVersion]:
    """Restore the tables of a subscription, as they were at a moment, into a folder."""
    lake, subscription = moment.lake, moment.subscription
    target_lake = lake.with_address(folder if is_uri(folder) else str(Path(folder).expanduser().absolute()))
    if lake.is_reached_by_spark_only or target_lake.is_reached_by_spark_only:
        raise MomentError(
            f'subscription "{subscription}" cannot be restored to "{folder}": Spark alone reaches one of them',
            hint="read the tables with `read_at`, and write them with Spark",
            sqlstate="0A000",
        )
    _refuse_occupied_folder(lake, target_lake)
    table_bases, records_path = find_bases(moment), f"{target_lake.uri}/{OWN_FOLDER}"
    target_lake.access.begin_writing()
    with target_lake.access.translate_errors(target_lake.uri):
        target_lake.store.touch(f"{records_path}/unfinished")
    try:
        tables = clone_up_to(moment, table_bases, target_lake)
    except PgsieveError:
        for path in (f"{target_lake.uri}/{subscription}", records_path):
            target_lake.remove(path)
        raise
    target_lake.access.make_durable()
    # The changes and the states of the tables were needed only to apply the changes.
    for path in (f"{target_lake.uri}/{subscription}/_changes", target_lake.paths.table_states(subscription)):
        target_lake.remove(path)
    target_lake.access.make_durable()
    target_lake.remove(records_path)
    return tables


def _refuse_occupied_folder(lake: Lake, target_lake: Lake) -> None:
    """Raise MomentError if a folder is not empty, is within the lake, or contains the lake."""
    lake_prefix, target_prefix = (f"{any_lake.uri.rstrip('/')}/" for any_lake in (lake, target_lake))
    if lake_prefix.startswith(target_prefix) or target_prefix.startswith(lake_prefix):
        raise MomentError(
            f'"{target_lake.uri}" is within the lake, or the lake is within it',
            hint="choose another folder",
            sqlstate="22023",
        )
    with target_lake.access.translate_errors(target_lake.uri):
        names = target_lake.store.list_file_names(target_lake.uri)
    if names:
        raise MomentError(
            f'folder "{target_lake.uri}" is not empty',
            hint=f"choose an empty one; a folder with `{OWN_FOLDER}` is left from a restore that did not end: remove it",
            sqlstate="55000",
        )
