"""Defines the errors of the lake, and interprets the exceptions of its engines, delta-rs and Spark.

In: exceptions of delta-rs, Arrow, the operating system and Spark.
Out: errors of pgsieve, most of them subclasses of `LakeError`. Their messages contain no value of a cell.

If an error concerns one table, the table is set aside: its changes are no longer applied, and the run goes on without
it. Five errors stop the run (`ERRORS_OF_NO_TABLE`): the storage refuses requests (`LakeUnavailableError`), Spark has
lost executors or their data (`SparkLostError`), a job was cancelled (`JobCancelledError`), there is no Spark session (`SparkUnavailableError`), or another writer
keeps pgsieve from committing (`ConcurrentWriteError`).
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from traceback import walk_tb

from deltalake.exceptions import CommitFailedError, DeltaError
from py4j.protocol import Py4JNetworkError
from pyspark.errors import AnalysisException
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.passwords import conceal_passwords

#: Maps the operating system's messages about refused writes to their codes.
_CODE_BY_MESSAGE = {
    os.strerror(code): code
    for code in (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENFILE, errno.EMFILE),
        *(errno.EROFS, errno.EACCES, errno.EPERM),
    )
}
#: The codes of refusals that may concern only one folder.
_FOLDER_REFUSALS = {errno.EROFS, errno.EACCES, errno.EPERM}
#: Messages of SQLite about the same errors. Dagster writes its own records with SQLite.
_CODE_BY_SQLITE_MESSAGE = {
    "database or disk is full": errno.ENOSPC,
    "attempt to write a readonly database": errno.EROFS,
}
_REFUSAL_WORDS = "|".join(map(re.escape, [*_CODE_BY_MESSAGE, *_CODE_BY_SQLITE_MESSAGE]))
#: A message of the operating system, in the form in which delta-rs, Python, Arrow, the JVM and SQLite quote it. Other
#: forms do not count, because the same words may be a value of a cell.
_SYSTEM_MESSAGE = re.compile(
    r"\(os error (?P<rust>\d+)\)|\[[Ee]rrno (?P<python>\d+)\]"
    rf"|(?:java\.(?:io|nio)\.[\w.]+: |sqlite3\.OperationalError\) )[^\n]*?(?P<words>{_REFUSAL_WORDS})"
)
#: An error of a row filter that Spark evaluates. It has PostgreSQL's message and SQLSTATE, and no values.
_FILTER_ERROR = re.compile(r"\[USER_RAISED_EXCEPTION\] (.+? \[[0-9A-Z]{5}\])")
#: Messages of Spark or Spark Connect about lost executors, workers or data.
_SPARK_LOST = re.compile(
    r"ExecutorLostFailure|Python worker exited unexpectedly|CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND|FetchFailed"
    r"|Master removed our application|SparkContext was shut down|StatusCode\.UNAVAILABLE"
)
#: Messages of Spark about a job that was cancelled.
_JOB_CANCELLED = re.compile(r"\[(?:OPERATION_CANCELED|SPARK_JOB_CANCELLED)\]")
#: The messages of Spark, delta-rs and Arrow about a file that does not exist.
_MISSING_FILE = re.compile(r"(?:reading file|Object at location|open local file) '?(?:file:)?(\S+?\.parquet)")
_NOT_FOUND_WORDS = ("not found", "FILE_NOT_EXIST", "No such file or directory")
#: The messages of delta-rs about a log that lacks an entry or a checkpoint. They also occur for a moment while old
#: entries are removed.
_MISSING_ENTRY = re.compile(
    r"File not found[^\n]*/_delta_log/|Object at location \S*_delta_log/\S+ not found|Expected contiguous commit files"
    r"|didn't find any checkpoints|No (?:protocol|table metadata|table metadata or protocol) found"
)
#: Messages of delta-rs about illegible log entries, and the beginning of its other messages about a log.
_ILLEGIBLE_LOG = re.compile(r"Json error|Unexpected state: the newest version in the log")
_LOG_PREFIX = "Kernel error: "
#: Messages about a file that is not a Parquet file. Those of delta-rs come first. The pattern must
#: not match errors of an SQL condition that is evaluated on the rows of a file.
_INVALID_PARQUET = re.compile(
    r"Failed to fetch metadata for file |Invalid Parquet file|Parquet argument error: (?!Arrow: )"
    r"|Parquet error: (?:EOF: |Arrow: (?:Unable to |incompatible arrow schema))|Kernel error: Arrow error: (?:EOF|Parquet error): "
    # Messages of Arrow when it opens a file, reads a page, and decodes a page.
    r"|Could not open Parquet input source|Parquet file size is \d+ bytes|Parquet magic bytes not found|deserialize thrift"
    r"|Deserializing page header failed|decompression failed|Unexpected end of stream|[Cc]orrupt data page|corrupted bit_width"
    r"|truncated PLAIN-encoded|rep / def levels|Unknown encoding type|not in dictionary bounds|Invalid flatbuffers message"
    r"|Invalid base64 input"
    # Messages of Spark and Hadoop.
    r"|is not a Parquet file|the footer index is not within the file|CANNOT_READ_FILE_FOOTER"
    r"|ParquetDecodingException|can not read class org\.apache\.parquet"
)
#: Messages about a read that has failed, and about a read beyond the end of a file. In the second case the file was cut
#: off.
_READ_FAILED = re.compile(
    r"Object Store error|Error performing [A-Z]+ |\(os error \d+\)|\[[Ee]rrno \d+\]|error sending request|Resources exhausted"
)
_CUT_OFF = re.compile(r"Requested range was invalid|status code:? 416|object was only \d+ bytes")
#: The beginning of delta-rs's message about an error of an object store. The next lines of the message begin with ↳,
#: and describe the request and its result.
_STORE_ERROR = re.compile(r"(?:Kernel error -> )?Generic \w+ error\b")
_DETAIL_LINE = re.compile(r"\s*(?:\x1b\[[0-9;]*m)?↳(?:\x1b\[[0-9;]*m)?\s*")
#: A request. Its address is shown only up to the server. The rest has a signature, or names of objects, which may
#: contain values of cells.
_REQUEST = re.compile(r"(Error performing [A-Z]+ \w+://[^/\s?]+)\S*(?: in [\d.]+\S+)?|(?<=\S)\?\S+")
_STATUS_LINE = re.compile(r"\d{3} [A-Z]")
#: The answer of a store, after its status code.
_ANSWER_BODY = re.compile(r"(status code: \d{3} [^:]*):.*", re.DOTALL)
_ANSWER_CODE = re.compile(r"<Code>(\w+)</Code>")

#: Messages of a CommitFailedError that is no conflict. A second attempt would raise it again.
_NO_CONFLICT = re.compile(r"Unsupported table features|Table features must be specified|append-only")


class LakeError(PgsieveError):
    """The lake cannot be read or written."""


class ConcurrentWriteError(LakeError):
    """Another writer of the table has committed first. If the write is repeated, it may succeed."""


class OvertakenError(ConcurrentWriteError):
    """Another process has committed after this write was planned, so the step must make a new plan."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f'Delta table "{path}": another process wrote to it meanwhile',
            hint="two runs work on the same tables: let one of them end; `pgsieve run` goes on from the last commit",
            sqlstate="40001",
        )


