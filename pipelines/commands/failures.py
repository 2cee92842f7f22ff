"""Errors that end a command's work for some subscriptions, while the others go on.

In: blocks of work, each for some subscriptions. Out: the errors, as `Failure`s. An error about a slot or a
change log concerns every subscription that reads it; an error about a subscription's own tables concerns only
this subscription. Raises only what `unless` names, and what ends the process.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import Failure
from pgsieve.resources.lake.delta.errors import causes, is_lost, refusal, spark_lost
from pgsieve.resources.lake.stores.store_errors import store_refusal


class _Named(Protocol):
    """A subscription, or an object that works for one."""

    @property
    def name(self) -> str:
        """The subscription's name."""


Part = TypeVar("Part", bound=_Named)
Result = TypeVar("Result")


def _ignore(_: Failure) -> None:
    """Ignore a failure: the caller reads `listed` at the end."""


def never(_: Exception) -> bool:
    """False for every error, so that `Failures` records each."""
    return False


class Failures:
    """The first error of each subscription that has failed; `tell` is called with each new failure."""

    def __init__(self, tell: Callable[[Failure], None] = _ignore) -> None:
        self._errors: dict[str, Exception] = {}
        self._tell = tell

    def __contains__(self, subscription: object) -> bool:
        return subscription in self._errors

    @contextmanager
    def of(self, *subscriptions: str, unless: Callable[[Exception], bool] = never) -> Iterator[None]:
        """End the block at an error, and record the error for the subscriptions.

        A subscription that failed before keeps its first error. An error for which `unless` is true is raised
        instead.
        """
        try:
            yield
        except Exception as error:
            # Even a fault of pgsieve itself must not end the work for the other subscriptions.
            if unless(error):
                raise
            reported = as_refusal(error) or error
            concerned = tuple(name for name in subscriptions if name not in self)
            self._errors |= dict.fromkeys(concerned, reported)
            if concerned:
                self._tell(Failure(concerned, reported))

    def each(
        self,
        parts: Iterable[Part],
        step: Callable[[Part], Result],
        *,
        unless: Callable[[Exception], bool] = never,
    ) -> list[Result]:
        """The results of a step for each subscription that has not failed; an error does not stop the others.

        Raises an error for which `unless` is true.
        """
        results = []
        for part in parts:
            if part.name not in self:
                with self.of(part.name, unless=unless):
                    results.append(step(part))
        return results

    def listed(self) -> tuple[Failure, ...]:
        """The failures; the same error of several subscriptions is one failure with their names."""
        concerned: dict[tuple[type, str], list[str]] = {}
        for name, error in self._errors.items():
            concerned.setdefault((type(error), str(error)), []).append(name)
        return tuple(Failure(tuple(sorted(names)), self._errors[names[0]]) for names in concerned.values())


def as_refusal(error: Exception) -> PgsieveError | None:
    """A `PgsieveError` that says what to do, if a disk or store refused, or Spark was lost; else None.

    The disk may be that of the lake, of Dagster's records, or of temporary files.
    """
    if isinstance(error, PgsieveError):
        return None
    if is_lost(error):
        return spark_lost()
    if refused := store_refusal(causes(error)):
        return PgsieveError(f"the lake: {refused.what}", hint=refused.hint)
    if (code := refusal(error)) is None:
        return None
    folder = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return PgsieveError(
        f"{os.strerror(code)}{folder}",
        hint="make room, or give this user the right to write: in the lake, in DAGSTER_HOME or beside pgsieve.yaml, and in"
        " TMPDIR; then run again: nothing is lost",
    )
