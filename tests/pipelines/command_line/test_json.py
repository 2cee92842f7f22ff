"""`--json`: every command with a result also prints it as JSON, from a real source and lake. Only the demo needs a JVM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from pgsieve.pipelines.command_line import cli
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import find_connection_sqlstate
from tests.fixtures.shop import Shop

ROOT = Path(__file__).parents[3]

#: Commands whose stdout is not a result, and why.
WITHOUT = {
    "decode": "the messages are in the plugin's format, and `--plugin json` is one",
    "refresh-defs-state": "it prints nothing",
    "ui": "it serves until it is stopped",
}

#: Arguments of each command, and the keys of its result, in an order in which each has something to do.
CALLS = [
    ("validate", "", {"publications", "subscriptions", "problems", "statements", "warnings"}),
    ("run", "--explain", {"tables", "waiting_bytes", "small_bytes"}),
    ("run", "", {"subscriptions", "failures"}),
    ("run", "--explain --log-level warning", {"tables", "waiting_bytes", "small_bytes"}),
    ("status", "", {"slots", "subscriptions"}),
    ("check", "", {"tables", "failures", "sequences", "warnings"}),
    ("read", "one", {"subscription", "lsn", "tables", "folder", "warnings"}),
    ("refilter", "one --plan public.orders", {"subscription", "planned", "lsn", "tables"}),
    ("restore", "one {folder}", {"subscription", "lsn", "tables", "folder", "warnings"}),
    ("resync", "one public.notes", {"subscription", "tables", "lost", "run", "followed", "damaged"}),
    ("skip", "one 7/7", {"subscription", "skip_lsn"}),
    ("skip", "one none", {"subscription", "skip_lsn"}),
    ("enable", "one", {"subscription", "changed"}),
    ("maintain", "one", None),
    ("engine status", "", {"serving", "address", "pid", "version", "current", "used", "seconds", "resident_bytes"}),
    ("engine stop", "", {"stopped"}),
    ("drop", "two --delete-tables", {"subscription", "slot", "altered", "publications", "kept_for", "folders", "left", "unregistered"}),
]  # fmt: skip
#: Where other tests call the remaining commands: these need a JVM, their own servers, or a machine's jars.
ELSEWHERE = {
    "init": ('"init"', __file__),
    "demo": ('"demo", "--json"', "tests/test_distribution.py"),
    "jars": ('"jars", "copy", "--json"', "tests/pipelines/command_line/test_cli.py"),
    "engine start": ('"engine", "start", "--json"', "tests/resources/lake/engine/test_engine.py"),
}


def _commands(click: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in click.commands.items():
        if hasattr(child, "commands"):
            yield from _commands(child, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", child


COMMANDS = dict(_commands(typer.main.get_command(cli.app)))


def test_every_command_with_a_result_has_the_option() -> None:
    without = {
        name
        for name, command in COMMANDS.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == WITHOUT.keys()
    assert {name for name, *_ in CALLS} | ELSEWHERE.keys() | WITHOUT.keys() == COMMANDS.keys()
    for call, file in ELSEWHERE.values():
        assert call in (ROOT / file).read_text(encoding="utf-8"), file


@pytest.mark.slow
def test_stdout_is_the_result_and_nothing_else(shop: Shop) -> None:
    shop.configure(spark={"engine": "use"})
    for name, arguments, keys in CALLS:
        given = arguments.format(folder=shop.path.parent / "restored").split()
        command = ["-c", str(shop.path), *name.split(), *given, "--json"]
        done = CliRunner().invoke(cli.app, command, prog_name="pgsieve")
        # Rows of the server's publications are only copied, so no Spark runs.
        has_output = name in {"engine status", "refilter"}
        assert done.exit_code == (1 if has_output else 0), (name, done.stdout, done.stderr)
        result = json.loads(done.stdout)
        if keys is None:
            assert [each.keys() for each in result]
        else:
            assert result.keys() == keys, name


def test_init_prints_json_too(publisher_server: EmbeddedServer, tmp_path: Path) -> None:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database init_json")
        conninfo = publisher_server.conninfo(dbname="init_json")
        with psycopg.connect(conninfo, autocommit=True) as owner:
            owner.execute("create table t (a int primary key); create publication p for table t")
        command = ["-c", str(tmp_path / "pgsieve.yaml"), "init", "--conninfo", conninfo, "--json"]
        done = CliRunner().invoke(cli.app, command, prog_name="pgsieve")
        admin.execute("drop database init_json with (force)")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout).keys() == {
        *("config", "statements", "variable", "role", "validation", "inserts_only")
    }


@pytest.mark.parametrize("arguments", ["demo --ui --json", "status --prometheus --json"])
def test_a_command_with_another_format_refuses_json(arguments: str) -> None:
    done = CliRunner().invoke(cli.app, arguments.split(), prog_name="pgsieve")
    assert done.exit_code == 2
    assert "`--json`" in done.stderr
    assert json.loads(done.stdout)["error"]["message"] in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("status --json -c /nowhere/pgsieve.yaml", "cannot be read"),
        ("run --json --bogus", "No such option"),
        ("engine status --json --bogus", "No such option"),
        ("bogus --json", "No such command"),
        ("--bogus status --json", "No such option"),
        ("skip --json", "Missing argument"),
    ],
)
def test_a_refusal_is_a_result_too(arguments: str, says: str) -> None:
    done = CliRunner().invoke(cli.app, arguments.split(), prog_name="pgsieve")
    assert (done.exit_code, done.stdout.count("\n")) == (2, 1)
    error = json.loads(done.stdout)["error"]
    assert error.keys() == {"message", "hint", "sqlstate"}
    assert says in error["message"]


def test_a_connection_that_is_refused_has_a_sqlstate_and_leaves_the_slot_unknown(shop: Shop) -> None:
    source = shop.written["sources"]["shop"]
    refused = {"dbname": "nosuch", "user": "nosuch", "port": "1"}
    states = {}
    for parameter, value in refused.items():
        away = {**source, "conninfo": make_conninfo(source["conninfo"], **{parameter: value})}
        shop.configure(sources={"shop": away})
        done = CliRunner().invoke(
            cli.app, ["-c", str(shop.path), "resync", "one", "--json"], prog_name="pgsieve"
        )
        assert done.exit_code == 2
        states[parameter] = json.loads(done.stdout)["error"]["sqlstate"]
    assert states == {"dbname": "3D000", "user": "28000", "port": "08006"}
    done = CliRunner().invoke(cli.app, ["-c", str(shop.path), "status", "--json"], prog_name="pgsieve")
    (slot,) = json.loads(done.stdout)["slots"]
    assert (done.exit_code, slot["exists"], slot["active"]) == (2, "unknown", "unknown")
    assert "[08006]" in slot["problem"]
    output = shop.cli("status")[1]
    assert "[08006]\n  hint: check host" in output
    shop.configure(sources={"shop": source})


@pytest.mark.parametrize(
    ("output", "sqlstate"),
    [
        ('FATAL:  password authentication failed for user "clerk"', "28P01"),
        ('FATAL:  no pg_hba.conf entry for host "::1", user "clerk", database "shop"', "28000"),
        ("FATAL:  sorry, too many clients already", "53300"),
        ("FATAL:  the database system is starting up", "57P03"),
        ("FATAL:  le mot de passe est faux", "08006"),
    ],
)
def test_the_text_of_a_refused_connection_gives_the_sqlstate(output: str, sqlstate: str) -> None:
    assert find_connection_sqlstate(psycopg.OperationalError(f"connection failed: {output}")) == sqlstate
