"""How results look on a terminal: results in, rich text out.

Data goes to stdout, progress and errors to stderr, so that `pgsieve status --json > file` holds JSON only.
Nothing here raises. What comes from a database or a file is never read as markup.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import OPERATIONS
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.pipelines.command_line.json_log import JsonLog, JsonProgress, plain
from pgsieve.pipelines.commands.results import (
    CheckReport,
    ComparedTable,
    DemoReport,
    DropReport,
    EngineReport,
    Failure,
    InitReport,
    JarsReport,
    LiveDemo,
    MaintainedFolder,
    Progress,
    PublicationPicture,
    ReceivedTable,
    ResyncReport,
    RunSummary,
    StatusReport,
    SubscriptionRun,
    SurveyedPublication,
    SurveyedTable,
    TableStatus,
    ValidationReport,
)
from pgsieve.pipelines.config.file import ConfigError
from pgsieve.resources.passwords import concealed

_NOTHING = "–"

#: Where progress and errors go as JSON, one object a line; None: as text.
_json: JsonLog | None = None


def log_as_json() -> None:
    """Write progress, warnings and errors as JSON from now on, as well as what others write to stderr."""
    global _json  # noqa: PLW0603 - stderr is the process's, too
    if _json is None:
        _json = JsonLog()


def log_as_text() -> bool:
    """Give stderr back, before another program takes this process over, or it ends at once; whether it was JSON."""
    global _json
    closing, _json = _json, None
    if closing is not None:
        closing.close()
    return closing is not None


def _out() -> Console:
    """Console on the stdout of this moment; in a pipe or a file, tables are as wide as they need."""
    width = None if sys.stdout.isatty() else 10_000
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _err() -> Console:
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def _print(*what: RenderableType) -> None:
    console = _out()
    for each in what:
        console.print(
            each, soft_wrap=not isinstance(each, Table)
        )  # a sentence is one line, whatever its length


def _table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", header_style="dim"
        )
    return table


def _cell(value: object, style: str = "") -> Text:
    if value is None:
        return Text(_NOTHING, style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no", style=style)
    return Text(f"{value:,}" if isinstance(value, int) else str(value), style=style)


def _row(table: Table, *values: object) -> None:
    table.add_row(*(value if isinstance(value, Text) else _cell(value) for value in values))


def _size(count: int | None) -> str | None:
    """Write a number of bytes as `pg_size_pretty` does: 10 kB, not 10240 bytes (src/backend/utils/adt/dbsize.c)."""
    if count is None:
        return None
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 10_240:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} TB"


# Errors


def print_error(error: PgsieveError, concerned: str = "") -> None:
    """One red line, and what to do about it; a configuration file's problems one by one."""
    if _json is not None and not isinstance(error, ConfigError):
        _json.error(error)
        return
    if isinstance(error, ConfigError):
        for problem in error.problems:
            _error_line(error.describe(problem), problem.hint)
        return
    code = f" [{error.sqlstate}]" if error.sqlstate else ""
    _error_line(f"{concerned}{error.message}{code}", error.hint)


def print_failures(failures: Sequence[Failure], *, verbose: bool) -> None:
    """Print the errors that ended the part of some subscriptions, with their names."""
    for failure in failures:
        if _json is not None:
            _json.error(failure.error, subscriptions=failure.subscriptions, verbose=verbose)
            continue
        concerned = f"{', '.join(failure.subscriptions)}: "
        if isinstance(failure.error, PgsieveError):
            print_error(failure.error, concerned)
        else:
            print_unexpected(failure.error, concerned, verbose=verbose)


def print_unexpected(error: BaseException, concerned: str = "", *, verbose: bool) -> None:
    """Name a fault of pgsieve's own; the traceback only when asked, and without variables: they hold values."""
    if _json is not None:
        _json.error(error, verbose=verbose)
    elif verbose:
        _err().print(concealed("".join(traceback.format_exception(error))), end="", soft_wrap=True)
        _error_line(f"{concerned}unexpected {type(error).__name__}", None)
    else:
        _error_line(
            f"{concerned}unexpected {type(error).__name__}", "run `pgsieve --verbose …` for the traceback"
        )


def _error_line(message: str, hint: str | None) -> None:
    if _json is not None:
        _json.write("error", message=message, hint=hint)
        return
    console = _err()
    console.print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)
    if hint:
        console.print(Text.assemble(("hint: ", "bold"), hint), soft_wrap=True)


