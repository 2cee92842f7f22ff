"""`pgsieve decode` prints the same as pg_recvlogical, confirms nothing, and refuses what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import Result
from typer.testing import CliRunner

from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.ready import prepare_slot
from pgsieve.pipelines.command_line import cli
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer

pytestmark = pytest.mark.slow

CONFIG = """\
lake: ./lake
sources:
  shop: {{conninfo: "{conninfo}"}}
  other: {{conninfo: "dbname=nowhere"}}
subscriptions:
  sales: {{source: shop, publications: [everything], row_filter: publisher}}
"""
SLOT = "pgsieve_shop_sales"
DATABASE = "decoded"
SCHEMA = """
    CREATE TYPE mood AS ENUM ('sad');
    CREATE DOMAIN positive AS int;
    CREATE TABLE t (id int PRIMARY KEY, "user" text, moods mood[], amount positive, big bigint, yes bool);
    CREATE PUBLICATION everything FOR ALL TABLES;
"""
WORKLOAD = [
    """INSERT INTO t VALUES (1, 'it''s é', '{sad,NULL}', 5, 9007199254740993, true), (2, NULL, NULL, NULL, NULL, NULL)""",
    "UPDATE t SET id = 3 WHERE id = 2",
    "DELETE FROM t WHERE id = 3",
    "BEGIN; INSERT INTO t VALUES (4); TRUNCATE t; COMMIT",
]

Decode = Callable[..., Result]


@pytest.fixture
def conninfo(decoding_server: EmbeddedServer) -> Iterator[str]:
    with psycopg.connect(decoding_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {DATABASE}")
        yield decoding_server.conninfo(dbname=DATABASE)
        admin.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s",
            [DATABASE],
        )
        admin.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


@pytest.fixture
def config(conninfo: str, tmp_path: Path) -> Path:
    file = tmp_path / "pgsieve.yaml"
    file.write_text(CONFIG.format(conninfo=conninfo))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(SCHEMA)
    return file


@pytest.fixture
def decode(config: Path) -> Decode:
    def run(*arguments: str, plugin: str = "test_decoding", source: str = "shop") -> Result:
        return CliRunner().invoke(
            cli.app, ["-c", str(config), "decode", source, "--plugin", plugin, *arguments]
        )

    return run


@pytest.fixture
def worked(config: Path, conninfo: str) -> None:
    """Make a slot as `pgsieve run` creates it, and a second one with test_decoding, and write changes."""
    project = build_project(load_config(config))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        prepare_slot(connection, project.slot_streams[SLOT], project.lake.open())
        connection.execute("SELECT pg_create_logical_replication_slot('theirs', 'test_decoding')")
        for statement in WORKLOAD:
            connection.execute(statement)


def received(server: EmbeddedServer, conninfo: str, *options: str) -> str:
    """The output of pg_recvlogical for the second slot, up to now."""
    with psycopg.connect(conninfo) as connection:
        row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
    assert row is not None
    arguments = [text for option in options for text in ("-o", option)]
    command = [
        "-d",
        conninfo,
        "--slot",
        "theirs",
        "--start",
        "--no-loop",
        "-f",
        "-",
        "--endpos",
        row[0],
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    done = subprocess.run(
        [server.programs_path / "pg_recvlogical", *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    return done.stdout


def confirmed(conninfo: str) -> object:
    with psycopg.connect(conninfo) as connection:
        return connection.execute(
            "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", [SLOT]
        ).fetchone()


@pytest.mark.usefixtures("worked")
@pytest.mark.parametrize("options", [[], ["include-xids=false", "skip-empty-xacts"]], ids=["", "options"])
def test_decode_prints_the_same_as_pg_recvlogical(
    decode: Decode, decoding_server: EmbeddedServer, conninfo: str, options: list[str]
) -> None:
    before = confirmed(conninfo)
    result = decode(*(text for option in options for text in ("-o", option)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == received(decoding_server, conninfo, *options)
    assert "moods[public.mood[]]:'{sad,NULL}' amount[public.positive]:'5'" in result.stdout
    assert confirmed(conninfo) == before


@pytest.mark.usefixtures("worked")
def test_decode_prints_the_same_from_the_change_log_as_from_the_slot(
    config: Path, decode: Decode, conninfo: str
) -> None:
    waiting = decode()
    project = build_project(load_config(config))
    slot_stream = project.slot_streams[SLOT]
    drain_slot(slot_stream, project.lake.open(), [], lambda _: None)
    assert decode().stdout == ""
    recorded = decode("--from-change-log")
    assert (recorded.exit_code, recorded.stderr) == (0, "")
    # Without the catalog the name of a domain is unknown.
    assert recorded.stdout == waiting.stdout.replace("[public.positive]", "[int4]")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (9)")
    drain_slot(slot_stream, project.lake.open(), [], lambda _: None)
    assert decode("--from-change-log").stdout.startswith(recorded.stdout)
    assert len(decode("--from-change-log").stdout) > len(recorded.stdout)


@pytest.mark.usefixtures("worked")
def test_json_has_exact_values(decode: Decode) -> None:
    lines = [json.loads(line) for line in decode(plugin="json").stdout.splitlines()]
    assert [line["action"] for line in lines] == [
        *("begin", "insert", "insert", "commit"),
        *("begin", "update", "commit"),
        *("begin", "delete", "commit"),
        *("begin", "insert", "truncate", "commit"),
    ]
    inserted, updated, deleted, truncated = lines[1], lines[5], lines[8], lines[12]
    assert inserted == {
        "action": "insert",
        "xid": lines[0]["xid"],
        "schema": "public",
        "table": "t",
        "new": {
            "id": 1,
            "user": "it's é",
            "moods": "{sad,NULL}",
            "amount": "5",
            "big": 9007199254740993,
            "yes": True,
        },
    }
    assert (updated["old"], updated["new"]["id"], updated["new"]["user"]) == ({"id": 2}, 3, None)
    assert (deleted["old"], "new" in deleted) == ({"id": 3}, False)
    assert (truncated["tables"], truncated["cascade"]) == ([["public", "t"]], False)
    assert lines[0].keys() == {"action", "xid", "lsn", "time"}
    assert lines[3].keys() == {"action", "xid", "lsn", "end_lsn", "time"}


@pytest.mark.usefixtures("worked")
def test_pgoutput_prints_the_messages_themselves(decode: Decode) -> None:
    result = decode("-o", "proto_version=1", plugin="pgoutput")
    assert result.exit_code == 0
    assert result.stdout_bytes.startswith(b"B")
    assert b"it's \xc3\xa9" in result.stdout_bytes


@pytest.mark.parametrize(
    ("arguments", "plugin", "source", "message"),
    [
        (
            [],
            "wal2json",
            "shop",
            'error: output plugin "wal2json" does not exist [58P01]\nhint: plugins: json',
        ),
        (
            ["-o", "foo=1"],
            "test_decoding",
            "shop",
            'error: option "foo" = "1" is unknown [22023]\nhint: options: ',
        ),
        ([], "json", "shoq", "error: no subscription reads a source \"shoq\"\nhint: did you mean 'shop'?"),
        ([], "json", "other", 'error: no subscription reads a source "other"\n'),
        (
            ["--slot", "s"],
            "json",
            "shop",
            f'error: source "shop" has no slot "s"\nhint: allowed here: {SLOT}',
        ),
        ([], "json", "shop", f'error: source "shop": replication slot "{SLOT}" does not exist [42704]\n'),
        (["--from-change-log"], "json", "shop", 'error: source "shop": the change log has nothing of slot'),
    ],
    ids=["plugin", "option", "source", "unread", "slot", "missing", "change log"],
)
def test_missing_objects_are_refused(
    decode: Decode, arguments: list[str], plugin: str, source: str, message: str
) -> None:
    result = decode(*arguments, plugin=plugin, source=source)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)


def test_a_change_log_that_needs_spark_is_refused(config: Path, decode: Decode) -> None:
    config.write_text(config.read_text().replace("./lake", "hdfs://name/lake"))
    result = decode("--from-change-log")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith('error: lake "hdfs://name/lake" can be read only by Spark')


@pytest.mark.usefixtures("worked")
def test_one_of_several_slots_has_to_be_named(config: Path, decode: Decode, conninfo: str) -> None:
    with config.open("a") as file:
        file.write("  more: {source: shop, publications: [everything]}\n")
    result = decode()
    assert result.exit_code == 2
    assert result.stderr == (
        f'error: source "shop" has several slots\nhint: name one with --slot: pgsieve_shop, {SLOT}\n'
    )
    assert decode("--slot", SLOT).stdout.count("\n") > len(WORKLOAD)
    # In mode pipeline pgsieve's own publications read the slot. The first run creates them.
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('pgsieve_shop', 'pgoutput')")
    result = decode("--slot", "pgsieve_shop")
    assert result.exit_code == 2
    assert "is read with publications that do not exist: pgsieve_shop [42704]" in result.stderr


EMPTY = """\
lake: ./lake
sources:
  shop: {{conninfo: "{conninfo}"}}
