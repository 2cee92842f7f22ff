"""Caches Spark's answers about the newest version of tables; each question is asked once per version.

In: the session and a table's path. Out: answers, cached until the table has another version. Delta in the
session's JVM shows the newest version (`DeltaLog.update`, https://docs.delta.io, which lists `_delta_log` and
runs no job). With Spark Connect there is no JVM to ask, so nothing is cached. Raises the questions' errors.
"""

from collections import defaultdict
from collections.abc import Callable

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.answers import Answer, Answers

#: The time and the number of a version, which distinguish it from other versions, also of former tables at
#: its path.
Stamp = tuple[str, int]


class VersionAnswers:
    """The answers about tables of one session."""

    def __init__(self, session: Callable[[], SparkSession]) -> None:
        self._session = session
        self._answers = defaultdict[str, Answers](Answers)

    def of(self, path: str, question: str, ask: Callable[[], Answer]) -> Answer:
        """The answer of `ask`, which is called once per version; `question` identifies it."""
        # The stamp is taken before the question. So if a version is committed meanwhile, its answer is stored
        # under the former version, which is never used again.
        stamp = self.stamp(path)
        return ask() if stamp is None else self._answers[path].of(stamp, question, ask)

    def stamp(self, path: str) -> Stamp | None:
        """The stamp of the newest version of a table; None without a table, or without a JVM to ask."""
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
            # The log is unreadable, or this version of Delta differs. The question itself reports an error,
            # if any.
            return None
        return None if version < 0 else (str(written), version)
