"""Caches answers about the newest version of a table, until the table has another version.

In: a stamp that distinguishes versions, names of questions, and functions that compute the answers. Out:
answers. Raises the functions' errors.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Answers:
    """The answers about one table."""

    #: A version and its answers; one value, as threads may ask in parallel.
    _kept: tuple[Hashable, dict[str, Any]] = field(default_factory=lambda: (None, {}))

    def of(self, version: Hashable, question: str, ask: Callable[[], Answer]) -> Answer:
        """The answer of `ask` about a version, computed once; `question` identifies it."""
        answers: dict[str, Answer] = self._of(version)
        if question not in answers:
            answers[question] = ask()
        return answers[question]

    def record_answer(self, version: Hashable, question: str, answer: object) -> None:
        """Record an answer about a version."""
        self._of(version)[question] = answer

    def _of(self, version: Hashable) -> dict[str, Any]:
        kept = self._kept
        if version != kept[0]:
            kept = self._kept = version, {}
        return kept[1]
