"""Errors of engines are classified: the storage refuses, a file is missing, or neither."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from py4j.clientserver import ClientServer, JavaParameters, PythonParameters

from pgsieve.resources.lake.delta.errors import (
    DamagedTableError,
    LakeUnavailableError,
    SparkLostError,
    describe_spark_error,
    find_missing_file,
    find_refusal_code,
    find_spark_failure,
    get_first_message_line,
)
from pgsieve.resources.lake.lake import Lake
from tests.fixtures.lakes import no_session


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_a_refusal_is_found_among_the_causes() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert (
        find_refusal_code(raised_from(RuntimeError("it failed"), raised_from(ValueError(), full)))
        == errno.ENOSPC
    )
    assert find_refusal_code(RuntimeError("it failed")) is None


def test_a_cycle_of_causes_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    raised_from(first, raised_from(second, first))
    assert find_refusal_code(first) is None
    assert find_missing_file(second) is None


def test_spark_is_lost_if_spark_says_so_and_not_if_a_cell_does() -> None:
    lost = "Task 0 in stage 3.0 failed 4 times: ExecutorLostFailure (executor 7 exited unrelated to the running tasks)"
    failure = find_spark_failure(raised_from(RuntimeError("it failed"), ValueError(lost)))
    assert isinstance(failure, SparkLostError)
    assert find_spark_failure(RuntimeError("it failed")) is None
    cell = "[CAST_INVALID_INPUT] The value 'ExecutorLostFailure' cannot be cast to \"INT\". SQLSTATE: 22018"
    assert find_spark_failure(RuntimeError(cell)) is None


def test_an_error_in_the_data_shows_only_its_condition_or_postgresqls_words() -> None:
    overflow = RuntimeError("[CAST_OVERFLOW] The value 777777 cannot be cast. SQLSTATE: 22003")
    assert describe_spark_error(overflow) == "Spark's error CAST_OVERFLOW"
    division = RuntimeError("[USER_RAISED_EXCEPTION] division by zero [22012] SQLSTATE: P0001")
    assert describe_spark_error(division) == "division by zero [22012]"


_ARROW = "\n  \x1b[31m↳\x1b[0m "
_GET = "Error performing GET http://store:9000/lake/region=EMEA/x.parquet?sig=s3cr3t in 4.44785ms"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            _ARROW.join(
                (
                    "Kernel error -> Generic S3 error",
                    f"{_GET} - Server returned non-2xx status code",
                    "405 Method Not Allowed",
                    "<?xml version='1'?>\n<Error><Code>MethodNotAllowedX</Code><StringToSign>s3cr3t</StringToSign></Error>",
                )
            ),
            (
                "Kernel error -> Generic S3 error: Error performing GET http://store:9000 - Server returned non-2xx status code:"
                " 405 Method Not Allowed (MethodNotAllowedX)"
            ),
        ),
        (
            _ARROW.join(("Generic S3 error", f"{_GET} - Server said", "418 I'm a teapot", "s3cr3t\ns3cr3t")),
            "Generic S3 error: Error performing GET http://store:9000 - Server said: 418 I'm a teapot",
        ),
        (
            _ARROW.join(("Generic S3 error", "Got invalid list response", "missing field `Name`")),
            "Generic S3 error: Got invalid list response: missing field `Name`",
        ),
        (
            f"Generic S3 error: {_GET} - Server returned non-2xx status code: 405 Method Not Allowed: <Error><x>s3cr3t</x>",
            (
                "Generic S3 error: Error performing GET http://store:9000 - Server returned non-2xx status code: 405 Method Not"
                " Allowed"
            ),
        ),
        (
            "Generic S3 error: Error performing PUT http://h/x - Server returned non-2xx status code: 418 I'm a teapot: s3cr3t: x",
            "Generic S3 error: Error performing PUT http://h - Server returned non-2xx status code: 418 I'm a teapot",
        ),
        ("Cast error: it failed\n  \x1b[31m↳\x1b[0m s3cr3t", "Cast error: it failed"),
        ("", "RuntimeError"),
    ],
)
def test_a_stores_error_shows_the_request_and_its_end(text: str, line: str) -> None:
    assert get_first_message_line(RuntimeError(text)) == line


@pytest.mark.parametrize("lost", [("protocol",), ("metaData",), ("protocol", "metaData")])
def test_a_log_without_its_beginning_gives_pgsieves_own_message(
    tmp_path: Path, lost: tuple[str, ...]
) -> None:
    path = str(tmp_path / "t")
    write_deltalake(path, pa.table({"id": [1]}))
    entry = tmp_path / "t" / "_delta_log" / f"{0:020}.json"
    kept = [line for line in entry.read_text().splitlines() if not json.loads(line).keys() & {*lost}]
    entry.write_text("\n".join(kept))
    with (
        pytest.raises(DamagedTableError) as damaged,
        Lake(str(tmp_path), no_session).access.translate_errors(path),
    ):
        DeltaTable(path)
    assert damaged.value.message == f'Delta table "{path}": its log lacks an entry or a checkpoint'


def test_a_jvm_that_no_longer_answers_is_a_lost_spark() -> None:
    with socket.socket() as taken:  # no process listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        gateway = ClientServer(JavaParameters(port=port), PythonParameters(port=0))
        with pytest.raises(ConnectionRefusedError) as raised:
            gateway.jvm.System.currentTimeMillis()
        gateway.shutdown_callback_server()
        with pytest.raises(ConnectionRefusedError) as other:
            socket.create_connection(("127.0.0.1", port))
    assert find_spark_failure(raised.value)
    assert find_spark_failure(other.value) is None


def test_a_lake_below_a_folder_that_this_user_may_not_search_cannot_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "lake").mkdir(parents=True)
    lake = Lake(str(closed / "lake"), no_session)
    closed.chmod(0)
    users = os.getresuid()
    if os.geteuid() == 0:
        tmp_path.chmod(0o755)
        os.setresuid(65534, 65534, 0)
    try:
        with pytest.raises(LakeUnavailableError, match=f"cannot be written: {os.strerror(errno.EACCES)} \\("):
            lake.access.check_permitted()
    finally:
        os.setresuid(*users)
        closed.chmod(0o700)
