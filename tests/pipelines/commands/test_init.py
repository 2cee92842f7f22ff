"""`pgsieve init`: the files that it writes for a real database, what it refuses, and its questions on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml
from typer.testing import CliRunner

from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.pipelines.command_line import cli
from pgsieve.pipelines.commands.validate import validate
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures import commands
from tests.fixtures.servers import drop_slots, own_database

PASSWORD = "s3cret-of-the-shop"


@pytest.fixture(scope="module")
def database(publisher_server: EmbeddedServer) -> Iterator[str]:
    """The conninfo of a role without privileges, in a database with two publications and three tables."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute('create database "Shop-1"')
        admin.execute(f"create role clerk login password '{PASSWORD}'")
        with psycopg.connect(publisher_server.conninfo(dbname="Shop-1"), autocommit=True) as owner:
            owner.execute("create table orders (id int primary key, region text not null)")
            owner.execute("alter table orders replica identity full")
            owner.execute('create schema "Odd"; create table "Odd"."Lines" (id int primary key)')
            owner.execute("create table bare (a int)")
            owner.execute("create publication sales for table orders where (region = 'EMEA')")
            owner.execute('create publication lines for table "Odd"."Lines"')
        yield publisher_server.conninfo(dbname="Shop-1", user="clerk", password=PASSWORD)
        admin.execute('drop database "Shop-1" with (force)')
        admin.execute("drop role clerk")


def init(folder: Path, *arguments: str) -> tuple[int, str]:
    file = folder / "pgsieve.yaml"
    result = CliRunner().invoke(cli.app, ["-c", str(file), "init", *arguments], prog_name="pgsieve")
    return result.exit_code, result.stdout + result.stderr


def without_comments(statements: str) -> list[str]:
    return [line for line in statements.splitlines() if line and not line.startswith("--")]


@pytest.mark.slow
def test_the_written_file_is_valid_and_the_sql_grants_what_is_needed(
    database: str, publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    code, text = init(tmp_path, "--conninfo", database, "--publication", "sales", "--publication", "lines")
    assert "shop_1_PASSWORD".upper() in text
    file, statements = tmp_path / "pgsieve.yaml", tmp_path / "pgsieve-role.sql"
    assert PASSWORD not in file.read_text() + statements.read_text() + text
    written = yaml.safe_load(file.read_text())
    assert written["sources"]["shop_1"].keys() == {"conninfo", "password"}
    assert written["sources"]["shop_1"]["password"] == "${SHOP_1_PASSWORD}"
    assert written["subscriptions"] == {"sales": {"source": "shop_1", "publications": ["sales", "lines"]}}
    assert without_comments(statements.read_text())[:5] == [
        "ALTER ROLE clerk REPLICATION;",
        'GRANT USAGE ON SCHEMA "Odd" TO clerk;',
        "GRANT USAGE ON SCHEMA public TO clerk;",
        'GRANT SELECT ON "Odd"."Lines" TO clerk;',
        "GRANT SELECT ON public.orders TO clerk;",
    ]
    # The statements grant what the role lacks: after them, validate reports nothing and a run succeeds.
    assert code == 0, text
    environment = {**os.environ, "SHOP_1_PASSWORD": PASSWORD, "DAGSTER_HOME": str(tmp_path)}

    def lacking() -> list[tuple[str, str]]:
        done = commands.run("-c", str(file), "validate", "--json", environment=environment)
        problems = [
            (p["message"].partition(":")[0], p["sqlstate"]) for p in json.loads(done.stdout)["problems"]
        ]
        assert done.returncode == (1 if problems else 0)
        return problems

    assert lacking() == [
        ("permission denied to use replication slots", "42501"),
        ('permission denied for schema "Odd"', "42501"),
        ('permission denied for table "Odd"."Lines"', "42501"),
        ("permission denied for table public.orders", "42501"),
    ]
    with psycopg.connect(publisher_server.conninfo(dbname="Shop-1"), autocommit=True) as owner:
        for line in without_comments(statements.read_text()):
            owner.execute(line)
    assert lacking() == []
    run = commands.run("-c", str(file), "run", environment=environment)
    assert run.returncode == 0, run.stderr
    with psycopg.connect(publisher_server.conninfo(dbname="Shop-1"), autocommit=True) as owner:
        owner.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = 'Shop-1'"
        )
        owner.execute("drop publication if exists pgsieve_shop_1; alter role clerk noreplication")


