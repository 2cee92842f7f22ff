"""The replicas of a subscription as they were at an LSN, as Delta tables: versions of the replicas, or clones.

A slice is the changes from one position of the slot to another. A cut is an LSN. For each replica it names the Delta
version that has exactly the changes before this LSN. A table's change history is a Delta table with all changes of the
table.

In: the base of each table (a version of its replica, and the later slices of its change history), and a folder for
    clones
Out: a `TableVersion` for each table

If a base has no slices, it is a version of the replica itself. If it has slices, the version is cloned into the folder,
and the changes are copied to a change history beside the clone. Then they are applied to the clone, by the same
functions as to a replica. Raises LakeError. Raises MomentError if a change cannot be applied; it could not be applied
to the replica either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from pgsieve.assets.steps.apply.batch import Batch
from pgsieve.assets.steps.apply.replica_tables import divide_batch, divide_slices
from pgsieve.assets.steps.moments.bases import TableBase, find_bases
from pgsieve.assets.steps.moments.moment import Moment, MomentError
from pgsieve.assets.steps.moments.slices import copy_slice
from pgsieve.assets.steps.records.table_states import Name, TableStates
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.clones import clone
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.paths import OWN_FOLDER
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.table_rows import open_all_rows
from pgsieve.resources.private_folder import private_folder, remove_abandoned_folders
from pgsieve.resources.work import name_jobs

#: The folder for clones in a lake on this machine. The folder of a slot stream (a slot with its subscriptions) cannot have
#: this name, because names of streams have no dot.
_CLONES_FOLDER = f"{OWN_FOLDER}/.moments"


@dataclass(frozen=True)
class TableVersion:
    """A table as it was at a moment: a version of a Delta table in `lake`.

    `change_count` is the number of changes that were applied to the table, if it is a clone.
    """

    name: Name
    lake: Lake
    path: str
    version: int
    change_count: int = 0

    @property
    def qualified_name(self) -> str:
        """The table's name, as it is written in SQL."""
        return quote_qualified(*self.name)

    def read_frame(self) -> DataFrame:
        """The table's rows for Spark."""
        return self.lake.read_version(self.path, self.version)

    def open_table(self) -> DeltaTable:
        """The table for delta-rs. Raises MomentError if delta-rs cannot reach the lake."""
        delta_rs = self.lake.require_delta_rs(
            MomentError(
                f'table "{self.qualified_name}": only Spark reaches its lake',
                hint="read it with `read_at`, in Spark",
                sqlstate="0A000",
            )
        )
        return delta_rs.open_version(self.path, self.version)

    def read_schema(self) -> pa.Schema:
        """The table's columns as an Arrow schema."""
        return pa.schema(self.open_table().schema().to_arrow())

    def read_batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the table in batches."""
        with self.lake.access.translate_errors(self.path):
            yield from open_all_rows(self.lake, self.path, self.version).read()

    def count_rows(self) -> int:
        """The number of the table's rows."""
        return self.lake.count_rows(self.path, self.version)


def read_at(
    spark: SparkSession, lake: str, subscription: str, moment: str | datetime, scratch: str | None = None
) -> dict[str, DataFrame]:
    """The replicas of a subscription as they were at any moment: maps each table, such as `public.orders`, to a DataFrame.

    `lake` is the path or URI in pgsieve.yaml. The moment is an LSN as PostgreSQL writes it (`16/B374D848`: all
    transactions that committed before it), or a time with its time zone (all transactions that committed up to it).
    Tables that have changed between the cut before the moment and the moment are read from clones, which are deleted when
    this process ends. If the lake is in an object store, and Spark runs on other machines, pass a folder in the store for
    the clones as `scratch`, and remove it afterwards. Raises MomentError with the reason if the lake can no longer show
    the moment.
    """
    return read_frames(Moment.from_user_input(Lake(lake, lambda: spark), subscription, moment), scratch)


def read_frames(moment: Moment, scratch: str | None = None) -> dict[str, DataFrame]:
    """Maps each table to its replica at a moment, as a DataFrame."""
    return {table.qualified_name: table.read_frame() for table in find_tables(moment, scratch)}


