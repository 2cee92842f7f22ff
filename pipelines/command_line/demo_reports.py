"""Prints what `pgsieve demo` shows to people: its steps, its result, and where to look at it.

In: results (`pgsieve.pipelines.demo.results`)
Out: lines and tables on stdout. Nothing here raises an error.
"""

import sys
from collections.abc import Sequence

from rich.table import Table

from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.command_line.console import (
    Text,
    add_row,
    make_table,
    print_out,
)
from pgsieve.pipelines.demo.results import ComparedTable, DemoReport, LargeTableReport, LiveDemo


def print_live_demo(demo: LiveDemo) -> None:
    """Print which pages to open, and what to click there."""
    lines = (
        ("Look at it:", demo.url),
        (
            "1.",
            "The lineage: the source's tables, their replicas, the cut; the steps are in the group shop_replication.",
        ),
        (
            "",
            "The first run copies the tables; then a run every few seconds applies the changes. The assets show when.",
        ),
        ("2.", "Click sales › shop › orders: its rows, and what each run inserted, updated and deleted."),
        (
            "3.",
            "There, Checks › Execute: subscriber_consistency compares it with the publisher's filtered rows.",
        ),
        (
            "4.",
            "Runs: the record of each run. Automation: the schedules and sensors; all are off until you switch them on.",
        ),
        ("5.", "Change a row yourself, and see it enter or leave the row filter region = 'EMEA':"),
        ("", f"psql '{demo.conninfo}' -c \"update shop.orders set region = 'EMEA' where id = 1001\""),
        ("6.", "From another terminal:"),
        ("", f"pgsieve -c {demo.config} status"),
        ("", f"tail -f {demo.log}"),
        ("Ctrl-C", f"ends the demo; its files stay in {demo.config.parent}"),
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for mark, text in lines:
        table.add_row(Text(mark, style="bold"), Text(text, overflow="fold"))
    print_out("", table, "")
    sys.stdout.flush()


def print_demo_step(title: str, tables: Sequence[ComparedTable]) -> None:
    """Print the tables after a step of the demo: the publisher's, pgsieve's and the subscriber's rows, side by side."""
    print_out("", Text(title, style="bold"))
    for compared_table in tables:
        verdict = (
            Text("equal", style="green") if compared_table.equal else Text("DIFFERENT", style="bold red")
        )
        heading = f"{compared_table.table} ({', '.join(compared_table.columns)}), row_filter: {compared_table.row_filter}: "
        print_out(Text.assemble(heading, verdict))
        table = make_table("publisher", "pgsieve (Delta)", "CREATE SUBSCRIPTION")
        sides = (compared_table.publisher, compared_table.replica, compared_table.subscriber)
        for row_index in range(max(map(len, sides))):
            add_row(table, *(" | ".join(side[row_index]) if row_index < len(side) else "" for side in sides))
        print_out(table)


def _print_large_table(report: LargeTableReport) -> None:
    """Print how long PostgreSQL's subscriber and pgsieve have taken for the large table, and what `check` has found."""
    table = make_table(
        *("at size", "rows or changes", "CREATE SUBSCRIPTION", "pgsieve", "run by"),
        right_aligned=("rows or changes", "CREATE SUBSCRIPTION", "pgsieve"),
    )
    for step in report.steps:
        speeds = (
            f"{seconds:.1f} s, {step.rows / seconds:,.0f} a second"
            for seconds in (step.subscriber, step.pgsieve)
        )
        engine = f"{step.spent.engine}, {quantity(step.spent.tasks, 'task')}" if step.spent else ""
        add_row(table, step.title, f"{step.rows:,}", *speeds, engine)
    verdict = Text("equal", style="green") if report.equal else Text("DIFFERENT", style="bold red")
    print_out("", table, Text.assemble("pgsieve check: ", verdict))


def print_demo(report: DemoReport) -> None:
    """Print whether all replicas equal the tables of PostgreSQL's subscriber, and where the demo's files are."""
    if report.sized is not None:
        _print_large_table(report.sized)
    verdict = (
        Text(
            "Every replica holds just the rows of the built-in subscription, in both row_filter modes.",
            "green",
        )
        if report.equal
        else Text("A replica differs from the built-in subscription.", "bold red")
    )
    print_out(
        "",
        Text.assemble(verdict, f" {report.seconds:.0f} s."),
        Text(f"Delta tables:  {report.lake}"),
        Text(f"Configuration: {report.config}"),
        Text("The servers have ended. One that stays, with Dagster's pages on it: pgsieve demo --ui"),
    )