def test_nothing_is_overwritten_without_force(database: str, tmp_path: Path) -> None:
    (tmp_path / "pgsieve-role.sql").write_text("mine")
    code, text = init(tmp_path, "--conninfo", database, "--publication", "sales")
    assert (code, "pgsieve-role.sql exists already" in text) == (2, True)
    assert not (tmp_path / "pgsieve.yaml").exists()
    (tmp_path / "pgsieve.yaml").write_text("mine")
    code, text = init(tmp_path, "--conninfo", "host=127.0.0.1 port=1")
    assert (code, "pgsieve.yaml exists already" in text) == (2, True), (
        "it does not refuse before its questions"
    )
    assert init(tmp_path, "--conninfo", database, "--publication", "sales", "--force")[0] == 0
    assert "mine" not in (tmp_path / "pgsieve.yaml").read_text() + (tmp_path / "pgsieve-role.sql").read_text()


def test_tables_get_a_publication_in_the_file_and_an_administrator_a_role(
    publisher_server: EmbeddedServer, database: str, tmp_path: Path
) -> None:
    admin = publisher_server.conninfo(dbname="Shop-1")
    code, text = init(
        tmp_path, "--conninfo", admin, "--table", '"Odd"."Lines"', "--table", "public.orders", "--source", "shop",
        "--subscription", "all_of_it", "--lake", "./elsewhere",
    )  # fmt: skip
    assert code == 0, text
    config = load_config(tmp_path / "pgsieve.yaml")
    assert config.lake == str(tmp_path / "elsewhere")
    assert [t.relation for t in config.sources["shop"].publications["all_of_it"].tables] == [
        ("Odd", "Lines"),
        ("public", "orders"),
    ]
    statements = without_comments((tmp_path / "pgsieve-role.sql").read_text())
    assert statements[0].startswith("CREATE ROLE pgsieve LOGIN REPLICATION;")
    assert statements[-1].startswith('create publication "pgsieve_shop" for table')


