"""Changes of one table that the server cannot send stop no other table: in both modes, in databases of several encodings."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pyarrow.compute as pc
import pytest

from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.following.follow import follow
from pgsieve.resources.failpoints import VARIABLE, Failpoint
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.commands import start
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import drop_slots
from tests.fixtures.shop import Quiet, Shop

_numbers = itertools.count(1)


@contextmanager
def _site(
    server: EmbeddedServer, folder: Path, publications: dict[str, str], encoding: str = "UTF8"
) -> Iterator[Shop]:
    """A database in an encoding, and two subscriptions to each publication: NAME in mode pipeline, NAME_publ in mode publisher."""
    name = f"unsendable_{next(_numbers)}"
    conninfo = server.conninfo(dbname=name)
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(
            f"create database {name} encoding '{encoding}' template template0 lc_collate 'C' lc_ctype 'C'"
        )
        with psycopg.connect(conninfo, autocommit=True) as database:
            shop = Shop(database, {}, folder / "pgsieve.yaml")
            modes = {"": {}, "_publ": {"row_filter": "publisher"}}
            shop.configure(
                lake=str(folder / "lake"),
                sources={name: {"conninfo": conninfo}},
                subscriptions={
                    subscription + suffix: {"source": name, "publications": [publication], **mode}
                    for subscription, publication in publications.items()
                    for suffix, mode in modes.items()
                },
            )
            yield shop
            drop_slots(database)
        admin.execute(f"drop database {name} with (force)")


def _follow(shop: Shop, done: Callable[[], bool]) -> None:
    """Follow until `done`, or until so much time has passed that something must be wrong."""
    config = load_config(shop.path)

    def tell(summary: RunSummary) -> None:
        if done():
            os.kill(os.getpid(), signal.SIGTERM)

    late = threading.Timer(100, os.kill, [os.getpid(), signal.SIGTERM])
    late.start()
    try:
        assert follow(config, config.select([]), Quiet(), tell) == ()
    finally:
        late.cancel()
    assert done()


@pytest.mark.drawn
@pytest.mark.usefixtures("orchestrator")
def test_an_invalid_utf8_byte_sets_only_its_table_aside(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: many commands for two subscriptions."""
    with _site(publisher_server, tmp_path, {"s": "p"}, "SQL_ASCII") as shop:
        for table in ("good", "bad"):
            shop.database.execute(f"create table {table} (id int primary key, v text)")
        shop.database.execute("create publication p for table good, bad")
        assert (ran := shop.cli("run"))[0] == 0, ran
        shop.database.execute(r"insert into bad values (1, E'caf\351')")
        shop.database.execute("insert into good values (1, 'a')")
        code, output = shop.cli("run")
        assert code == 1, output
        for subscription in ("s", "s_publ"):
            assert shop.ids(subscription, "good") == [1], output
            assert [shop.state(subscription, table) for table in ("good", "bad")] == ["ready", "set aside"]
        assert "set aside" in shop.cli("status")[1]
        shop.database.execute("delete from bad")
        for subscription in ("s", "s_publ"):
            code, output = shop.cli("resync", subscription, "public.bad")
            assert code == 0, output
        assert (checked := shop.cli("check"))[0] == 0, checked


