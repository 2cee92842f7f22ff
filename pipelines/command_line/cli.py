"""The command line: `pgsieve COMMAND`.

In: arguments, the configuration file, the environment. Out: results on stdout, progress and errors on stderr,
and an exit code that scripts can rely on:

====  ===================================================================================================
0     done, and nothing wrong was found
1     done, and something was found: `check` a difference, `validate` a problem, `run` a table set aside
2     refused: wrong arguments or configuration, or anything else that says what to do about it, also where
      that concerns some of the subscriptions and the others went on
70    a fault of pgsieve's own (EX_SOFTWARE of sysexits.h); `--verbose` shows the traceback
130   interrupted
====  ===================================================================================================

Dagster and Spark are imported inside the commands that need them: `--help` and a wrong file answer at once.
"""

import errno
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from pgsieve import __version__
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line import console
from pgsieve.pipelines.command_line.extras import require_extra
from pgsieve.pipelines.commands.results import Failure
from pgsieve.pipelines.config.model import DEFAULT_FILE, FILE_VARIABLE, Config, load_config
from pgsieve.resources.tracing import span

FOUND = 1
REFUSED = 2
FAULT = 70


class _Command(TyperCommand):
    """A command whose errors become one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command's function; its arguments have been read by now."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except PgsieveError as error:
            console.print_error(error)
            raise typer.Exit(REFUSED) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:  # `pgsieve … | head` is no fault
                raise
            from pgsieve.pipelines.commands.failures import storage_refusal

            if (refused := storage_refusal(error)) is not None:
                console.print_error(refused)
                raise typer.Exit(REFUSED) from error
            console.print_unexpected(error, verbose=_verbose(ctx))
            raise typer.Exit(FAULT) from error


app = typer.Typer(
    name="pgsieve",
    help="PostgreSQL logical replication into Delta Lake, with PostgreSQL's own row filters.",
    epilog="Example: pgsieve demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Configuration file (default: $PGSIEVE_CONFIG, else ./pgsieve.yaml).",
    ),
]
Subscriptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="SUBSCRIPTION", help="Subscriptions, by name (default: all)."),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


UiHost = Annotated[str, typer.Option("--host", help="Address that the web interface listens on.")]
UiPort = Annotated[
    int, typer.Option("--port", min=1, max=65535, help="Port that the web interface listens on.")
]


class _LogFormat(StrEnum):
    """How progress and errors are written to stderr."""

    TEXT = "text"
    JSON = "json"


LogFormat = Annotated[
    _LogFormat | None,
    typer.Option(
        "--log-format",
        help="How progress, warnings and errors are written to stderr; json: one object a line. Also PGSIEVE_LOG_FORMAT.",
        show_choices=True,
    ),
]

Subscription = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="A subscription, by name.")]


def _command(
    epilog: str, name: str | None = None, to: typer.Typer = app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command, with the options that every one has after its name, too."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def invoked(*arguments: Any, log_format: _LogFormat | None = None, **options: Any) -> None:
            if log_format == _LogFormat.JSON:
                console.log_as_json()
            with span(f"pgsieve {function.__name__}"):
                function(*arguments, **options)

        declared = inspect.signature(function)
        parameter = inspect.Parameter(
            "log_format", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogFormat
        )
        signed: Any = invoked
        signed.__signature__ = declared.replace(parameters=[*declared.parameters.values(), parameter])
        signed.__annotations__ = {**function.__annotations__, "log_format": LogFormat}
        to.command(name, cls=_Command, epilog=epilog)(invoked)
        return function

    return register


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pgsieve {__version__}")
        raise typer.Exit


@app.callback()
def common(
    ctx: typer.Context,
    config: ConfigFile = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the traceback of an unexpected error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    log_format: LogFormat = None,
) -> None:
    """Keep the options that come before the command."""
    del verbose, version  # read from the context, and by the callback
    if (log_format or os.environ.get("PGSIEVE_LOG_FORMAT")) == _LogFormat.JSON:
        console.log_as_json()
    ctx.obj = config


def _load(ctx: typer.Context, config: Path | None) -> Config:
    """Read the file of the option after the command, else of the one before it, else the default."""
    return load_config(config or ctx.obj)


def _verbose(ctx: Any) -> bool:
    return bool(ctx.find_root().params["verbose"])


def _ignore(*_: object) -> None:
    """What is shown at the end needs not be shown step by step."""


def _end(failures: Sequence[Failure], *, found: bool = False) -> None:
    """Exit with the greatest code that there is a reason for."""
    codes = [REFUSED if isinstance(failure.error, PgsieveError) else FAULT for failure in failures]
    if code := max(codes, default=FOUND if found else 0):
        raise typer.Exit(code)


@_command("Example: pgsieve demo --keep ./demo")
def demo(
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="FOLDER", help="Make everything in this folder (default: a temporary one)."
        ),
    ] = None,
    as_json: AsJson = False,
    with_ui: Annotated[
        bool,
        typer.Option(
            "--ui", help="Instead: made-up traffic, its replicas, and Dagster's web interface, until Ctrl-C."
        ),
    ] = False,
    host: UiHost = "127.0.0.1",
    port: UiPort = 3000,
    lake: Annotated[
        Literal["folder", "s3"],
        typer.Option("--lake", help="Where the Delta tables are: in the folder, or on an S3 server in it."),
    ] = "folder",
) -> None:
    """Replay the manual's row filter examples on an embedded PostgreSQL, beside a built-in subscription.

    With --ui it stays: a server on which something changes all the time, a run every few seconds, and Dagster's pages to
    look at, and to click.
    """
    require_extra("demo")
    if with_ui:
        if lake != "folder":
            raise PgsieveError("`--ui` has its lake in a folder", hint="leave out `--lake` or `--ui`")
        require_extra("ui")
        from pgsieve.pipelines.demo.live_demo import live_demo

        with console.progress() as progress:
            live_demo(keep, host, port, progress, console.print_live_demo, console.print_run)
        return
    from pgsieve.pipelines.demo.demo import demo as run_demo

    with console.progress() as progress:
        shown = _ignore if as_json else console.print_demo_step
        report = run_demo(keep, progress, shown, on_s3=lake == "s3")
    if as_json:
        console.print_json(report)
    else:
        console.print_demo(report)
    if not report.equal:
        raise typer.Exit(FOUND)


@_command("Example: pgsieve init --conninfo 'host=db dbname=shop user=pgsieve' --publication sales")
def init(
    ctx: typer.Context,
    conninfo: Annotated[
        str | None,
        typer.Option(
            "--conninfo",
            help="The database, as libpq writes it, or a postgresql:// URI; a password in it is not written to the file.",
        ),
    ] = None,
    password_command: Annotated[
        str | None,
        typer.Option(
            "--password-command",
            metavar="COMMAND",
            help="A program that prints the password, for tokens that expire, with its arguments.",
        ),
    ] = None,
    publications: Annotated[
        list[str] | None,
        typer.Option("--publication", metavar="NAME", help="A publication of the server; repeatable."),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--table", metavar="SCHEMA.TABLE", help="Instead: a table to publish by pgsieve.yaml; repeatable."
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="Its name (default: the database's).")
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Option("--subscription", metavar="NAME", help="Its name (default: the first publication's)."),
    ] = None,
    lake: Annotated[
        str, typer.Option("--lake", metavar="FOLDER|URI", help="Where the Delta tables go.")
    ] = "./lake",
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            help="The role that replicates (default: that of the conninfo, unless it may do anything).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there already.")] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Write pgsieve.yaml and the SQL for its role, from what a database publishes; then validate.

    On a terminal it asks for what no option says. Nothing on the server is changed, no password is written.
    Exits with 1 when validate finds a problem.
    """
    from pgsieve.pipelines.command_line.interview import chosen, connected
    from pgsieve.pipelines.commands.init import initialise, refuse_existing

    file = config or ctx.obj or Path(os.environ.get(FILE_VARIABLE) or DEFAULT_FILE)
    refuse_existing(file, force=force)
    connection, found = connected(conninfo, password_command)
    choice = chosen(found, publications or [], tables or [], source, subscription, lake, role)
    report = initialise(file, connection, found, choice, force=force)
    if as_json:
        console.print_json(report)
    else:
        console.print_init(report)
    if report.validation.problems:
        raise typer.Exit(FOUND)


