"""Prints the results of commands for people.

In: results (`pgsieve.pipelines.commands.results`)
Out: lines and tables on stdout (`print_survey`: on stderr). Nothing here raises an error.

`console.print_json` prints the same results as JSON.
"""

from collections.abc import Sequence
from datetime import timedelta

from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.command_line.console import (
    Text,
    add_row,
    format_bytes,
    make_cell,
    make_table,
    print_failures,
    print_out,
    stderr_console,
)
from pgsieve.pipelines.command_line.sequences import print_compared_sequences, print_sequences
from pgsieve.pipelines.command_line.validation_report import print_changes_since_copy, print_validation
from pgsieve.pipelines.commands.explanation import Explanation
from pgsieve.pipelines.commands.results import (
    UNKNOWN,
    CheckedTable,
    CheckReport,
    DropReport,
    EnableReport,
    EngineReport,
    EngineStopReport,
    InitReport,
    JarsReport,
    MaintainedFolder,
    ResyncReport,
    RunSummary,
    SkipReport,
    SlotStatus,
    StatusReport,
    SubscriptionRun,
    SubscriptionStatus,
    SurveyedPublication,
    SurveyedTable,
    TransformedTable,
)


def print_run(summary: RunSummary, *, verbose: bool = False) -> None:
    """Print for each subscription what a run has copied and applied, and print what has failed."""
    for run in summary.subscriptions:
        if not run.changed:
            print_out(Text(f"{run.name}: nothing new: everything up to LSN {run.to_lsn} is already applied"))
        else:
            _print_changes(run)
        _print_transformed(run.transformed)
        if run.notice:
            print_out(Text(run.notice))
        for problem in run.problems:
            print_out(Text.assemble(("problem: ", "bold red"), problem))
        print_warnings(run.warnings)
    print_failures(summary.failures, verbose=verbose)


def print_warnings(warnings: Sequence[str]) -> None:
    """Print each warning on a line of its own."""
    print_out(*(Text.assemble(("warning: ", "bold yellow"), warning) for warning in warnings))


def _print_changes(run: SubscriptionRun) -> None:
    # A cut has a version of each replica, so that together they equal the publisher at one LSN.
    cut = f", cut {run.cut_version}" if run.cut_version is not None else ""
    print_out(Text(f"{run.name}: applied up to LSN {run.to_lsn} (from {run.from_lsn}){cut}", style="bold"))
    if run.copied:
        copy_table = make_table("copied", "rows", "seconds", right_aligned=("rows", "seconds"))
        for copied_table in run.copied:
            add_row(
                copy_table,
                quote_qualified(copied_table.schema, copied_table.name),
                copied_table.rows,
                f"{copied_table.seconds:.1f}",
            )
        print_out(copy_table)
    if run.tables:
        count_columns = ("inserted", "updated", "deleted", "version")
        apply_table = make_table(
            "applied", "inserted", "updated", "deleted", "truncated", "version", right_aligned=count_columns
        )
        for table in run.tables:
            counts = (table.inserted, table.updated, table.deleted)
            add_row(
                apply_table,
                quote_qualified(table.schema, table.name),
                *counts,
                table.truncated,
                table.version,
            )
        print_out(apply_table)
    if run.spent is not None:
        tasks, written_size = quantity(run.spent.tasks, "task"), format_bytes(run.spent.bytes)
        print_out(
            Text(f"run by: {run.spent.engine}, {tasks}, {written_size} written, {run.spent.seconds:.1f} s")
        )


def _print_transformed(tables: Sequence[TransformedTable]) -> None:
    """Print how many UPDATEs became INSERTs or DELETEs, for tables where a row filter or partitions may do that."""
    count_columns = ("UPDATEs", "as INSERT", "as UPDATE", "as DELETE", "not sent")
    table = make_table("transformed", "through", *count_columns, "row filter", right_aligned=count_columns)
    for entry in tables:
        table_name = quote_qualified(entry.schema, entry.name)
        if entry.updates and (entry.row_filter is not None or entry.source != table_name):
            add_row(
                table,
                table_name,
                entry.source,
                entry.updates,
                entry.updates_sent_as_insert,
                entry.updates_sent_as_update,
                entry.updates_sent_as_delete,
                entry.updates_not_sent,
                entry.row_filter,
            )
    if table.row_count:
        print_out(table)


