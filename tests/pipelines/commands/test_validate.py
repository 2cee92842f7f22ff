"""`pgsieve validate` shows publications, tables and problems, of the server and of pgsieve.yaml alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from pgsieve.pipelines.command_line import cli
from pgsieve.pipelines.commands.validate import validate
from pgsieve.pipelines.config.model import load_config
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.shop import Shop

CONFIG = """\
lake: ./lake
sources:
  shop:
    conninfo: "{conninfo}"
    publications:
      emea:
        publish_via_partition_root: true
        tables:
          - {{table: public.orders, where: "region = 'EMEA'", columns: [id, region]}}
      broken:
        tables: [{{table: public.a_view}}, {{table: public.keyless, where: "a > random()"}}]
      mutable:
        tables: [{{table: public.keyless, where: "a > random()"}}]
subscriptions:
  sales: {{source: shop, publications: [{publications}]}}
"""
A_VIEW = 'cannot add relation "a_view" to publication: This operation is not supported for views.'
MUTABLE = "invalid publication WHERE expression: User-defined or built-in mutable functions are not allowed."
LISTED = "Column list used by the publication does not cover the replica identity."
FILTERED = "Column used in the publication WHERE expression is not part of the replica identity."
SCHEMA = """
    CREATE TABLE orders (id int, region text, amount int, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
    CREATE TABLE orders_emea PARTITION OF orders FOR VALUES IN ('EMEA');
    CREATE TABLE orders_rest PARTITION OF orders DEFAULT;
    ALTER TABLE orders_rest REPLICA IDENTITY FULL;
    CREATE TABLE keyless (a int);
    CREATE VIEW a_view AS SELECT 1;
    CREATE PUBLICATION inserted FOR TABLE orders (id, region) WITH (publish = 'insert', publish_via_partition_root);
    CREATE PUBLICATION unkeyed FOR TABLE keyless WHERE (a > 1);
    CREATE TABLE invoices ("Line No" int, n int);
    CREATE PUBLICATION blank FOR TABLE invoices WITH (publish = 'insert');
"""


@pytest.fixture(scope="module")
def conninfo(publisher_server: EmbeddedServer) -> Iterator[str]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE validated")
        conninfo = publisher_server.conninfo(dbname="validated")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(SCHEMA)
        yield conninfo
        admin.execute("DROP DATABASE validated WITH (FORCE)")


def validated(conninfo: str, folder: Path, publications: str, more: str = "") -> tuple[int, dict[str, Any]]:
    """The exit code and the report as JSON; `more` are further keys of the subscription. Nothing is created on the server."""
    file = folder / "pgsieve.yaml"
    written = CONFIG.format(conninfo=conninfo, publications=publications).rstrip()
    file.write_text(f"{written.removesuffix('}')}{more}}}\n")
    result = CliRunner().invoke(cli.app, ["validate", "--json", "-c", str(file)])
    with psycopg.connect(conninfo) as connection:
        created = connection.execute(
            "SELECT pubname FROM pg_publication WHERE pubname NOT IN ('inserted', 'unkeyed', 'blank') UNION ALL"
            " SELECT slot_name FROM pg_replication_slots UNION ALL SELECT viewname FROM pg_views WHERE viewname ~ 'pgsieve'"
        ).fetchall()
    assert created == []
    return result.exit_code, json.loads(result.stdout)


def test_a_subscription_sees_publications_of_both_kinds_together(conninfo: str, tmp_path: Path) -> None:
    _, report = validated(conninfo, tmp_path, "inserted, emea")
    pictures = {p["name"]: p for p in report["publications"]}
    assert (pictures["inserted"]["owner"], pictures["emea"]["owner"]) == ("postgres", None)
    assert pictures["emea"]["tables"] == [
        {"schema": "public", "name": "orders", "columns": ["id", "region"], "where": "region = 'EMEA'"}
    ]
    ((received,),) = (s["tables"] for s in report["subscriptions"])
    assert (received["name"], received["columns"], received["row_filter"]) == (
        "orders",
        ["id", "region"],
        None,
    )
    filters = {"insert": None, "update": "region = 'EMEA'", "delete": "region = 'EMEA'", "truncate": None}
    assert [(c["relations"], c["row_filters"], c["identity"]) for c in received["changes"]] == [
        (["public.orders_emea"], filters, "PRIMARY KEY (id, region)"),
        (["public.orders_rest"], filters, "FULL"),
    ]


def test_problems_come_in_the_words_of_the_server(conninfo: str, tmp_path: Path) -> None:
    exit_code, report = validated(conninfo, tmp_path, "emea, unkeyed, broken")
    assert exit_code == 1
    assert [(p["object"], p["message"], p["sqlstate"]) for p in report["problems"]] == [
        ("shop", f'publication "broken": {A_VIEW}', "22023"),
        ("shop", f'publication "mutable": {MUTABLE}', "0A000"),
        (
            "sales",
            f'cannot update table "public.orders_rest": {LISTED} (publication "emea": amount)',
            "42P10",
        ),
        (
            "sales",
            f'cannot delete from table "public.orders_rest": {LISTED} (publication "emea": amount)',
            "42P10",
        ),
        ("sales", f'cannot update table "public.keyless": {FILTERED} (publication "unkeyed": a)', "42P10"),
        (
            "sales",
            f'cannot delete from table "public.keyless": {FILTERED} (publication "unkeyed": a)',
            "42P10",
        ),
    ]


def test_a_refused_subscription_does_not_hide_the_statements_for_the_others(
    conninfo: str, tmp_path: Path
) -> None:
    """A run also creates the capture publication of the others, or says that `validate` prints the statements."""
    file = tmp_path / "pgsieve.yaml"
    other = "  lines: {source: shop, publications: [blank]}\n"
    file.write_text(CONFIG.format(conninfo=conninfo, publications="mutable") + other)
    result = CliRunner().invoke(cli.app, ["validate", "-c", str(file)])
    assert result.exit_code == 1
    assert f'publication "mutable": {MUTABLE}' in result.stdout
    _, statements = result.stdout.split("statements to run:\n")
    assert re.search(r'^create publication "pgsieve_shop_i" for table .*"invoices"', statements, re.MULTILINE)
    assert "keyless" not in statements


def test_names_with_blanks_and_tables_without_a_key_are_shown_as_such(conninfo: str, tmp_path: Path) -> None:
    _, report = validated(conninfo, tmp_path, "blank")
    (changes,) = report["subscriptions"][0]["tables"][0]["changes"]
    assert changes["identity"] == "DEFAULT, without a primary key"
    (warning,) = (w for w in report["warnings"] if w["object"] == "sales")
    assert warning["message"].startswith('table "public.invoices": the names "Line No" stay as they are')


def test_an_impossible_type_of_a_column_is_a_problem(conninfo: str, tmp_path: Path) -> None:
    """Any error that ends the examination of a subscription is reported."""
    code, report = validated(conninfo, tmp_path, "blank", ", types: {public.invoices.n: date}")
    (problem,) = (p for p in report["problems"] if p["object"] == "sales")
    assert code == 1
    assert problem["message"].startswith("a column of PostgreSQL type 23 cannot be of Spark type")


def test_a_missing_java_is_reported_before_a_copy_needs_it(
    conninfo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, report = validated(conninfo, tmp_path, "inserted")
    assert not [w for w in report["warnings"] if w["object"] == "spark"]
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, report = validated(conninfo, tmp_path, "inserted")
    (warning,) = (w for w in report["warnings"] if w["object"] == "spark")
    assert (code, warning["message"]) == (before, "Spark needs Java, and no `java` is on the PATH")
    assert "install a JDK or JRE 17 or 21" in warning["hint"]
    assert 'spark: {master: "threads[' in warning["hint"]


def test_a_lake_that_is_not_a_folder_is_reported_before_a_copy(conninfo: str, tmp_path: Path) -> None:
    (tmp_path / "lake").touch()
    code, report = validated(conninfo, tmp_path, "inserted")
    assert code == 1
    (problem,) = (p for p in report["problems"] if p["object"] == "lake")
    assert problem["message"].startswith(
        f'lake "{tmp_path}/lake" cannot be written: {tmp_path}/lake is not a folder'
    )
    (tmp_path / "lake").unlink()
    assert not [p for p in validated(conninfo, tmp_path, "inserted")[1]["problems"] if p["object"] == "lake"]
    assert not (tmp_path / "lake").exists()


@pytest.mark.usefixtures("orchestrator")
def test_a_missing_right_on_the_schema_of_a_filtered_table_is_told_with_the_grant(shop: Shop) -> None:
    """The role is granted what the hints say, as they say it. Then nothing is left to report, and a run copies the table."""
    database, role = shop.database, f"Reader of {shop.database.info.dbname}"
    database.execute(
        'create schema "Sales"; create table "Sales".t (id int primary key, n int); insert into "Sales".t values (1, 1);'
        f'create role "{role}" login replication; grant create on database {database.info.dbname} to "{role}"'
    )
    try:
        source = shop.written["sources"]["shop"]
        conninfo = re.sub(r"user=\S+", f"user='{role}'", source["conninfo"])
        table = {"table": '"Sales".t', "where": "id > 0"}
        publications = {"mine": {"tables": [table]}}
        shop.configure(
            sources={"shop": {**source, "conninfo": conninfo, "publications": publications}},
            subscriptions={"s": {"source": "shop", "publications": ["mine"]}},
        )
        report = validate(load_config(shop.path))
        assert {problem.sqlstate for problem in report.problems} == {"42501"}, report.problems
        for hint in {problem.hint for problem in report.problems}:
            assert hint is not None
            database.execute(hint.encode())
        # A capture publication is created by the owner of the table.
        for statement in report.statements:
            database.execute(statement.encode())
        report = validate(load_config(shop.path))
        assert report.problems == ()
        assert (ran := shop.cli("run", "s"))[0] == 0, ran
        source_publications = {"mine": {"tables": [{**table, "where": "nowhere > 0"}]}}
        shop.configure(
            sources={"shop": {**source, "conninfo": conninfo, "publications": source_publications}}
        )
        (problem,) = validate(load_config(shop.path)).problems
        assert (problem.object, problem.sqlstate) == ("shop", "42703")
    finally:
        database.execute(f'drop owned by "{role}"; drop role "{role}"')


@pytest.mark.usefixtures("orchestrator")
def test_a_layout_of_a_table_that_left_the_publication_is_a_warning(shop: Shop) -> None:
    tables = {"public.notes": {"cluster_by": ["n"]}}
    shop.written["subscriptions"]["one"]["layout"] = {"tables": tables}
    shop.configure()
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    entry = "does not replicate table public.notes, which its layout names"
    for statement in ("alter publication p drop table notes", "drop table notes"):
        shop.database.execute(statement.encode())
        code, printed = shop.cli("validate")
        assert code == 0, printed
        assert entry in " ".join(printed.split())
        assert "warning: one: " in printed
    tables["public.note"] = tables.pop("public.notes")
    shop.configure()
    code, printed = shop.cli("validate")
    assert code == 1, printed
    assert "problem: one: " in printed


def test_the_removal_of_a_root_that_is_no_longer_captured_is_printed(shop: Shop) -> None:
    database = shop.database
    database.execute(
        "create table tree (a int primary key) partition by range (a);"
        "create table leaf partition of tree for values from (0) to (9);"
        "create publication trees for table tree with (publish_via_partition_root = true)"
    )
    shop.configure(subscriptions={"one": {"source": "shop", "publications": ["trees"]}})

    def execute_statements() -> list[str]:
        statements = [*validate(load_config(shop.path)).statements]
        for statement in statements:
            database.execute(statement.encode())
        return statements

    capture = shop.written["sources"]["shop"]["capture"]
    assert len(execute_statements()) == 1
    database.execute("alter publication trees set (publish_via_partition_root = false)")
    assert f'alter publication "{capture}_root" drop table "public"."tree";' in execute_statements()
    assert execute_statements() == []
