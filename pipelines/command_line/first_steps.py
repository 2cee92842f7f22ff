"""The commands for the first steps: `demo`, and `init`, which writes a first pgsieve.yaml."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line import console, demo_reports, reports
from pgsieve.pipelines.command_line.app import (
    EXIT_FINDINGS,
    ConfigOption,
    JsonOption,
    UiHostOption,
    UiPortOption,
    command,
    ignore_step,
)
from pgsieve.pipelines.command_line.extras import require_extra
from pgsieve.pipelines.commands.results import Progress, RunSummary
from pgsieve.pipelines.config.model import DEFAULT_FILE, FILE_VARIABLE

_PANEL = "First steps"


class _DemoLake(StrEnum):
    """Where the demo stores its Delta tables."""

    FOLDER = "folder"
    S3 = "s3"


LakeOption = Annotated[
    _DemoLake,
    typer.Option(
        "--lake",
        metavar="folder|s3",
        help="Where the Delta tables are: in the folder, or on an embedded S3 server.",
    ),
]
RowsOption = Annotated[
    int,
    typer.Option(
        "--rows",
        min=0,
        metavar="NUMBER",
        help="Rows of the large table, which is copied last; 0 leaves it out.",
    ),
]


@contextmanager
def _open_run_log(file: Path) -> Iterator[tuple[Progress, Callable[[RunSummary], None]]]:
    """Open a log file; yields an object that writes progress into it, and a function that writes results of runs.

    The terminal is left to the demo's own lines.
    """
    with file.open("w", encoding="utf-8") as log:

        def print_summary(summary: RunSummary) -> None:
            with console.redirect_output(log):
                reports.print_run(summary)

        yield console.LineProgress(log), print_summary


@command("Example: pgsieve demo --keep ./demo", panel=_PANEL)
def demo(
    kept_folder: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="FOLDER", help="Make everything in this folder (default: a temporary one)."
        ),
    ] = None,
    as_json: JsonOption = False,
    with_ui: Annotated[
        bool,
        typer.Option(
            "--ui",
            help="Keep a server with invented traffic, its replicas, and Dagster's web interface running until Ctrl-C.",
        ),
    ] = False,
    host: UiHostOption = "127.0.0.1",
    port: UiPortOption = 3000,
    lake: LakeOption = _DemoLake.FOLDER,
    rows: RowsOption = 1_000_000,
    without_spark: Annotated[
        bool,
        typer.Option("--without-spark", help="Use threads instead of Spark, on a machine without Java."),
    ] = False,
) -> None:
    """Replay PostgreSQL's examples of row filters, and compare pgsieve with a built-in subscription.

    The demo starts its own PostgreSQL. Then pgsieve (by Spark) and the built-in subscription each copy a million
    rows, with a row filter and a partition root, and apply half a million changes. With --ui the demo keeps
    running instead: a server whose rows change all the time, a run every few seconds, and Dagster's web
    interface.
    """
    require_extra("demo")
    if with_ui:
        if as_json:
            raise PgsieveError(
                "`--ui` runs until Ctrl-C and has no result for `--json`", hint="leave out `--json` or `--ui`"
            )
        if lake != _DemoLake.FOLDER:
            raise PgsieveError("`--ui` has its lake in a folder", hint="leave out `--lake` or `--ui`")
        require_extra("ui")
        from pgsieve.pipelines.demo.live_demo import run_live_demo

        with console.show_progress() as progress:
            run_live_demo(kept_folder, host, port, progress, demo_reports.print_live_demo, _open_run_log)
        return
    from pgsieve.pipelines.demo.demo import demo as run_demo

    with console.show_progress() as progress:
        print_step = ignore_step if as_json else demo_reports.print_demo_step
        report = run_demo(
            kept_folder,
            progress,
            print_step,
            on_s3=lake == _DemoLake.S3,
            rows=rows,
            without_spark=without_spark,
        )
    console.print_result(report, demo_reports.print_demo, as_json=as_json)
    if not report.equal:
        raise typer.Exit(EXIT_FINDINGS)


ConninfoOption = Annotated[
    str | None,
    typer.Option(
        "--conninfo",
        metavar="CONNINFO",
        help="The database, as a libpq connection string or a postgresql:// URI; a password in it is not written to the"
        " file.",
    ),
]
PasswordCommandOption = Annotated[
    str | None,
    typer.Option(
        "--password-command",
        metavar="COMMAND",
        help="A program with its arguments that prints the password: for tokens that expire.",
    ),
]
PublicationsOption = Annotated[
    list[str] | None,
    typer.Option("--publication", metavar="NAME", help="A publication of the server; repeatable."),
]
TablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--table",
        metavar="SCHEMA.TABLE",
        help="A table, instead of --publication: pgsieve.yaml then defines the publication; repeatable.",
    ),
]
ViaRootOption = Annotated[
    bool | None,
    typer.Option(
        "--publish-via-partition-root/--no-publish-via-partition-root",
        help="Replicate a partition tree among the tables as one table (default), or each partition as a table.",
    ),
]
RoleOption = Annotated[
    str | None,
    typer.Option(
        "--role",
        metavar="NAME",
        help="The role that replicates (default: that of the conninfo, unless it is a superuser).",
    ),
]
AllowUntestedServerOption = Annotated[
    bool,
    typer.Option(
        "--allow-untested-server",
        help="Accept a server newer than the versions that pgsieve was tested with; written to pgsieve.yaml.",
    ),
]


@command(
    "Example: pgsieve init --conninfo 'host=db dbname=shop user=pgsieve' --publication sales", panel=_PANEL
)
def init(
    ctx: typer.Context,
    conninfo: ConninfoOption = None,
    password_command: PasswordCommandOption = None,
    publications: PublicationsOption = None,
    tables: TablesOption = None,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="NAME", help="The source's name (default: the database's)."),
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription",
            metavar="NAME",
            help="The subscription's name (default: the first publication's).",
        ),
    ] = None,
    lake: Annotated[
        str, typer.Option("--lake", metavar="FOLDER|URI", help="Where the Delta tables go.")
    ] = "./lake",
    role: RoleOption = None,
    via_root: ViaRootOption = None,
    allow_untested_server: AllowUntestedServerOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there already.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write pgsieve.yaml from a database's publications or tables, and the SQL for its role; then validate.

    On a terminal it asks for missing options. It changes nothing on the server, and writes no password. A
    table without a replica identity is published with its INSERTs only. If validate finds a problem, no SQL
    is written, and the exit code is 1.
    """
    from pgsieve.pipelines.command_line.interview import Options, connect_and_survey, make_choice
    from pgsieve.pipelines.commands.init import refuse_existing_file, write_configuration

    file = config or ctx.obj or Path(os.environ.get(FILE_VARIABLE) or DEFAULT_FILE)
    refuse_existing_file(file, force=force)
    options = Options(
        conninfo=conninfo,
        password_command=password_command,
        allow_untested_server=allow_untested_server,
        source=source,
        subscription=subscription,
        publications=publications or [],
        tables=tables or [],
        lake=lake,
        role=role,
        via_root=via_root,
    )
    connection, survey = connect_and_survey(options)
    report = write_configuration(file, connection, survey, make_choice(survey, options), force=force)
    console.print_result(report, reports.print_init, as_json=as_json)
    if report.validation.problems:
        raise typer.Exit(EXIT_FINDINGS)
