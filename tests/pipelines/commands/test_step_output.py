"""What a step writes is in Dagster's files and on the terminal, without more processes; other libraries print nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dagster as dg
import psutil
import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

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


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_a_database_is_closed_prints_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with open_instance(Config.model_construct()):
        pass
    caplog.clear()
    engine = create_engine("sqlite://", poolclass=NullPool)
    monkeypatch.setattr(engine.dialect, "do_close", _interrupt)
    with pytest.raises(KeyboardInterrupt), engine.connect():
        pass
    assert not caplog.records
