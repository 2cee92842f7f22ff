"""Prints the result of `pgsieve validate` for people: the publications, and what each subscription will receive.

In: a result (`pgsieve.pipelines.commands.validation_results`)
Out: lines on stdout. Nothing here raises an error.
"""

from collections.abc import Mapping, Sequence

from pgsieve.decoding.changes.deleted_rows import DELETED
from pgsieve.decoding.publications.catalog import OPERATIONS
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.command_line.console import Text, make_cell, print_out
from pgsieve.pipelines.command_line.sequences import print_sequences
from pgsieve.pipelines.commands.results import TableStatus
from pgsieve.pipelines.commands.validation_results import (
    PublicationDescription,
    ReceivedChanges,
    ReceivedTable,
    ReceivedTables,
    ValidationProblem,
    ValidationReport,
)


def print_validation(report: ValidationReport) -> None:
    """Print the publications, what each subscription will receive, the problems, and the statements to run."""
    for publication in report.publications:
        _print_publication(publication)
    for subscription in report.subscriptions:
        print_out(Text(f"Subscription {subscription.subscription} will receive", style="bold"))
        for table in subscription.tables:
            _print_received_table(table)
            print_changes_since_copy(table)
            for line in table.histories:
                print_out(Text(f"{quote_qualified(table.schema, table.name)}: {line}"))
            _print_refilter(subscription.subscription, table)
        print_sequences(subscription.sequences)
        _print_oldest_moment(subscription)
        print_out("")
    for problem in report.problems:
        _print_problem("problem", "bold red", problem)
    for warning in report.warnings:
        _print_problem("warning", "bold yellow", warning)
    if report.statements:
        print_out(
            Text("statements to run:", style="bold"),
            *(Text(f"{statement.rstrip(';')};") for statement in report.statements),
        )
    if not report.problems:
        summary = f"nothing is refused, {quantity(len(report.warnings), 'warning')}"
        print_out(Text(summary if report.warnings else "no problems", style="bold green"))


def _print_problem(kind: str, style: str, problem: ValidationProblem) -> None:
    code = f" [{problem.sqlstate}]" if problem.sqlstate else ""
    print_out(Text.assemble((f"{kind}: ", style), f"{problem.object}: {problem.message}{code}"))
    if problem.hint:
        print_out(Text.assemble(("hint: ", "bold"), problem.hint))


def _print_publication(publication: PublicationDescription) -> None:
    r"""Print what psql shows about a publication for `\dRp+`, in lines that fit a terminal of any width."""
    origin = "pgsieve.yaml" if publication.owner is None else f"owner {publication.owner}"
    print_out(
        Text(
            f"Publication {_quote_names((publication.name,))} (source {publication.source}, {origin})",
            style="bold",
        )
    )
    property_values = {
        "all tables": publication.all_tables,
        **{f"{o}s": o in publication.operations for o in OPERATIONS},
        "generated columns": publication.generated_columns,
        "via root": publication.via_root,
    }
    print_out(
        Text.assemble(
            "  ",
            *(
                part
                for name, value in property_values.items()
                for part in ((f"{name} ", "dim"), make_cell(value), "  ")
            ),
        )
    )
    for entry in publication.tables:
        column_clause = "" if entry.columns is None else f" ({_quote_names(entry.columns)})"
        filter_clause = "" if entry.where is None else f" WHERE {entry.where}"
        print_out(
            Text(f"  table {_quote_names((entry.schema, entry.name), '.')}{column_clause}{filter_clause}")
        )
    for name in publication.excluded:
        print_out(Text(f"  except table {_quote_names(name, '.')}"))
    for schema in publication.schemas:
        print_out(Text(f"  tables in schema {_quote_names((schema,))}"))
    print_out("")


def _print_received_table(table: ReceivedTable) -> None:
    print_out(Text(f"  {_quote_names((table.schema, table.name), '.')} ({_quote_names(table.columns)})"))
    if table.metadata:
        columns_text = ", ".join(
            f"{quote_identifier(name)} ({kind})" for kind, name in table.metadata.items()
        )
        print_out(Text.assemble(("    metadata columns: ", "dim"), columns_text))
    if DELETED in table.metadata:
        print_out(Text.assemble(("    deletes: ", "dim"), "soft, the row stays, marked as deleted"))
    if table.renamed:
        renames = (
            f"{quote_identifier(column)} is {replica_name}" for column, replica_name in table.renamed.items()
        )
        print_out(Text.assemble(("    in the replica: ", "dim"), ", ".join(renames)))
    for changes in table.changes:
        name = quote_qualified(table.schema, table.name)
        if changes.relations != (name,):
            print_out(Text(f"    from {', '.join(changes.relations)}", style="dim"))
        print_out(Text.assemble(("    replica identity: ", "dim"), changes.identity))
        for row_filter, operations in _group_by_filter(
            {"initial copy": table.row_filter, **changes.row_filters}
        ):
            print_out(Text.assemble((f"    {', '.join(operations)}: ", "dim"), row_filter or "every row"))
        _print_updates(changes)


def _print_updates(changes: ReceivedChanges) -> None:
    """Print the operations as which an UPDATE may be sent, if the row filter decides this. Each run counts them."""
    operations = [name.upper() for name in changes.updates_sent_as if name != "nothing"]
    if len(operations) > 1:
        description = f"sent as {', '.join(operations)}, or not sent, as {changes.row_filters['update']} decides; each run counts them"
        print_out(Text.assemble(("    UPDATEs: ", "dim"), description))


def _print_refilter(subscription: str, table: ReceivedTable) -> None:
    if table.refilter_from is not None:
        print_out(
            Text(
                f"{quote_qualified(table.schema, table.name)}: `pgsieve refilter {subscription}` makes it from the replica of"
                f' "{table.refilter_from}", without the publisher\'s rows'
            )
        )


def _print_oldest_moment(received: ReceivedTables) -> None:
    oldest_moment = received.oldest_moment or "the first cut"
    print_out(
        Text.assemble(
            ("  rows as of any moment: ", "dim"),
            f"from {oldest_moment} on (`pgsieve read {received.subscription} --at`)",
        )
    )


def _group_by_filter(row_filters: Mapping[str, str | None]) -> list[tuple[str | None, list[str]]]:
    """List each row filter with the operations to which it applies.

    TRUNCATE is listed as "the whole table", because no row filter applies to it.
    """
    operations_by_filter: dict[str | None, list[str]] = {}
    for operation, row_filter in row_filters.items():
        if operation != "truncate":
            operations_by_filter.setdefault(row_filter, []).append(operation)
    filters = list(operations_by_filter.items())
    return [*filters, ("the whole table", ["truncate"])] if "truncate" in row_filters else filters


def _quote_names(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(map(quote_identifier, names))


def print_changes_since_copy(table: TableStatus | ReceivedTable) -> None:
    """Print how a table's publications have changed since it was copied."""
    for change in table.since_copy:
        print_out(Text(f"{quote_qualified(table.schema, table.name)}: changed since its copy: {change}"))
