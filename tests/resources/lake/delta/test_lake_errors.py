"""What an engine raised is told apart: the storage refuses, a file is missing, or neither."""

from __future__ import annotations

import errno
import socket

import pytest
from py4j.clientserver import ClientServer, JavaParameters, PythonParameters

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


def test_a_jvm_that_does_not_answer_any_more_is_a_lost_spark() -> None:
    with socket.socket() as taken:  # Nobody listens there.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        gateway = ClientServer(JavaParameters(port=port), PythonParameters(port=0))
        with pytest.raises(ConnectionRefusedError) as raised:
            gateway.jvm.System.currentTimeMillis()
        gateway.shutdown_callback_server()
        with pytest.raises(ConnectionRefusedError) as other:
            socket.create_connection(("127.0.0.1", port))
    assert is_lost(raised.value)
    assert not is_lost(other.value)
