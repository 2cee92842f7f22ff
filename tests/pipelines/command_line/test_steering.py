"""Names of a database that would steer a terminal, or reorder what stands beside them, are shown as escapes; JSON has them as they are."""

from __future__ import annotations

import json
import logging

import dagster as dg
import pytest
from psycopg import sql
from rich.text import Text as RichText

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_identifier
from pgsieve.decoding.visible import _CONTROLS, visible, visible_json
from pgsieve.pipelines.command_line.console import Text, show_warnings
from tests.fixtures.shop import Shop

HOSTILE = "a\x1b[31mred\x07\r\b\u202egpj\x9b2J\nerror: no\u2028z"
SHOWN = r"a\x1b[31mred\x07\r\x08\u202egpj\x9b2J\nerror: no\u2028z"


def steering(text: str) -> str:
    """What in a text steers, other than its own line ends."""
    return "".join(_CONTROLS.findall(text.replace("\n", "")))


def test_what_steers_is_escaped_and_nothing_else() -> None:
    assert visible(HOSTILE) == SHOWN
    assert (
        visible("plain, größe, 表, می‌خواهم, 👩‍👩, \u3000 \\x1b")
        == "plain, größe, 表, می‌خواهم, 👩‍👩, \u3000 \\x1b"
    )
    assert visible("\udc80\U000e0041\ufeff\u2066") == r"\udc80\U000e0041\ufeff\u2066"
    for character in map(
        chr, (*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    ):
        assert visible(character).isascii()
        assert visible(character).isprintable()
    text = json.dumps({HOSTILE: [HOSTILE, "\U000e0041"]}, indent=2, ensure_ascii=False)
    assert json.loads(visible_json(text)) == {HOSTILE: [HOSTILE, "\U000e0041"]}
    assert steering(visible_json(text)) == ""


def test_each_way_of_writing_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert Text.assemble((HOSTILE, "red"), HOSTILE).plain == SHOWN * 2
    assert Text(HOSTILE).append(HOSTILE).append(RichText("plain")).plain == SHOWN * 2 + "plain"
    error = PgsieveError(HOSTILE, hint=HOSTILE)
    assert (error.message, error.hint, str(error)) == (SHOWN, SHOWN, f"{SHOWN}\nhint: {SHOWN}")
    show_warnings()
    assert logging.lastResort is not None
    record = logging.LogRecord("pgsieve", logging.WARNING, __file__, 1, "held by %s", (HOSTILE,), None)
    assert logging.lastResort.format(record) == f"held by {SHOWN}"


@pytest.mark.drawn
def test_names_of_a_database_steer_nothing(shop: Shop) -> None:
    name, other = quote_identifier(HOSTILE), quote_identifier(f"{HOSTILE} aside")
    execute = shop.database.execute
    label = sql.Literal(HOSTILE).as_string(None)
    execute(f"create schema {name}; create type {name}.label as enum ({label})")
    execute(f"create table {name}.{name} (id int primary key, e {name}.label)")
    execute(f"insert into {name}.{name} values (1, null), (2, null)")
    execute(f"create table {name}.{other} ({name} int primary key, {quote_identifier(HOSTILE.upper())} int)")
    execute(f"create publication {name} for table {name}.{name} where (id > 0), {name}.{other}")
    shop.configure(
        subscriptions={
            "one": {"source": "shop", "publications": [HOSTILE]},
            "two": {"source": "shop", "publications": [f"{HOSTILE} missing"]},
        }
    )
    for command in ("validate", "run", "status", "check", "drop one"):
        code, told = shop.cli(*command.split())
        assert steering(told) == "", (command, told)
        assert not any(line.startswith("error: no") for line in told.splitlines()), (command, told)
        assert code in (0, 1, 2), told
        if command in ("validate", "run", "status"):
            assert SHOWN in told, (command, told)
        if command == "status":
            code, told = shop.cli("status", "--json")
            tables = [t for s in json.loads(told)["subscriptions"] for t in s["tables"]]
            assert (HOSTILE, HOSTILE) in [(t["schema"], t["name"]) for t in tables]
            assert steering(told) == ""
    with dg.DagsterInstance.get() as instance:
        entries = [entry for run in instance.get_runs() for entry in instance.all_logs(run.run_id)]
    said = [entry.user_message for entry in entries if "[31mred" in entry.user_message]
    assert said
    assert [message for message in said if steering(message)] == []
