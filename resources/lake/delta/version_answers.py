"""Caches the results of Spark's queries of the newest version of tables, so that each query runs once per version.

In: the session, and the path of a table.
Out: results. They are cached until the table has another version.

The log object of Delta in the session's JVM shows the newest version: `DeltaLog.update` lists the folder
`_delta_log`, and runs no job. A session of Spark Connect has no JVM, so nothing is cached for it. Raises the
errors of the queries.
"""

from collections import defaultdict
from collections.abc import Callable

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.answers import Answer, Answers

#: The time and the number of a version. No other version has the same stamp, not even a version of another table
#: that was at this path before.
Stamp = tuple[str, int]


class VersionAnswers:
    """The cached results of one session."""

    def __init__(self, session: Callable[[], SparkSession]) -> None:
        self._session = session
        self._answers = defaultdict[str, Answers](Answers)

    def of(self, path: str, question: str, ask: Callable[[], Answer]) -> Answer:
        """The result of `ask`, which is called only once per version. `question` identifies the query."""
        # The stamp is read before the result. If a new version is committed in between, the result for the new version is
        # cached under the stamp of the former version. This does no harm, because that stamp never occurs again.
        stamp = self.stamp(path)
        return ask() if stamp is None else self._answers[path].of(stamp, question, ask)

    def stamp(self, path: str) -> Stamp | None:
        """The stamp of the newest version of a table. None if there is no table, or no JVM."""
        session = self._session()
        jvm = getattr(session, "_jvm", None)
        if jvm is None:
            return None
        try:
            log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session._jsparkSession, path)  # noqa: SLF001 - no public way
            absent = jvm.scala.Option.empty()
            snapshot = log.update(False, absent, absent)
            version, time_written = (
                snapshot.version(),
                snapshot.logSegment().lastCommitFileModificationTimestamp(),
            )
        except Py4JNetworkError:
            raise
        except (Py4JError, TypeError):
            # The log is illegible, or this version of Delta has other functions. If there is an error, the query raises it.
            return None
        return None if version < 0 else (str(time_written), version)
