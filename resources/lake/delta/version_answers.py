"""Caches the results of Spark's queries about the newest version of tables, so that each runs once per version.

In: the session and a table's path. Out: results, cached until the table has another version. Delta in the
session's JVM shows the newest version (`DeltaLog.update` lists `_delta_log`, and runs no job). Spark Connect has
no JVM, so nothing is cached. Raises the queries' errors.
"""

from collections import defaultdict
from collections.abc import Callable

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.answers import Answer, Answers

#: The time and the number of a version, which distinguish it from other versions, even of former tables at its
#: path.
Stamp = tuple[str, int]


class VersionAnswers:
    """The cached results of one session."""

    def __init__(self, session: Callable[[], SparkSession]) -> None:
        self._session = session
        self._answers = defaultdict[str, Answers](Answers)

    def of(self, path: str, question: str, ask: Callable[[], Answer]) -> Answer:
        """The result of `ask`, which is called once per version; `question` identifies it."""
        # The stamp is older than the result. So if a version is committed in between, its result is cached under
        # the former version, which is never used again.
        stamp = self.stamp(path)
        return ask() if stamp is None else self._answers[path].of(stamp, question, ask)

    def stamp(self, path: str) -> Stamp | None:
        """The stamp of the newest version of a table; None without a table, or without a JVM."""
        session = self._session()
        jvm = getattr(session, "_jvm", None)
        if jvm is None:
            return None
        try:
            log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session._jsparkSession, path)  # noqa: SLF001 - no public way
            absent = jvm.scala.Option.empty()
            snapshot = log.update(False, absent, absent)
            version, written = snapshot.version(), snapshot.logSegment().lastCommitFileModificationTimestamp()
        except Py4JNetworkError:
            raise
        except (Py4JError, TypeError):
            # The log is illegible, or this version of Delta differs. The query itself will raise an error, if any.
            return None
        return None if version < 0 else (str(written), version)