def print_explanation(explanation: Explanation) -> None:
    """Print what a run would do for each table, and how much WAL waits in each slot."""
    limit = format_bytes(explanation.small_bytes)
    table = make_table(
        "table", "would", "bytes", f"up to {limit}", "more", "because", right_aligned=("bytes",)
    )
    for planned_table in explanation.tables:
        name = f"{planned_table.subscription}: {quote_qualified(planned_table.schema, planned_table.name)}"
        add_row(
            table,
            name,
            planned_table.work,
            format_bytes(planned_table.bytes),
            planned_table.few,
            planned_table.many,
            planned_table.because,
        )
    print_out(table)
    for slot_stream, waiting in explanation.waiting_bytes.items():
        slot = "no slot yet" if waiting is None else f"{format_bytes(waiting)} of WAL wait in the slot"
        print_out(Text(f"{slot_stream}: {slot}"))


def print_resync(report: ResyncReport) -> None:
    """Print the tables that were copied again, how their publications had changed, and the result of the run."""
    name = report.subscription
    if report.lost:
        print_out(Text.assemble(("slot replaced: ", "bold"), report.lost))
    for path in report.damaged:
        print_out(Text.assemble(("damaged, and begun anew: ", "bold"), path))
    if not report.tables:
        print_out(
            Text(f"{name}: nothing to resynchronise: every table is ready, and published as it was copied")
        )
    copied_names = {(each.schema, each.name) for each in (report.run.copied if report.run else ())}
    for table in report.tables:
        # The reason for the former state is left out: it would look as if it still held.
        former_state = table.state.partition(": ")[0]
        state = (
            f"copied again; before: {former_state}"
            if (table.schema, table.name) in copied_names
            else table.state
        )
        print_out(Text.assemble((f"{quote_qualified(table.schema, table.name)}: ", "bold"), state))
        print_out(*(Text(f"  {change}") for change in table.changes))
    if report.followed:
        print_out(Text(f"{name}: the process that follows the slot copies them after the next change"))
    if report.run:
        print_run(RunSummary((report.run,)))


def print_enabled(report: EnableReport) -> None:
    """Print that a subscription is enabled."""
    print_out(Text(f"{report.subscription}: {'enabled' if report.changed else 'was enabled already'}"))


def print_skip(report: SkipReport) -> None:
    """Print which transaction a subscription will skip."""
    lsn = report.skip_lsn
    outcome = f"will skip the transaction finished at LSN {lsn}" if lsn else "skips no transaction"
    print_out(Text(f"{report.subscription}: {outcome}"))


def print_drop(report: DropReport) -> None:
    """Print what was removed, and what remains."""
    removed_objects = [
        *([f"replication slot {report.slot}"] if report.slot else []),
        *(f"publication {name}" for name in report.publications),
        *(f"tables no longer needed in publication {name}" for name in report.altered),
        *report.folders,
        *(f"{name} of the catalog" for name in report.unregistered),
    ]
    print_out(Text(f"{report.subscription}: dropped", style="bold"))
    for removed_object in removed_objects:
        print_out(Text(f"  removed: {removed_object}"))
    if report.kept_for:
        print_out(Text(f"  kept: the slot, for {', '.join(report.kept_for)}"))
    if report.left:
        print_out(Text(f"  left on the server: {report.left}"))
    if not report.folders:
        print_out(Text("  kept: its tables in the lake (--delete-tables removes them)"))
    print_out(Text("  take it out of pgsieve.yaml, or the next run begins it from scratch"))


def print_maintenance(folders: Sequence[MaintainedFolder]) -> None:
    """Print what maintenance has deleted and compacted."""
    table = make_table(
        "maintained", "rows deleted", "files compacted", right_aligned=("rows deleted", "files compacted")
    )
    for folder in folders:
        add_row(table, folder.name, folder.rows, folder.files)
    print_out(table)


def print_status(report: StatusReport) -> None:
    """Print the slots and the replicas."""
    _print_slots(report.slots)
    for subscription in report.subscriptions:
        title = f"{subscription.name} (source {subscription.source}, row_filter {subscription.row_filter})"
        replica_table = make_table(
            "table",
            "state",
            "LSN",
            "version",
            "rows",
            "row filter",
            title=title,
            right_aligned=("version", "rows"),
        )
        for table in subscription.tables:
            state_text = make_cell(table.state, "red" if table.problem else "")
            table_facts = (table.lsn, table.version, table.rows)
            add_row(
                replica_table,
                quote_qualified(table.schema, table.name),
                state_text,
                *table_facts,
                table.row_filter,
            )
        print_out("", replica_table)
        print_sequences(subscription.sequences)
        if progress := _describe_progress(subscription):
            print_out(Text(progress))
        if subscription.problem:
            _print_problem(subscription.name, subscription.problem)
        if not subscription.enabled:
            print_out(Text.assemble(("disabled: ", "bold red"), subscription.reason or ""))
        if subscription.skip_lsn:
            print_out(Text(f"skips the transaction finished at LSN {subscription.skip_lsn}"))
        elif subscription.notice:
            print_out(Text(f"last skip: {subscription.notice}"))
        for table in subscription.tables:
            print_changes_since_copy(table)
            if table.problem:
                print_out(
                    Text.assemble((f"{quote_qualified(table.schema, table.name)}: ", "red"), table.problem)
                )
        print_warnings(subscription.warnings)


