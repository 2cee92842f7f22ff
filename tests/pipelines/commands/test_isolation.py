"""An error of one subscription names it, and the others continue. Only the followed subscription needs a JVM."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.commands.status import status
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.pipelines.following.follow import follow
from pgsieve.resources.postgres.source import Source
from tests.fixtures import commands
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Quiet, Shop
from tests.fixtures.spark_servers import connect_server


def _folder(shop: Shop, subscription: str) -> Path:
    return Path(load_config(shop.path).lake) / subscription


def _break(shop: Shop, subscription: str) -> None:
    """Make it impossible to write the subscription's tables."""
    folder = _folder(shop, subscription)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(folder.with_name("aside"))
    folder.write_text("in the way")


def _mend(shop: Shop, subscription: str) -> None:
    folder = _folder(shop, subscription)
    folder.unlink()
    if (aside := folder.with_name("aside")).exists():
        aside.rename(folder)


def test_a_failing_subscription_is_named_and_the_others_of_its_slot_continue(shop: Shop) -> None:
    _break(shop, "one")
    code, output = shop.cli("run")
    assert code != 0
    assert output.count("error: ") == output.count("error: one: ") == 1
    assert shop.ids("two", "stock") == [1, 2, 3, 4]
    _mend(shop, "one")
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [2, 3, 4]
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


@pytest.mark.drawn
@pytest.mark.parametrize("table", [pytest.param("_transformed", marks=pytest.mark.long), "_cuts"])
def test_dagster_records_the_other_subscriptions_of_a_failed_step(shop: Shop, table: str) -> None:
    """It may take long: three runs of the whole graph."""
    assert shop.cli("run")[0] == 0
    path = _folder(shop, "one") / table
    aside = path.with_name("aside")
    shop.database.execute("insert into orders values (5, 5); insert into stock values (5, 5)")
    path.rename(aside)
    path.write_text("in the way")
    code, output = shop.cli("run")
    assert code != 0
    assert output.count("error: one: ") == 1, output
    assert "error: two" not in output
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
    with open_instance(load_config(shop.path)) as dagster:
        (run,) = dagster.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]), limit=1)
        failed = dagster.all_logs(run.run_id, dg.DagsterEventType.STEP_FAILURE)
        succeeded = dagster.all_logs(run.run_id, dg.DagsterEventType.STEP_SUCCESS)
    assert [str(entry.step_key)[:3] for entry in failed] == ["one"]
    assert [str(entry.step_key)[:3] for entry in succeeded] == ["two"]
    path.unlink()
    aside.rename(path)
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [2, 3, 4, 5]


@pytest.mark.drawn
def test_ctrl_c_ends_the_step_in_progress_and_is_no_subscriptions_error(shop: Shop) -> None:
    assert shop.cli("run")[0] == 0
    shop.database.execute("insert into orders values (5, 5); insert into stock values (5, 5)")
    source = Source("shop", shop.written["sources"]["shop"]["conninfo"])
    log = shop.path.with_name("log")
    with source.hold_lock("two"):
        process = commands.start(["-c", str(shop.path), "run"], log)
        wait_until(lambda: log.exists() and 'waiting for "two"' in log.read_text(), log.read_text, 300)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join()
    assert process.exitcode == 130, log.read_text()
    assert "error: " not in log.read_text()
    assert log.read_text().endswith("interrupted: committed work stays, and the next run continues\n")
    assert shop.cli("run")[0] == 0
    assert [shop.ids("one", "orders"), shop.ids("two", "stock")] == [[2, 3, 4, 5], [1, 2, 3, 4, 5]]


