"""The end of a step that is incomplete or has failed: an error of Dagster whose description gives the reason.

In: the problems of a subscription, or the error of a step. Out: `IncompleteError`, raised after all other
work is done, or `StepFailedError`. Both fail the run, so sensors of failed runs see it, and Dagster shows
their descriptions before any traceback. Nothing is rolled back: applied changes stay applied. A problem fails only
the first run that finds it. Later runs succeed until there is another problem; the check `sync_state` keeps
reporting the first problem.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import dagster as dg

from pgsieve.assets.dagster_names import Name
from pgsieve.assets.steps.prefetched import PREFETCH_LOG
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionState, disabled_error
from pgsieve.assets.steps.records.table_states import SyncState, TableState
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import Work

T = TypeVar("T")

#: The parent of pgsieve's own loggers.
_LOGGERS = "pgsieve"


#: In the keys of sequences' problems, instead of a schema.
_SEQUENCE_SCHEMA = ""


class IncompleteError(dg.Failure):
    """Some tables are set aside, a sequence cannot be read, or the subscription is disabled.

    All other tables are up to date. A retry would not help.
    """

    def __init__(self, subscription: str, problems: Sequence[str]) -> None:
        super().__init__(
            description=f"subscription {subscription}: {'; '.join(problems)}",
            metadata={
                "problems": dg.MetadataValue.md("\n".join(f"- {problem}" for problem in problems)),
                "what to do": "correct the reason for which each table is set aside; then copy it again: materialise its"
                f" Dagster partition in {subscription}/initial_sync, or run `pgsieve resync {subscription} TABLE`",
            },
            allow_retries=False,
        )


class StepFailedError(dg.Failure):
    """A step ended with the error `error` of pgsieve. The user's retry policy applies."""

    def __init__(self, error: PgsieveError) -> None:
        entries = {"what to do": error.hint, "SQLSTATE": error.sqlstate}
        super().__init__(
            description=error.message, metadata={name: value for name, value in entries.items() if value}
        )
        self.error = error


class _RunLogHandler(logging.Handler):
    """Writes the records of pgsieve's own loggers to a run's log, except those of prefetched work."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if PREFETCH_LOG.get() is None:
            self._log.log(record.levelno, record.getMessage())


def log_to_step(record: logging.LogRecord) -> None:
    """Write a record of prefetched work to the log of the running step."""
    for handler in logging.getLogger(_LOGGERS).handlers:
        if isinstance(handler, _RunLogHandler):
            handler.emit(record)


@contextmanager
def attached_handler(handler: logging.Handler) -> Iterator[None]:
    """Let a handler receive the records of pgsieve's own loggers within the block."""
    logger = logging.getLogger(_LOGGERS)
    # Python prints warnings on stderr only while there is no handler; this keeps them there.
    last_resort = None if logger.hasHandlers() else logging.lastResort
    if last_resort is not None:
        logger.addHandler(last_resort)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if last_resort is not None:
            logger.removeHandler(last_resort)


class _Visible(logging.Filter):
    """Escapes characters in records that control a terminal: names from a database may contain them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = escape_controls(record.getMessage()), ()
        return True


_VISIBLE = _Visible()


@contextmanager
def as_step(
    context: dg.OpExecutionContext | dg.AssetExecutionContext | dg.AssetCheckExecutionContext,
) -> Iterator[None]:
    """Run the block as a step: pgsieve's messages go to the run's log, and a PgsieveError becomes a StepFailedError.

    For any error but a Failure, Dagster shows only "Error occurred while executing op", also to sensors.
    """
    logger = logging.getLogger(_LOGGERS)
    level = logger.level
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    context.log.addFilter(_VISIBLE)
    try:
        with attached_handler(_RunLogHandler(context.log)):
            yield
    except PgsieveError as error:
        raise StepFailedError(error) from error
    finally:
        logger.setLevel(level)


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True)
class StepCallbacks(Generic[T]):
    """The functions of a command that a step in the command's own process calls.

    `report` gets the step's results, `add_work` the costs of its work, `fail` the error that ended it.
    """

    report: Callable[[T], None] = _ignore
    add_work: Callable[[Work], None] = _ignore
    fail: Callable[[Exception], None] = _ignore

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Call `fail` with the error that ends the block: Dagster keeps only the text of an error."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise


#: For a step that no command runs.
NO_CALLBACKS: StepCallbacks[Any] = StepCallbacks()


def subscription_problems(
    subscription: str, lake: Lake, states: Mapping[Name, TableState], whole: SubscriptionState
) -> dict[Name | None, str]:
    """The problems of a subscription by table. The key None is for a disabled subscription.

    The problem of a sequence has a key that no table can have; `cut_obstacles` leaves these keys out.
    """
    problems: dict[Name | None, str] = {
        name: escape_controls(f"{quote_qualified(*name)} is set aside: {state.reason}")
        for name, state in sorted(states.items())
        if state.state == SyncState.SET_ASIDE
    }
    if not whole.enabled:
        error = disabled_error(subscription, whole)
        problems[None] = f"{error.message} ({error.hint})"
    return problems | {(_SEQUENCE_SCHEMA, each): each for each in Sequences(lake, subscription).problems()}


def cut_obstacles(problems: Mapping[Name | None, str]) -> set[Name | None]:
    """The keys of the problems that make a cut incomplete: all but the problems of sequences."""
    return {name for name in problems if name is None or name[0] != _SEQUENCE_SCHEMA}