def _print_slots(slots: Sequence[SlotStatus]) -> None:
    """Print a table of the slots, and then the problems of single slots."""
    slot_table = make_table(
        *("source", "slot", "state", "WAL", "confirmed", "change log", "lag"),
        title="slots",
        right_aligned=("lag",),
    )
    for slot in slots:
        state = "active" if slot.active else "idle" if slot.exists else "not created"
        state = UNKNOWN if slot.exists == UNKNOWN else state
        is_at_risk = slot.wal_status in ("lost", "unreserved")
        add_row(
            slot_table,
            f"{slot.source} ({slot.subscription})" if slot.subscription else slot.source,
            slot.slot,
            state,
            make_cell(slot.wal_status, "bold red" if is_at_risk else ""),
            slot.confirmed_lsn,
            slot.change_log_lsn,
            format_bytes(slot.lag_bytes),
        )
    print_out(slot_table)
    for slot in slots:
        if slot.problem:
            _print_problem(slot.source, slot.problem)
        if slot.decoding == "while a slot exists":
            text = "wal_level is replica: the last logical slot that is dropped switches logical decoding off"
            print_out(Text.assemble((f"{slot.source}: ", "dim"), text))


def _print_problem(name: str, problem: str) -> None:
    """Print the problem of a slot or subscription, and its hint on a line of its own."""
    text, *hints = problem.split("\n")
    print_out(Text.assemble((f"{name}: ", "red"), text), *(Text(f"  {hint}") for hint in hints))


def _describe_progress(subscription: SubscriptionStatus) -> str:
    """Say how far a subscription is behind, and when it was last up to date. Empty before the first run."""
    parts = []
    if subscription.seconds_behind is not None:
        delay = timedelta(seconds=round(subscription.seconds_behind))
        behind_count = sum(table.behind for table in subscription.tables)
        exception = f" except {quantity(behind_count, 'table')}" if behind_count else ""
        parts.append(f"{delay} behind" if subscription.seconds_behind else f"up to date{exception}")
    if subscription.last_success is not None:
        parts.append(f"all changes were last applied at {subscription.last_success}")
    return "; ".join(parts)


def print_check(report: CheckReport) -> None:
    """Print the comparison of each table, the keys of some rows that differ, and why a table could not be compared."""
    columns = ("subscription", "table", "publisher", "replica", "result", "LSN")
    result_table = make_table(*columns, right_aligned=("publisher", "replica"))
    for table in report.tables:
        result = (
            Text("equal", style="green") if table.equal else Text(_label_difference(table), style="bold red")
        )
        rows = (table.rows_publisher, table.rows_replica) if table.is_compared else (None, None)
        add_row(
            result_table,
            table.subscription,
            quote_qualified(table.schema, table.name),
            *rows,
            result,
            table.lsn,
        )
    print_out(result_table)
    for table in report.tables:
        name = f"{table.subscription} {quote_qualified(table.schema, table.name)}: "
        if table.differing_keys:
            keys = f"differing keys {', '.join(table.differing_keys)}"
            print_out(Text.assemble((name, "red"), "; ".join([*_count_differences(table), keys])))
        if table.problem:
            outcome = "not repaired" if table.is_compared else _NOT_COMPARED
            print_out(Text.assemble((name, "red"), f"{outcome}, {table.problem}"))
        if table.repaired:
            written_count, removed_count = table.repaired
            print_out(
                Text(
                    f"{name}repaired, {quantity(written_count, 'row')} written and {removed_count:,} removed"
                )
            )
    print_compared_sequences(report.sequences)
    print_warnings(report.warnings)
    print_out(_summarize_checks(report))


_NOT_COMPARED = "not compared"


def _label_difference(table: CheckedTable) -> str:
    return "differs" if table.is_compared else _NOT_COMPARED


