"""Classifies the errors of steps, and describes why a table is set aside.

A table that is set aside gets no more changes until it is copied again.

In: - the error of a step
    - a function that tries the transformation (the decoding and filtering of changes) up to a transaction
Out: the kind of the error; or a reason for the table's state, which contains no values of rows

The reason names the commit LSN of the transaction that fails, as PostgreSQL's apply worker does
(apply_error_callback() in src/backend/replication/logical/worker.c).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from pgsieve.decoding.errors import TABLE_PLACEHOLDER, PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.decoding.values.quoting import double_single_quotes, quote_qualified
from pgsieve.resources.lake.access import SPARK_ERRORS
from pgsieve.resources.lake.delta.errors import (
    ERRORS_OF_NO_TABLE,
    DamagedTableError,
    ExecutorError,
    RefusedTableError,
    SparkLostError,
    StoreUnavailableError,
    describe_spark_error,
    find_illegible_file,
    find_missing_file,
    raise_if_executor_error,
)
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import (
    ForeignServerError,
    LockedTableError,
    SourceUnreachableError,
    TransientError,
)
from pgsieve.resources.postgres.snapshot import AlteredTableError, SnapshotLostError

#: Errors that may go away by themselves. An executor of Spark reports them by the names of these classes.
_TRANSIENT_ERRORS = (
    TransientError,
    SourceUnreachableError,
    SnapshotLostError,
    AlteredTableError,
    LockedTableError,
)

#: Errors of a row filter that cannot be evaluated for a row.
_FILTER_ERRORS = (FilterValueError, NumericError)

#: Errors of a table that is damaged, or that Spark or delta-rs refuses. The user need not follow the hint, because the
#: next copy replaces the table.
CURED_BY_COPY = (DamagedTableError, RefusedTableError)

#: Errors that the data or the definition of a table may cause. Any other error is a fault, and ends the run.
TABLE_ERRORS = (PgsieveError, *SPARK_ERRORS)


def is_transient(error: BaseException) -> bool:
    """True if an error is a transient fault of a server, a store, the network or Spark.

    Another attempt may succeed.
    """
    if isinstance(error, ExecutorError):
        return error.class_name in {kind.__name__ for kind in _TRANSIENT_ERRORS}
    return isinstance(error, (*_TRANSIENT_ERRORS, SparkLostError, StoreUnavailableError))


def is_lock_error(error: PgsieveError) -> bool:
    """True if a table cannot be read because another session has locked it."""
    return _is_kind(error, LockedTableError)


def is_foreign_server_error(error: PgsieveError) -> bool:
    """True if a foreign server that has rows of the table did not answer the publisher."""
    return _is_kind(error, ForeignServerError)


def is_filter_error(error: Exception) -> bool:
    """True if a row filter cannot be evaluated for a row."""
    try:
        raise_if_executor_error(error)
    except ExecutorError as executor_error:
        error = executor_error
    return isinstance(error, PgsieveError) and any(_is_kind(error, kind) for kind in _FILTER_ERRORS)


def _is_kind(error: PgsieveError, kind: type[PgsieveError]) -> bool:
    """True if the error is of this kind, or an executor of Spark has reported an error of this kind."""
    return isinstance(error, kind) or (isinstance(error, ExecutorError) and error.class_name == kind.__name__)


def describe_error(lake: Lake, error: Exception) -> str:
    """The reason why the changes of a table cannot be transformed or applied.

    If the error is not the table's own (it is in ERRORS_OF_NO_TABLE, or transient), it is raised.
    """
    if isinstance(error, ERRORS_OF_NO_TABLE) or is_transient(error):
        raise error
    if isinstance(error, _FILTER_ERRORS) and error.sqlstate:
        return f"{error.message} [{error.sqlstate}]"  # If Spark evaluates the filter, the reason has this form, too.
    if isinstance(error, PgsieveError):
        return error.message
    lake.access.raise_if_unavailable(error)
    try:
        raise_if_executor_error(error)
    except ExecutorError as executor_error:
        if is_transient(executor_error):
            raise
        return executor_error.message
    return describe_spark_error(error)


def describe_error_fully(
    lake: Lake, error: Exception, name: tuple[str, str], commit_lsn: int | None = None
) -> str:
    """Describe an error as `describe_error` does. Add the transaction, and what the user has to do before the next copy.

    Raises the same errors as `describe_error`.
    """
    problem, remedy = add_transaction(describe_error(lake, error), commit_lsn), _find_remedy(error)
    table = double_single_quotes(quote_qualified(*name))
    return f"{problem}; {remedy.replace(TABLE_PLACEHOLDER, table)}" if remedy else problem


def _find_remedy(error: Exception) -> str | None:
    """What the user has to do before the table is copied again; None if nothing."""
    if isinstance(error, PgsieveError):
        return None if isinstance(error, CURED_BY_COPY) else error.hint
    try:
        raise_if_executor_error(error)
    except ExecutorError as executor_error:
        return executor_error.hint
    return None


def is_damage(error: Exception) -> bool:
    """True if files of the table are missing or cannot be read.

    In that case no change is the cause, and skipping a transaction would not help.
    """
    return (
        isinstance(error, DamagedTableError)
        or find_missing_file(error) is not None
        or find_illegible_file(error) is not None
    )


def find_first_failing_commit(commits: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """The first commit with which the transformation fails, found by bisection; None if it never fails.

    `commits` are commit LSNs in ascending order. `fails` says whether the transformation of all changes up to a commit
    fails.
    """
    index = bisect_left(commits, True, key=fails)
    return commits[index] if index < len(commits) else None


def add_transaction(problem: str, commit_lsn: int | None) -> str:
    """Add to a problem the commit LSN of its transaction. The user can pass this LSN to `pgsieve skip`."""
    return (
        problem
        if commit_lsn is None
        else f"{problem}, in the transaction finished at {format_lsn(commit_lsn)}"
    )