def test_a_resync_that_succeeds_does_not_print_the_former_problem(shop: Shop) -> None:
    shop.copy()
    shutil.rmtree(_folder(shop, "one") / "public" / "orders")
    shop.database.execute("insert into orders values (5, 5)")
    code, output = shop.cli("run")
    assert (code, "is gone" in output) == (1, True), output
    code, output = shop.cli("resync", "one")
    assert code == 0, output
    assert "public.orders: copied again; before: set aside\none: applied" in output
    assert "is gone" not in output


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_prints_what_it_has_done(shop: Shop, signal_number: signal.Signals) -> None:
    source = Source("shop", shop.written["sources"]["shop"]["conninfo"])
    output, errors = shop.path.with_name("output"), shop.path.with_name("errors")
    with source.hold_lock("two"):
        process = commands.start(["-c", str(shop.path), "run"], output, errors=errors)
        wait_until(
            lambda: errors.exists() and 'waiting for "two"' in errors.read_text(), errors.read_text, 300
        )
        assert process.pid is not None
        os.kill(process.pid, signal_number)
        process.join()
    assert process.exitcode == 130, errors.read_text()
    assert re.search(r"^one: applied up to LSN (.*\n)+public.orders +3 ", output.read_text(), re.MULTILINE)
    assert "two" not in output.read_text()
    assert "interrupted: " in errors.read_text()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_says_that_it_was_interrupted_before_its_first_step(
    shop: Shop, signal_number: signal.Signals
) -> None:
    """The server accepts the connection and says nothing."""
    errors = shop.path.with_name("errors")
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        conninfo = f"host=127.0.0.1 port={silent_server.getsockname()[1]} dbname=shop user=shop"
        shop.configure(sources={"shop": {"conninfo": conninfo}})
        process = commands.start(["-c", str(shop.path), "run"], shop.path.with_name("output"), errors=errors)
        connection, _ = silent_server.accept()
        with connection:
            assert process.pid is not None
            os.kill(process.pid, signal_number)
            process.join(60)
    assert process.exitcode == 130, errors.read_text()
    assert errors.read_text().endswith("interrupted: committed work stays, and the next run continues\n")


@pytest.mark.drawn
def test_ctrl_c_in_a_terminal_prints_no_traceback_of_dagsters_processes(shop: Shop) -> None:
    """It reaches the whole group: also the processes that print and watch the output of the step."""
    assert shop.cli("run")[0] == 0
    shop.database.execute("insert into orders values (5, 5); insert into stock values (5, 5)")
    source = Source("shop", shop.written["sources"]["shop"]["conninfo"])
    log, home = shop.path.with_name("log"), shop.path.with_name("home")
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
    }  # the settings of other tests turn these processes off
    with source.hold_lock("two"):
        process = commands.start(
            ["-c", str(shop.path), "run"], log, environment=environment, prepare=os.setpgrp
        )
        wait_until(lambda: log.exists() and 'waiting for "two"' in log.read_text(), log.read_text, 300)
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGINT)
        process.join()
    assert process.exitcode == 130, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.drawn
def test_an_error_of_a_source_stops_only_its_subscriptions(shop: Shop) -> None:
    source = shop.written["sources"]["shop"]
    gone = {"conninfo": "host=127.0.0.1 port=1 dbname=x"}
    one, two = shop.written["subscriptions"].values()
    elsewhere = {"source": "gone", "publications": ["p"]}
    shop.configure(
        sources={"gone": gone, "shop": source},
        subscriptions={"first": elsewhere, "one": one, "other": elsewhere, "two": two},
    )
    for command in ("run", "check"):
        code, output = shop.cli(command)
        assert code == 2, output
        assert (
            output.count("error: ") == output.count('error: first, other: source "gone": no connection') == 1
        )
        assert shop.ids("one", "orders") == [2, 3, 4]
        assert shop.ids("two", "stock") == [1, 2, 3, 4]
    dg.Definitions.validate_loadable(build_ui_definitions(load_config(shop.path)))


@pytest.mark.drawn
def test_an_error_of_a_slot_is_printed_once_for_all_its_subscriptions(shop: Shop) -> None:
    own: dict[str, Any] = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    shop.configure(subscriptions={**shop.written["subscriptions"], "three": own})
    shop.copy()
    shop.database.execute("select pg_drop_replication_slot(%s)", [shop.written["sources"]["shop"]["slot"]])
    shop.database.execute("create table later (id int primary key); alter publication q add table later")
    code, output = shop.cli("run")
    assert code == 2
    assert output.count("error: ") == output.count("error: one, two: ") == 1, output
    assert shop.ids("three", "later") == []


