"""pyspark's client logs nothing about errors that it raises. No JVM; other fixtures test sessions themselves."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pgsieve.resources.lake.session import silence_client

pytestmark = pytest.mark.slow

#: A separate process, because logging is configured for a whole process.
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


def test_the_client_logs_no_error_whatever_dagster_does_to_its_loggers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_threads_that_start_a_session_together_restore_the_class_of_loggers() -> None:
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


#: A process that is interrupted while a server does not answer.
_WAITING = """
import os, signal, threading
from pgsieve.resources.lake.session import SparkEngine
engine = SparkEngine(master="sc://127.0.0.1:1")
threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    assert engine.session
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_a_process_that_waits_for_a_server() -> None:
    """At the end of the process, pyspark would wait for the server for ten minutes more."""
    waiting = subprocess.run(
        [sys.executable, "-c", _WAITING], capture_output=True, text=True, check=False, timeout=60
    )
    assert (waiting.returncode, waiting.stdout, waiting.stderr) == (0, "interrupted\n", "")
