"""Classifies the errors of steps, and words the reason for which a table is set aside.

In: the error of a step; a function that tries the transformation up to a transaction. Out: the kind of the error, or a
reason without values for the table's state. It names the finish LSN of the transaction that fails, as PostgreSQL's apply
worker does (apply_error_callback() in src/backend/replication/logical/worker.c).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from pgsieve.decoding.errors import TABLE_PLACEHOLDER, PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.access import SPARK_ERRORS
from pgsieve.resources.lake.delta.errors import (
    ERRORS_OF_NO_TABLE,
    DamagedTableError,
    ExecutorError,
    RefusedTableError,
    SparkLostError,
    StoreUnavailableError,
    illegible_file,
    missing_file,
    raise_executor_error,
    spark_message,
)
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import (
    ForeignServerError,
    LockedTableError,
    SourceUnreachableError,
    TransientError,
)
from pgsieve.resources.postgres.snapshot import AlteredTableError, SnapshotLostError

#: Errors of transient faults. An executor reports them by the names of these classes.
_TRANSIENT = (
    TransientError,
    SourceUnreachableError,
    SnapshotLostError,
    AlteredTableError,
    LockedTableError,
)

#: Errors that end with the next copy; their hints are only for other readers and writers of the table.
CURED_BY_COPY = (DamagedTableError, RefusedTableError)

#: Errors that a table's own data or definition can cause. Any other error is a fault, and ends the run.
TABLE_ERRORS = (PgsieveError, *SPARK_ERRORS)


def is_transient(error: BaseException) -> bool:
    """Whether an error is a transient fault of a server, a store, the network or Spark: a later attempt may succeed."""
    if isinstance(error, ExecutorError):
        return error.kind in {kind.__name__ for kind in _TRANSIENT}
    return isinstance(error, (*_TRANSIENT, SparkLostError, StoreUnavailableError))


def is_locked_out(error: PgsieveError) -> bool:
    """Whether the error is that another session has locked a table, so that it cannot be read."""
    return _is_kind(error, LockedTableError)


def is_of_foreign_table(error: PgsieveError) -> bool:
    """Whether the error is that a foreign server with rows of a table did not answer the publisher."""
    return _is_kind(error, ForeignServerError)


def _is_kind(error: PgsieveError, kind: type[PgsieveError]) -> bool:
    return isinstance(error, kind) or (isinstance(error, ExecutorError) and error.kind == kind.__name__)


def reason(lake: Lake, error: Exception) -> str:
    """The reason why a table's changes cannot be transformed or applied.

    Raises the error if the table is not the cause: one of ERRORS_OF_NO_TABLE, or a transient fault.
    """
    if isinstance(error, ERRORS_OF_NO_TABLE) or is_transient(error):
        raise error
    if isinstance(error, (FilterValueError, NumericError)) and error.sqlstate:
        return f"{error.message} [{error.sqlstate}]"  # As Spark reports it.
    if isinstance(error, PgsieveError):
        return error.message
    lake.access.refuse_unavailable(error)
    try:
        raise_executor_error(error)
    except ExecutorError as ours:
        if is_transient(ours):
            raise
        return ours.message
    return spark_message(error)


def full_reason(lake: Lake, error: Exception, name: tuple[str, str], commit_lsn: int | None = None) -> str:
    """The `reason` with the transaction that fails, and what the user has to do before the table is copied again.

    Raises the errors that `reason` raises.
    """
    problem, hint = in_transaction(reason(lake, error), commit_lsn), _remedy(error)
    return f"{problem}; {hint.replace(TABLE_PLACEHOLDER, quote_qualified(*name))}" if hint else problem


def _remedy(error: Exception) -> str | None:
    """What the user has to do before a copy; None if nothing."""
    if isinstance(error, PgsieveError):
        return None if isinstance(error, CURED_BY_COPY) else error.hint
    try:
        raise_executor_error(error)
    except ExecutorError as ours:
        return ours.hint
    return None


def is_damage(error: Exception) -> bool:
    """Whether the error is that files are missing or unreadable: then no change is the cause, and skipping does not help."""
    return (
        isinstance(error, DamagedTableError)
        or missing_file(error) is not None
        or illegible_file(error) is not None
    )


def first_failing(commits: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """The first of some ascending commits with which the transformation fails, found by bisection.

    `fails` says whether the transformation of all changes up to a commit fails. None if it never does.
    """
    first = bisect_left(commits, True, key=fails)
    return commits[first] if first < len(commits) else None


def in_transaction(problem: str, commit_lsn: int | None) -> str:
    """A problem with the finish LSN of its transaction, which `pgsieve skip` takes."""
    return (
        problem
        if commit_lsn is None
        else f"{problem}, in the transaction finished at {format_lsn(commit_lsn)}"
    )
