"""Malformed bytes are refused with the documented error, however the messages of a server are mutated.

hypothesis mutates them in this process, and a fuzzer guided by coverage (atheris, libFuzzer) in another, for PGSIEVE_BUDGET_SECONDS
(6) over all targets. `python -m tests.fuzzing` fuzzes one target for any time.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tracemalloc
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.recordings import FOLDER
from tests.fixtures.tries import budget_seconds
from tests.fuzzing.targets import TARGETS, seeds

SECONDS = budget_seconds(6) / len(TARGETS)
LIES = (
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff",
    b"\xff\xff",
    b"\0\0\0\0",
    b"\0",
    b"N",
    b"K",
    b"t",
    b"\x80",
)


@cache
def seeds_of(name: str) -> list[bytes]:
    return sorted(set(seeds(name)), key=lambda seed: (len(seed), seed))


@st.composite
def mutated(draw, name):
    """A seed in which some bytes were flipped, inserted, deleted or cut off."""
    data = bytearray(draw(st.sampled_from(seeds_of(name))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 4) | st.just(len(data)))
        data[at : at + length] = draw(st.binary(max_size=5) | st.sampled_from(LIES))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
@given(st.data())
def test_mutated_messages_are_refused_or_accepted(name, data):
    TARGETS[name](data.draw(mutated(name)))


@pytest.mark.parametrize("name", ["messages", "session", "envelope"])
@settings(max_examples=50)
@given(st.data())
def test_memory_is_bounded_by_the_bytes(name, data):
    """A value of one byte needs an object of several words, but no object is as large as a count or a length in the bytes says."""
    malformed = data.draw(mutated(name))
    tracemalloc.start()
    try:
        TARGETS[name](malformed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(malformed) + 16_384


if (sys.platform, platform.machine()) == ("linux", "x86_64"):  # atheris has a wheel here

    @pytest.mark.drawn
    @pytest.mark.parametrize("name", TARGETS)
    def test_a_fuzzer_finds_nothing(name: str, tmp_path: Path) -> None:
        seconds = max(1, round(SECONDS))
        arguments = [
            name,
            str(tmp_path / "corpus"),
            f"-max_total_time={seconds}",
            f"-artifact_prefix={tmp_path}/",
        ]
        fuzzing = subprocess.run(
            [sys.executable, "-m", "tests.fuzzing", *arguments],
            cwd=FOLDER.parent.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        findings = [
            f"{file.name}: {file.read_bytes().hex()}" for file in tmp_path.glob("*-*") if file.is_file()
        ]
        assert fuzzing.returncode == 0, "\n".join([fuzzing.stdout, fuzzing.stderr[-4000:], *findings])
        done = re.search(r"Done (\d+) runs", fuzzing.stderr)
        assert done is not None
        assert int(done[1]) > len(seeds_of(name)), "only the seeds were tried"
