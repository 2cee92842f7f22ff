"""pyspark's client writes nothing of the errors that it raises. Without a JVM; sessions themselves are others' fixtures."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

#: In a process of its own, as logging is set up for all of one.
PROGRAM = """
import logging.config
from pgsieve.resources.lake.session import silence_client
silence_client()
from pyspark.logger import PySparkLogger
from pyspark.sql.connect.logging import logger
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as Dagster does
for each in (logger, *map(PySparkLogger.getLogger, ("SQLQueryContextLogger", "DataFrameQueryContextLogger"))):
    each.exception("The value 'secret' cannot be cast", errorClass="CAST_INVALID_INPUT")
"""


def test_the_client_writes_no_error_whatever_dagster_does_to_its_loggers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