def test_a_publication_that_is_missing_does_not_hide_the_other_subscriptions_from_dagster(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("drop publication q")
    graph = build_ui_definitions(load_config(shop.path)).resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert {"one/public/orders", "one/public/notes", "two/public/stock"} <= keys


def test_dagsters_job_materialises_the_subscriptions_that_do_not_fail(shop: Shop) -> None:
    shop.copy()
    SubscriptionRecord(shop.lake, "one").disable("an error")
    defs, config = build_ui_definitions(load_config(shop.path)), load_config(shop.path)
    with open_instance(config) as dagster:
        job = defs.resolve_job_def("shop_increments")
        result = job.execute_in_process(instance=dagster, raise_on_error=False)
    assert not result.success
    materialised = {e.asset_key.to_user_string() for e in result.get_asset_materialization_events()}
    assert materialised == {"shop/change_log", "two/table_changes", "two/public/stock", "two/cut"}


@pytest.mark.spark
def test_a_failing_followed_subscription_is_left_out_and_the_others_are_followed(shop: Shop) -> None:
    shop.copy()
    _break(shop, "one")
    config, messages = load_config(shop.path), []

    def tell(summary: RunSummary) -> None:
        messages.append(summary)
        if summary.failures:
            shop.database.execute("insert into stock values (5, 5)")
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    (failure,) = follow(config, config.select([]), Quiet(), tell)
    assert failure.subscriptions == ("one",)
    assert [summary.failures for summary in messages] == [(failure,), ()]
    assert [(each.name, each.tables[0].inserted) for each in messages[1].subscriptions] == [("two", 1)]
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]


