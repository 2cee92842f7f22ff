"""What a step writes on stdout or stderr is in Dagster's files and on the terminal, and no process is started for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dagster as dg
import psutil
import pytest

from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.config.model import Config

_LINES = "".join(f"line {number}\n" for number in range(20_000))


def test_the_output_of_a_step_is_printed_and_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    earlier_children = set(psutil.Process().children())

    @dg.asset
    def talkative() -> None:
        assert set(psutil.Process().children()) <= earlier_children
        os.write(sys.stdout.fileno(), b"from a library\n")
        sys.stderr.write(_LINES)

    with open_instance(Config.model_construct()) as instance:
        dg.materialize(
            [talkative],
            instance=instance,
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        )
    printed = capfd.readouterr()
    (output_path,), (error_path,) = (
        list(tmp_path.rglob(f"compute_logs/*.{kind}")) for kind in ("out", "err")
    )
    assert printed.out == output_path.read_text() == "from a library\n"
    assert printed.err == error_path.read_text()
    assert printed.err.endswith(_LINES)
