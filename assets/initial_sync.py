"""The asset of the initial sync, which copies published tables. Each published table is one of its Dagster partitions.

The copy of a table in the lake is called its replica.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

import dagster as dg

from pgsieve.assets.encoded_names import decode_partition_key, encode_partition_key
from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import (
    NO_COMMENTS,
    NO_FILTER,
    SECONDS,
    column_metadata,
    column_schema,
    replica_metadata,
    replica_version,
    standard_metadata,
    work_metadata,
)
from pgsieve.assets.outcome import NO_CALLBACKS, IncompleteError, StepCallbacks, run_as_step
from pgsieve.assets.published import PublishedTable
from pgsieve.assets.runless_events import make_unplanned_event
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.initial_sync.one_table import CopyResult
from pgsieve.assets.steps.log import no_log
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.operations.registration import Registration
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.translator import (
    AssetKind,
    DagsterNames,
    replica_asset,
    source_table_asset,
    subscription_asset,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.waits import PATIENT_SECONDS
from pgsieve.resources.work import Work, measure_work

#: The tag of a run that was started because tables had no copy yet. Another run may have copied some of them by the
#: time at which this run begins.
ONLY_MISSING_TAG = "pgsieve/lacking"

#: What the op yields to Dagster.
Event = dg.MaterializeResult[None] | dg.AssetMaterialization


def tables_partitions(subscription: str) -> dg.DynamicPartitionsDefinition:
    """The Dagster partitions of a subscription's initial sync. Each published table is a partition."""
    return dg.DynamicPartitionsDefinition(name=f"{subscription}_tables")


def divide_into_ranges(ordered_keys: Sequence[str], keys: Collection[str]) -> list[list[str]]:
    """Divide the Dagster partitions `keys` into ranges. One run can copy one range.

    `ordered_keys` has all partitions in order. A range consists of partitions that follow each other in this order.
    """
    return [
        list(key_range)
        for is_in_keys, key_range in groupby(ordered_keys, key=set(keys).__contains__)
        if is_in_keys
    ]


def range_tags(key_range: Sequence[str]) -> dict[str, str]:
    """The tags of the run that copies a range of partitions."""
    return {
        "dagster/asset_partition_range_start": key_range[0],
        "dagster/asset_partition_range_end": key_range[-1],
    }


def initial_sync_asset(
    subscription: Subscription,
    dagster_names: DagsterNames,
    *,
    name_template: str | None = None,
    show_progress: Callable[[str], None] = no_log,
    seconds: float = PATIENT_SECONDS,
    callbacks: StepCallbacks[Sequence[CopyResult]] = NO_CALLBACKS,
) -> dg.AssetsDefinition:
    """Make the asset `<subscription>/initial_sync`. When a partition is materialised, its table is copied anew.

    - `name_template`: the template for the replicas' names in Spark's catalog; None if they are not registered there
    - `show_progress`: gets lines about the progress, which also go to the log of the run
    - `seconds`: the copy waits at most this long for open transactions to end

    A run with the tag `ONLY_MISSING_TAG` copies only tables that have no copy when it begins. If a table cannot be copied,
    its partition is not materialised, and the run fails after it has copied the others.
    """
    asset = subscription_asset(subscription, AssetKind.INITIAL_SYNC)
    key, partitions = dagster_names.asset_key(asset), tables_partitions(subscription.name)

    def copy_and_measure(context: dg.AssetExecutionContext, lake: Lake) -> tuple[Sequence[CopyResult], Work]:
        def log(line: str) -> None:
            context.log.info(line)
            show_progress(line)

        names = [decode_partition_key(key) for key in context.partition_keys]
        is_tagged = ONLY_MISSING_TAG in context.run.tags
        with measure_work() as work:
            copies = copy_tables(subscription, lake, names, log, only_needed=is_tagged, wait_seconds=seconds)
        return copies, work

    with warnings.catch_warnings():
        # Dagster warns that `backfill_policy`, by which a backfill copies all tables in one run, is a beta feature.
        warnings.simplefilter("ignore", dg.BetaWarning)

        @dg.multi_asset(
            specs=[dagster_names.asset_spec(asset).replace_attributes(partitions_def=partitions)],
            name=dagster_names.prefixed_name(f"{subscription.name}__initial_sync"),
            partitions_def=partitions,
            backfill_policy=dg.BackfillPolicy.single_run(),
            required_resource_keys=dagster_names.resource_keys,
            pool=f"slot_{subscription.slot_stream.slot}",
            can_subset=True,
        )
        def initial_sync(context: dg.AssetExecutionContext) -> Iterator[Event]:
            with run_as_step(context), callbacks.report_errors():
                lake = open_lake(context, dagster_names)
                copy_results, work = copy_and_measure(context, lake)
                callbacks.add_work(work)
                callbacks.report(copy_results)
                yield from _make_partition_events(key, context.partition_keys, copy_results, work)
                for result in (r for r in copy_results if not (r.problem or r.is_overtaken)):
                    yield _make_replica_event(context, subscription, dagster_names, result, work)
                if name_template is not None:
                    Registration(subscription, lake, name_template).register()
                if problems := _find_problems(copy_results):
                    raise IncompleteError(subscription.name, list(problems.values()))

    return initial_sync


