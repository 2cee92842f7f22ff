"""Caches the results of queries of a table until the table has a newer version.

In: values that distinguish versions, names of queries, and functions that compute the results.
Out: the results.

Raises the errors of the functions.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class QueryCache:
    """The cached results of queries of one table."""

    #: A version, and the results for it. They are in one tuple, so that threads that use the cache at the same time
    #: never see the results of another version.
    _cached: tuple[Hashable, dict[str, Any]] = field(default_factory=lambda: (None, {}))

    def get(self, version: Hashable, query_name: str, run_query: Callable[[], Result]) -> Result:
        """The result of `run_query` for a version. It is computed only once. `query_name` identifies the query."""
        results: dict[str, Result] = self._get_version_results(version)
        if query_name not in results:
            results[query_name] = run_query()
        return results[query_name]

    def store(self, version: Hashable, query_name: str, result: object) -> None:
        """Store the result of a query for a version in the cache."""
        self._get_version_results(version)[query_name] = result

    def _get_version_results(self, version: Hashable) -> dict[str, Any]:
        cached = self._cached
        if version != cached[0]:
            cached = self._cached = version, {}
        return cached[1]
