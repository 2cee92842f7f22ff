"""The commands for operation: maintenance, Dagster's web interface and definitions, jars, and the warm engine.

The warm engine is a Spark server that keeps running after a run, for later runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from pgsieve.pipelines.command_line import console, reports
from pgsieve.pipelines.command_line.app import (
    AFTER_INTERRUPTED_CHANGE,
    EXIT_FINDINGS,
    EXIT_REFUSED,
    ConfigOption,
    Group,
    JsonOption,
    SubscriptionsArgument,
    UiHostOption,
    UiPortOption,
    app,
    command,
    load_settings,
)
from pgsieve.pipelines.command_line.extras import require_extra
from pgsieve.pipelines.commands.results import EngineStopReport

_PANEL = "Operate"


@command("Example: pgsieve maintain sales", panel=_PANEL, after_interrupt=AFTER_INTERRUPTED_CHANGE)
def maintain(
    ctx: typer.Context,
    subscriptions: SubscriptionsArgument = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete applied changes that are older than their retention, compact small files, remove old versions.

    `retention` in the configuration says how long each is kept. Runs may go on meanwhile.
    """
    settings = load_settings(ctx, config)
    subscription_configs = settings.select(subscriptions or [])
    from pgsieve.pipelines.commands.maintain import maintain as maintain_tables

    with console.show_progress() as progress:
        maintained_folders = maintain_tables(settings, subscription_configs, progress)
    console.print_result(maintained_folders, reports.print_maintenance, as_json=as_json)


@command("Example: pgsieve ui --port 3000", panel=_PANEL)
def ui(
    ctx: typer.Context,
    config: ConfigOption = None,
    host: UiHostOption = "127.0.0.1",
    port: UiPortOption = 3000,
) -> None:
    """Start Dagster's web interface for this configuration, until interrupted.

    Dagster keeps its records in $DAGSTER_HOME, or in .pgsieve/dagster beside the configuration file.
    Meanwhile a warm engine (a Spark that keeps running) serves the runs, unless `spark.engine` is off.
    """
    require_extra("ui")
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.engine import start_with_this_process
    from pgsieve.pipelines.commands.in_process import open_instance
    from pgsieve.pipelines.commands.ui import serve
    from pgsieve.pipelines.definitions import register_tables

    with open_instance(settings) as instance:
        register_tables(settings, instance)
    start_with_this_process(settings)
    options = ["--log-format", "json"] if console.log_as_text() else []
    if code := serve(settings, host, port, *options):
        raise typer.Exit(code)


@command("Example: pgsieve refresh-defs-state", "refresh-defs-state", panel=_PANEL)
def refresh_defs_state(ctx: typer.Context, config: ConfigOption = None) -> None:
    """Record the published tables, so that Dagster's definitions can load without asking a source.

    The file is .pgsieve/published.json beside the configuration file. A source that does not answer keeps its
    former entry. `pgsieve ui` also records them when it starts.
    """
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.project import build_project
    from pgsieve.pipelines.published import refresh_published

    errors = refresh_published(settings, build_project(settings))
    for error in errors:
        console.print_error(error)
    if errors:
        raise typer.Exit(EXIT_REFUSED)


@command("Example: pgsieve jars ./jars", panel=_PANEL)
def jars(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Copy the jars here, for a machine without network."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch the jars that Spark needs for Delta and S3; the first run that starts a Spark does so by itself.

    For a machine that reaches no Maven repository, copy FOLDER there and set PGSIEVE_JARS to its path.
    """
    from pgsieve.pipelines.commands.jars import jars as fetch_jars

    with console.show_progress() as progress:
        report = fetch_jars(folder, progress)
    console.print_result(report, reports.print_jars, as_json=as_json)


engine = typer.Typer(
    cls=Group,
    help="Keep a Spark running on this machine, for all runs of this configuration.",
    epilog="Example: pgsieve engine start",
    no_args_is_help=True,
)
app.add_typer(engine, name="engine", rich_help_panel=_PANEL)


@command("Example: pgsieve engine start", "start", engine)
def start_engine(ctx: typer.Context, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Start the engine unless it runs already.

    An engine with other settings or of another version is ended first. The engine ends when no run has used
    it for `spark.engine_idle` (15 minutes).
    """
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.engine import start

    with console.show_progress() as progress:
        report = start(settings, progress)
    console.print_result(report, reports.print_engine, as_json=as_json)


@command("Example: pgsieve engine status --json", "status", engine)
def print_engine_status(
    ctx: typer.Context,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show whether the engine runs, since when, whether a run uses it, and its memory.

    Exits with 1 if it does not run.
    """
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.engine import status as engine_status

    report = engine_status(settings)
    console.print_result(report, reports.print_engine, as_json=as_json)
    if not report.serving:
        raise typer.Exit(EXIT_FINDINGS)


@command("Example: pgsieve engine stop", "stop", engine)
def stop_engine(ctx: typer.Context, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """End the engine, even if runs use it. These runs end with an error, and the next runs continue their work."""
    settings = load_settings(ctx, config)
    from pgsieve.pipelines.commands.engine import stop

    report = EngineStopReport(stop(settings))
    console.print_result(report, reports.print_engine_stopped, as_json=as_json)