def test_status_shows_the_lakes_tables_of_an_unreachable_source(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shop.copy()
    away = {"conninfo": "host=127.0.0.1 port=1 dbname=away"}
    far = {"source": "away", "publications": ["p"]}
    both, subscriptions = shop.written["sources"], shop.written["subscriptions"]
    shop.configure(sources={"away": away, **both}, subscriptions={"far": far, **subscriptions})
    ends, printed = shop.cli("status")
    assert ends == 2
    assert 'away: source "away"' in printed
    assert printed.count("ready") == 3, "the tables of the source that answers"

    shop.configure(sources={"shop": {**both["shop"], **away}}, subscriptions=subscriptions)
    one, two = status(load_config(shop.path)).subscriptions
    assert [(t.name, t.state, t.rows) for t in one.tables] == [("notes", "ready", 4), ("orders", "ready", 3)]
    assert [(t.name, t.state, t.rows) for t in two.tables] == [("stock", "ready", 4)]
    shop.configure(sources=both)


#: A row filter that pgsieve cannot evaluate as the server does.
_BEYOND = "n > 0 and quote_ident(b) = 'x'"


def _named(shop: Shop) -> None:
    """Create a table `names` with a row."""
    shop.database.execute("create table names (id int primary key, n int, b text)")
    shop.database.execute("alter table names replica identity full")
    shop.database.execute("insert into names values (1, 1, 'x')")


def _publish(shop: Shop, names: str) -> None:
    shop.database.execute(f"alter publication p set table orders where (id > 1), notes, {names}")


def _insert(shop: Shop, number: int) -> None:
    for table in ("orders", "notes", "stock"):
        shop.database.execute(f"insert into {table} values ({number}, {number})")


def _going_on(shop: Shop, upto: int) -> None:
    """Assert that the other tables have all rows."""
    everything = list(range(1, upto + 1))
    assert shop.ids("one", "orders") == everything[1:]
    assert shop.ids("one", "notes") == shop.ids("two", "stock") == everything


@pytest.mark.drawn
def test_only_the_table_waits_whose_filter_cannot_be_evaluated(shop: Shop) -> None:
    """It may take long: five runs of the whole graph."""
    _named(shop)
    _publish(shop, f"names where ({_BEYOND})")
    code, printed = shop.cli("run")
    assert code == 1, printed
    assert "public.names is to be copied: row filter of public.names" in " ".join(printed.split())
    _insert(shop, 5)
    assert shop.cli("run")[0] == 1
    _going_on(shop, 5)
    assert shop.state("one", "names") == "to be copied"
    code, printed = shop.cli("resync", "one", "public.names")
    assert code == 1, printed

    shop.database.execute("insert into names values (2, 2, 'x')")
    _publish(shop, "names where (n > 0)")
    code, printed = shop.cli("run")
    assert code == 0, printed
    shop.database.execute("insert into names values (3, 3, 'x'), (4, 0, 'x')")
    _insert(shop, 6)
    assert shop.cli("run")[0] == 0
    _going_on(shop, 6)
    assert shop.ids("one", "names") == [1, 2, 3]


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.parametrize("by", ["run", pytest.param("job", marks=pytest.mark.long)])
def test_altering_a_filter_to_one_that_cannot_be_evaluated_loses_nothing(shop: Shop, by: str) -> None:
    """It may take long: several runs of the whole graph."""
    _named(shop)
    _publish(shop, "names where (n > 0)")
    assert shop.cli("run")[0] == 0
    shop.database.execute("insert into names values (2, 2, 'x')")
    _publish(shop, f"names where ({_BEYOND})")
    shop.database.execute("insert into names values (3, 3, 'x')")
    for number in (5, 6):
        _insert(shop, number)
        if by == "run":
            assert shop.cli("run")[0] == 1
        else:
            config = load_config(shop.path)
            with open_instance(config) as dagster:
                build_ui_definitions(config).resolve_job_def("shop_increments").execute_in_process(
                    instance=dagster, raise_on_error=False
                )
        shop.database.execute("insert into names values (%s, 1, 'x')", [number])
        _going_on(shop, number)
    assert shop.state("one", "names") == "to be copied"
    _publish(shop, "names where (n > 0)")
    _insert(shop, 7)
    code, printed = shop.cli("run")
    assert code == 0, printed
    _going_on(shop, 7)
    assert shop.ids("one", "names") == [1, 2, 3, 5, 6]


@pytest.mark.drawn
@pytest.mark.spark
def test_a_followed_table_waits_after_its_filter_becomes_one_that_cannot_be_evaluated(shop: Shop) -> None:
    _named(shop)
    _publish(shop, "names where (n > 0)")
    shop.run()
    config, messages = load_config(shop.path), []
    steps = iter(range(5, 8))

    def tell(summary: RunSummary) -> None:
        messages.append(summary)
        number = next(steps, None)
        if number is None:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if number == 6:
            _publish(shop, f"names where ({_BEYOND})")
            shop.database.execute("insert into names values (2, 2, 'x')")
        _insert(shop, number)

    _insert(shop, 4 + 100)
    shop.database.execute("delete from orders where id = 104; delete from notes where id = 104")
    assert follow(config, config.select([]), Quiet(), tell) == ()
    assert shop.cli("run")[0] == 1
    assert shop.ids("one", "orders") == [2, 3, 4, 5, 6, 7]
    assert shop.ids("one", "names") == [1]
    assert shop.state("one", "names") == "to be copied"


@pytest.mark.drawn
def test_only_the_table_with_an_impossible_type_waits(shop: Shop) -> None:
    assert shop.cli("run")[0] == 0
    one, two = shop.written["subscriptions"].values()
    shop.configure(subscriptions={"one": {**one, "types": {"public.notes.n": "date"}}, "two": two})
    _insert(shop, 5)
    code, printed = shop.cli("run")
    assert code == 1, printed
    assert "notes is to be copied: a column of PostgreSQL type 23 cannot be" in " ".join(printed.split())
    assert shop.ids("one", "orders") == [2, 3, 4, 5]
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
    assert shop.state("one", "notes") == "to be copied"
    shop.configure(subscriptions={"one": one, "two": two})
    _insert(shop, 6)
    assert shop.cli("run")[0] == 0
    _going_on(shop, 6)


@pytest.mark.drawn
def test_a_missing_java_sets_no_table_aside(shop: Shop) -> None:
    shop.database.execute("create table log (id int); alter table log replica identity full")
    shop.database.execute("insert into log values (2), (3), (4); alter publication p add table log")
    shop.copy()
    shop.configure(spark={"engine": "off", "conf": {"spark.pgsieve.smallBytes": "-1"}})
    # Many changes of a table without a key: most other work needs no Java.
    shop.database.execute("update log set id = 14 where id = 4; insert into stock values (5, 5)")
    # It runs in a separate process, because the process of the tests may have a session.
    done = commands.run("-c", str(shop.path), "run", environment={**os.environ, "JAVA_HOME": "/none"})
    assert done.returncode == 2, done.stderr
    assert "no Spark session" in done.stderr
    assert [shop.state("one", "log"), shop.state("two", "stock")] == ["ready", "ready"]
    shop.configure(spark={})
    assert shop.cli("run")[0] == 0
    assert [shop.ids("one", "log"), shop.ids("two", "stock")] == [[2, 3, 14], [1, 2, 3, 4, 5]]


@pytest.mark.long
def test_a_spark_server_without_delta_sets_no_table_aside(shop: Shop, tmp_path: Path) -> None:
    """It takes long: a Spark Connect server starts."""
    with connect_server(tmp_path / "server", Path(sys.executable), with_jars=False) as master:
        conf = {"spark.pgsieve.smallBytes": "-1"}
        shop.configure(spark={"engine": "off", "master": master, "conf": conf})
        done = commands.run("-c", str(shop.path), "run", "--json")
    assert done.returncode == 2, done.stderr
    assert "has no Delta Lake" in done.stdout
    assert {shop.state("one", "orders"), shop.state("one", "notes"), shop.state("two", "stock")} <= {
        "to be copied",
        "data is being copied",
    }
    shop.configure(spark={"engine": "off"})
    assert shop.cli("run")[0] == 0


def _drop_publication(shop: Shop) -> None:
    shop.database.execute("drop publication p")


def _create_publication(shop: Shop) -> None:
    shop.database.execute("create publication p for table orders where (id > 1), notes")


def _disagree(shop: Shop) -> None:
    shop.database.execute("create publication other for table notes (id)")
    one, two = shop.written["subscriptions"].values()
    shop.configure(subscriptions={"one": {**one, "publications": ["p", "other"]}, "two": two})


def _agree(shop: Shop) -> None:
    one, two = shop.written["subscriptions"].values()
    shop.configure(subscriptions={"one": {**one, "publications": ["p"]}, "two": two})


def _define_badly(shop: Shop) -> None:
    one, two = shop.written["subscriptions"].values()
    own = {"own": {"tables": [{"table": "public.notes", "where": "random() > 2"}]}}
    shop.configure(
        sources={"shop": {**shop.written["sources"]["shop"], "publications": own}},
        subscriptions={"one": {**one, "publications": ["p", "own"]}, "two": two},
    )


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("hinder", "mend", "says"),
    [
        (_drop_publication, _create_publication, 'publication "p" does not exist'),
        pytest.param(_disagree, _agree, "cannot use different column lists", marks=pytest.mark.long),
        pytest.param(_define_badly, _agree, "invalid publication WHERE expression", marks=pytest.mark.long),
    ],
)
def test_only_the_subscription_with_refused_publications_waits(
    shop: Shop, hinder: Callable[[Shop], None], mend: Callable[[Shop], None], says: str
) -> None:
    """It may take long: several runs of the whole graph."""
    assert shop.cli("run")[0] == 0
    hinder(shop)
    for number in (5, 6):
        _insert(shop, number)
        code, printed = shop.cli("run")
        assert code == 2, printed
        assert printed.count("error: ") == printed.count("error: one: ") == 1
        assert says in " ".join(printed.split())
        assert shop.ids("two", "stock") == list(range(1, number + 1))
        assert shop.ids("one", "notes") == [1, 2, 3, 4]
    code, printed = shop.cli("status")
    assert code == 2, printed
    assert printed.count("ready") == 3, printed
    assert says in " ".join(printed.split())
    mend(shop)
    _insert(shop, 7)
    code, printed = shop.cli("run")
    assert code == 0, printed
    _going_on(shop, 7)


@pytest.mark.drawn
def test_unreadable_records_stop_only_their_subscription(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("insert into stock values (5, 5)")
    for entry in (_folder(shop, "one") / "_table_states" / "_delta_log").glob("*.json"):
        entry.write_text("damaged")
    code, printed = shop.cli("run")
    assert code == 2, printed
    assert "error: one: " in printed
    assert "two: applied" in printed
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
