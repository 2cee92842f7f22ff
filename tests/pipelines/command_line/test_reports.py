"""Results as text: every number and reason is shown, and no text of a database is read as markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line import demo_reports, reports, validation_report
from pgsieve.pipelines.commands.results import (
    AppliedTable,
    CheckedTable,
    CheckReport,
    CopiedTable,
    DropReport,
    Failure,
    ResyncedTable,
    ResyncReport,
    RunSummary,
    SlotStatus,
    StatusReport,
    SubscriptionRun,
    SubscriptionStatus,
    TableStatus,
    WorkCost,
)
from pgsieve.pipelines.commands.validation_results import (
    ListedTable,
    PublicationDescription,
    ReceivedChanges,
    ReceivedTable,
    ReceivedTables,
    ValidationProblem,
    ValidationReport,
)
from pgsieve.pipelines.demo.results import ComparedTable, DemoReport

NOTHING_NEW = SubscriptionRun("sales", (), (), "0/10", "0/10", 3, changed=False)
CHANGED = SubscriptionRun(
    name="sales",
    copied=(CopiedTable("public", "orders", 2_000_000, 3.14159),),
    tables=(AppliedTable("public", "orders", 1_500, 20, 3, truncated=True, version=7),),
    from_lsn="0/10",
    to_lsn="0/2F",
    cut_version=4,
    changed=True,
)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    """Print to a pipe with a meaningless width."""
    monkeypatch.setenv("COLUMNS", "40")


def lines(capsys) -> list[list[str]]:
    """The words of each line on stdout."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return [line.split() for line in captured.out.splitlines()]


def test_a_run_without_changes_says_its_lsn(capsys):
    reports.print_run(RunSummary((NOTHING_NEW,)))
    assert capsys.readouterr().out == "sales: nothing new: everything up to LSN 0/10 is already applied\n"


def test_a_run_shows_what_was_copied_and_applied(capsys):
    reports.print_run(RunSummary((CHANGED,)))
    assert lines(capsys) == [
        ["sales:", "applied", "up", "to", "LSN", "0/2F", "(from", "0/10),", "cut", "4"],
        ["copied", "rows", "seconds"],
        ["public.orders", "2,000,000", "3.1"],
        ["applied", "inserted", "updated", "deleted", "truncated", "version"],
        ["public.orders", "1,500", "20", "3", "yes", "7"],
    ]


def test_a_run_shows_its_runner_its_tasks_and_what_they_wrote(capsys):
    spent = WorkCost("driver + Spark, local", 12, 34_000_000, 5.25)
    reports.print_run(RunSummary((replace(CHANGED, spent=spent),)))
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "run by: driver + Spark, local, 12 tasks, 32 MB written, 5.2 s"
    )


def test_a_resync_shows_the_changes_of_each_table(capsys):
    table = ResyncedTable("public", "[red]t", "ready", ("row filter: (a > 1) → (a > 2)",))
    reports.print_resync(ResyncReport("sales", (table,), "slot [b]x[/b] is gone", NOTHING_NEW))
    assert capsys.readouterr().out.splitlines() == [
        "slot replaced: slot [b]x[/b] is gone",
        'public."[red]t": ready',
        "  row filter: (a > 1) → (a > 2)",
        "sales: nothing new: everything up to LSN 0/10 is already applied",
    ]
    reports.print_resync(ResyncReport("sales", (), None, None))
    assert capsys.readouterr().out.startswith("sales: nothing to resynchronise")
    reports.print_resync(ResyncReport("sales", (table,), None, None, followed=True))
    assert "the process that follows the slot copies them" in capsys.readouterr().out


def test_a_drop_shows_what_was_removed_and_what_is_left(capsys):
    reports.print_drop(DropReport("sales", "slot_1", ("cap",), ("cap_i",), (), ("/lake/sales",), None))
    assert capsys.readouterr().out.splitlines()[:5] == [
        "sales: dropped",
        "  removed: replication slot slot_1",
        "  removed: publication cap_i",
        "  removed: tables no longer needed in publication cap",
        "  removed: /lake/sales",
    ]
    reports.print_drop(DropReport("sales", None, (), (), ("emea",), (), "replication slot slot_1"))
    shown = capsys.readouterr().out
    assert "kept: the slot, for emea" in shown
    assert "left on the server: replication slot slot_1" in shown


