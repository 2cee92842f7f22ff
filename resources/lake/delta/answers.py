"""Caches the results of queries of a table's newest version, until the table has another version.

In: a stamp that distinguishes versions, names of queries, and functions that compute the results.
Out: the results.

Raises the errors of the functions.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Answers:
    """The cached results of queries of one table."""

    #: A version, and the results for it. They are one value, because several threads may use it at the same time.
    _cached: tuple[Hashable, dict[str, Any]] = field(default_factory=lambda: (None, {}))

    def of(self, version: Hashable, question: str, ask: Callable[[], Answer]) -> Answer:
        """The result of `ask` for a version. It is computed only once. `question` identifies the query."""
        answers: dict[str, Answer] = self._version_results(version)
        if question not in answers:
            answers[question] = ask()
        return answers[question]

    def record_answer(self, version: Hashable, question: str, answer: object) -> None:
        """Store the result of a query for a version in the cache."""
        self._version_results(version)[question] = answer

    def _version_results(self, version: Hashable) -> dict[str, Any]:
        cached = self._cached
        if version != cached[0]:
            cached = self._cached = version, {}
        return cached[1]
