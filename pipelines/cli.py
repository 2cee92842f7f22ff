"""The command line: `pgsieve COMMAND`.

In: arguments, the configuration file, the environment. Out: results on stdout, progress and errors on stderr,
and an exit code that scripts can rely on:

====  ===================================================================================================
0     done, and nothing wrong was found
1     done, and something was found: `check` a difference, `validate` a problem, `run` a table set aside
2     refused: wrong arguments or configuration, or anything else that says what to do about it
70    a fault of pgsieve's own (EX_SOFTWARE of sysexits.h); `--verbose` shows the traceback
130   interrupted
====  ===================================================================================================

Dagster and Spark are imported inside the commands that need them: `--help` and a wrong file answer at once.
"""

import errno
import importlib.metadata
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from decoding.errors import PgsieveError
from pipelines import console
from pipelines.config import Config, load_config

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
            console.print_unexpected(error, verbose=ctx.find_root().params["verbose"])
            raise typer.Exit(FAULT) from error


app = typer.Typer(
    name="pgsieve",
    help="PostgreSQL logical replication into Delta Lake, with PostgreSQL's own row filters.",
    epilog="Example: pgsieve demo",
    no_args_is_help=True,
    add_completion=False,
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


def version() -> str:
    """Version of the installed distribution, or of the checkout that runs without being installed."""
    try:
        return importlib.metadata.version("pgsieve")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pgsieve {version()}")
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
) -> None:
    """Keep the options that come before the command."""
    del verbose, version  # read from the context, and by the callback
    ctx.obj = config


def _load(ctx: typer.Context, config: Path | None) -> Config:
    """Read the file of the option after the command, else of the one before it, else the default."""
    return load_config(config or ctx.obj)


@app.command(cls=_Command, epilog="Example: pgsieve demo --keep ./demo")
def demo(
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="FOLDER", help="Make everything in this folder (default: a temporary one)."
        ),
    ] = None,
) -> None:
    """Replay the manual's row filter examples on an embedded PostgreSQL, beside a built-in subscription."""
    from pipelines.demo import demo as run_demo

    with console.progress() as progress:
        report = run_demo(keep, progress, console.print_demo_step)
    console.print_demo(report)
    if not report.equal:
        raise typer.Exit(FOUND)


@app.command(cls=_Command, epilog="Example: pgsieve run sales")
def run(
    ctx: typer.Context,
    subscriptions: Subscriptions = None,
    config: ConfigFile = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Go on applying changes as they arrive, until SIGTERM or Ctrl-C."),
    ] = False,
) -> None:
    """Copy what is new, apply every change up to the source's current LSN, and exit.

    Prints what was copied and applied. Exits with 1 when a table had to be set aside.
    """
    settings = _load(ctx, config)
    selected = settings.selected(subscriptions or [])
    if follow:
        from pipelines.follow import follow as follow_pipeline

        with console.progress() as progress:
            follow_pipeline(settings, selected, progress, console.print_run)
        return
    from pipelines.run import run as run_pipeline

    with console.progress() as progress:
        summary = run_pipeline(settings, selected, progress)
    console.print_run(summary)
    if summary.problems:
        raise typer.Exit(FOUND)


@app.command(cls=_Command, epilog="Example: pgsieve status --json")
def status(
    ctx: typer.Context,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show slots, their lag, and the state of every replica table."""
    settings = _load(ctx, config)
    from pipelines.status import status as read_status

    report = read_status(settings)
    if as_json:
        console.print_json(report)
    else:
        console.print_status(report)


@app.command(cls=_Command, epilog="Example: pgsieve check sales && echo consistent")
def check(ctx: typer.Context, subscriptions: Subscriptions = None, config: ConfigFile = None) -> None:
    """Compare replica tables with the publisher's filtered tables at the same LSN.

    Exits with 1 on any difference, and prints the keys of some rows that differ.
    """
    settings = _load(ctx, config)
    selected = settings.selected(subscriptions or [])
    from pipelines.check import check as compare

    report = compare(settings, selected)
    console.print_check(report)
    if not report.equal:
        raise typer.Exit(FOUND)


@app.command(cls=_Command, epilog="Example: pgsieve validate -c pgsieve.yaml")
def validate(ctx: typer.Context, config: ConfigFile = None) -> None:
    """Find what PostgreSQL would refuse, before anything is created.

    Prints the publications, what each subscription will receive, and SQL that is still to be run.
    Exits with 1 when there is a problem.
    """
    settings = _load(ctx, config)
    from pipelines.validate import validate as find_problems

    report = find_problems(settings)
    console.print_validation(report)
    if report.problems:
        raise typer.Exit(FOUND)


@app.command(cls=_Command, epilog="Example: pgsieve ui --port 3000")
def ui(
    ctx: typer.Context,
    config: ConfigFile = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 3000,
) -> None:
    """Start Dagster's web interface on this configuration, until interrupted.

    Dagster keeps its records in $DAGSTER_HOME, or in .pgsieve/dagster beside the configuration file.
    """
    settings = _load(ctx, config)
    from pipelines.definitions import register_tables
    from pipelines.run import instance
    from pipelines.ui import serve

    with instance(settings) as dagster:
        register_tables(settings, dagster)
    serve(settings, host, port)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="pgsieve")


if __name__ == "__main__":
    main()
