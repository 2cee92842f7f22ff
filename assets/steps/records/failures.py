"""The failure of one table's changes, without a value; and the transaction that caused it.

In: the error of a step, and a function that tries the transformation up to a transaction. Out: a reason for
the table's state, which names the transaction's finish LSN as PostgreSQL's apply worker does
(apply_error_callback() in src/backend/replication/logical/worker.c).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from pgsieve.decoding.errors import OF_TABLE, PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.access import SPARK_ERRORS
from pgsieve.resources.lake.delta.errors import (
    NO_TABLES_FAULT,
    DamagedTableError,
    ExecutorError,
    RefusedTableError,
    SparkLostError,
    StoreUnavailableError,
    illegible_file,
    missing_file,
    raise_ours,
    spark_message,
)
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import (
    ForeignServerError,
    LockedTableError,
    PassingFaultError,
    SourceUnreachableError,
)
from pgsieve.resources.postgres.snapshot import AlteredTableError, SnapshotLostError

#: Faults that pass by themselves; an executor reports them by the names of these classes.
_PASSING = (
    PassingFaultError,
    SourceUnreachableError,
    SnapshotLostError,
    AlteredTableError,
    LockedTableError,
)

#: Errors that the next copy cures: their hints are only for other readers and writers of the table.
CURED_BY_COPY = (DamagedTableError, RefusedTableError)

#: Errors that a table's own data or definition can cause; any other error is a fault, and stops the run.
TABLE_ERRORS = (PgsieveError, *SPARK_ERRORS)


def passes(error: BaseException) -> bool:
    """Whether a fault of a server, a store, the network or Spark passes by itself: a later attempt may succeed."""
    if isinstance(error, ExecutorError):
        return error.kind in {kind.__name__ for kind in _PASSING}
    return isinstance(error, (*_PASSING, SparkLostError, StoreUnavailableError))


def is_locked_out(error: PgsieveError) -> bool:
    """Whether a table could not be read because another session has locked it."""
    return _is(error, LockedTableError)


def is_of_foreign_table(error: PgsieveError) -> bool:
    """Whether a table could not be read because a foreign server with rows of it did not answer the publisher."""
    return _is(error, ForeignServerError)


def _is(error: PgsieveError, kind: type[PgsieveError]) -> bool:
    return isinstance(error, kind) or (isinstance(error, ExecutorError) and error.kind == kind.__name__)


def reason(lake: Lake, error: Exception) -> str:
    """Why a table's changes cannot be transformed or applied.

    Raises the error where it is neither the changes' fault nor the table's: one of NO_TABLES_FAULT, or one that passes.
    """
    if isinstance(error, NO_TABLES_FAULT) or passes(error):
        raise error
    if isinstance(error, (FilterValueError, NumericError)) and error.sqlstate:
        return f"{error.message} [{error.sqlstate}]"  # As Spark reports it.
    if isinstance(error, PgsieveError):
        return error.message
    lake.access.refuse_unavailable(error)
    try:
        raise_ours(error)
    except ExecutorError as ours:
        if passes(ours):
            raise
        return ours.message
    return spark_message(error)


def explained(lake: Lake, error: Exception, name: tuple[str, str], commit_lsn: int | None = None) -> str:
    """The reason with the transaction that caused it, and what to do before a copy of the table helps.

    Raises as `reason` does.
    """
    problem, hint = in_transaction(reason(lake, error), commit_lsn), _remedy(error)
    return f"{problem}; {hint.replace(OF_TABLE, quote_qualified(*name))}" if hint else problem


def _remedy(error: Exception) -> str | None:
    """The remedy; None if a copy alone helps."""
    if isinstance(error, PgsieveError):
        return None if isinstance(error, CURED_BY_COPY) else error.hint
    try:
        raise_ours(error)
    except ExecutorError as ours:
        return ours.hint
    return None


def is_damage(error: Exception) -> bool:
    """Whether files are missing or unreadable: then no change is the cause, and none can be skipped."""
    return (
        isinstance(error, DamagedTableError)
        or missing_file(error) is not None
        or illegible_file(error) is not None
    )


def first_failing(commits: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """The first transaction with which the transformation fails; `fails` says whether it fails up to a transaction."""
    first = bisect_left(commits, True, key=fails)
    return commits[first] if first < len(commits) else None


def in_transaction(problem: str, commit_lsn: int | None) -> str:
    """A reason with the finish LSN of the transaction, which `pgsieve skip` takes."""
    return (
        problem
        if commit_lsn is None
        else f"{problem}, in the transaction finished at {format_lsn(commit_lsn)}"
    )