# Progress


class _TerminalProgress:
    """A line for each task that runs, below what is printed; it goes as the task ends."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, task: str) -> None:
        self._tasks[task] = self._bars.add_task(task, total=None)

    def finish(self, task: str) -> None:
        self._bars.remove_task(self._tasks.pop(task))

    def tell(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)


class _LineProgress:
    """A line when a task starts and one when it ends: for logs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, float] = {}

    def start(self, task: str) -> None:
        with self._lock:
            self._tasks[task] = time.monotonic()
        self._say(f"{task}: started")

    def finish(self, task: str) -> None:
        with self._lock:
            began = self._tasks.pop(task)
        self._say(f"{task}: ended after {time.monotonic() - began:.1f} s")

    def tell(self, line: str) -> None:
        self._say(line)

    @staticmethod
    def _say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress on stderr: what runs, on a terminal; plain lines otherwise, or JSON."""
    if _json is not None:
        yield JsonProgress(_json)
        return
    console = _err()
    if not console.is_terminal:
        yield _LineProgress()
        return
    text = TextColumn("{task.description}", markup=False)
    with Bars(SpinnerColumn(), text, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield _TerminalProgress(bars)


# Results


def as_json(report: object, *, indent: int | None = 2) -> str:
    """Write a result as JSON, the fields under their names in `pgsieve.pipelines.commands.results`."""
    return json.dumps(plain(report), indent=indent, ensure_ascii=False)


def print_json(report: object) -> None:
    """Print a result as JSON."""
    sys.stdout.write(as_json(report) + "\n")


def print_json_line(report: object) -> None:
    """Print one of many results as JSON, on a line of its own, at once."""
    sys.stdout.write(as_json(report, indent=None) + "\n")
    sys.stdout.flush()


def print_run(summary: RunSummary, *, verbose: bool = False) -> None:
    """Print what a run copied and applied, per subscription, and what failed."""
    for run in summary.subscriptions:
        if not run.changed:
            _print(Text(f"{run.name}: nothing new: everything up to LSN {run.to_lsn} is already applied"))
        else:
            _print_changes(run)
        if run.notice:
            _print(Text(run.notice))
        for problem in run.problems:
            _print(Text.assemble(("problem: ", "bold red"), problem))
    print_failures(summary.failures, verbose=verbose)


def _print_changes(run: SubscriptionRun) -> None:
    cut = f", cut {run.cut_version}" if run.cut_version is not None else ""
    _print(Text(f"{run.name}: applied up to LSN {run.to_lsn} (from {run.from_lsn}){cut}", style="bold"))
    if run.copied:
        copied = _table("copied", "rows", "seconds", right=("rows", "seconds"))
        for each in run.copied:
            _row(copied, quote_qualified(each.schema, each.name), each.rows, f"{each.seconds:.1f}")
        _print(copied)
    if run.tables:
        numbers = ("inserted", "updated", "deleted", "version")
        applied = _table("applied", "inserted", "updated", "deleted", "truncated", "version", right=numbers)
        for table in run.tables:
            counts = (table.inserted, table.updated, table.deleted)
            _row(applied, quote_qualified(table.schema, table.name), *counts, table.truncated, table.version)
        _print(applied)


def print_resync(report: ResyncReport) -> None:
    """Print which tables were copied again, what had changed of each, and what the run did."""
    name = report.subscription
    if report.lost:
        _print(Text.assemble(("slot replaced: ", "bold"), report.lost))
    if not report.tables:
        _print(
            Text(f"{name}: nothing to resynchronise: every table is ready, and published as it was copied")
        )
    for table in report.tables:
        _print(Text.assemble((f"{quote_qualified(table.schema, table.name)}: ", "bold"), table.state))
        _print(*(Text(f"  {change}") for change in table.changes))
    if report.followed:
        _print(Text(f"{name}: the process that follows the slot copies them after the next change"))
    if report.run:
        print_run(RunSummary((report.run,)))


def print_enabled(subscription: str, changed: bool) -> None:
    """Print that a subscription is enabled."""
    _print(Text(f"{subscription}: {'enabled' if changed else 'was enabled already'}"))


def print_skip(subscription: str, lsn: str | None) -> None:
    """Print what a subscription will skip."""
    outcome = f"will skip the transaction finished at LSN {lsn}" if lsn else "skips no transaction"
    _print(Text(f"{subscription}: {outcome}"))


def print_drop(report: DropReport) -> None:
    """Print what was removed, and what is left."""
    removed = [
        *([f"replication slot {report.slot}"] if report.slot else []),
        *(f"publication {name}" for name in report.publications),
        *(f"tables no longer needed in publication {name}" for name in report.altered),
        *report.folders,
        *(f"{name} of the catalog" for name in report.unregistered),
    ]
    _print(Text(f"{report.subscription}: dropped", style="bold"))
    for each in removed:
        _print(Text(f"  removed: {each}"))
    if report.kept_for:
        _print(Text(f"  kept: the slot, for {', '.join(report.kept_for)}"))
    if report.left:
        _print(Text(f"  left on the server: {report.left}"))
    if not report.folders:
        _print(Text("  kept: its tables in the lake (--delete-tables removes them)"))
    _print(Text("  take it out of pgsieve.yaml, or the next run begins it from scratch"))


def print_maintenance(done: Sequence[MaintainedFolder]) -> None:
    """Print what maintenance deleted and compacted."""
    table = _table("maintained", "rows deleted", "files compacted", right=("rows deleted", "files compacted"))
    for each in done:
        _row(table, each.name, each.rows, each.files)
    _print(table)


def print_status(report: StatusReport) -> None:
    """Print slots and replica tables."""
    slots = _table(
        "source", "slot", "state", "WAL", "confirmed", "change log", "lag", title="slots", right=("lag",)
    )
    for slot in report.slots:
        state = "active" if slot.active else "idle" if slot.exists else "not created"
        state = "unknown" if slot.problem else state
        at_risk = slot.wal_status in ("lost", "unreserved")
        _row(
            slots,
            f"{slot.source} ({slot.subscription})" if slot.subscription else slot.source,
            slot.slot,
            state,
            _cell(slot.wal_status, "bold red" if at_risk else ""),
            slot.confirmed_lsn,
            slot.change_log_lsn,
            _size(slot.lag_bytes),
        )
    _print(slots)
    for slot in report.slots:
        if slot.problem:
            _print(Text.assemble((f"{slot.source}: ", "red"), slot.problem))
    for subscription in report.subscriptions:
        title = f"{subscription.name} (source {subscription.source}, row_filter {subscription.row_filter})"
        tables = _table(
            "table", "state", "LSN", "version", "rows", "row filter", title=title, right=("version", "rows")
        )
        for table in subscription.tables:
            state_text = _cell(table.state, "red" if table.problem else "")
            position = (table.lsn, table.version, table.rows)
            _row(tables, quote_qualified(table.schema, table.name), state_text, *position, table.row_filter)
        _print("", tables)
        if subscription.problem:
            _print(Text.assemble((f"{subscription.name}: ", "red"), subscription.problem))
        if not subscription.enabled:
            _print(Text.assemble(("disabled: ", "bold red"), subscription.reason or ""))
        if subscription.skip_lsn:
            _print(Text(f"skips the transaction finished at LSN {subscription.skip_lsn}"))
        elif subscription.notice:
            _print(Text(f"last skip: {subscription.notice}"))
        for table in subscription.tables:
            _print_since_copy(table)
            if table.problem:
                _print(
                    Text.assemble((f"{quote_qualified(table.schema, table.name)}: ", "red"), table.problem)
                )


def _print_since_copy(table: TableStatus | ReceivedTable) -> None:
    for change in table.since_copy:
        _print(Text(f"{quote_qualified(table.schema, table.name)}: changed since its copy: {change}"))


def print_check(report: CheckReport) -> None:
    """Print the comparison, and the sample of keys of each table that differs."""
    columns = ("subscription", "table", "publisher", "replica", "result", "LSN")
    tables = _table(*columns, right=("publisher", "replica"))
    for table in report.tables:
        result = Text("equal", style="green") if table.equal else Text("differs", style="bold red")
        rows = (table.rows_publisher, table.rows_replica)
        _row(tables, table.subscription, quote_qualified(table.schema, table.name), *rows, result, table.lsn)
    _print(tables)
    for table in report.tables:
        if table.differing_keys:
            keys = ", ".join(table.differing_keys)
            _print(
                Text.assemble(
                    (f"{table.subscription} {quote_qualified(table.schema, table.name)}: ", "red"),
                    f"differing keys {keys}",
                )
            )
        if table.repaired:
            written, removed = table.repaired
            outcome = f"repaired, {written} rows written and {removed} taken out"
            _print(Text(f"{table.subscription} {quote_qualified(table.schema, table.name)}: {outcome}"))
    unequal = sum(not table.equal for table in report.tables)
    total = len(report.tables)
    _print(
        Text(f"{unequal} of {total} tables differ", style="bold red")
        if unequal
        else Text("every table equals the publisher", style="bold green")
    )


def print_survey(listed: Sequence[SurveyedPublication], surveyed: Sequence[SurveyedTable]) -> None:
    """Print the publications and tables that a database has, to stderr: what is asked about them follows there."""
    publications = _table("publication", "publishes", "tables")
    for each in listed:
        shown = ", ".join(each.tables[:6]) + (f" and {len(each.tables) - 6} more" if each.tables[6:] else "")
        _row(publications, each.name, ", ".join(each.operations), shown or None)
    tables = _table("table", "replica identity")
    for table in surveyed:
        _row(
            tables,
            quote_qualified(table.schema, table.name),
            "yes" if table.has_identity else Text("none: only INSERTs can be published", style="yellow"),
        )
    for each_table in (publications, tables):
        if each_table.row_count:
            _err().print(each_table)


def print_init(report: InitReport) -> None:
    """Print what was written, what validate says, and what to do next."""
    print_validation(report.validation)
    steps = [
        f"1. run {report.statements} as the owner of the tables; its role is {report.role}",
        "2. look at "
        + str(report.config)
        + (
            f"; its password is expected in {report.variable}: export it, or use password_command"
            if report.variable
            else ""
        ),
        "3. pgsieve validate, then pgsieve run",
    ]
    _print("", Text("written; next:", style="bold"), *map(Text, steps))


def print_live_demo(demo: LiveDemo) -> None:
    """Print where to look, and what to click."""
    lines = (
        ("Look at it:", demo.url),
        (
            "1.",
            "The lineage: the change log of the source, what each subscription gets of it, one asset a table.",
        ),
        ("", "A run every few seconds applies what was written meanwhile: the assets tell when."),
        ("2.", "Click sales › shop › orders: its rows, and what each run inserted, updated and deleted."),
        (
            "3.",
            "There, Checks › Execute: subscriber_consistency compares it with the publisher's filtered rows.",
        ),
        (
            "4.",
            "Runs: what is recorded of each run. Automation: the schedules and sensors, off until you say so.",
        ),
        ("5.", "Write yourself, and watch it arrive, or leave the row filter region = 'EMEA':"),
        ("", f"psql '{demo.conninfo}' -c \"update shop.orders set region = 'EMEA' where id = 1001\""),
        ("6.", "From another terminal:"),
        ("", f"pgsieve -c {demo.config} status"),
        ("Ctrl-C", f"ends it all; what it made stays in {demo.config.parent}"),
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for mark, text in lines:
        table.add_row(Text(mark, style="bold"), Text(text, overflow="fold"))
    _print("", table, "")
    sys.stdout.flush()


def print_validation(report: ValidationReport) -> None:
    """Print publications, what each subscription will receive, problems, and statements to run."""
    for publication in report.publications:
        _print_publication(publication)
    for subscription in report.subscriptions:
        _print(Text(f"Subscription {subscription.subscription} will receive", style="bold"))
        for table in subscription.tables:
            _print_received(table)
            _print_since_copy(table)
        _print("")
    for problem in report.problems:
        code = f" [{problem.sqlstate}]" if problem.sqlstate else ""
        _print(Text.assemble(("problem: ", "bold red"), f"{problem.object}: {problem.message}{code}"))
        if problem.hint:
            _print(Text.assemble(("hint: ", "bold"), problem.hint))
    if report.statements:
        _print(
            Text("statements to run:", style="bold"),
            *(Text(f"{each.rstrip(';')};") for each in report.statements),
        )
    if not report.problems:
        _print(Text("no problems", style="bold green"))


def _print_publication(publication: PublicationPicture) -> None:
    r"""Say what psql's `\dRp+` says, in lines that fit any width."""
    origin = "pgsieve.yaml" if publication.owner is None else f"owner {publication.owner}"
    _print(
        Text(
            f"Publication {_names((publication.name,))} (source {publication.source}, {origin})", style="bold"
        )
    )
    facts = {
        "all tables": publication.all_tables,
        **{f"{o}s": o in publication.operations for o in OPERATIONS},
        "generated columns": publication.generated_columns,
        "via root": publication.via_root,
    }
    _print(
        Text.assemble(
            "  ", *(part for name, fact in facts.items() for part in ((f"{name} ", "dim"), _cell(fact), "  "))
        )
    )
    for entry in publication.tables:
        columns_listed = "" if entry.columns is None else f" ({_names(entry.columns)})"
        where = "" if entry.where is None else f" WHERE {entry.where}"
        _print(Text(f"  table {_names((entry.schema, entry.name), '.')}{columns_listed}{where}"))
    for schema in publication.schemas:
        _print(Text(f"  tables in schema {_names((schema,))}"))
    _print("")