def _count_differences(table: CheckedTable) -> list[str]:
    """Say how many rows differ, and on which side."""
    counts = (
        (table.only_publisher, "only at the publisher"),
        (table.only_replica, "only in the replica"),
        (table.different, "with other values"),
    )
    return [f"{quantity(count, 'row')} {where}" for count, where in counts if count]


def _summarize_checks(report: CheckReport) -> Text:
    """A sentence that says how many tables differ, and what could not be compared."""
    tables = report.tables
    differing_count = sum(table.is_compared and not table.equal for table in tables)
    uncompared_count, total = sum(not table.is_compared for table in tables), quantity(len(tables), "table")
    parts = (
        [f"{differing_count:,} of {total} {'differs' if differing_count == 1 else 'differ'}"]
        if differing_count
        else []
    )
    parts += [f"{_NOT_COMPARED}: {uncompared_count:,} of {total}"] if uncompared_count else []
    failed_subscriptions = sorted({name for failure in report.failures for name in failure.subscriptions})
    parts += [f"{_NOT_COMPARED}: {', '.join(failed_subscriptions)}"] if failed_subscriptions else []
    if parts:
        return Text("; ".join(parts), style="bold red")
    return Text("every table equals the publisher", style="bold green")


def print_survey(
    surveyed_publications: Sequence[SurveyedPublication], surveyed_tables: Sequence[SurveyedTable]
) -> None:
    """Print the publications and tables of a database on stderr, before the questions about them."""
    publication_table = make_table("publication", "publishes", "tables")
    for publication in surveyed_publications:
        names = ", ".join(publication.tables[:6]) + (
            f" and {len(publication.tables) - 6} more" if publication.tables[6:] else ""
        )
        add_row(publication_table, publication.name, ", ".join(publication.operations), names or None)
    tables_table = make_table("table", "replica identity")
    for table in surveyed_tables:
        add_row(
            tables_table,
            quote_qualified(table.schema, table.name),
            "yes" if table.has_identity else Text("none: only INSERTs can be published", style="yellow"),
        )
    for printed_table in (publication_table, tables_table):
        if printed_table.row_count:
            stderr_console().print(printed_table)


def print_init(report: InitReport) -> None:
    """Print which files were written, what `validate` has found, and what to do next."""
    print_validation(report.validation)
    if report.inserts_only:
        print_out(
            Text(
                f"only INSERTs are published of {', '.join(report.inserts_only)}: without a replica identity the publisher"
                " would refuse their UPDATEs and DELETEs",
                style="yellow",
            )
        )
    password = f"; the password of {report.role} is expected in {report.variable}" if report.variable else ""
    review_file = f"look at {report.config}{password}" + (
        ": export it, or use password_command" if password else ""
    )
    if report.statements is None:
        steps = [
            review_file,
            "solve the problems above: until then no SQL is written",
            f"the same `pgsieve init` with --force: it replaces {report.config}, with what was changed there",
        ]
    else:
        steps = [
            f"run {report.statements} as the owner of the tables; its role is {report.role}",
            review_file,
            "pgsieve validate, then pgsieve run",
        ]
    numbered_steps = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    print_out("", Text("written; next:", style="bold"), *map(Text, numbered_steps))


def print_jars(report: JarsReport) -> None:
    """Print the packages and their jars, and how to use the copy on a machine without a network."""
    table = make_table("package", "files", "size", right_aligned=("files", "size"))
    for package in report.packages:
        add_row(table, package.package, package.files, format_bytes(package.bytes))
    print_out(table)
    if report.folder is not None:
        print_out(Text(f"copied; on a machine without Maven repository: export PGSIEVE_JARS={report.folder}"))


def print_engine(report: EngineReport) -> None:
    """Print whether the warm engine (a Spark server that stays after a run) is running, and whether runs use it."""
    if not report.serving:
        print_out("the engine does not run; start it: pgsieve engine start")
        return
    use = "in use" if report.used else "not in use"
    print_out(
        f"the engine serves at {report.address} (process {report.pid}, {format_bytes(report.resident_bytes)}) since"
        f" {timedelta(seconds=report.seconds)}, {use}"
    )
    if not report.current:
        print_out(
            "runs do not use it: it was started with other settings or another version; pgsieve engine start"
        )


def print_engine_stopped(report: EngineStopReport) -> None:
    """Print whether an engine was running and has ended."""
    print_out("the engine has ended" if report.stopped else "no engine ran")
