"""Caches results of queries of the newest version of a table, until the table has another version.

In: a stamp that distinguishes versions, names of queries, and functions that compute the results. Out: results.
Raises the functions' errors.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Answers:
    """The cached results of one table."""

    #: A version and its results: one value, as threads may use it in parallel.
    _cached: tuple[Hashable, dict[str, Any]] = field(default_factory=lambda: (None, {}))

    def of(self, version: Hashable, question: str, ask: Callable[[], Answer]) -> Answer:
        """The result of `ask` for a version, computed once; `question` identifies it."""
        answers: dict[str, Answer] = self._results_of(version)
        if question not in answers:
            answers[question] = ask()
        return answers[question]

    def record_answer(self, version: Hashable, question: str, answer: object) -> None:
        """Cache a result for a version."""
        self._results_of(version)[question] = answer

    def _results_of(self, version: Hashable) -> dict[str, Any]:
        cached = self._cached
        if version != cached[0]:
            cached = self._cached = version, {}
        return cached[1]