@pytest.mark.drawn
@pytest.mark.usefixtures("orchestrator")
def test_a_row_filter_that_fails_at_the_publisher_sets_only_its_table_aside(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: many commands for four subscriptions."""
    with _site(publisher_server, tmp_path, {"s1": "p", "s2": "q"}) as shop:
        database = shop.database
        database.execute(
            "create table t (id int primary key, v text); create table other (id int primary key)"
        )
        database.execute("create table quiet (id int primary key)")
        database.execute("insert into t values (1, 'a'), (2, 'b')")
        database.execute("create publication p for table t where (10 / id > 0), other, quiet")
        database.execute("create publication q for table other")
        assert (ran := shop.cli("run"))[0] == 0, ran
        # The catalog changes within the slice, so the publisher decides.
        database.execute("alter table other add column x int")
        database.execute("insert into other values (1)")
        database.execute("insert into t values (0, 'zero')")
        database.execute("insert into other values (7)")
        code, output = shop.cli("run")
        assert code == 1, output
        for subscription in ("s1", "s1_publ", "s2", "s2_publ"):
            assert shop.ids(subscription, "other") == [1, 7], output
        for subscription in ("s1", "s1_publ"):
            states = {table: shop.state(subscription, table) for table in ("t", "other", "quiet")}
            assert states == {"t": "set aside", "other": "ready", "quiet": "ready"}
        database.execute("alter publication p set table t where (id > 0), other, quiet")
        for subscription in ("s1", "s1_publ"):
            code, output = shop.cli("resync", subscription, "public.t")
            assert code == 0, output
        database.execute("insert into t values (-1, 'x'), (3, 'c')")
        assert (ran := shop.cli("run"))[0] == 0, ran
        assert shop.ids("s1", "t") == shop.ids("s1_publ", "t") == [1, 2, 3]
        assert (checked := shop.cli("check"))[0] == 0, checked


@pytest.mark.drawn
@pytest.mark.usefixtures("orchestrator")
@pytest.mark.parametrize(
    "point", [Failpoint.SNAPSHOT_EXPORTED, Failpoint.TABLE_COPIED, Failpoint.COPY_FINISHED]
)
def test_a_table_is_copied_again_if_a_transaction_was_not_sent_while_another_process_copied_it(
    publisher_server: EmbeddedServer, tmp_path: Path, point: Failpoint
) -> None:
    with _site(publisher_server, tmp_path, {"s1": "p", "s2": "q"}) as shop:
        subscriptions = shop.written["subscriptions"]
        shop.configure(subscriptions={name: subscriptions[name] for name in ("s1", "s2")})
        database = shop.database
        database.execute(
            "create table t (id int primary key); create table other (id int primary key);"
            "insert into t values (1), (2)"
        )
        database.execute("create publication p for table t where (10 / id > 0)")
        database.execute("create publication q for table other")
        assert (ran := shop.cli("run"))[0] == 0, ran
        output, stop = tmp_path / "output", {**os.environ, VARIABLE: f"{point}?"}
        copying = start(["-c", str(shop.path), "resync", "s1", "public.t"], output, environment=stop)
        process = Path(f"/proc/{copying.pid}/stat")
        wait_until(lambda: process.read_text().rpartition(")")[2].split()[0] == "T", output.read_text, 60)
        # The catalog changes within the slice, so the publisher decides. It evaluates the filter of `t`, which fails.
        database.execute("alter table other add column x int")
        database.execute("begin; insert into t values (3), (0); insert into other values (1); commit")
        assert (ran := shop.cli("run", "s2"))[0] == 0, ran
        assert shop.state("s1", "t") == "to be copied"
        database.execute("alter publication p set table t where (id > 0)")
        assert copying.pid is not None
        os.kill(copying.pid, signal.SIGCONT)
        copying.join(60)
        assert (ran := shop.cli("run", "s1"))[0] == 0, (ran, output.read_text())
        assert shop.ids("s1", "t") == [1, 2, 3], output.read_text()
        assert (checked := shop.cli("check"))[0] == 0, checked


@pytest.mark.drawn
@pytest.mark.usefixtures("orchestrator")
def test_a_row_filter_that_keeps_failing_at_the_publisher_causes_no_copy(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: many commands for two subscriptions."""
    with _site(publisher_server, tmp_path, {"s": "p"}) as shop:
        database = shop.database
        database.execute(
            "create table t (id int primary key, v text); create table other (id int primary key)"
        )
        database.execute("insert into t values (1, 'a'), (2, 'b')")
        database.execute("create publication p for table t where (10 / id > 0), other")
        # pgsieve keeps a publication of this name that it did not create.
        aside = f'publication "pgsieve_{shop.database.info.dbname}_s_publ_aside"'
        database.execute(f"create {aside}")
        assert (ran := shop.cli("run"))[0] == 0, ran
        database.execute(f"drop {aside}")
        # The filter is true for the old row, and fails for the new one.
        database.execute("begin; insert into other values (1); update t set id = 0 where id = 1; commit")
        code, output = shop.cli("run")
        assert code == 1, output
        assert "its row filter fails at the publisher" in " ".join(output.split())
        for number, failing in enumerate(
            ("update t set v = 'x' where id = 0", "delete from t where id = 0"), 2
        ):
            database.execute(f"begin; {failing}; insert into other values ({number}); commit")
            database.execute(f"insert into other values ({number}0); update t set v = v")
            code, output = shop.cli("run", "--json")
            assert code == 1, output
            assert '"copied": [\n' not in output, output
        for subscription in ("s", "s_publ"):
            assert shop.ids(subscription, "other") == [1, 2, 3, 20, 30]
            assert [shop.state(subscription, table) for table in ("t", "other")] == ["set aside", "ready"]
        # The corrected row makes the filter fail, too; but the copy is of a later time.
        database.execute(
            "begin; insert into t values (0, 'y'); insert into other values (4); delete from t where id = 0; commit"
        )
        for subscription in ("s", "s_publ"):
            code, output = shop.cli("resync", subscription, "public.t")
            assert code == 0, output
        # After the copy the table has its filter again, and pgsieve's publication is gone.
        assert shop.on_server()[1] == ["p", "pgsieve_" + shop.database.info.dbname]
        database.execute("insert into t values (-1, 'x'), (3, 'c')")
        assert (ran := shop.cli("run"))[0] == 0, ran
        assert shop.ids("s", "t") == shop.ids("s_publ", "t") == [2, 3]
        assert (checked := shop.cli("check"))[0] == 0, checked
        database.execute("insert into t values (0, 'zero')")
        assert (ran := shop.cli("run"))[0] == 1, ran
        assert "s_publ_aside" in " ".join(shop.cli("drop", "s_publ")[1].split())


@pytest.mark.drawn
@pytest.mark.usefixtures("orchestrator")
def test_changes_after_a_failing_row_filter_follow_the_publications(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """pgsieve's publication of the table without its filter has the same columns and operations; otherwise pgoutput refuses both."""
    with _site(publisher_server, tmp_path, {"s": "p"}) as shop:
        shop.configure(subscriptions={"s_publ": shop.written["subscriptions"]["s_publ"]})
        database, aside = shop.database, f"pgsieve_{shop.database.info.dbname}_s_publ_aside"
        database.execute(
            "create table t (id int primary key, v text, w int); create table other (id int primary key)"
        )
        database.execute("create publication p for table t (id, v) where (10 / id > 0), other")
        assert (ran := shop.cli("run"))[0] == 0, ran
        database.execute("insert into t values (0, 'zero'); delete from t where id = 0")
        assert (ran := shop.cli("run"))[0] == 1, ran
        listed = "select attnames::text[], rowfilter from pg_publication_tables where pubname = %s"
        for number, (alteration, columns) in enumerate(
            {
                "set table t (id, v, w) where (10 / id > 0), other": ["id", "v", "w"],
                "set table t where (10 / id > 0), other": ["id", "v", "w"],
                "set (publish = 'insert, delete')": ["id", "v", "w"],
            }.items()
        ):
            database.execute(f"alter publication p {alteration}")
            shop.cli("run")
            failing = f"insert into t values (0, 'zero', {number}); delete from t where id = 0"
            database.execute(f"begin; insert into other values ({number}); {failing}; commit")
            code, output = shop.cli("run", "--json")
            assert code == 1, output
            assert '"copied": [\n' not in output, output
            assert shop.ids("s_publ", "other") == list(range(number + 1)), output
            assert database.execute(listed, [aside]).fetchall() == [(columns, None)]
        updates = "select pubupdate from pg_publication where pubname = %s"
        assert database.execute(updates, [aside]).fetchone() == (False,)
        database.execute("drop table t")
        assert (ran := shop.cli("run"))[0] == 0, ran
        assert shop.on_server()[1] == ["p"]


@pytest.mark.usefixtures("orchestrator")
@pytest.mark.drawn
def test_a_follower_continues_after_changes_that_cannot_be_sent(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: a run, and a follower that is refused and begins again."""
    with _site(publisher_server, tmp_path, {"s": "p"}, "SQL_ASCII") as shop:
        database = shop.database
        for table in ("t", "bad", "other"):
            database.execute(f"create table {table} (id int primary key, v text)")
        database.execute("create publication p for table t where (10 / id > 0), bad, other")
        assert (ran := shop.cli("run"))[0] == 0, ran
        database.execute("alter table other add column x int")
        database.execute("insert into other values (1); insert into t values (0)")
        database.execute(r"insert into t values (5); insert into bad values (1, E'\351')")
        database.execute("insert into other values (2)")
        _follow(shop, lambda: [shop.ids(s, "other") for s in ("s", "s_publ")] == [[1, 2]] * 2)
        states = {shop.state(s, table) for s in ("s", "s_publ") for table in ("t", "bad")}
        assert states == {"set aside"}


#: A type whose text output fails unless its value is the oid of an enum's label, and its binary format.
_FAILING = """
create type {name};
create function {name}_in(cstring) returns {name} language internal strict immutable as 'int4in';
create function {name}_out({name}) returns cstring language internal strict stable as 'enum_out';
create function {name}_send({name}) returns bytea language internal strict stable as 'int4send';
create type {name} (input = {name}_in, output = {name}_out, internallength = 4, passedbyvalue{send})
"""


@pytest.mark.long
@pytest.mark.usefixtures("orchestrator")
def test_a_value_that_the_server_cannot_print_sets_only_its_table_aside(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: several commands for two subscriptions."""
    with _site(publisher_server, tmp_path, {"s": "p"}) as shop:
        database = shop.database
        for name, send in {"textless": ", send = textless_send", "mute": ""}.items():
            database.execute(_FAILING.format(name=name, send=send))
            database.execute(f"create table {name}_values (id int primary key, v {name})")
        database.execute("create table other (id int primary key)")
        database.execute("create publication p for table textless_values, mute_values, other")
        assert (ran := shop.cli("run"))[0] == 0, ran
        # The server sends the first column in binary format. A transaction with the second one is left out as a whole.
        database.execute("insert into other values (1); insert into textless_values values (1, '1')")
        database.execute(
            "begin; insert into mute_values values (1, '1'); insert into other values (2); commit"
        )
        database.execute("insert into other values (3)")
        code, output = shop.cli("run")
        assert code == 1, output
        for subscription in ("s", "s_publ"):
            assert shop.ids(subscription, "other") == [1, 2, 3], output
            states = [shop.state(subscription, t) for t in ("textless_values", "mute_values", "other")]
            assert states == ["set aside", "set aside", "ready"], output


@pytest.mark.long
@pytest.mark.usefixtures("orchestrator")
def test_a_value_of_more_than_1_gb_as_text_is_replicated_and_stops_no_other_table(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: the server makes 600 MB, which it cannot print, and sends them in binary format to two subscriptions."""
    with _site(publisher_server, tmp_path, {"s": "p"}) as shop:
        database = shop.database
        database.execute(
            "create table huge (id int primary key, v bytea); create table other (id int primary key)"
        )
        database.execute("create publication p for table huge, other")
        assert (ran := shop.cli("run"))[0] == 0, ran
        database.execute("insert into other values (1)")
        make = "convert_to(repeat('x', 600000000), 'UTF8')"
        database.execute(f"begin; insert into huge values (1, {make}); insert into other values (2); commit")
        database.execute("insert into other values (3)")
        assert (ran := shop.cli("run"))[0] == 0, ran
        for subscription in ("s", "s_publ"):
            assert shop.ids(subscription, "other") == [1, 2, 3]
            (size,) = pc.binary_length(shop.table(subscription, "huge").to_pyarrow_table()["v"]).to_pylist()
            assert size == 600_000_000


@pytest.mark.drawn
@pytest.mark.usefixtures("orchestrator")
def test_an_invalid_name_stops_only_its_own_object(publisher_server: EmbeddedServer, tmp_path: Path) -> None:
    """It takes long: many commands for two subscriptions."""
    with _site(publisher_server, tmp_path, {"s": "p"}, "SQL_ASCII") as shop:
        database = shop.database
        database.execute("create table good (id int primary key, v text)")
        database.execute("create publication p for table good")
        assert (ran := shop.cli("run"))[0] == 0, ran
        for statement in (
            b'create role "r\xe9"; create database "d\xe9" template template0',
            b'create table "caf\xe9" (id int primary key, "\xe9" text default \'\xe9\')',
            b"create type \"mood\xe9\" as enum ('fine', '\xe9'); comment on table good is '\xe9'",
            b'create publication "q\xe9" for table "caf\xe9" where ("\xe9" <> \'\xe9\') with (publish = \'insert\')',
            b'alter publication "q\xe9" owner to "r\xe9"; create collation "c\xe9" from "C"',
        ):
            for one in statement.split(b"; "):
                database.execute(one)
        try:
            database.execute("insert into good values (1, 'a')")
            for command in ("run", "check", "validate", "status"):
                code, output = shop.cli(command)
                assert code == 0, (command, output)
            assert shop.ids("s", "good") == shop.ids("s_publ", "good") == [1]
            database.execute(b'alter publication p add table "caf\xe9"')
            database.execute("insert into good values (2, 'b')")
            database.execute(b'insert into "caf\xe9" values (2)')
            code, output = shop.cli("run")
            assert code == 1, output
            assert r"public.caf\xe9" in output, output
            assert "no text in UTF8" in output, output
            assert shop.ids("s", "good") == shop.ids("s_publ", "good") == [1, 2]
            database.execute(b'alter table "caf\xe9" rename to cafe; alter table cafe rename "\xe9" to e')
            code, output = shop.cli("run")
            assert code in (0, 1), output
        finally:
            for one in (b'drop database "d\xe9"', b'drop publication "q\xe9"', b'drop role "r\xe9"'):
                database.execute(one)
