"""Names of a database that would control a terminal, or reorder text around them, are shown as escapes. JSON keeps them unchanged."""

from __future__ import annotations

import json
import logging

import dagster as dg
import pytest
from psycopg import sql
from rich.text import Text as RichText

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_identifier
from pgsieve.decoding.visible import _CONTROLS, escape_controls, escape_controls_in_json
from pgsieve.pipelines.command_line.console import Text, install_warning_formatter
from tests.fixtures.shop import Shop

HOSTILE = "a\x1b[31mred\x07\r\b\u202egpj\x9b2J\nerror: no\u2028z"
SHOWN = r"a\x1b[31mred\x07\r\x08\u202egpj\x9b2J\nerror: no\u2028z"


def control_characters(text: str) -> str:
    """The control characters in a text, except line ends."""
    return "".join(_CONTROLS.findall(text.replace("\n", "")))


def test_only_control_characters_are_escaped() -> None:
    assert escape_controls(HOSTILE) == SHOWN
    assert (
        escape_controls("plain, größe, 表, می‌خواهم, 👩‍👩, \u3000 \\x1b")
        == "plain, größe, 表, می‌خواهم, 👩‍👩, \u3000 \\x1b"
    )
    assert escape_controls("\udc80\U000e0041\ufeff\u2066") == r"\udc80\U000e0041\ufeff\u2066"
    for character in map(
        chr, (*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    ):
        assert escape_controls(character).isascii()
        assert escape_controls(character).isprintable()
    text = json.dumps({HOSTILE: [HOSTILE, "\U000e0041"]}, indent=2, ensure_ascii=False)
    assert json.loads(escape_controls_in_json(text)) == {HOSTILE: [HOSTILE, "\U000e0041"]}
    assert control_characters(escape_controls_in_json(text)) == ""


def test_every_kind_of_output_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert Text.assemble((HOSTILE, "red"), HOSTILE).plain == SHOWN * 2
    assert Text(HOSTILE).append(HOSTILE).append(RichText("plain")).plain == SHOWN * 2 + "plain"
    error = PgsieveError(HOSTILE, hint=HOSTILE)
    assert (error.message, error.hint, str(error)) == (SHOWN, SHOWN, f"{SHOWN}\nhint: {SHOWN}")
    install_warning_formatter()
    assert logging.lastResort is not None
    record = logging.LogRecord("pgsieve", logging.WARNING, __file__, 1, "held by %s", (HOSTILE,), None)
    assert logging.lastResort.format(record) == f"held by {SHOWN}"


@pytest.mark.drawn
def test_names_of_a_database_control_no_terminal(shop: Shop) -> None:
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
        code, output = shop.cli(*command.split())
        assert control_characters(output) == "", (command, output)
        assert not any(line.startswith("error: no") for line in output.splitlines()), (command, output)
        assert code in (0, 1, 2), output
        if command in ("validate", "run", "status"):
            assert SHOWN in output, (command, output)
        if command == "status":
            code, output = shop.cli("status", "--json")
            tables = [t for s in json.loads(output)["subscriptions"] for t in s["tables"]]
            assert (HOSTILE, HOSTILE) in [(t["schema"], t["name"]) for t in tables]
            assert control_characters(output) == ""
    with dg.DagsterInstance.get() as instance:
        entries = [entry for run in instance.get_runs() for entry in instance.all_logs(run.run_id)]
    messages = [entry.user_message for entry in entries if "[31mred" in entry.user_message]
    assert messages
    assert [message for message in messages if control_characters(message)] == []
