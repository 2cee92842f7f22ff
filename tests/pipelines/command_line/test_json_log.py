"""stderr as JSON: every line is one object, whichever library writes it. Copies are small and need no JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.fixtures import commands
from tests.fixtures.shop import Shop

FOREIGN = """
import logging, os, subprocess, warnings
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line import console
from pgsieve.resources.passwords import remember_secrets

remember_secrets("correct horse")
print("before", flush=True)
console.log_as_json()
console.log_as_json()
os.write(2, b"from a library: correct horse\\n\\n")
subprocess.run(["sh", "-c", "echo from a child >&2"], check=True)
logging.getLogger("x").warning("a warning of %s", "x")
try:
    1 / 0
except ZeroDivisionError as error:
    logging.getLogger("x").exception("failed")
    console.print_fault(error, verbose=True)
warnings.warn("old")
console.print_error(PgsieveError("table is gone", hint="look", sqlstate="42P01"))
with console.show_progress() as progress:
    progress.start("copy")
    progress.tell("half of it")
    progress.finish("copy")
os.write(2, b"without an end")
console.log_as_text()
os.write(2, b"text again\\n")
"""


def run(*arguments: str, **variables: str) -> tuple[int, str, list[str]]:
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
        timeout=300,
    )
    return process.returncode, process.stdout, process.stderr.splitlines()


def test_every_librarys_output_on_stderr_is_one_object_per_line() -> None:
    code, _, lines = run("-c", FOREIGN)
    assert (code, lines.pop()) == (0, "text again")
    objects: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert all(each.keys() >= {"time", "level"} for each in objects)
    foreign = [each["message"] for each in objects if each.get("logger") == "stderr"]
    assert foreign == ["from a library: ...", "from a child", "without an end"]
    own = [
        {name: value for name, value in each.items() if name not in {"time", "traceback", "seconds"}}
        for each in objects
        if each.get("logger") != "stderr"
    ]
    warned = own.pop(3)
    assert warned["logger"] == "py.warnings"
    assert own == [
        {"level": "warning", "logger": "x", "message": "a warning of x"},
        {"level": "error", "logger": "x", "message": "failed"},
        {"level": "error", "message": "unexpected ZeroDivisionError"},
        {"level": "error", "message": "table is gone", "hint": "look", "sqlstate": "42P01"},
        {"level": "info", "event": "started", "task": "copy"},
        {"level": "info", "message": "half of it"},
        {"level": "info", "event": "ended", "task": "copy"},
    ]
    assert [("traceback" in each) for each in objects].count(True) == 2


def test_a_run_logs_json_and_prints_json(shop: Shop) -> None:
    shop.copy()
    source = shop.written["sources"]["shop"]
    config = ["-c", str(shop.path)]
    done = commands.run(*config, "run", "--json", "--log-format", "json")
    assert done.returncode == 0, done.stderr
    subscriptions = json.loads(done.stdout)["subscriptions"]
    assert [(each["name"], each["changed"]) for each in subscriptions] == [("one", False), ("two", False)]
    objects = [json.loads(line) for line in done.stderr.splitlines()]
    ended = {each["task"]: each["seconds"] for each in objects if each.get("event") == "ended"}
    assert f"drain {source['slot']}" in ended
    assert all(seconds >= 0 for seconds in ended.values())

    shop.configure(sources={"shop": {**source, "conninfo": "host=127.0.0.1 port=1 dbname=shop"}})
    done = commands.run(*config, "run", "--json", environment={**os.environ, "PGSIEVE_LOG_FORMAT": "json"})
    assert done.returncode == 2
    (failure,) = json.loads(done.stdout)["failures"]
    assert failure["subscriptions"] == ["one", "two"]
    errors = [each for each in map(json.loads, done.stderr.splitlines()) if each["level"] == "error"]
    assert [each["subscriptions"] for each in errors] == [["one", "two"]]
    assert errors[0]["message"] == failure["error"]["message"]
