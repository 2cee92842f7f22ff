"""Collects the errors that end a command's work for some subscriptions, while it goes on for the others.

In: blocks of work, each for some subscriptions
Out: the errors, as `Failure`s

An error about a slot, or about the table of its messages, ends the work for all subscriptions that read the slot. An
error about the tables of a subscription ends the work only for that subscription. Errors for which the function
`is_fatal` returns true are not collected but raised, as are exceptions that end the process, such as KeyboardInterrupt.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import Failure
from pgsieve.resources.lake.delta.errors import find_refusal_code, find_spark_failure, list_causes
from pgsieve.resources.lake.stores.store_errors import find_store_refusal


class _NamedWork(Protocol):
    """A subscription, or an object that works for one subscription."""

    @property
    def name(self) -> str:
        """The subscription's name."""


Item = TypeVar("Item", bound=_NamedWork)
Result = TypeVar("Result")


def _ignore_failure(_: Failure) -> None:
    """Ignore a failure: at the end the caller asks for all failures (`group_by_error`)."""


def is_never_fatal(_: Exception) -> bool:
    """Return false for each error, so that `Failures` records it."""
    return False


class Failures:
    """The first error of each subscription that has failed. `on_failure` is called with each new failure."""

    def __init__(self, on_failure: Callable[[Failure], None] = _ignore_failure) -> None:
        self._errors: dict[str, Exception] = {}
        self._on_failure = on_failure

    def __contains__(self, subscription: object) -> bool:
        return subscription in self._errors

    @contextmanager
    def catch(
        self, *subscriptions: str, is_fatal: Callable[[Exception], bool] = is_never_fatal
    ) -> Iterator[None]:
        """If the block raises an error, record it for these subscriptions.

        A subscription that failed before keeps its first error. If `is_fatal` is true for an error, it is raised instead.
        """
        try:
            yield
        except Exception as error:
            # All exceptions are caught: even a fault in pgsieve must not end the work for the other subscriptions.
            if is_fatal(error):
                raise
            recorded_error = find_refusal(error) or error
            new_names = tuple(name for name in subscriptions if name not in self)
            self._errors |= dict.fromkeys(new_names, recorded_error)
            if new_names:
                self._on_failure(Failure(new_names, recorded_error))

    def for_each(
        self,
        items: Iterable[Item],
        step: Callable[[Item], Result],
        *,
        is_fatal: Callable[[Exception], bool] = is_never_fatal,
    ) -> list[Result]:
        """Run a step for each subscription that has not failed. Returns the results of the steps that succeed.

        If `is_fatal` is true for an error, it is raised.
        """
        results = []
        for item in items:
            if item.name not in self:
                with self.catch(item.name, is_fatal=is_fatal):
                    results.append(step(item))
        return results

    def group_by_error(self) -> tuple[Failure, ...]:
        """All failures. Subscriptions that have the same error share one failure."""
        names_by_error: dict[tuple[type, str], list[str]] = {}
        for name, error in self._errors.items():
            names_by_error.setdefault((type(error), str(error)), []).append(name)
        return tuple(
            Failure(tuple(sorted(names)), self._errors[names[0]]) for names in names_by_error.values()
        )


def find_refusal(error: Exception) -> PgsieveError | None:
    """Convert an error to a PgsieveError with a hint, if a disk or store has refused an operation, or Spark has failed.

    Returns None for other errors. The disk may be that of the lake, of Dagster's records, or of temporary files.
    """
    if isinstance(error, PgsieveError):
        return None
    if (failure := find_spark_failure(error)) is not None:
        return failure
    if refusal := find_store_refusal(list_causes(error)):
        return PgsieveError(f"the lake: {refusal.reason}", hint=refusal.hint)
    if (code := find_refusal_code(error)) is None:
        return None
    folder = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return PgsieveError(
        f"{os.strerror(code)}{folder}",
        hint="make room, or give this user the right to write: in the lake, in DAGSTER_HOME or beside pgsieve.yaml, and in"
        " TMPDIR; then run again: nothing is lost",
    )