def test_a_run_shows_what_became_of_the_lsn_to_skip(capsys):
    result = replace(NOTHING_NEW, notice="skipped the transaction finished at 0/20")
    reports.print_run(RunSummary((result,)))
    assert capsys.readouterr().out.splitlines()[-1] == "skipped the transaction finished at 0/20"


def test_a_status_shows_what_is_disabled_skipped_or_changed_since_its_copy(capsys):
    table = TableStatus("public", "t", "ready", None, "0/1", 1, since_copy=("key: (a) → (b)",))
    subscription = SubscriptionStatus(
        "sales", "shop", "pipeline", (table,), enabled=False, reason="a value", skip_lsn="0/20"
    )
    reports.print_status(StatusReport((), (subscription,)))
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "disabled: a value",
        "skips the transaction finished at LSN 0/20",
        "public.t: changed since its copy: key: (a) → (b)",
    ]


def test_a_run_shows_what_was_set_aside_even_when_nothing_is_new(capsys):
    aside = SubscriptionRun(
        "sales", (), (), "0/1", "0/1", None, changed=False, problems=("public.t: [bold]NaN",)
    )
    summary = RunSummary((aside,))
    reports.print_run(summary)
    assert lines(capsys)[-1] == ["problem:", "public.t:", "[bold]NaN"]
    assert (summary.problems, summary.changed) == (True, False)


def test_a_run_a_status_and_a_check_show_warnings(capsys):
    warnings, shown = ("table [b]t[/b] is not replicated",), "warning: table [b]t[/b] is not replicated"
    reports.print_run(RunSummary((replace(NOTHING_NEW, warnings=warnings),)))
    assert capsys.readouterr().out.splitlines()[-1] == shown
    reports.print_status(
        StatusReport((), (SubscriptionStatus("sales", "shop", "pipeline", (), warnings=warnings),))
    )
    assert capsys.readouterr().out.splitlines()[-1] == shown
    reports.print_check(CheckReport((), warnings=warnings))
    assert capsys.readouterr().out.splitlines()[-2:] == [shown, "every table equals the publisher"]


def test_a_summary_has_changed_when_any_subscription_has():
    assert RunSummary((NOTHING_NEW, CHANGED)).changed
    assert not RunSummary((NOTHING_NEW, CHANGED)).problems


def test_status_shows_slots_and_tables_and_reasons(capsys):
    gone = SlotStatus(
        "shop",
        "mail",
        "pgsieve_shop_mail",
        exists=False,
        active=False,
        wal_status=None,
        confirmed_lsn=None,
        lag_bytes=None,
        change_log_lsn=None,
    )
    lost = SlotStatus(
        "shop",
        None,
        "pgsieve_shop",
        exists=True,
        active=True,
        wal_status="lost",
        confirmed_lsn="0/1",
        lag_bytes=20_480,
        change_log_lsn="0/2",
    )
    tables = (
        TableStatus("public", "orders", "ready", "(region = 'EMEA'::text)", "0/2", 4, 1_000),
        TableStatus("public", "items", "set aside", None, None, None, problem="column price holds NaN"),
    )
    reports.print_status(
        StatusReport((lost, gone), (SubscriptionStatus("sales", "shop", "pipeline", tables),))
    )
    assert lines(capsys) == [
        ["slots"],
        ["source", "slot", "state", "WAL", "confirmed", "change", "log", "lag"],
        ["shop", "pgsieve_shop", "active", "lost", "0/1", "0/2", "20", "kB"],
        ["shop", "(mail)", "pgsieve_shop_mail", "not", "created", "–", "–", "–", "–"],
        [],
        ["sales", "(source", "shop,", "row_filter", "pipeline)"],
        ["table", "state", "LSN", "version", "rows", "row", "filter"],
        ["public.orders", "ready", "0/2", "4", "1,000", "(region", "=", "'EMEA'::text)"],
        ["public.items", "set", "aside", "–", "–", "–", "–"],
        ["public.items:", "column", "price", "holds", "NaN"],
    ]