@_command("Example: pgsieve run sales")
def run(
    ctx: typer.Context,
    subscriptions: Subscriptions = None,
    config: ConfigFile = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Go on applying changes as they arrive, until SIGTERM or Ctrl-C."),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=0,
            max=65535,
            metavar="PORT",
            help="With --follow: serve Prometheus metrics at /metrics and the process's health at /healthz.",
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(
            "--metrics-host",
            metavar="ADDRESS",
            help="Address that they are served at (0.0.0.0: at all of this machine).",
        ),
    ] = "127.0.0.1",
    stall_limit: Annotated[
        int,
        typer.Option(
            "--stall-limit",
            min=0,
            metavar="SECONDS",
            help="With --follow: end with an error where for so long nothing moves though something waits; 0: never.",
        ),
    ] = 1800,
    as_json: AsJson = False,
) -> None:
    """Copy what is new, apply every change up to the source's current LSN, and exit.

    Prints what was copied and applied; with --follow and --json an object a line. Exits with 1 when a table had to be set
    aside.
    """
    settings = _load(ctx, config)
    selected = settings.selected(subscriptions or [])
    if follow:
        from pgsieve.pipelines.following.follow import follow as follow_pipeline
        from pgsieve.pipelines.following.watch import StalledError

        try:
            with console.progress() as progress:
                failures = follow_pipeline(
                    settings,
                    selected,
                    progress,
                    console.print_json_line if as_json else partial(console.print_run, verbose=_verbose(ctx)),
                    metrics_at=None if metrics_port is None else (metrics_host, metrics_port),
                    stall_limit=stall_limit or None,
                )
        except StalledError as error:
            console.print_error(error)
            console.log_as_text()
            sys.stdout.flush()
            os._exit(REFUSED)  # Not sys.exit, which waits for the threads that do not move.
        console.print_failures(failures, verbose=_verbose(ctx))
        _end(failures)
        return
    if metrics_port is not None:
        raise PgsieveError(
            "--metrics-port is for --follow: a process that ends cannot be scraped",
            hint="after a run, `pgsieve status --prometheus` prints the metrics, e.g. for node_exporter's textfile collector",
        )
    from pgsieve.pipelines.commands.run import run as run_pipeline

    with console.progress() as progress:
        summary = run_pipeline(settings, selected, progress)
    if as_json:
        console.print_json(summary)
        console.print_failures(summary.failures, verbose=_verbose(ctx))
    else:
        console.print_run(summary, verbose=_verbose(ctx))
    _end(summary.failures, found=summary.problems)


