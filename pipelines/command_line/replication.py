"""Commands that replicate: `run`, `resync`, `skip`, `enable`, `drop`.

A table set aside gets no changes until it is copied again. Capture publications are pgsieve's own publications, with
which it reads the slot.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
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
    SubscriptionArgument,
    SubscriptionsArgument,
    command,
    exit_with,
    is_verbose,
    load_settings,
    report_error,
)
from pgsieve.pipelines.commands.results import EnableReport, Failure, RunSummary, SkipReport
from pgsieve.pipelines.config.model import Config, SubscriptionConfig

_PANEL = "Replicate"

TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Take over the replication slot, even if another lake still reads it. The tables of that lake must then be copied again.",
    ),
]


FollowOption = Annotated[
    bool,
    typer.Option("--follow", help="Keep running and apply changes as they arrive, until SIGTERM or Ctrl-C."),
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65535,
        metavar="PORT",
        help="With --follow: serve Prometheus metrics at /metrics and the process's health at /healthz.",
    ),
]
MetricsHostOption = Annotated[
    str,
    typer.Option(
        "--metrics-host",
        metavar="ADDRESS",
        help="Address that metrics are served at (0.0.0.0: all addresses of this machine).",
    ),
]
StallLimitOption = Annotated[
    int,
    typer.Option(
        "--stall-limit",
        min=0,
        metavar="SECONDS",
        help="With --follow: end with an error if changes wait and nothing progresses for this time; 0: never.",
    ),
]


@command(
    "Example: pgsieve run sales",
    panel=_PANEL,
    after_interrupt="committed work stays, and the next run continues",
)
def run(
    ctx: typer.Context,
    subscriptions: SubscriptionsArgument = None,
    config: ConfigOption = None,
    follow: FollowOption = False,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    stall_limit: StallLimitOption = 1800,
    take_over: TakeOverOption = False,
    is_explain_only: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Only show what a run would do for each table, which engine would write it, and why; change nothing.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy new tables, apply every change up to the source's current LSN, and exit.

    Prints the copied tables and the applied changes; with --follow and --json, one JSON object per line. Exits with
    1 if a table is set aside.
    """
    settings = load_settings(ctx, config)
    subscription_configs = settings.select(subscriptions or [])
    if is_explain_only:
        _explain(settings, subscription_configs, as_json=as_json)
        return
    if take_over:
        from pgsieve.pipelines.commands.run import take_over as take_slots_over

        take_slots_over(settings, subscription_configs)
    if follow:
        print_result = (
            console.print_json_line if as_json else partial(reports.print_run, verbose=is_verbose(ctx))
        )
        metrics_address = None if metrics_port is None else (metrics_host, metrics_port)
        stall_seconds = stall_limit or None
        failures = _follow(ctx, settings, subscription_configs, print_result, metrics_address, stall_seconds)
        console.print_failures(failures, verbose=is_verbose(ctx))
        exit_with(failures)
        return
    if metrics_port is not None:
        raise PgsieveError(
            "--metrics-port is for --follow: a process that ends cannot be scraped",
            hint="after a run, `pgsieve status --prometheus` prints the metrics, e.g. for node_exporter's textfile collector",
        )
    summary = _run_once(settings, subscription_configs, as_json=as_json)
    if as_json:
        console.print_json(summary)
        console.print_failures(summary.failures, verbose=is_verbose(ctx))
    else:
        reports.print_run(summary, verbose=is_verbose(ctx))
    exit_with(summary.failures, problems=summary.problems)


def _run_once(
    settings: Config, subscription_configs: Sequence[SubscriptionConfig], *, as_json: bool
) -> RunSummary:
    """Apply every change up to now. If the run is interrupted, print what it has done, and raise the interrupt."""
    from pgsieve.pipelines.commands.early_start import start_early

    start_early(settings, subscription_configs)
    from pgsieve.pipelines.commands.run import RunInterruptedError
    from pgsieve.pipelines.commands.run import run as run_pipeline

    try:
        with console.show_progress() as progress:
            return run_pipeline(settings, subscription_configs, progress)
    except RunInterruptedError as interrupt:
        if interrupt.summary.changed:
            console.print_result(interrupt.summary, reports.print_run, as_json=as_json)
        raise


