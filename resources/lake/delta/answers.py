"""What has been asked of one version of a table: each question is asked once, until the table has another version.

In: what tells a version from every other, questions as texts, and what asks them. Out: answers. Raises what asking raises.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Answers:
    """The answers about one table."""

    #: Of which version they are, and they; one value, as threads may ask side by side.
    _held: tuple[Hashable, dict[str, Any]] = field(default_factory=lambda: (None, {}))

    def of(self, version: Hashable, question: str, ask: Callable[[], Answer]) -> Answer:
        """What `ask` answers about a version to a question, by a text that says which."""
        known: dict[str, Answer] = self._of(version)
        if question not in known:
            known[question] = ask()
        return known[question]

    def learn(self, version: Hashable, question: str, answer: object) -> None:
        """Know an answer about a version without asking."""
        self._of(version)[question] = answer

    def _of(self, version: Hashable) -> dict[str, Any]:
        held = self._held
        if version != held[0]:
            held = self._held = version, {}
        return held[1]