@_command("Example: pgsieve resync sales public.orders")
def resync(
    ctx: typer.Context,
    subscription: Subscription,
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCHEMA.TABLE", help="Tables to copy again (default: those that need it)."),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy tables again, and bring the subscription up to date; the other tables are left alone.

    Says of each table what changed since it was copied. Without tables it copies those that are set aside, or whose
    row filter, columns or publications changed; and all of them where the slot was lost, after making a new one.
    """
    settings = _load(ctx, config)
    (selected,) = settings.selected([subscription])
    from pgsieve.pipelines.commands.resync import resync as copy_again

    with console.progress() as progress:
        report = copy_again(settings, selected, tables or [], progress)
    if as_json:
        console.print_json(report)
    else:
        console.print_resync(report)
    if report.run and report.run.problems:
        raise typer.Exit(FOUND)


@_command("Example: pgsieve skip sales 0/14C0A38")
def skip(
    ctx: typer.Context,
    subscription: Subscription,
    lsn: Annotated[
        str, typer.Argument(metavar="LSN", help="The finish LSN of the transaction to skip; none clears it.")
    ],
    config: ConfigFile = None,
) -> None:
    """Skip all changes of one transaction, as ALTER SUBSCRIPTION ... SKIP does.

    The LSN is the one that the error of a disabled subscription names. It is cleared once that transaction was
    skipped, or another one that was not empty was applied.
    """
    settings = _load(ctx, config)
    (selected,) = settings.selected([subscription])
    from pgsieve.pipelines.commands.skip import skip as choose

    console.print_skip(subscription, choose(settings, selected, lsn))


@_command("Example: pgsieve enable sales")
def enable(ctx: typer.Context, subscription: Subscription, config: ConfigFile = None) -> None:
    """Enable a subscription that an error disabled (disable_on_error); the next run goes on where it stopped."""
    settings = _load(ctx, config)
    (selected,) = settings.selected([subscription])
    from pgsieve.pipelines.commands.skip import enable as enable_again

    console.print_enabled(subscription, enable_again(settings, selected))


@_command("Example: pgsieve drop sales --delete-tables")
def drop(
    ctx: typer.Context,
    subscription: Subscription,
    delete_tables: Annotated[
        bool, typer.Option("--delete-tables", help="Delete its tables in the lake, too.")
    ] = False,
    leave_slot: Annotated[
        bool, typer.Option("--leave-slot", help="Do not ask the server, which may be gone.")
    ] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove what pgsieve made for a subscription on the server: slot and capture publications.

    A slot that other subscriptions need is kept, and captures no more than they need.
    """
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.drop import drop as drop_subscription

    report = drop_subscription(settings, subscription, delete_tables=delete_tables, leave_slot=leave_slot)
    if as_json:
        console.print_json(report)
    else:
        console.print_drop(report)


@_command("Example: pgsieve status --json")
def status(
    ctx: typer.Context,
    config: ConfigFile = None,
    as_json: AsJson = False,
    prometheus: Annotated[
        bool,
        typer.Option("--prometheus", help="Print metrics in Prometheus' text format instead of tables."),
    ] = False,
) -> None:
    """Show slots, their lag, and the state of every replica table.

    Exits with 2 if a source does not answer, or a subscription cannot be replicated. What the lake has of it is
    still shown.
    """
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.status import status as read_status

    report = read_status(settings)
    if prometheus:
        from pgsieve.pipelines.following.metrics import status_metrics

        sys.stdout.write(status_metrics(report).decode())
    elif as_json:
        console.print_json(report)
    else:
        console.print_status(report)
    if any(s.problem for s in report.slots) or any(s.problem for s in report.subscriptions):
        raise typer.Exit(REFUSED)


@_command("Example: pgsieve check sales && echo consistent")
def check(
    ctx: typer.Context,
    subscriptions: Subscriptions = None,
    config: ConfigFile = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Make the rows that differ those of the publisher.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare replica tables with the publisher's filtered tables at the same LSN.

    Exits with 1 on any difference, and prints the keys of some rows that differ.
    """
    settings = _load(ctx, config)
    selected = settings.selected(subscriptions or [])
    from pgsieve.pipelines.commands.check import check as compare

    with console.progress() as progress:
        report = compare(settings, selected, progress, repairing=repair)
    if as_json:
        console.print_json(report)
    elif report.tables or not report.failures:
        console.print_check(report)
    console.print_failures(report.failures, verbose=_verbose(ctx))
    _end(report.failures, found=not report.equal)


@_command("Example: pgsieve maintain sales")
def maintain(
    ctx: typer.Context,
    subscriptions: Subscriptions = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete what is applied and older than its retention, compact small files, remove old versions.

    How long things are kept is `retention` in the configuration. Runs may go on meanwhile.
    """
    settings = _load(ctx, config)
    selected = settings.selected(subscriptions or [])
    from pgsieve.pipelines.commands.maintain import maintain as maintain_tables

    with console.progress() as progress:
        done = maintain_tables(settings, selected, progress)
    if as_json:
        console.print_json(done)
    else:
        console.print_maintenance(done)


@_command("Example: pgsieve validate -c pgsieve.yaml")
def validate(
    ctx: typer.Context,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Find what PostgreSQL would refuse, before anything is created.

    Prints the publications, what each subscription will receive, and SQL that is still to be run.
    Exits with 1 when there is a problem.
    """
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.validate import validate as find_problems

    report = find_problems(settings)
    if as_json:
        console.print_json(report)
    else:
        console.print_validation(report)
    if report.problems:
        raise typer.Exit(FOUND)


@_command("Example: pgsieve decode shop --plugin test_decoding -o include-xids=false")
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
        typer.Option(
            "--slot", "-S", metavar="NAME", help="Which of the source's slots, where it has several."
        ),
    ] = None,
    from_change_log: Annotated[
        bool,
        typer.Option(
            "--from-change-log", help="Read what has been recorded instead of what waits in the slot."
        ),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Print what waits in a slot, as pg_recvlogical prints it with this output plugin; confirms nothing."""
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.decode import decode as run_decode

    for line in run_decode(settings, source, plugin, options or [], slot, from_change_log=from_change_log):
        sys.stdout.buffer.write(line + b"\n")


@_command("Example: pgsieve ui --port 3000")
def ui(
    ctx: typer.Context,
    config: ConfigFile = None,
    host: UiHost = "127.0.0.1",
    port: UiPort = 3000,
) -> None:
    """Start Dagster's web interface on this configuration, until interrupted.

    Dagster keeps its records in $DAGSTER_HOME, or in .pgsieve/dagster beside the configuration file. A Spark is kept
    warm for the runs meanwhile, unless `spark.engine` is off.
    """
    require_extra("ui")
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.engine import keep_for_this_process
    from pgsieve.pipelines.commands.run import instance
    from pgsieve.pipelines.commands.ui import serve
    from pgsieve.pipelines.definitions import register_tables

    with instance(settings) as dagster:
        register_tables(settings, dagster)
    keep_for_this_process(settings)
    serve(settings, host, port, *(["--log-format", "json"] if console.log_as_text() else []))


@_command("Example: pgsieve refresh-defs-state", "refresh-defs-state")
def refresh_defs_state(ctx: typer.Context, config: ConfigFile = None) -> None:
    """Read what is published, for Dagster's definitions: these load without asking a source.

    It is kept in .pgsieve/published.json beside the configuration file; of a source that does not answer, what was
    known before. `pgsieve ui` does the same when it starts.
    """
    settings = _load(ctx, config)
    from pgsieve.pipelines.project import project
    from pgsieve.pipelines.published import refresh_published

    errors = refresh_published(settings, project(settings))
    for error in errors:
        console.print_error(error)
    if errors:
        raise typer.Exit(REFUSED)


@_command("Example: pgsieve jars ./jars")
def jars(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Copy them here, for a machine without network."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the jars that Spark needs for Delta and S3, as the first run that starts a Spark does by itself.

    A machine that reaches no Maven repository takes them from a copy of the folder, which PGSIEVE_JARS names there.
    """
    from pgsieve.pipelines.commands.jars import jars as fetch_jars

    with console.progress() as progress:
        report = fetch_jars(folder, progress)
    if as_json:
        console.print_json(report)
    else:
        console.print_jars(report)


engine = typer.Typer(
    help="Keep a Spark warm on this machine, which the runs of this configuration share.",
    epilog="Example: pgsieve engine start",
    no_args_is_help=True,
)
app.add_typer(engine, name="engine")


@_command("Example: pgsieve engine start", "start", engine)
def start_engine(ctx: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Start the engine unless it serves already; one of other settings or another version ends before.

    It ends when no run has used it for `spark.engine_idle` (15 minutes).
    """
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.engine import start

    with console.progress() as progress:
        report = start(settings, progress)
    if as_json:
        console.print_json(report)
    else:
        console.print_engine(report)


@_command("Example: pgsieve engine status --json", "status", engine)
def print_engine_status(
    ctx: typer.Context,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say whether the engine serves, since when, for whom, and in how much memory. Exits with 1 when it does not."""
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.engine import status as engine_status

    report = engine_status(settings)
    if as_json:
        console.print_json(report)
    else:
        console.print_engine(report)
    if not report.serving:
        raise typer.Exit(FOUND)


@_command("Example: pgsieve engine stop", "stop", engine)
def stop_engine(ctx: typer.Context, config: ConfigFile = None) -> None:
    """End the engine, also where runs use it: they end with an error, and the next ones go on."""
    settings = _load(ctx, config)
    from pgsieve.pipelines.commands.engine import stop

    console.print_engine_stopped(stop(settings))


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="pgsieve")


if __name__ == "__main__":
    main()
