"""What Spark has answered about the newest version of tables: each question is asked once a version.

In: the session and a table's path. Out: answers, kept while the table has the version that they are of. The log is looked at in
the session's JVM by Delta itself (`DeltaLog.update`, https://docs.delta.io, which lists `_delta_log` and runs no job). Through
Spark Connect there is no JVM to look in, and each question is asked each time. Raises what asking raises.
"""

from collections import defaultdict
from collections.abc import Callable

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.answers import Answer, Answers

#: Tells a version of a table from every other, and from those of a table that was at its path before: written when, its number.
Stamp = tuple[str, int]


class VersionAnswers:
    """The answers about tables that one session reaches."""

    def __init__(self, session: Callable[[], SparkSession]) -> None:
        self._session = session
        self._answers = defaultdict[str, Answers](Answers)

    def of(self, path: str, question: str, ask: Callable[[], Answer]) -> Answer:
        """What `ask` answers to a question, by a text that says which; asked again only of another version."""
        # Before it is asked: an answer of a version that is committed meanwhile is kept under the former, which is looked for no more.
        stamp = self.stamp(path)
        return ask() if stamp is None else self._answers[path].of(stamp, question, ask)

    def stamp(self, path: str) -> Stamp | None:
        """What tells the newest version of a table from every other; None where there is no table, or nothing to look with."""
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
            # The log cannot be read, or Delta is another version: the question itself reports what is wrong.
            return None
        return None if version < 0 else (str(written), version)
