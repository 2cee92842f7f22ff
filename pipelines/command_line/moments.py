"""Commands that read replicas as they were at a moment, or make replicas from others: `read`, `restore`, `refilter`.

A cut names a version of each replica; together these versions equal the publisher at one LSN.
"""

from typing import Annotated

import typer

from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.pipelines.command_line import console, reports
from pgsieve.pipelines.command_line.app import (
    AFTER_INTERRUPTED_CHANGE,
    EXIT_FINDINGS,
    ConfigOption,
    JsonOption,
    SubscriptionArgument,
    command,
    load_settings,
)
from pgsieve.pipelines.commands.moment_results import MomentReport, RefilterReport

_PANEL = "Inspect"

MomentOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="LSN|TIME",
        help="All commits before this LSN (16/B374D848), or up to this time with its zone ('2026-03-01 12:00:00+00:00').",
    ),
]


@command(
    "Example: pgsieve read sales public.orders --at '2026-03-01 12:00:00+00:00' > orders.csv", panel=_PANEL
)
def read(
    ctx: typer.Context,
    subscription: SubscriptionArgument,
    table: Annotated[
        str | None,
        typer.Argument(metavar="SCHEMA.TABLE", help="Print its rows as CSV (default: list all tables)."),
    ] = None,
    at: MomentOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read the replicas of a subscription as they were at one moment, the same for all tables.

    The rows are those of all commits before an LSN, or up to a time; without --at, those of the newest cut.
    If a table changed between the last cut and the moment, the changes are applied to a copy in a temporary
    folder. The rows are exact: if `retention` has removed versions or changes that are needed, the command
    refuses and says why. The publisher is not asked.

    With SCHEMA.TABLE, prints its rows as CSV: NULL is empty, texts are quoted, arrays are JSON.
    With --json, prints one JSON object per row.
    """
    settings = load_settings(ctx, config)
    (subscription_config,) = settings.select([subscription])
    from pgsieve.pipelines.commands import read as reading

    if table is None:
        report = reading.read(settings, subscription_config, at)
        console.print_result(report, print_moment, as_json=as_json)
        return
    moment_table = reading.read_table(settings, subscription_config, at, table)
    from pgsieve.pipelines.command_line.rows import print_rows

    print_rows(moment_table.read_batches(), moment_table.read_schema(), as_json=as_json)


@command("Example: pgsieve restore sales ./sales-before --at 16/B374D848", panel=_PANEL)
def restore(
    ctx: typer.Context,
    subscription: SubscriptionArgument,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="An empty folder, or an address in an object store.")
    ],
    at: MomentOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy the replicas as they were at one moment into another folder, as Delta tables.

    The tables are in FOLDER/SUBSCRIPTION/SCHEMA/TABLE. On the lake's own file system, their files are hard
    links and take no room. `pgsieve run` does not update these tables. The lake and the publisher stay as they
    are. --at means the same as for `pgsieve read`.
    """
    settings = load_settings(ctx, config)
    (subscription_config,) = settings.select([subscription])
    from pgsieve.pipelines.commands.restore import restore as restore_tables

    report = restore_tables(settings, subscription_config, at, folder)
    console.print_result(report, print_moment, as_json=as_json)


@command(
    "Example: pgsieve refilter emea --from sales --plan",
    panel="Replicate",
    after_interrupt=AFTER_INTERRUPTED_CHANGE,
)
def refilter(
    ctx: typer.Context,
    subscription: SubscriptionArgument,
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCHEMA.TABLE", help="Tables to make (default: all that are published)."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SUBSCRIPTION",
            help="Make the tables from the replicas of this subscription (default: any subscription that has the rows).",
        ),
    ] = None,
    is_plan_only: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Show from which replica each table would be made, and from which LSN on, or why not; change nothing.",
        ),
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make replicas from other replicas, after row filters, columns or publications changed.

    It also makes the replicas of a new subscription, before its first run. No row is read from the publisher:
    a wide subscription is copied once, and narrow ones are made from it later. `pgsieve run` continues the
    replicas from the LSN that is printed, as after a copy.

    A table is made only if its rows are certain to be right. So the other replica must have all of the
    table's columns, in the same types, and all of its rows. And the publications of the other replica must not
    have changed since it was copied. Otherwise the table stays as it is, the reason is printed, and the exit
    code is 1; `pgsieve resync` copies the table.
    """
    settings = load_settings(ctx, config)
    (subscription_config,) = settings.select([subscription])
    from pgsieve.pipelines.commands.refilter import refilter as filter_again

    with console.show_progress() as progress:
        report = filter_again(
            settings, subscription_config, tables or [], source, progress, is_plan_only=is_plan_only
        )
    console.print_result(report, print_refilter_report, as_json=as_json)
    if report.has_tables_to_copy:
        raise typer.Exit(EXIT_FINDINGS)


def print_refilter_report(report: RefilterReport) -> None:
    """Print for each table from which replica it is made, or why it cannot be made."""
    summary = (
        "would be made"
        if report.planned
        else f"made, as of LSN {report.lsn}"
        if report.lsn
        else "nothing made"
    )
    console.print_out(console.Text(f"{report.subscription}: {summary}", style="bold"))
    printed_table = console.make_table(
        "table", "made of", "from LSN", "rows", "reason", right_aligned=("rows",)
    )
    for table in report.tables:
        name = quote_qualified(table.schema, table.name)
        console.add_row(printed_table, name, table.source, table.lsn, table.rows, table.reason)
    console.print_out(printed_table)
    if report.has_tables_to_copy:
        copy_hint = f"`pgsieve resync {report.subscription} SCHEMA.TABLE` copies it; `pgsieve run` copies a table that has no replica yet"
        console.print_out(
            console.Text.assemble(("hint: ", "bold"), f"if no replica has the rows of a table, {copy_hint}")
        )


def print_moment(report: MomentReport) -> None:
    """Print the tables as they were at a moment, with their paths."""
    console.print_out(console.Text(f"{report.subscription} as of LSN {report.lsn}", style="bold"))
    printed_table = console.make_table(
        "table",
        "rows",
        "changes applied",
        "version",
        "path",
        right_aligned=("rows", "changes applied", "version"),
    )
    for table in report.tables:
        name = quote_qualified(table.schema, table.name)
        console.add_row(printed_table, name, table.rows, table.changes, table.version, table.path)
    console.print_out(printed_table)
    reports.print_warnings(report.warnings)