def _follow(
    ctx: typer.Context,
    settings: Config,
    subscription_configs: Sequence[SubscriptionConfig],
    print_result: Callable[[RunSummary], None],
    metrics_address: tuple[str, int] | None,
    stall_seconds: float | None,
) -> tuple[Failure, ...]:
    """Follow the subscriptions until the process is stopped; returns the failures.

    If threads do not end in time, the function ends this process and does not return.
    """
    from pgsieve.pipelines.following.follow import follow
    from pgsieve.pipelines.following.watch import StalledError, StopTimeoutError

    try:
        with console.show_progress() as progress:
            try:
                return follow(
                    settings,
                    subscription_configs,
                    progress,
                    print_result,
                    metrics_address=metrics_address,
                    stall_seconds=stall_seconds,
                )
            except StopTimeoutError as error:
                progress.tell(error.message)
                exit_code = 0
    except StalledError as error:
        report_error(ctx, error)
        exit_code = EXIT_REFUSED
    console.log_as_text()
    sys.stdout.flush()
    os._exit(exit_code)  # `sys.exit` would wait until the threads have ended.


def _explain(settings: Config, subscription_configs: Sequence[SubscriptionConfig], *, as_json: bool) -> None:
    from pgsieve.pipelines.commands.explain import explain

    explanation = explain(settings, subscription_configs)
    console.print_result(explanation, reports.print_explanation, as_json=as_json)


@command(
    "Example: pgsieve resync sales public.orders", panel=_PANEL, after_interrupt=AFTER_INTERRUPTED_CHANGE
)
def resync(
    ctx: typer.Context,
    subscription: SubscriptionArgument,
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCHEMA.TABLE", help="Tables to copy again (default: those that need it)."),
    ] = None,
    config: ConfigOption = None,
    take_over: TakeOverOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy tables again, and bring the subscription up to date; other tables are not copied.

    Prints for each table what changed since it was copied. Without SCHEMA.TABLE it copies the tables that are
    set aside, or whose row filter, columns or publications changed. If the slot was lost, it makes a new one
    and copies all tables. If one of pgsieve's own tables cannot be read, an empty one replaces it, and
    the tables that it describes are copied.
    """
    settings = load_settings(ctx, config)
    (subscription_config,) = settings.select([subscription])
    from pgsieve.pipelines.commands.resync import resync as copy_again

    with console.show_progress() as progress:
        report = copy_again(settings, subscription_config, tables or [], progress, take_over=take_over)
    console.print_result(report, reports.print_resync, as_json=as_json)
    if report.run and report.run.problems:
        raise typer.Exit(EXIT_FINDINGS)


@command("Example: pgsieve skip sales 0/14C0A38", panel=_PANEL)
def skip(
    ctx: typer.Context,
    subscription: SubscriptionArgument,
    lsn: Annotated[
        str,
        typer.Argument(
            metavar="LSN", help="The finish LSN of the transaction; `none` cancels an earlier skip."
        ),
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Skip all changes of one transaction, as ALTER SUBSCRIPTION ... SKIP does.

    The error that disabled the subscription names the LSN. The skip ends once this transaction was skipped,
    or another one with changes was applied.
    """
    settings = load_settings(ctx, config)
    (subscription_config,) = settings.select([subscription])
    from pgsieve.pipelines.commands.skip import skip as record_skip

    report = SkipReport(subscription, record_skip(settings, subscription_config, lsn))
    console.print_result(report, reports.print_skip, as_json=as_json)


@command("Example: pgsieve enable sales", panel=_PANEL)
def enable(
    ctx: typer.Context,
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Enable a subscription that an error disabled (disable_on_error).

    The next run continues where it stopped.
    """
    settings = load_settings(ctx, config)
    (subscription_config,) = settings.select([subscription])
    from pgsieve.pipelines.commands.skip import enable as enable_again

    report = EnableReport(subscription, enable_again(settings, subscription_config))
    console.print_result(report, reports.print_enabled, as_json=as_json)


@command(
    "Example: pgsieve drop sales --delete-tables", panel=_PANEL, after_interrupt=AFTER_INTERRUPTED_CHANGE
)
def drop(
    ctx: typer.Context,
    subscription: SubscriptionArgument,
    delete_tables: Annotated[
        bool, typer.Option("--delete-tables", help="Delete the subscription's tables in the lake, too.")
    ] = False,
    leave_slot: Annotated[
        bool, typer.Option("--leave-slot", help="Leave the server as it is, for example because it is gone.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a subscription's slot and capture publications from the server.

    If other subscriptions need the slot, it stays, and captures only the tables that they need.
    """
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.drop import drop as drop_subscription

    report = drop_subscription(settings, subscription, delete_tables=delete_tables, leave_slot=leave_slot)
    console.print_result(report, reports.print_drop, as_json=as_json)