def test_status_shows_a_subscriptions_lag_and_unknown_values(capsys):
    silent = SlotStatus(
        "mail", None, "pgsieve_mail", exists="unknown", active="unknown", wal_status=None, confirmed_lsn=None,
        lag_bytes=None, change_log_lsn=None, problem="no connection",
    )  # fmt: skip
    table = TableStatus("public", "orders", "ready", None, "0/2", 4, 1_000)
    subscriptions = (
        SubscriptionStatus(
            "sales", "shop", "pipeline", (table,), seconds_behind=75.2, last_success="2026-11-23T08:40:11Z"
        ),
        SubscriptionStatus(
            "news",
            "mail",
            "pipeline",
            (replace(table, row_filter="unknown"),),
            last_success="2026-11-23T08:40:11Z",
        ),
        SubscriptionStatus("idle", "shop", "pipeline", (), seconds_behind=0.0),
    )
    reports.print_status(StatusReport((silent,), subscriptions))
    shown = [" ".join(words) for words in lines(capsys)]
    assert shown[shown.index("sales (source shop, row_filter pipeline)") :] == [
        "sales (source shop, row_filter pipeline)",
        "table state LSN version rows row filter",
        "public.orders ready 0/2 4 1,000 –",
        "0:01:15 behind; all changes were last applied at 2026-11-23T08:40:11Z",
        "",
        "news (source mail, row_filter pipeline)",
        "table state LSN version rows row filter",
        "public.orders ready 0/2 4 1,000 unknown",
        "all changes were last applied at 2026-11-23T08:40:11Z",
        "",
        "idle (source shop, row_filter pipeline)",
        "table state LSN version rows row filter",
        "up to date",
    ]


def test_check_shows_the_keys_that_differ(capsys):
    equal = CheckedTable("sales", "public", "items", 5, 5, equal=True, differing_keys=(), lsn="0/2F")
    differs = CheckedTable(
        "sales",
        "public",
        "orders",
        10,
        9,
        equal=False,
        differing_keys=("(1)", "(7)"),
        lsn="0/2F",
        repaired=(1, 1),
    )
    altered = CheckedTable(
        "sales", "public", "a", 2, 1, equal=False, differing_keys=("(3)",), lsn="0/2F", problem="altered"
    )
    aside = CheckedTable(
        "sales", "public", "b", 0, 0, equal=False, differing_keys=(), lsn="0/2F", problem="set aside: NaN"
    )
    report = CheckReport((equal, differs, altered, aside))
    reports.print_check(report)
    assert lines(capsys) == [
        ["subscription", "table", "publisher", "replica", "result", "LSN"],
        ["sales", "public.items", "5", "5", "equal", "0/2F"],
        ["sales", "public.orders", "10", "9", "differs", "0/2F"],
        ["sales", "public.a", "2", "1", "differs", "0/2F"],
        ["sales", "public.b", "–", "–", "not", "compared", "0/2F"],
        ["sales", "public.orders:", "differing", "keys", "(1),", "(7)"],
        ["sales", "public.orders:", *["repaired,", "1", "row", "written", "and", "1", "removed"]],
        ["sales", "public.a:", "differing", "keys", "(3)"],
        ["sales", "public.a:", "not", "repaired,", "altered"],
        ["sales", "public.b:", "not", "compared,", "set", "aside:", "NaN"],
        ["2", "of", "4", "tables", "differ;", "not", "compared:", "1", "of", "4", "tables"],
    ]
    assert not report.equal


def test_check_says_when_all_are_equal(capsys):
    report = CheckReport(
        (CheckedTable("sales", "public", "items", 5, 5, equal=True, differing_keys=(), lsn="0/2F"),)
    )
    reports.print_check(report)
    assert lines(capsys)[-1] == ["every", "table", "equals", "the", "publisher"]
    assert report.equal
    reports.print_check(replace(report, failures=(Failure(("b", "a"), PgsieveError("no connection")),)))
    assert lines(capsys)[-1] == ["not", "compared:", "a,", "b"]


