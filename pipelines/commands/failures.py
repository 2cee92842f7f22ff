"""Errors that end some subscriptions' part of a command, while the others go on.

In: blocks of work, each on behalf of some subscriptions. Out: the errors, as `Failure`s. An error of a slot
or a change log concerns every subscription that reads it; one of a subscription's own tables concerns no
other. Raises only errors that end the process.
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
    """A subscription, or the part of one."""

    @property
    def name(self) -> str:
        """The subscription's name."""


Part = TypeVar("Part", bound=_Named)
Result = TypeVar("Result")


def _ignore(_: Failure) -> None:
    """Ignores a failure: the caller reads `listed` at the end."""


def never(_: Exception) -> bool:
    """Every error ends its part."""
    return False


class Failures:
    """The first error of each subscription that has failed; `tell` is called when one happens."""

    def __init__(self, tell: Callable[[Failure], None] = _ignore) -> None:
        self._errors: dict[str, Exception] = {}
        self._tell = tell

    def __contains__(self, subscription: object) -> bool:
        return subscription in self._errors

    @contextmanager
    def of(self, *subscriptions: str, unless: Callable[[Exception], bool] = never) -> Iterator[None]:
        """End the block at an error, and record it for the subscriptions.

        A subscription that failed before keeps its first error. An error for which `unless` holds is raised, and not
        recorded.
        """
        try:
            yield
        except Exception as error:
            # Any error is caught: even a fault of pgsieve itself must not end the other subscriptions' part.
            if unless(error):
                raise
            reported = what_refused(error) or error
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
        """The results of a step for the subscriptions that have not failed.

        One that fails does not stop the others.

        Raises an error for which `unless` holds.
        """
        results = []
        for part in parts:
            if part.name not in self:
                with self.of(part.name, unless=unless):
                    results.append(step(part))
        return results

    def listed(self) -> tuple[Failure, ...]:
        """The failures; an error that several subscriptions met is one failure of them all."""
        concerned: dict[tuple[type, str], list[str]] = {}
        for name, error in self._errors.items():
            concerned.setdefault((type(error), str(error)), []).append(name)
        return tuple(Failure(tuple(sorted(names)), self._errors[names[0]]) for names in concerned.values())


def what_refused(error: Exception) -> PgsieveError | None:
    """The refusal of a disk or a store, also for Dagster's records or temporary files, or the loss of Spark."""
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
