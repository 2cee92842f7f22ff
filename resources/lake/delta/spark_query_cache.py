"""Caches the results of Spark's queries of a table's newest version, so that each query runs once per version.

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

from pgsieve.resources.lake.delta.query_cache import QueryCache, Result

#: The time and the number of a version. No other version has the same stamp, not even a version of another table
#: that was at this path before.
Stamp = tuple[str, int]


class SparkQueryCache:
    """The cached results of one session."""

    def __init__(self, get_session: Callable[[], SparkSession]) -> None:
        self._get_session = get_session
        self._cache_by_path = defaultdict[str, QueryCache](QueryCache)

    def get(self, path: str, query_name: str, run_query: Callable[[], Result]) -> Result:
        """The result of `run_query`, which is called only once per version. `query_name` identifies the query."""
        # The stamp is read before the result. If a new version is committed in between, the result for the new version is
        # cached under the stamp of the former version. This does no harm, because the former stamp never occurs again.
        stamp = self.stamp(path)
        return run_query() if stamp is None else self._cache_by_path[path].get(stamp, query_name, run_query)

    def stamp(self, path: str) -> Stamp | None:
        """The stamp of the newest version of a table. None if there is no table, or no JVM."""
        session = self._get_session()
        jvm = getattr(session, "_jvm", None)
        if jvm is None:
            return None
        try:
            delta_log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session._jsparkSession, path)  # noqa: SLF001 - no public way
            no_value = jvm.scala.Option.empty()
            snapshot = delta_log.update(False, no_value, no_value)
            version, time_written = (
                snapshot.version(),
                snapshot.logSegment().lastCommitFileModificationTimestamp(),
            )
        except Py4JNetworkError:
            raise
        except (Py4JError, TypeError):
            # The log is illegible, or this version of Delta has other functions. An error is not cached: the query
            # raises it.
            return None
        return None if version < 0 else (str(time_written), version)