def find_tables(
    moment: Moment, scratch: str | None = None, only_table: Name | None = None
) -> list[TableVersion]:
    """The tables of a subscription at a moment. With `only_table`, just this table.

    Clones are made in the folder `scratch`. Without it, they are made in a temporary folder, which is deleted when this
    process ends.
    """
    lake, tables, bases_with_changes = moment.lake, list[TableVersion](), list[TableBase]()
    for base in find_bases(moment, only_table):
        if base.slice_ends:
            bases_with_changes.append(base)
        else:
            tables.append(TableVersion(base.name, lake, base.path, base.version))
    if not bases_with_changes:
        return tables
    target_lake = lake.with_address(
        mkdtemp(dir=_make_scratch_folder(lake)) if scratch is None else scratch, temporary=True
    )
    return [*tables, *clone_up_to(moment, bases_with_changes, target_lake)]


def _make_scratch_folder(lake: Lake) -> Path:
    """A temporary folder for clones.

    If the lake is a folder that this user can write, it is in the lake, because a clone may have hard links to data
    files, and these need one file system. Otherwise it is in the folder for temporary files.
    """
    if not is_uri(lake.uri):
        try:
            return private_folder(f"{lake.uri}/{_CLONES_FOLDER}")
        except OSError:  # This user may only read the lake.
            pass
    return private_folder()


def remove_stale_clones(lake: Lake) -> None:
    """Remove the clones of processes that were killed. Their links would keep data files from being freed."""
    if not is_uri(lake.uri):
        remove_abandoned_folders(Path(lake.uri, _CLONES_FOLDER))


def clone_up_to(moment: Moment, bases: Sequence[TableBase], target_lake: Lake) -> list[TableVersion]:
    """Clone the bases into another lake, and apply their changes up to a moment."""
    subscription = moment.subscription
    target_lake.access.begin_writing()
    changes_of_bases = moment.lake.map_in_parallel(partial(_clone_table, moment, target_lake), bases)
    TableStates(target_lake, subscription).append(base.state for base in bases)
    _apply_changes(subscription, target_lake, [change for changes in changes_of_bases for change in changes])
    tables = []
    for base, changes in zip(bases, changes_of_bases, strict=True):
        path = target_lake.paths.replica(subscription, *base.name)
        change_count = sum(
            sum(slice_changes.sent_counts.values()) + slice_changes.truncate_count
            for slice_changes in changes
        )
        tables.append(
            TableVersion(base.name, target_lake, path, target_lake.records.version(path), change_count)
        )
    return tables


def _clone_table(moment: Moment, target_lake: Lake, base: TableBase) -> list[TableChanges]:
    """Clone a table, and copy the slices that the clone lacks.

    Returns the table's changes by slice.
    """
    lake, subscription = moment.lake, moment.subscription
    path = target_lake.paths.replica(subscription, *base.name)
    with lake.access.translate_errors(base.path), target_lake.access.translate_errors(path):
        table = TableVersion(base.name, lake, base.path, base.version).open_table()
        clone(table, base.path, lake.store, path, target_lake.store)
    history = target_lake.paths.change_history(subscription, *base.name, base.definition.history.generation)
    with name_jobs(subscription, f"{quote_qualified(*base.name)} up to {format_lsn(moment.lsn)}"):
        changes = [
            copy_slice(lake, target_lake, base, slice_end, moment.lsn, history)
            for slice_end in base.slice_ends
        ]
    return [slice_changes for slice_changes in changes if slice_changes.has_changes]


def _apply_changes(subscription: str, target_lake: Lake, changes: Sequence[TableChanges]) -> None:
    """Apply changes in batches, as a run does. Raises MomentError if some of them cannot be applied."""
    changes_by_slice: dict[int, list[TableChanges]] = {}
    for change in sorted(changes, key=lambda each: each.slice_end):
        changes_by_slice.setdefault(change.slice_end, []).append(change)
    for slice_ends in (
        part_ends
        for batch_ends in divide_slices(list(changes_by_slice))
        for part_ends in divide_batch(batch_ends, changes_by_slice)
    ):
        batch = Batch(
            subscription,
            target_lake,
            slice_ends[-1],
            [change for slice_end in slice_ends for change in changes_by_slice[slice_end]],
        )
        plan, _, _ = batch.plan(None)
        for result in batch.apply(plan):
            if result.problem is not None:
                raise MomentError(
                    f'subscription "{subscription}": table "{quote_qualified(*result.name)}" cannot be brought up to {format_lsn(slice_ends[-1])}: {result.problem}',
                    hint="the replica could not apply this change either; choose an earlier LSN, or one after the next copy",
                    sqlstate="55000",
                )
