"""What an engine raised is told apart: the storage refuses, a file is missing, or neither."""

from __future__ import annotations

import errno

from pgsieve.resources.lake.delta.errors import is_lost, missing_file, refusal, told


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_a_refusal_is_found_among_the_causes() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert refusal(raised_from(RuntimeError("it failed"), raised_from(ValueError(), full))) == errno.ENOSPC
    assert refusal(RuntimeError("it failed")) is None


def test_errors_that_are_each_others_causes_come_to_an_end() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    raised_from(first, raised_from(second, first))
    assert refusal(first) is None
    assert missing_file(second) is None


def test_spark_is_lost_where_it_says_so_and_not_where_a_cell_does() -> None:
    lost = "Task 0 in stage 3.0 failed 4 times: ExecutorLostFailure (executor 7 exited unrelated to the running tasks)"
    assert is_lost(raised_from(RuntimeError("it failed"), ValueError(lost)))
    assert not is_lost(RuntimeError("it failed"))
    cell = "[CAST_INVALID_INPUT] The value 'ExecutorLostFailure' cannot be cast to \"INT\". SQLSTATE: 22018"
    assert not is_lost(RuntimeError(cell))


def test_of_an_error_in_the_data_only_the_condition_or_postgresqls_words_are_told() -> None:
    overflow = RuntimeError("[CAST_OVERFLOW] The value 777777 cannot be cast. SQLSTATE: 22003")
    assert told(overflow) == "Spark's error CAST_OVERFLOW"
    division = RuntimeError("[USER_RAISED_EXCEPTION] division by zero [22012] SQLSTATE: P0001")
    assert told(division) == "division by zero [22012]"
