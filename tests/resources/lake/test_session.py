"""pyspark's client writes nothing of the errors that it raises. Without a JVM; sessions themselves are others' fixtures."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pgsieve.resources.lake.session import silence_client

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


def test_threads_that_ask_for_a_session_at_once_leave_the_class_of_loggers_as_it_was() -> None:
    former, pause = logging.getLoggerClass(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(silence_client) for _ in range(1600)]:
                done.result()
        assert logging.getLoggerClass() is former
    finally:
        sys.setswitchinterval(pause)
        logging.setLoggerClass(former)
