"""`pgsieve run` starts Spark while it imports its own modules, where the publisher has much for it, and only there."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pgsieve.pipelines.command_line.app import load_config
from pgsieve.pipelines.commands.early_start import start_early
from tests.fixtures import commands
from tests.fixtures.shop import Shop

pytestmark = [pytest.mark.slow, pytest.mark.spark]

_LIMIT = {"spark.pgsieve.smallBytes": "100000"}


def _begin(file: Path) -> bool:
    """Do what the command does first. Return whether this process has a session after that."""
    from pyspark import SparkContext

    config = load_config(file)
    start_early(config, config.select(()))
    for name in ("pgsieve-early-start", "pgsieve-spark"):
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join()
    return SparkContext._active_spark_context is not None


def _starts_spark(shop: Shop) -> bool:
    return commands.call(_begin, shop.path)


def test_spark_starts_early_for_many_rows_to_copy_and_for_much_wal(shop: Shop):
    """It takes long: seven processes, three of them with Spark."""
    shop.configure(spark={"conf": _LIMIT})
    assert not _starts_spark(shop)
    shop.database.execute("insert into notes select i, i from generate_series(5, 9000) i")
    assert _starts_spark(shop)
    command = [sys.executable, "-m", "pgsieve", "-c", str(shop.path), "--log-level", "info", "run"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (said.stdout + said.stderr).count("starting Spark") == 1
    assert shop.state("one", "notes") == "ready"
    assert not _starts_spark(shop)
    shop.database.execute("update notes set n = n + 1; update notes set n = n + 1")
    assert _starts_spark(shop)
    shop.configure(spark={"master": "threads[2]", "conf": _LIMIT})
    assert not _starts_spark(shop)


def test_a_server_that_does_not_answer_is_reported_by_the_run_alone(shop: Shop):
    shop.configure(sources={"shop": {"conninfo": "host=127.0.0.1 port=1 dbname=shop connect_timeout=2"}})
    assert not _starts_spark(shop)
