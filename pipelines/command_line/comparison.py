"""The commands that inspect the publisher and the replicas: `status`, `check`, `validate`, `decode`."""

import sys
from typing import Annotated

import typer

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line import console, reports
from pgsieve.pipelines.command_line.app import (
    AFTER_INTERRUPTED_CHANGE,
    EXIT_FINDINGS,
    EXIT_REFUSED,
    ConfigOption,
    JsonOption,
    SubscriptionsArgument,
    command,
    exit_with,
    is_verbose,
    load_settings,
)
from pgsieve.pipelines.command_line.validation_report import print_validation

_PANEL = "Inspect"


@command("Example: pgsieve status --json", panel=_PANEL)
def status(
    ctx: typer.Context,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    prometheus: Annotated[
        bool,
        typer.Option("--prometheus", help="Print metrics in Prometheus' text format instead of tables."),
    ] = False,
) -> None:
    """Show slots, their lag, and the state of every replica table.

    Exits with 2 if a source does not answer, or a subscription cannot be replicated. The lake's own facts
    are still shown.
    """
    if prometheus and as_json:
        raise PgsieveError("`--json` and `--prometheus` are two formats", hint="leave out one of them")
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.status import status as read_status

    report = read_status(settings)
    if prometheus:
        from pgsieve.pipelines.following.metrics import format_status_metrics

        sys.stdout.write(format_status_metrics(report).decode())
    elif as_json:
        console.print_json(report)
    else:
        reports.print_status(report)
    if any(s.problem for s in report.slots) or any(s.problem for s in report.subscriptions):
        raise typer.Exit(EXIT_REFUSED)


@command(
    "Example: pgsieve check sales && echo consistent", panel=_PANEL, after_interrupt=AFTER_INTERRUPTED_CHANGE
)
def check(
    ctx: typer.Context,
    subscriptions: SubscriptionsArgument = None,
    config: ConfigOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Make rows that differ equal to the publisher's rows.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare replicas with the publisher's filtered tables at the same LSN.

    Exits with 1 on any difference, and prints the keys of some rows that differ.
    """
    settings = load_settings(ctx, config)
    subscription_configs = settings.select(subscriptions or [])
    from pgsieve.pipelines.commands.check import check as compare

    with console.show_progress() as progress:
        report = compare(settings, subscription_configs, progress, is_repair_requested=repair)
    if as_json:
        console.print_json(report)
    elif report.tables or not report.failures:
        reports.print_check(report)
    console.print_failures(report.failures, verbose=is_verbose(ctx))
    exit_with(report.failures, problems=not report.equal)


@command("Example: pgsieve validate -c pgsieve.yaml", panel=_PANEL)
def validate(
    ctx: typer.Context,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find what PostgreSQL would refuse, before anything is created.

    Prints the publications, what each subscription will receive, and the SQL statements that you have to run.
    Exits with 1 if there is a problem.
    """
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.validate import validate as find_problems

    report = find_problems(settings)
    console.print_result(report, print_validation, as_json=as_json)
    if report.problems:
        raise typer.Exit(EXIT_FINDINGS)


@command("Example: pgsieve decode shop --plugin test_decoding -o include-xids=false", panel=_PANEL)
def decode(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A source, by name.")],
    plugin: Annotated[
        str,
        typer.Option("--plugin", "-P", metavar="NAME", help="Output plugin: json, pgoutput, test_decoding."),
    ],
    options: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME[=VALUE]", help="An option of the plugin; repeatable."),
    ] = None,
    slot: Annotated[
        str | None,
        typer.Option("--slot", "-S", metavar="NAME", help="The slot to read, if the source has several."),
    ] = None,
    from_change_log: Annotated[
        bool,
        typer.Option(
            "--from-change-log",
            help="Read the lake's change log, the messages that runs have read, instead of the slot.",
        ),
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Print the changes that wait in a slot, as pg_recvlogical does with this output plugin.

    The slot stays where it is.
    """
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.decode import decode as run_decode

    for line in run_decode(settings, source, plugin, options or [], slot, from_change_log=from_change_log):
        sys.stdout.buffer.write(line + b"\n")
