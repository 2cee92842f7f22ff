"""Every benchmark still runs, as a process, with the smallest possible size. It must print something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = {
    "backlog.py": ["--changes", "20000", "--slice", "1"],
    "choices.py": ["4000", "--changes", "400", "--rounds", "1"],
    "consistency.py": ["--rows", "10000"],
    "decode.py": ["--rows", "1000", "--runs", "1"],
    "follow_latency.py": ["5"],
    "follow_long.py": ["10", "5"],
    "foreign_writes.py": ["--megabytes", "1", "--minutes", "1"],
    "idle_tables.py": ["1", "2"],
    "key_conflicts.py": ["--rows", "10000", "--times", "1"],
    "large_transaction.py": ["--rows", "1000"],
    "no_cliff.py": ["--rows", "4000", "--changes", "400", "--times", "1"],
    "object_store.py": ["--tables", "1", "--rounds", "1", "--rows", "1000", "--wait", "1"],
    "replication.py": ["--rows", "4000"],
    "scale.py": ["--rows", "4000", "--changes", "4000"],
    "scale_model.py": ["--minutes", "2"],
    "scattered_updates.py": ["10000", "20000", "--updates", "100"],
    "slot_consumption.py": ["--rows", "4000", "--rounds", "2"],
    "small_changes.py": ["1", "2"],
    "small_limit.py": ["1"],
    "subscriptions.py": ["1", "2", "--rows", "1000", "--rounds", "1"],
    "transports.py": ["--rows", "1000", "--runs", "1"],
    "views.py": ["4000", "--changes", "400"],
}


def test_each_benchmark_has_a_test() -> None:
    assert {path.name for path in (ROOT / "benchmarks").glob("*.py")} == SMALL.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    """It takes long: a benchmark starts servers and processes."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *SMALL[name]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