class LakeUnavailableError(LakeError):
    """The storage refuses requests of pgsieve, and this concerns the whole lake.

    For example, the disk is full, the file system is read-only, rights are missing, or the bucket does not exist.
    """


class StoreUnavailableError(LakeUnavailableError):
    """The lake's object store answers with errors, or does not answer. The same request may succeed a moment later."""


class SparkLostError(LakeError):
    """Spark has lost executors or their data too often, or has ended. The cause is not a table."""


class JobCancelledError(LakeError):
    """A job of Spark was cancelled: by an interruption of this process, or by a user in Spark's web interface."""


class SparkUnavailableError(PgsieveError):
    """There is no Spark session, because Java is missing, or the master does not answer."""


#: Errors whose cause is not a table.
ERRORS_OF_NO_TABLE = (
    ConcurrentWriteError,
    JobCancelledError,
    LakeUnavailableError,
    SparkLostError,
    SparkUnavailableError,
)


class DamagedTableError(LakeError):
    """A Delta table has lost files or its log, completely or in part, and must be made again."""


class RefusedTableError(LakeError):
    """An engine cannot read or write a Delta table, because of a property of this table."""


#: The problem of a table whose newest log entries no longer exist.
PUT_BACK_PROBLEM = "it was put back to an earlier version"