def _print_received(table: ReceivedTable) -> None:
    _print(Text(f"  {_names((table.schema, table.name), '.')} ({_names(table.columns)})"))
    for changes in table.changes:
        name = quote_qualified(table.schema, table.name)
        if changes.relations != (name,):
            _print(Text(f"    from {', '.join(changes.relations)}", style="dim"))
        _print(Text.assemble(("    replica identity: ", "dim"), changes.identity))
        for row_filter, operations in _by_filter({"initial copy": table.row_filter, **changes.row_filters}):
            _print(Text.assemble((f"    {', '.join(operations)}: ", "dim"), row_filter or "every row"))


def _by_filter(row_filters: Mapping[str, str | None]) -> list[tuple[str | None, list[str]]]:
    """The operations that share a row filter; TRUNCATE has none, and is no row."""
    grouped: dict[str | None, list[str]] = {}
    for operation, row_filter in row_filters.items():
        if operation != "truncate":
            grouped.setdefault(row_filter, []).append(operation)
    shown = list(grouped.items())
    return [*shown, ("the whole table", ["truncate"])] if "truncate" in row_filters else shown


def _names(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(map(quote_identifier, names))


def print_demo_step(title: str, tables: Sequence[ComparedTable]) -> None:
    """The tables after one step of the demo, side by side."""
    _print(Text(f"\n{title}", style="bold"))
    for compared in tables:
        verdict = Text("equal", style="green") if compared.equal else Text("DIFFERENT", style="bold red")
        heading = f"{compared.table} ({', '.join(compared.columns)}), row_filter: {compared.row_filter}: "
        _print(Text.assemble(heading, verdict))
        table = _table("publisher", "pgsieve (Delta)", "CREATE SUBSCRIPTION")
        sides = (compared.publisher, compared.replica, compared.subscriber)
        for number in range(max(map(len, sides))):
            _row(table, *(" | ".join(side[number]) if number < len(side) else "" for side in sides))
        _print(table)


def print_demo(report: DemoReport) -> None:
    """The verdict, and where things are."""
    verdict = (
        Text(
            "Every replica holds just the rows of the built-in subscription, in both row_filter modes.",
            "green",
        )
        if report.equal
        else Text("A replica differs from the built-in subscription.", "bold red")
    )
    _print(
        Text.assemble("\n", verdict, f" {report.seconds:.0f} s."),
        Text(f"Delta tables: {report.lake}"),
        Text(f"The graph:    pgsieve ui -c {report.config}"),
    )


def print_jars(report: JarsReport) -> None:
    """Print which jars are there, and what a machine without network does with the copy."""
    table = _table("package", "files", "size", right=("files", "size"))
    for each in report.packages:
        _row(table, each.package, each.files, _size(each.bytes))
    _print(table)
    if report.folder is not None:
        _print(Text(f"copied; where no Maven repository is reached: export PGSIEVE_JARS={report.folder}"))


def print_engine(report: EngineReport) -> None:
    """Print whether the engine serves."""
    if not report.serving:
        _print("the engine does not run; start it: pgsieve engine start")
        return
    use = "in use" if report.used else "not in use"
    _print(
        f"the engine serves at {report.address} (process {report.pid}, {_size(report.resident_bytes)}) since"
        f" {timedelta(seconds=report.seconds)}, {use}"
    )
    if not report.current:
        _print(
            "runs do not use it: it was started with other settings or another version; pgsieve engine start"
        )


def print_engine_stopped(stopped: bool) -> None:
    """Print whether there was an engine to end."""
    _print("the engine has ended" if stopped else "no engine ran")
