"""Commands that start a JVM, on a terminal: all lines there are pgsieve's, and none is log4j's, Ivy's or the JVM's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.killable import NOT_SMALL
from tests.fixtures.shop import Shop
from tests.fixtures.spark_servers import SMALL_DATA
from tests.fixtures.terminal import shown_on_a_terminal

pytestmark = pytest.mark.spark

_FOREIGN = re.compile(
    r"\d\d:\d\d:\d\d (TRACE|DEBUG|INFO|WARN|ERROR|FATAL) |log4j|SLF4J|^WARNING: |Setting default log level|:: loading settings ::"
    r"|Traceback",
    re.MULTILINE,
)
_STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _shown(*arguments: str) -> str:
    code, shown = shown_on_a_terminal("-m", "pgsieve", *arguments, seconds=600)
    text = _STEERING.sub("", shown.decode().replace("\r", "\n"))
    assert code == 0, text
    assert not _FOREIGN.search(text), text
    return text


@pytest.mark.drawn
def test_no_line_of_spark_reaches_a_terminal(shop: Shop) -> None:
    """A run, a copy, maintenance and a check by a Spark of their own, then by the warm engine: eight starts of Python, four of a JVM."""
    shop.configure(spark={"master": "local[1]", "conf": {**SMALL_DATA, **NOT_SMALL}})
    config = ("-c", str(shop.path))
    assert "started" not in _shown("jars")
    assert "4 rows" in _shown("run", *config) or shop.ids("one", "orders") == [2, 3, 4]
    shop.database.execute("insert into orders values (5, 5)")
    for command in ("run", "resync one public.orders", "maintain one", "check one"):
        _shown(*command.split(), *config)
    shop.configure(spark={**shop.written["spark"], "engine": "use"})
    _shown("engine", "start", *config)
    try:
        shop.database.execute("insert into orders values (6, 6)")
        _shown("run", *config)
    finally:
        _shown("engine", "stop", *config)
    assert shop.ids("one", "orders") == [2, 3, 4, 5, 6]


@pytest.mark.long
def test_no_line_of_spark_reaches_a_terminal_from_the_demo(tmp_path: Path) -> None:
    text = _shown("demo", "--rows", "2000", "--keep", str(tmp_path / "demo"))
    assert "Every replica holds just the rows" in text