def test_the_sql_makes_no_statement_of_the_application_fail(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """The table owner runs the SQL, and every UPDATE and DELETE of the application still works."""
    admin = publisher_server.conninfo(dbname="bare_shop")
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as maintenance:
        maintenance.execute("create database bare_shop")
    tables = ("keyed", "bare", "nothing", "full_rows", "by_index", "tree", "bare_tree", "odd_tree")
    try:
        with psycopg.connect(admin, autocommit=True) as owner:
            owner.execute("""
            create table keyed (a int primary key);
            create table bare (a int);
            create table nothing (a int primary key); alter table nothing replica identity nothing;
            create table full_rows (a int); alter table full_rows replica identity full;
            create table by_index (a int not null); create unique index i on by_index (a);
            alter table by_index replica identity using index i;
            create table tree (a int primary key) partition by range (a);
            create table tree_1 partition of tree for values from (0) to (9);
            create table bare_tree (a int) partition by range (a);
            create table bare_tree_1 partition of bare_tree for values from (0) to (9);
            create table odd_tree (a int primary key) partition by range (a);
            create table odd_tree_1 partition of odd_tree for values from (0) to (5);
            create table odd_tree_2 partition of odd_tree for values from (5) to (9);
            alter table odd_tree_2 replica identity nothing""")
            for via_root in ("--publish-via-partition-root", "--no-publish-via-partition-root"):
                chosen = [part for table in tables for part in ("--table", f"public.{table}")]
                code, text = init(tmp_path, "--conninfo", admin, via_root, "--force", *chosen)
                assert (code, "only INSERTs are published of public.bare, " in text) == (0, True), text
                assert "user=pgsieve " in (tmp_path / "pgsieve.yaml").read_text(), (
                    "it is not the role of the SQL"
                )
                for line in without_comments((tmp_path / "pgsieve-role.sql").read_text()):
                    owner.execute(line)
                for table in tables:
                    owner.execute(f"insert into {table} values (1), (6)")
                    assert owner.execute(f"update {table} set a = a + 1").rowcount == 2, table
                    assert owner.execute(f"delete from {table}").rowcount == 2, table
                published = owner.execute(
                    "select array_agg(tablename::text order by 1), bool_or(pubupdate) from pg_publication_tables"
                    " join pg_publication using (pubname) group by pubupdate order by 2"
                ).fetchall()
                assert {"bare", "nothing"} <= set(published[0][0])
                trees = {name for names, _ in published for name in names if "tree" in name}
                assert ("tree" in trees) == (via_root == "--publish-via-partition-root")
                owner.execute("drop owned by pgsieve; drop role pgsieve")
                for name in [r[0] for r in owner.execute("select pubname from pg_publication").fetchall()]:
                    owner.execute(f'drop publication "{name}"')
    finally:
        with psycopg.connect(publisher_server.conninfo(), autocommit=True) as maintenance:
            maintenance.execute("drop database bare_shop with (force)")


def test_no_sql_is_written_while_there_is_a_problem(
    publisher_server: EmbeddedServer, database: str, tmp_path: Path
) -> None:
    admin = publisher_server.conninfo(dbname="Shop-1")
    with psycopg.connect(admin, autocommit=True) as owner:
        owner.execute("""
        create table mixed (a int not null, b int) partition by range (a);
        create table mixed_1 (a int not null, b int primary key);
        alter table mixed attach partition mixed_1 for values from (0) to (5);
        create table mixed_2 partition of mixed for values from (5) to (9);
        alter table mixed_2 replica identity full; alter table mixed replica identity full""")
        try:
            command = ("--conninfo", admin, "--table", "public.mixed")
            code, text = init(tmp_path, *command)
            assert (code, "until then no SQL is written" in text) == (1, True), text
            assert [each.name for each in tmp_path.iterdir()] == ["pgsieve.yaml"]
            # The next step that it names works without a terminal, too.
            assert "3. the same `pgsieve init` with --force: it replaces " in text
            owner.execute("alter table mixed detach partition mixed_1")
            code, text = init(tmp_path, *command, "--force")
        finally:
            owner.execute("drop table mixed; drop table if exists mixed_1")
    assert code == 0, text


def test_a_program_may_print_the_password(database: str, tmp_path: Path) -> None:
    without = psycopg.conninfo.make_conninfo(database, password="")
    command = "printf '%s' '" + PASSWORD + "'"
    code, text = init(
        tmp_path, "--conninfo", without, "--password-command", command, "--publication", "sales"
    )
    assert code == 0, text
    source = yaml.safe_load((tmp_path / "pgsieve.yaml").read_text())["sources"]["shop_1"]
    assert source["password_command"] == ["printf", "%s", PASSWORD]
    assert "password" not in source
    code, text = init(
        tmp_path, "--conninfo", database, "--password-command", command, "--publication", "sales", "--force"
    )
    assert (code, "keep one of the two" in text) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--conninfo is missing"),
        (["--conninfo", "nonsense"], "the conninfo is not valid"),
        (["--conninfo", "host=127.0.0.1 port=1 connect_timeout=2 dbname=Shop-1"], 'source "shop_1": no connection'),
        (["--conninfo", "host=127.0.0.1 port=1 user=clerk"], 'source "clerk": no connection'),
        (["--conninfo", "host=127.0.0.1 port=1", "--source", "web"], 'source "web": no connection'),
        (["--conninfo", "host=127.0.0.1 password=${NOT_SET}"], "environment variable NOT_SET is not set"),
        *(
            (["--conninfo", f"host=127.0.0.1 {keyword}=x"], f"the conninfo has a secret, {keyword}")
            for keyword in ("sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
        ),
        (["--conninfo", "{database}", "--publication", "sale"], 'publication "sale" does not exist'),
        (["--conninfo", "{database}", "--table", "public.order"], 'table "public.order" does not exist'),
        (["--conninfo", "{database}", "--table", "orders"], "where 2 are needed"),
        (["--conninfo", "{database}", "--table", "public.orders", "--publication", "sales"], "exclude each other"),
        (["--conninfo", "{database}", "--source", "a b"], "cannot be a name"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_refused_and_nothing_is_written(
    database: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, text = init(tmp_path, *(a.format(database=database) if "{database}" in a else a for a in arguments))
    assert (code, message in text) == (2, True), text
    assert list(tmp_path.iterdir()) == []


def _on_a_terminal(folder: Path, *dialogue: tuple[str, str]) -> str:
    """Run `pgsieve init` in a folder, and type each answer once its question is on the screen; what is shown after the last."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pgsieve", "init"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
        start_new_session=True,
    )
    os.close(terminal)
    seen = ""
    try:
        for question, line in dialogue:
            while question not in seen:
                seen += os.read(controller, 4096).decode()
            seen = ""
            os.write(controller, line.encode() + b"\n")
        while block := os.read(controller, 4096):
            seen += block.decode()
    except OSError:  # The terminal's other end is closed.
        pass
    finally:
        os.close(controller)
    assert process.wait(60) == 0, seen
    return seen


@pytest.mark.drawn
def test_on_a_terminal_it_asks(database: str, tmp_path: Path) -> None:
    shown = _on_a_terminal(
        tmp_path, ("conninfo (", database), ("publications, separated by commas [lines, sales]:", "sales")
    )
    assert re.search(r"next:", shown)
    assert list(load_config(tmp_path / "pgsieve.yaml", {"SHOP_1_PASSWORD": "x"}).subscriptions) == ["sales"]


def test_all_publications_become_as_many_subscriptions_as_their_column_lists_need(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    with own_database(publisher_server, "divided") as owner:
        owner.execute("""
        create table orders (id int primary key, region text, note text);
        insert into orders values (1, 'EMEA', 'a'), (2, 'APAC', 'b');
        create publication a_emea for table orders where (region = 'EMEA') with (publish = 'insert');
        create publication b_apac for table orders where (region = 'APAC') with (publish = 'insert');
        create publication c_short for table orders (id);
        create publication "C Short" for table orders (id, region);
        """)
        code, output = init(tmp_path, "--conninfo", publisher_server.conninfo(dbname="divided"))
        assert code == 0, output
        path = tmp_path / "pgsieve.yaml"
        # The statements name another role than the one that owns the tables here.
        path.write_text(path.read_text().replace("user=pgsieve", "user=postgres"))
        written = yaml.safe_load(path.read_text())["subscriptions"]
        assert {name: subscription["publications"] for name, subscription in written.items()} == {
            "c_short": ["C Short"],
            "a_emea": ["a_emea", "b_apac"],
            "c_short_2": ["c_short"],
        }
        assert "GRANT SELECT ON public.orders" in (tmp_path / "pgsieve-role.sql").read_text()
        config = load_config(path)
        assert not validate(config).problems
        project = build_project(config)
        lake = project.lake.open()
        for subscription in project.subscriptions.values():
            copies = copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), lambda _: None)
            assert [(copy.rows, copy.problem) for copy in copies] == [(2, None)]


@pytest.mark.slow
def test_on_a_terminal_it_asks_about_partition_trees(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """By its root by default; otherwise as its partitions. `pgsieve run` then makes the replicas of the answer."""
    admin = publisher_server.conninfo(dbname="trees")
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as maintenance:
        maintenance.execute("create database trees")
    replicas = {}
    try:
        with psycopg.connect(admin, autocommit=True) as owner:
            owner.execute("""
            create table plain (a int primary key);
            create table tree (a int primary key) partition by range (a);
            create table tree_1 partition of tree for values from (0) to (5);
            create table tree_2 partition of tree for values from (5) to (9);
            insert into tree values (1), (6)""")
            for answer in ("", "n"):
                folder = tmp_path / (answer or "default")
                folder.mkdir()
                shown = _on_a_terminal(
                    folder,
                    ("conninfo (", admin),
                    ("separated by commas [all]:", ""),
                    ("publish public.tree as one table each, not as its partitions [Y/n]:", answer),
                )
                assert "next:" in shown
                # The statements name another role than the one that owns the tables here.
                own = (folder / "pgsieve.yaml").read_text().replace("user=pgsieve", "user=postgres")
                (folder / "pgsieve.yaml").write_text(own)
                done = commands.run(
                    "run", folder=folder, environment={**os.environ, "DAGSTER_HOME": str(folder)}
                )
                assert done.returncode == 0, done.stderr
                public = folder / "lake" / "trees_replica" / "public"
                replicas[answer] = sorted(each.name for each in public.iterdir())
                drop_slots(owner)
                owner.execute("drop publication if exists pgsieve_trees, pgsieve_trees_root")
    finally:
        with psycopg.connect(publisher_server.conninfo(), autocommit=True) as maintenance:
            maintenance.execute("drop database trees with (force)")
    assert replicas == {"": ["plain", "tree"], "n": ["plain", "tree_1", "tree_2"]}
