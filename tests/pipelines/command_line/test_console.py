"""Progress and figures have the right form on each kind of terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from pgsieve.pipelines.command_line import console
from tests.fixtures.shop import Shop
from tests.fixtures.terminal import shown_on_a_terminal


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 bytes"), (10_239, "10239 bytes"), (10_240, "10 kB"), (10 * 2**20, "10 MB")),
        *((10 * 2**30, "10 GB"), (100 * 2**40, "100 TB"), (None, None)),
    ],
)
def test_sizes_are_written_as_pg_size_pretty_does(count, text):
    assert console.format_bytes(count) == text


def test_progress_off_a_terminal_is_a_line_at_each_end(capsys):
    with console.show_progress() as progress:
        progress.start("copy public.orders")
        progress.finish("copy public.orders")
        progress.start("apply")
        progress.finish("apply")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "copy public.orders: started",
        "copy public.orders: ended after 0.0 s",
        "apply: started",
        "apply: ended after 0.0 s",
    ]


def test_progress_on_a_terminal_is_a_bar_with_the_unchanged_name(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "stderr_console", lambda **_: Console(file=screen, force_terminal=True, width=100)
    )
    with console.show_progress() as progress:
        progress.start("copy public.[red]t")
        progress.finish("copy public.[red]t")
    assert "copy public.[red]t" in screen.getvalue()


PRINTED_AFTER_A_TASK = """
from pgsieve.pipelines.command_line import console
with console.show_progress() as progress:
    progress.start("a task")
    progress.finish("a task")
    console.print_out("a result")
"""


def test_a_result_does_not_share_the_line_of_a_task() -> None:
    code, shown = shown_on_a_terminal("-c", PRINTED_AFTER_A_TASK, seconds=60)
    assert code == 0
    after = shown.rpartition(b"a task")[2]
    assert after, shown
    assert after.partition(b"a result")[0].endswith(b"\r\x1b[2K"), shown


@pytest.mark.drawn
def test_messages_on_a_terminal_have_separate_lines(shop: Shop) -> None:
    """Dagster puts a pipe between a step and the terminal. Without a separate line, a message would continue the running task's line."""
    code, shown = shown_on_a_terminal("-m", "pgsieve", "-c", str(shop.path), "run", "two", seconds=120)
    assert code == 0, shown.decode()
    assert b"copy 1 table of two" in shown, "the task's line is missing"
    lines = re.findall(rb"([^\n]*)public\.stock: 4 rows copied in", shown)
    assert len(lines) == 1
    assert lines[0].endswith(b"\x1b[2K"), shown.decode()