subscriptions:
  sales: {{source: shop, publications: [everything], two_phase: true}}
"""


@pytest.mark.drawn
def test_a_prepared_transaction_without_changes_is_no_obstacle(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """PostgreSQL 18 sends only the Prepare of such a transaction; its own subscriber gets stuck there."""
    name = "decoded_empty"
    config, conninfo = tmp_path / "pgsieve.yaml", publisher_server.conninfo(dbname=name)
    config.write_text(EMPTY.format(conninfo=conninfo))

    def pgsieve(*arguments: str) -> str:
        result = CliRunner().invoke(cli.app, ["-c", str(config), *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    try:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
            connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
            pgsieve("run")
            for gid in ("empty", "empty_nodecode"):
                connection.execute(
                    f"BEGIN; SELECT FROM t WHERE id = 1 FOR UPDATE; PREPARE TRANSACTION '{gid}'"
                )
                pgsieve("decode", "shop", "-P", "test_decoding")
                if gid == "empty":
                    pgsieve("run")
                connection.execute(f"COMMIT PREPARED '{gid}'")
                connection.execute("INSERT INTO t SELECT max(id) + 1 FROM t")
            if publisher_server.version >= 18:
                pgsieve("decode", "shop", "-P", "test_decoding")
            pgsieve("run")
            assert "every table equals the publisher" in pgsieve("check")
            pgsieve("drop", "sales")
    finally:
        with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
