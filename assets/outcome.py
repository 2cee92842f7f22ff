"""Defines two errors by which a step of pgsieve fails its Dagster run. Also writes the log of a step.

In: the problems of a subscription (the replication of some publications into the lake), or the error of a step.
Out: - `IncompleteError`: some tables have problems. It is raised after the work on all other tables is done.
     - `StepFailedError`: the step itself ended with an error.

Both errors fail the Dagster run, so sensors of failed runs are notified. Dagster shows the description of the error
before any traceback, and the description contains the reason. Nothing is rolled back: changes that were applied
stay applied.

A problem of a table fails the first run that finds it. It also fails each later run that the user starts for this table.
Other runs succeed until there is another problem. Meanwhile the asset check `sync_state` still reports the first
problem.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import dagster as dg

from pgsieve.assets.steps.prefetched import PREFETCH_LOG
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionState, disabled_error
from pgsieve.assets.steps.records.table_states import SyncState, TableState
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import Work

T = TypeVar("T")

#: The name of the logger that is the parent of all loggers of pgsieve.
_PARENT_LOGGER = "pgsieve"


#: In the result of `find_subscription_problems`, the key of a table's problem is the schema and the name of the table.
#: The key of a sequence's problem has this text in place of the schema. No schema of PostgreSQL has an empty name.
_SEQUENCE_SCHEMA = ""


class IncompleteError(dg.Failure):
    """A step left some work undone: tables are set aside, a sequence cannot be read, or the subscription is disabled.

    After an error of a table, the table is set aside: its changes are no longer applied until it is copied again. The
    step has done its work on all other tables. Dagster does not retry the step, because the same problems would remain.
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
    """A step ended with an error of pgsieve, the attribute `error`. Dagster retries the step if the user's policy says so."""

    def __init__(self, error: PgsieveError) -> None:
        entries = {"what to do": error.hint, "SQLSTATE": error.sqlstate}
        super().__init__(
            description=error.message, metadata={name: value for name, value in entries.items() if value}
        )
        self.error = error


class _RunLogHandler(logging.Handler):
    """Writes the records of pgsieve's loggers to the log of a Dagster run.

    Records of prefetched work are left out. Prefetched work is done before the step to which it belongs has begun;
    its records are kept, and that step writes them by `log_to_step`.
    """

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if PREFETCH_LOG.get() is None:
            self._log.log(record.levelno, record.getMessage())


def log_to_step(record: logging.LogRecord) -> None:
    """Write a record of prefetched work to the log of the step that is running now."""
    for handler in logging.getLogger(_PARENT_LOGGER).handlers:
        if isinstance(handler, _RunLogHandler):
            handler.emit(record)


@contextmanager
def attach_handler(handler: logging.Handler) -> Iterator[None]:
    """Let `handler` receive the records of pgsieve's loggers during the `with` block."""
    logger = logging.getLogger(_PARENT_LOGGER)
    # As long as no logger has a handler, Python prints warnings on stderr. `handler` would end that, so Python's own
    # handler for this case is added, too.
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


class _ControlCharacterFilter(logging.Filter):
    """Escapes control characters in log records.

    Names of tables and columns may contain such characters. Without the filter they could, for example, clear the
    user's terminal.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = escape_controls(record.getMessage()), ()
        return True


_CONTROL_CHARACTER_FILTER = _ControlCharacterFilter()


@contextmanager
def run_as_step(
    context: dg.OpExecutionContext | dg.AssetExecutionContext | dg.AssetCheckExecutionContext,
) -> Iterator[None]:
    """Run the `with` block as a step of a Dagster run.

    During the block, pgsieve's log messages also go to the log of the run. If the block raises a PgsieveError, raise
    StepFailedError instead, which Dagster takes for a Failure. If a step raises any error that is not a Failure,
    Dagster shows users and sensors only "Error occurred while executing op", not the reason.
    """
    logger = logging.getLogger(_PARENT_LOGGER)
    level = logger.level
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    context.log.addFilter(_CONTROL_CHARACTER_FILTER)
    try:
        with attach_handler(_RunLogHandler(context.log)):
            yield
    except PgsieveError as error:
        raise StepFailedError(error) from error
    finally:
        logger.setLevel(level)


def _do_nothing(_: object) -> None:
    pass


@dataclass(frozen=True)
class StepCallbacks(Generic[T]):
    """Functions by which a step reports to the pgsieve command that runs it in the command's own process.

    - `report` gets the results of the step
    - `add_work` gets the costs of the step's work
    - `fail` gets the error that ended the step
    """

    report: Callable[[T], None] = _do_nothing
    add_work: Callable[[Work], None] = _do_nothing
    fail: Callable[[Exception], None] = _do_nothing

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Run the `with` block. If the block raises an error, call `fail` with the error, and raise the error again.

        The command needs the error itself, and Dagster keeps only the text of the error.
        """
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise


#: Callbacks that do nothing. They are for a step that no pgsieve command runs, for example one that the user
#: materialises in Dagster's web interface.
NO_CALLBACKS: StepCallbacks[Any] = StepCallbacks()


def find_subscription_problems(
    subscription: str,
    lake: Lake,
    states: Mapping[TableName, TableState],
    subscription_state: SubscriptionState,
) -> dict[TableName | None, str]:
    """Find the tables of a subscription that are set aside. Map each to a text with the reason.

    If the subscription is disabled, the key None has the reason. If the values of a sequence cannot be read, the
    problem has a key that no table can have.

    - `states`: maps each table to its state
    - `subscription_state`: the state of the subscription as a whole
    """
    problems: dict[TableName | None, str] = {
        name: escape_controls(f"{quote_qualified(*name)} is set aside: {state.reason}")
        for name, state in sorted(states.items())
        if state.state == SyncState.SET_ASIDE
    }
    if not subscription_state.enabled:
        error = disabled_error(subscription, subscription_state)
        problems[None] = f"{error.message} ({error.hint})"
    return problems | {
        (_SEQUENCE_SCHEMA, sequence_problem): sequence_problem
        for sequence_problem in Sequences(lake, subscription).describe_problems()
    }


def find_cut_obstacles(problems: Mapping[TableName | None, str]) -> set[TableName | None]:
    """Find the keys of the problems that make a cut incomplete: all problems except those of sequences.

    A cut is a set of versions, one of each replica, which together equal the publisher's tables at one moment.
    """
    return {name for name in problems if name is None or name[0] != _SEQUENCE_SCHEMA}