def _make_partition_events(
    key: dg.AssetKey, partitions: Sequence[str], copy_results: Sequence[CopyResult], work: Work
) -> Iterator[Event]:
    """The events for the Dagster partitions that a run has copied.

    Usually one event covers all partitions. If a table could not be copied, each of the others has its own event.
    """
    metadata = {**_make_metadata(copy_results), **work_metadata(work)}
    failed_partitions = {encode_partition_key(name) for name in _find_problems(copy_results)}
    if not failed_partitions:
        yield dg.MaterializeResult(asset_key=key, metadata=metadata)
        return
    for partition in partitions:
        if partition not in failed_partitions:
            yield dg.AssetMaterialization(key, metadata=metadata, partition=partition)


def _find_problems(copy_results: Sequence[CopyResult]) -> dict[TableName, str]:
    """Map each table that could not be copied to the reason."""
    return {
        (
            copy.schema,
            copy.table,
        ): f"{quote_qualified(copy.schema, copy.table)} cannot be copied: {copy.problem}"
        for copy in copy_results
        if copy.problem
    }


def _make_replica_event(
    context: dg.AssetExecutionContext,
    subscription: Subscription,
    dagster_names: DagsterNames,
    copy_result: CopyResult,
    work: Work,
) -> dg.AssetMaterialization:
    """The materialization of a replica after its copy. Later ones come from the runs that apply changes.

    `work` is the work of the whole run, which may have copied other tables, too.
    """
    name = copy_result.schema, copy_result.table
    publications = tuple(subscription.slot_stream.subscriptions[subscription.name])
    table = PublishedTable(*name, publications, copy_result.row_filter or NO_FILTER)
    source = dagster_names.asset_key(source_table_asset(subscription.slot_stream.source.name, name))
    event = dg.MaterializeResult[None](
        asset_key=dagster_names.asset_key(replica_asset(subscription, table)),
        data_version=replica_version(copy_result.lsn, copy_result.version),
        metadata={
            "LSN": format_lsn(copy_result.lsn),
            "Delta version": str(copy_result.version),
            "row filter": table.row_filter,
            **replica_metadata(TableResult(*name), {}),
            **work_metadata(work),
            SECONDS: round(copy_result.seconds, 2),
            **standard_metadata(rows=copy_result.rows, table=quote_qualified(*name)),
            **column_metadata(copy_result.columns, source, NO_COMMENTS, copy_result.publisher_name_by_column),
        },
    )
    changes = dagster_names.asset_key(subscription_asset(subscription, AssetKind.TABLE_CHANGES))
    return make_unplanned_event(context, event, [changes, source])


def _make_metadata(copy_results: Sequence[CopyResult]) -> dict[str, Any]:
    records = [
        dg.TableRecord(
            {
                "table": escape_controls(quote_qualified(copy.schema, copy.table)),
                "rows": copy.rows,
                "seconds": round(copy.seconds, 2),
                "row filter": escape_controls(copy.row_filter or ""),
                "LSN": format_lsn(copy.lsn),
                "Delta version": copy.version,
                "problem": escape_controls(copy.problem or ""),
            }
        )
        for copy in copy_results
    ]
    metadata: dict[str, Any] = {
        "tables": dg.MetadataValue.table(records) if records else dg.MetadataValue.text("none"),
        "dagster/row_count": dg.MetadataValue.int(sum(copy.rows for copy in copy_results)),
    }
    if len(copy_results) == 1:
        metadata["dagster/column_schema"] = dg.MetadataValue.table_schema(
            column_schema(copy_results[0].columns)
        )
    return metadata