def test_validate_shows_publications_tables_problems_and_statements(capsys):
    both = ("insert", "update")
    entries = (
        ListedTable("public", "root", ("id", "Name"), "(id > 5)"),
        ListedTable("public", "t", None, None),
    )
    pictures = (
        PublicationDescription("shop", "p1", "ann", False, both, "none", True, entries, ("sales",)),
        PublicationDescription("shop", "Mine", None, True, both, "stored", False, (), ()),
    )
    filters = {"insert": "(id > 5)", "update": None, "truncate": None}
    filtered, sent_as = {"update": "(a > 5)"}, ("delete", "insert", "update", "nothing")
    received = (
        ReceivedTable(
            "public", "root", ("id", "Name"), "(id > 5)",
            (ReceivedChanges(("public.leaf", "public.leaf_2"), filters, "PRIMARY KEY (id)"),),
        ),
        ReceivedTable(
            "public", "t", ("a",), None, (ReceivedChanges(("public.t",), {"insert": None}, "NOTHING"),),
            refilter_from="wide",
        ),
        ReceivedTable(
            "public", "u", ("a",), "(a > 5)", (ReceivedChanges(("public.u",), filtered, "FULL", sent_as),),
        ),
    )  # fmt: skip
    report = ValidationReport(
        publications=pictures,
        subscriptions=(ReceivedTables("sales", received, oldest_moment="0/1A2B"),),
        problems=(
            ValidationProblem("public.t", "no replica identity", "55000", "use REPLICA IDENTITY FULL"),
        ),
        statements=("CREATE PUBLICATION a FOR TABLE public.t", "SELECT 1;"),
    )
    validation_report.print_validation(report)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Publication p1 (source shop, owner ann)",
        "  all tables no  inserts yes  updates yes  deletes no  truncates no  generated columns none  via root yes",
        '  table public.root (id, "Name") WHERE (id > 5)',
        "  table public.t",
        "  tables in schema sales",
        "",
        'Publication "Mine" (source shop, pgsieve.yaml)',
        "  all tables yes  inserts yes  updates yes  deletes no  truncates no  generated columns stored  via root no",
        "",
        "Subscription sales will receive",
        '  public.root (id, "Name")',
        "    from public.leaf, public.leaf_2",
        "    replica identity: PRIMARY KEY (id)",
        "    initial copy, insert: (id > 5)",
        "    update: every row",
        "    truncate: the whole table",
        "  public.t (a)",
        "    replica identity: NOTHING",
        "    initial copy, insert: every row",
        'public.t: `pgsieve refilter sales` makes it from the replica of "wide", without the publisher\'s rows',
        "  public.u (a)",
        "    replica identity: FULL",
        "    initial copy, update: (a > 5)",
        "    UPDATEs: sent as DELETE, INSERT, UPDATE, or not sent, as (a > 5) decides; each run counts them",
        "  rows as of any moment: from 0/1A2B on (`pgsieve read sales --at`)",
        "",
        "problem: public.t: no replica identity [55000]",
        "hint: use REPLICA IDENTITY FULL",
        "statements to run:",
        "CREATE PUBLICATION a FOR TABLE public.t;",
        "SELECT 1;",
    ]


def test_validate_says_when_there_is_no_problem(capsys):
    validation_report.print_validation(ValidationReport((), (), (), ()))
    assert capsys.readouterr().out == "no problems\n"


def test_the_demo_shows_three_sides_and_where_its_files_are(capsys):
    rows = (("6", "999", "NSW"),)
    equal = ComparedTable("t1", "pipeline", ("a", "b", "c"), (*rows, ("9", "109", "VIC")), rows, rows)
    demo_reports.print_demo_step("after the UPDATEs", [equal])
    shown = capsys.readouterr().out
    assert "t1 (a, b, c), row_filter: pipeline: equal" in shown
    assert "9 | 109 | VIC" in shown
    demo_reports.print_demo(DemoReport(Path("/d/pgsieve.yaml"), "/d/lake", (equal,), 42.0))
    shown = capsys.readouterr().out
    assert "just the rows of the built-in subscription" in shown
    assert "/d/lake" in shown
    assert "/d/pgsieve.yaml" in shown
    assert "The servers have ended" in shown
    assert "pgsieve demo --ui" in shown


def test_the_demo_says_which_replica_differs(capsys):
    differing = ComparedTable("t1", "publisher", ("a",), (("1",),), (), (("1",),))
    demo_reports.print_demo_step("after a step", [differing])
    demo_reports.print_demo(DemoReport(Path("/d/pgsieve.yaml"), "/d/lake", (differing,), 1.0))
    shown = capsys.readouterr().out
    assert "row_filter: publisher: DIFFERENT" in shown
    assert "A replica differs" in shown


# Progress