def make_damaged_table_error(path: str, problem: str) -> DamagedTableError:
    """The error of a damaged table. Its hint is the remedy."""
    return DamagedTableError(
        f'Delta table "{path}": {problem}',
        hint="restore it from a backup, or have it made again: `pgsieve resync` with the name of its subscription, without a"
        ' table (pgsieve\'s documentation, "A damaged lake")',
    )


def make_damaged_log_error(path: str, problem: str) -> DamagedTableError:
    """The error of a table with a log that cannot be read."""
    return make_damaged_table_error(path, f"its log cannot be read: {problem}")


class ExecutorError(PgsieveError):
    """An error of pgsieve that was raised on an executor of Spark. `class_name` is the name of its class."""

    def __init__(self, message: str, *, class_name: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.class_name = class_name


def is_arrow_error(error: BaseException) -> bool:
    """True if delta-rs has passed on an error of Arrow, for example of a cast. Its class is then Exception itself."""
    return type(error) is Exception


def is_conflict(error: BaseException) -> bool:
    """True if a commit of this process has failed because another writer was faster."""
    return isinstance(error, CommitFailedError) and not _NO_CONFLICT.search(str(error))


_RETRY_WAIT, _RETRY_STOP = wait_random_exponential(0.1, max=5), stop_after_attempt(6)
#: Repeats an operation, for example a compaction, a few times if another writer was faster.
retry_after_conflict = retry(
    retry=retry_if_exception(lambda error: isinstance(error, ConcurrentWriteError) or is_conflict(error)),
    wait=_RETRY_WAIT,
    stop=_RETRY_STOP,
    reraise=True,
)
#: Repeats a commit a few times if another writer was faster. It is for commits that need no new plan.
retry_commit = retry(retry=retry_if_exception(is_conflict), wait=_RETRY_WAIT, stop=_RETRY_STOP, reraise=True)


def find_refusal_code(error: BaseException) -> int | None:
    """The errno of a write that the storage has refused, from an error or one of its causes. None for any other error."""
    for cause in list_causes(error):
        if isinstance(cause, OSError) and cause.errno in _CODE_BY_MESSAGE.values():
            return cause.errno
        text = str(cause)
        if (
            "SQLSTATE: 22" in text
        ):  # The message of a data exception may contain a cell, with any words in it.
            continue
        for match in _SYSTEM_MESSAGE.finditer(text):
            code_text = match["rust"] or match["python"]
            code = (
                int(code_text)
                if code_text
                else {**_CODE_BY_MESSAGE, **_CODE_BY_SQLITE_MESSAGE}[match["words"]]
            )
            if code in _CODE_BY_MESSAGE.values():
                return code
    return None


def find_spark_failure(error: BaseException) -> SparkLostError | JobCancelledError | None:
    """The error to raise if not a table but Spark has failed. None for any other error.

    Spark has lost an executor, its driver no longer runs, or a job was cancelled.
    """
    for cause in list_causes(error):
        # The message of a data exception may contain a cell, with any words in it.
        text = "" if "SQLSTATE: 22" in str(cause) else str(cause)
        if _JOB_CANCELLED.search(text):
            return JobCancelledError(
                "a job of Spark was cancelled", hint="`pgsieve run` goes on from the last commit"
            )
        if isinstance(cause, Py4JNetworkError) or _is_jvm_gone(cause) or _SPARK_LOST.search(text):
            return SparkLostError(
                "Spark lost executors, or has ended",
                hint="see Spark's log, above or of its server; `pgsieve run` goes on from the last commit",
            )
    return None


def _is_jvm_gone(error: BaseException) -> bool:
    """True if Py4J could not connect because the JVM no longer runs. Py4J then raises the error of the system."""
    return isinstance(error, ConnectionError) and any(
        frame.f_globals.get("__name__", "").startswith("py4j.") for frame, _ in walk_tb(error.__traceback__)
    )


def is_folder_refusal(code: int) -> bool:
    """True if a refusal with this code may concern only one folder."""
    return code in _FOLDER_REFUSALS


def find_missing_file(error: BaseException) -> str | None:
    """The Parquet file that an engine has not found. None for any other error."""
    for cause in list_causes(error):
        text = str(cause)
        if isinstance(cause, FileNotFoundError) and (file_match := re.search(r"/[^'\"]*\.parquet", text)):
            return file_match[0]
        if any(words in text for words in _NOT_FOUND_WORDS) and (match := _MISSING_FILE.search(text)):
            return match[1]
    return None


def has_missing_entries(error: BaseException) -> bool:
    """True if delta-rs has not found an entry or a checkpoint of a table's log."""
    return isinstance(error, DeltaError) and _MISSING_ENTRY.search(str(error)) is not None


def has_illegible_log(error: BaseException) -> bool:
    """True if delta-rs cannot read an entry or a checkpoint of a table's log."""
    if not isinstance(error, DeltaError):
        return False
    text = str(error)
    return _ILLEGIBLE_LOG.search(text) is not None or (
        text.startswith(_LOG_PREFIX) and _is_invalid_parquet(text)
    )


def find_illegible_file(error: BaseException) -> str | None:
    """The Parquet file that an engine cannot read because the file is empty, cut off, or corrupt.

    "" if the engine does not name the file. None for any other error.
    """
    for cause in list_causes(error):
        text = str(cause)
        if not isinstance(cause, PgsieveError) and "SQLSTATE: 22" not in text and _is_invalid_parquet(text):
            file_match = re.search(r"[^\s'\"/\\]+\.parquet", text)
            return file_match[0] if file_match else ""
    return None


def _is_invalid_parquet(text: str) -> bool:
    """True if a message is about a file that is not a Parquet file, and not about a read that has failed."""
    return _INVALID_PARQUET.search(text) is not None and (
        _READ_FAILED.search(text) is None or _CUT_OFF.search(text) is not None
    )


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, each of them once.

    The chain of causes may be circular, if an error was raised again.
    """
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def get_first_message_line(error: BaseException) -> str:
    """The first line of an engine's message, without values of cells.

    For a data exception it is only the name of the exception, because the message may contain cells. For an error
    of an object store it includes the result of the request, and the code in the store's answer.
    """
    text = str(error)
    condition = re.search(r"\[([A-Z_]+(?:\.[A-Z_]+)*)\].*SQLSTATE: 22", text, re.DOTALL)
    if condition:
        return condition[1]
    if details := re.search(r"RPC that terminated with:.*?\bdetails = \"(.*?)\"\n", text, re.DOTALL):
        text = details[
            1
        ]  # The client of Spark Connect passes on an error of gRPC, whose first line says nothing.
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and _STORE_ERROR.match(lines[0]):
        return conceal_passwords(_join_store_message(lines))
    return conceal_passwords(next(iter(lines), type(error).__name__))


def _join_store_message(lines: Sequence[str]) -> str:
    """The message of delta-rs about a request.

    The answer of the store is left out, because it contains the signed request.
    """
    words = [lines[0]]
    for line in lines[1:]:
        if not (prefix_match := _DETAIL_LINE.match(line)) or "<" in line or _STATUS_LINE.match(words[-1]):
            break
        words.append(line[prefix_match.end() :])
    text = _REQUEST.sub(r"\1", ": ".join(word.partition("<")[0].strip().rstrip(":") for word in words))
    text = _ANSWER_BODY.sub(r"\1", text)
    code = _ANSWER_CODE.search("\n".join(lines))
    return text + (f" ({code[1]})" if code else "")


def describe_spark_error(error: BaseException) -> str:
    """The message of an error of Spark, without values of cells.

    For an error in the data it is the name of Spark's error condition, or PostgreSQL's message and SQLSTATE.
    """
    if isinstance(error, AnalysisException):
        return get_first_message_line(error)
    filter_error = _FILTER_ERROR.search(str(error))
    if filter_error:
        return conceal_passwords(filter_error.group(1))
    match = re.search(r"\[([A-Z][A-Z0-9_.]*_[A-Z0-9_.]*)\] ", str(error))
    return f"Spark's error {match.group(1)}" if match else f"Spark's {type(error).__name__}"


def raise_if_executor_error(error: BaseException) -> None:
    """Raise ExecutorError if an error of Spark contains an error of pgsieve."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line, next_line in reversed(list(zip(lines, [*lines[1:], ""], strict=True))):
        match = re.match(r"pgsieve\.[\w.]*\.(\w+): (.*)", line)
        if match:
            hint = next_line.removeprefix("hint: ") if next_line.startswith("hint: ") else None
            raise ExecutorError(match.group(2), class_name=match.group(1), hint=hint) from error
