"""Caches the results of Spark's queries of a table's newest version, so that each query runs once per version.

In: the logs of tables (`spark_log`), and the path of a table.
Out: results. They are cached until the table has another version.

Each step of a run opens the lake anew, so the results are those of the session. Without a stamp of the newest version, as
with Spark Connect, nothing is cached. Raises the errors of the queries.
"""

from collections import defaultdict
from collections.abc import Callable
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.query_cache import QueryCache, Result
from pgsieve.resources.lake.delta.spark_log import SparkLog

_QueryCaches = defaultdict[str, QueryCache]
#: The cached results of each session, by the path of the table.
_caches_by_session: WeakKeyDictionary[SparkSession, _QueryCaches] = WeakKeyDictionary()


class SparkQueryCache:
    """The cached results of a session."""

    def __init__(self, get_session: Callable[[], SparkSession], log: SparkLog) -> None:
        self._get_session, self._log = get_session, log

    def get(self, path: str, query_name: str, run_query: Callable[[], Result]) -> Result:
        """The result of `run_query`, which is called only once per version. `query_name` identifies the query."""
        # The stamp is read before the result. If a new version is committed in between, the result for the new version is
        # cached under the stamp of the former version. This does no harm, because the former stamp never occurs again.
        if (stamp := self._log.read_stamp(path)) is None:
            return run_query()
        caches = _caches_by_session.setdefault(self._get_session(), defaultdict(QueryCache))
        return caches[path].get(stamp, query_name, run_query)
