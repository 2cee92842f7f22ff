"""Records `pgsieve demo` in a terminal: its output, as an asciicast and as an animated picture.

In: the files' path without a suffix. Out: `.cast`, which asciinema plays
(https://docs.asciinema.org/manual/asciicast/v2/), and `.svg`. Pauses in which only a spinner turns are shortened,
and pauses after a text to read are lengthened; nothing else is changed.
"""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

COLUMNS, ROWS = 98, 26
_PROMPT = b"$ "
_COMMAND = "pgsieve demo --keep ./demo"
#: The factor by which time with only a spinner is shortened, and the additional time for a text to read.
_SPINNER_SPEEDUP = 6
_READING_SECONDS = 2.0
#: The least time between two frames. Spinners turn faster.
_FRAME_MILLISECONDS = 200
_LAST_FRAME_MILLISECONDS = 8000
_TEMPLATE = "window_frame"

Event = tuple[float, str]


def _keys() -> Iterator[str]:
    """The keys that type the command."""
    yield from _COMMAND
    yield "\n"


def record_demo() -> list[Event]:
    """Run the demo in a terminal's shell; return the terminal's output with times in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PS1": _PROMPT.decode(),
            "TERM": "xterm-256color",
        }
        shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=environ,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        events: list[Event] = []
        began = time.monotonic()

        def read_until_prompt() -> None:
            tail = b""
            while not tail.endswith(_PROMPT):
                if select.select([leader], [], [], 300)[0]:
                    piece = os.read(leader, 65536)
                    tail = (tail + piece)[-len(_PROMPT) :]
                    events.append((time.monotonic() - began, piece.decode(errors="replace")))

        read_until_prompt()
        for key in _keys():
            os.write(leader, key.encode())
            time.sleep(0.05)
        read_until_prompt()
        shell.kill()
        shell.wait()
        os.close(leader)
    return events


def adjust_pauses(events: list[Event]) -> list[Event]:
    """Shorten pauses with only a spinner, and lengthen the pause after the table to read."""
    adjusted: list[Event] = []
    before = now = 0.0
    is_table = False
    for at, text in events:
        is_spinner = "\n" not in text and "\r" in text
        now += (at - before) / (_SPINNER_SPEEDUP if is_spinner else 1)
        if is_table:
            now += _READING_SECONDS
        adjusted.append((round(now, 3), text))
        before, is_table = at, "row_filter:" in text
    return adjusted


def record(path: Path, termtosvg: str) -> None:
    """Record the demo, and write both files; `termtosvg` is the program that draws the picture."""
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": _COMMAND}
    lines = [json.dumps(header), *(json.dumps([at, "o", text]) for at, text in adjust_pauses(record_demo()))]
    cast, picture = path.with_suffix(".cast"), path.with_suffix(".svg")
    cast.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pace = ["-m", str(_FRAME_MILLISECONDS), "-D", str(_LAST_FRAME_MILLISECONDS)]
    subprocess.run([termtosvg, "render", str(cast), str(picture), *pace, "-t", _TEMPLATE], check=True)
