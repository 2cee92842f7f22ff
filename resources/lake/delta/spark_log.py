"""Reads the log of Delta tables in the JVM of a Spark session, without a job of Spark.

In: the session, and the path of a table.
Out: the stamp of the table's newest version, and what the log says about a commit.

The log object of Delta lists the folder `_delta_log`, and its store reads an entry of the log. A session of Spark
Connect has no JVM. In this case, and if the log is illegible, the result is None, and the caller asks Spark by a query.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession

Result = TypeVar("Result")

#: The time and the number of a version. No other version has the same stamp, not even a version of another table
#: that was at this path before.
Stamp = tuple[str, int]

#: The information about a commit is among the first lines of its entry. Further lines, for example of many files, are not
#: read.
_MAX_LINES = 16
_COMMIT_INFO = "commitInfo"


class SparkLog:
    """The logs of the tables that a session can reach."""

    def __init__(self, get_session: Callable[[], SparkSession]) -> None:
        self._get_session = get_session

    def read_stamp(self, path: str) -> Stamp | None:
        """The stamp of the newest version of a table. None if there is no table, or no JVM."""
        return self._call(path, _read_stamp)

    def read_commit(self, path: str, version: int) -> Mapping[str, Any] | None:
        """The information about the commit of a version, with the names of DESCRIBE HISTORY. None if it is not there."""
        text = self._call(path, lambda jvm, log: _read_commit_line(jvm, log, version))
        if text is None:
            return None
        return {**json.loads(text)[_COMMIT_INFO], "version": version}

    def _call(self, path: str, function: Callable[[Any, Any], Result | None]) -> Result | None:
        session = self._get_session()
        if (jvm := getattr(session, "_jvm", None)) is None:
            return None
        try:
            delta_log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session._jsparkSession, path)  # noqa: SLF001 - no public way
            return function(jvm, delta_log)
        except Py4JNetworkError:
            raise
        except (Py4JError, TypeError):
            # The log is illegible, or this version of Delta has other functions. The query of the caller raises the error.
            return None


def _read_stamp(jvm: Any, delta_log: Any) -> Stamp | None:
    no_value = jvm.scala.Option.empty()
    snapshot = delta_log.update(False, no_value, no_value)
    version = snapshot.version()
    time_written = snapshot.logSegment().lastCommitFileModificationTimestamp()
    return None if version < 0 else (str(time_written), version)


def _read_commit_line(jvm: Any, delta_log: Any, version: int) -> str | None:
    """The line of a version's entry that has the information about the commit."""
    entry = jvm.org.apache.hadoop.fs.Path(delta_log.logPath(), f"{version:020d}.json")
    lines = delta_log.store().readAsIterator(entry, delta_log.newDeltaHadoopConf())
    try:
        for _ in range(_MAX_LINES):
            if not lines.hasNext():
                break
            line: str = lines.next()
            if line.startswith(f'{{"{_COMMIT_INFO}"'):
                return line
    finally:
        lines.close()
    return None
