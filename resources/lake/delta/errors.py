"""Errors of the lake: turns an engine's exception into an error that names the table and the cause.

In: exceptions of delta-rs, Arrow, the operating system and Spark. Out: `LakeError` and its subclasses,
without a cell value. An error of one table sets that table aside. Three errors concern no single table, and
stop the run: the whole storage refuses (`LakeUnavailableError`), Spark loses executors or their data
(`SparkLostError`), or another writer keeps pgsieve from committing (`ConcurrentWriteError`).
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
from pgsieve.resources.passwords import concealed

#: The operating system's messages for a write that the storage refuses, whichever process writes.
_REFUSALS = {
    os.strerror(code): code
    for code in (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENFILE, errno.EMFILE),
        *(errno.EROFS, errno.EACCES, errno.EPERM),
    )
}
#: The refusals that may concern only one folder.
_OF_A_FOLDER = {errno.EROFS, errno.EACCES, errno.EPERM}
#: SQLite's messages for the same errors; Dagster keeps its records in SQLite.
_SQLITE = {"database or disk is full": errno.ENOSPC, "attempt to write a readonly database": errno.EROFS}
_WORDS = "|".join(map(re.escape, [*_REFUSALS, *_SQLITE]))
#: A message of the operating system as delta-rs, Python, Arrow, the JVM and SQLite mark it. Without such a
#: mark the same words may be a cell's text.
_QUOTED = re.compile(
    r"\(os error (?P<rust>\d+)\)|\[[Ee]rrno (?P<python>\d+)\]"
    rf"|(?:java\.(?:io|nio)\.[\w.]+: |sqlite3\.OperationalError\) )[^\n]*?(?P<words>{_WORDS})"
)
#: Errors of a row filter: PostgreSQL's message and SQLSTATE, without values (`raise_error` in
#: pgsieve.assets.steps).
_OURS = re.compile(r"\[USER_RAISED_EXCEPTION\] (.+? \[[0-9A-Z]{5}\])")
#: Messages of Spark, classic or Connect, about lost executors, workers or data.
_LOST = re.compile(
    r"ExecutorLostFailure|Python worker exited unexpectedly|CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND|FetchFailed"
    r"|Master removed our application|SparkContext was shut down|StatusCode\.UNAVAILABLE"
)
#: Messages of Spark, of delta-rs, and of Arrow about a missing file.
_MISSING_FILE = re.compile(r"(?:reading file|Object at location|open local file) '?(?:file:)?(\S+?\.parquet)")
_NOT_THERE = ("not found", "FILE_NOT_EXIST", "No such file or directory")
#: delta-rs's messages for a log that lacks an entry or a checkpoint. They also occur for a moment during a
#: log's cleanup.
_LACKING = re.compile(
    r"File not found[^\n]*/_delta_log/|Object at location \S*_delta_log/\S+ not found|Expected contiguous commit files"
    r"|didn't find any checkpoints|No (?:protocol|table metadata|table metadata or protocol) found"
)
#: delta-rs's messages for a log with unreadable entries, and the beginning of its other messages about a log.
_ILLEGIBLE = re.compile(r"Json error|Unexpected state: the newest version in the log")
_OF_THE_LOG = "Kernel error: "
#: Messages about a file that is not, or is no longer, a Parquet file; delta-rs's come first. Messages about a
#: condition on the file's rows must not match.
_NO_PARQUET = re.compile(
    r"Failed to fetch metadata for file |Invalid Parquet file|Parquet argument error: (?!Arrow: )"
    r"|Parquet error: (?:EOF: |Arrow: (?:Unable to |incompatible arrow schema))|Kernel error: Arrow error: (?:EOF|Parquet error): "
    # Arrow's messages as it opens a file, reads a page, and decodes one.
    r"|Could not open Parquet input source|Parquet file size is \d+ bytes|Parquet magic bytes not found|deserialize thrift"
    r"|Deserializing page header failed|decompression failed|Unexpected end of stream|[Cc]orrupt data page|corrupted bit_width"
    r"|truncated PLAIN-encoded|rep / def levels|Unknown encoding type|not in dictionary bounds|Invalid flatbuffers message"
    r"|Invalid base64 input"
    # Spark's and Hadoop's.
    r"|is not a Parquet file|the footer index is not within the file|CANNOT_READ_FILE_FOOTER"
    r"|ParquetDecodingException|can not read class org\.apache\.parquet"
)
#: Messages about a file that could not be read. The second pattern is an exception: the store has no bytes at
#: the requested position, so the file was cut off.
_UNREAD = re.compile(
    r"Object Store error|Error performing [A-Z]+ |\(os error \d+\)|\[[Ee]rrno \d+\]|error sending request|Resources exhausted"
)
_ENDS_BEFORE = re.compile(r"Requested range was invalid|status code:? 416|object was only \d+ bytes")
#: The beginning of a store's error in delta-rs. The next lines begin with an arrow, and describe the request
#: and its end.
_OF_A_STORE = re.compile(r"(?:Kernel error -> )?Generic \w+ error\b")
_ARROW = re.compile(r"\s*(?:\x1b\[[0-9;]*m)?↳(?:\x1b\[[0-9;]*m)?\s*")
#: A request. After the server, its address has names of objects, which may contain values of cells, and a
#: signature.
_REQUEST = re.compile(r"(Error performing [A-Z]+ \w+://[^/\s?]+)\S*(?: in [\d.]+\S+)?|(?<=\S)\?\S+")
_STATUS = re.compile(r"\d{3} [A-Z]")
#: The store's answer, which follows its status in the line.
_BODY = re.compile(r"(status code: \d{3} [^:]*):.*", re.DOTALL)
_CODE = re.compile(r"<Code>(\w+)</Code>")

#: Errors that delta-rs raises in the class of its conflicts, although they are none: it never writes to such
#: a table.
_REFUSED = re.compile(r"Unsupported table features|Table features must be specified|append-only")


class LakeError(PgsieveError):
    """The lake cannot be read or written."""


class ConcurrentWriteError(LakeError):
    """Another writer of the table committed first; a repeated write reads that commit."""


class OverrunError(ConcurrentWriteError):
    """Another process committed after this write was planned, so the step has to plan again."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f'Delta table "{path}": another process wrote to it meanwhile',
            hint="two runs work on the same tables: let one of them end; `pgsieve run` goes on from the last commit",
            sqlstate="40001",
        )


class LakeUnavailableError(LakeError):
    """The storage refuses: a full disk, a read-only file system, missing rights, no bucket.

    No table is the cause.
    """


class StoreUnavailableError(LakeUnavailableError):
    """The lake's store answers with errors, or not at all; it may work a moment later."""


class SparkLostError(LakeError):
    """Spark lost executors or their data too often, or has ended. No table is the cause."""


class SparkUnavailableError(PgsieveError):
    """No Spark session: Java is missing, or the master does not answer."""


#: Errors whose cause is not a table.
NO_TABLES_FAULT = (ConcurrentWriteError, LakeUnavailableError, SparkLostError, SparkUnavailableError)


class DamagedTableError(LakeError):
    """A Delta table has lost files, its log, or parts of them, so it has to be made again."""


class RefusedTableError(LakeError):
    """An engine cannot read or write a Delta table because of a property of this table."""


#: The problem of a table that lacks its newest log entries.
PUT_BACK = "it was put back to an earlier version"


def damaged(path: str, what: str) -> DamagedTableError:
    """The error of a damaged table, with the remedy."""
    return DamagedTableError(
        f'Delta table "{path}": {what}',
        hint="restore it from a backup, or have it made again: `pgsieve resync` with the name of its subscription, without a"
        ' table (pgsieve\'s documentation, "A damaged lake")',
    )


def damaged_log(path: str, what: str) -> DamagedTableError:
    """The error of a table with an unreadable log."""
    return damaged(path, f"its log cannot be read: {what}")


class ExecutorError(PgsieveError):
    """An error of pgsieve that was raised on a Spark executor; `kind` is its class."""

    def __init__(self, message: str, *, kind: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


def is_arrows(error: BaseException) -> bool:
    """Whether an error of Arrow, such as of a cast, came through delta-rs, which raises it as a plain Exception."""
    return type(error) is Exception


def is_conflict(error: BaseException) -> bool:
    """Whether delta-rs, or another committer of this process, did not commit because another writer was faster."""
    return isinstance(error, CommitFailedError) and not _REFUSED.search(str(error))


_WAIT, _STOP = wait_random_exponential(0.1, max=5), stop_after_attempt(6)
#: Repeats an operation, such as a compaction, a few times if a concurrent writer was faster.
again_after_conflict = retry(
    retry=retry_if_exception(lambda error: isinstance(error, ConcurrentWriteError) or is_conflict(error)),
    wait=_WAIT,
    stop=_STOP,
    reraise=True,
)
#: Repeats a commit that needs no new plan.
commit_again = retry(retry=retry_if_exception(is_conflict), wait=_WAIT, stop=_STOP, reraise=True)


def refusal(error: BaseException) -> int | None:
    """The errno of the storage's refusal, from an error or one of its causes; None for any other error."""
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _REFUSALS.values():
            return each.errno
        text = str(each)
        if "SQLSTATE: 22" in text:  # A data exception shows a cell.
            continue
        for match in _QUOTED.finditer(text):
            number = match["rust"] or match["python"]
            code = int(number) if number else {**_REFUSALS, **_SQLITE}[match["words"]]
            if code in _REFUSALS.values():
                return code
    return None


def is_lost(error: BaseException) -> bool:
    """Whether Spark itself failed: it lost an executor, or its driver is gone."""
    return any(
        isinstance(each, Py4JNetworkError)
        or _no_jvm_answers(each)
        or ("SQLSTATE: 22" not in str(each) and _LOST.search(str(each)))
        for each in causes(error)
    )


def _no_jvm_answers(error: BaseException) -> bool:
    """Whether Py4J could not connect to a JVM that is gone; it raises the system's own error."""
    return isinstance(error, ConnectionError) and any(
        frame.f_globals.get("__name__", "").startswith("py4j.") for frame, _ in walk_tb(error.__traceback__)
    )


def spark_lost() -> SparkLostError:
    """The error of a lost Spark."""
    return SparkLostError(
        "Spark lost executors, or has ended",
        hint="see Spark's log, above or of its server; `pgsieve run` goes on from the last commit",
    )


def of_one_folder(code: int) -> bool:
    """Whether a refusal may concern only one folder."""
    return code in _OF_A_FOLDER


def missing_file(error: BaseException) -> str | None:
    """The Parquet file that an engine did not find."""
    for each in causes(error):
        text = str(each)
        if isinstance(each, FileNotFoundError) and (named := re.search(r"/[^'\"]*\.parquet", text)):
            return named[0]
        if any(words in text for words in _NOT_THERE) and (match := _MISSING_FILE.search(text)):
            return match[1]
    return None


def lacks_entries(error: BaseException) -> bool:
    """Whether delta-rs misses a file in a table's log."""
    return isinstance(error, DeltaError) and _LACKING.search(str(error)) is not None


def is_illegible(error: BaseException) -> bool:
    """Whether delta-rs cannot read an entry or a checkpoint of a table's log."""
    if not isinstance(error, DeltaError):
        return False
    text = str(error)
    return _ILLEGIBLE.search(text) is not None or (text.startswith(_OF_THE_LOG) and _is_no_parquet(text))


def illegible_file(error: BaseException) -> str | None:
    """The Parquet file that an engine cannot read, as it is empty, cut off, or corrupt.

    "" if the engine does not name the file; None for any other error.
    """
    for each in causes(error):
        text = str(each)
        if not isinstance(each, PgsieveError) and "SQLSTATE: 22" not in text and _is_no_parquet(text):
            named = re.search(r"[^\s'\"/\\]+\.parquet", text)
            return named[0] if named else ""
    return None


def _is_no_parquet(text: str) -> bool:
    """Whether a message says that a file is not a Parquet file, rather than that it could not be read."""
    return _NO_PARQUET.search(text) is not None and (
        _UNREAD.search(text) is None or _ENDS_BEFORE.search(text) is not None
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes. An error that is raised again may be the cause of its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an engine's message, without its stack.

    For a data exception it is only the exception's name, as such messages show cells. For a store's error it
    also has the end of the request and the code of the answer.
    """
    text = str(error)
    condition = re.search(r"\[([A-Z_]+(?:\.[A-Z_]+)*)\].*SQLSTATE: 22", text, re.DOTALL)
    if condition:
        return condition[1]
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and _OF_A_STORE.match(lines[0]):
        return concealed(_of_a_store(lines))
    return concealed(next(iter(lines), type(error).__name__))


def _of_a_store(lines: Sequence[str]) -> str:
    """delta-rs's message about a request, without the store's answer, which shows the signed request."""
    words = [lines[0]]
    for line in lines[1:]:
        if not (arrow := _ARROW.match(line)) or "<" in line or _STATUS.match(words[-1]):
            break
        words.append(line[arrow.end() :])
    text = _REQUEST.sub(r"\1", ": ".join(word.partition("<")[0].strip().rstrip(":") for word in words))
    text = _BODY.sub(r"\1", text)
    code = _CODE.search("\n".join(lines))
    return text + (f" ({code[1]})" if code else "")


def spark_message(error: BaseException) -> str:
    """Spark's message of an error, without values.

    For an error in the data it is only Spark's error condition, or PostgreSQL's message and SQLSTATE.
    """
    if isinstance(error, AnalysisException):
        return first_line(error)
    ours = _OURS.search(str(error))
    if ours:
        return concealed(ours.group(1))
    match = re.search(r"\[([A-Z][A-Z0-9_.]*_[A-Z0-9_.]*)\] ", str(error))
    return f"Spark's error {match.group(1)}" if match else f"Spark's {type(error).__name__}"


def raise_ours(error: BaseException) -> None:
    """Raise the pgsieve error that an executor raised, if a Spark error contains one."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line, after in reversed(list(zip(lines, [*lines[1:], ""], strict=True))):
        match = re.match(r"pgsieve\.[\w.]*\.(\w+): (.*)", line)
        if match:
            hint = after.removeprefix("hint: ") if after.startswith("hint: ") else None
            raise ExecutorError(match.group(2), kind=match.group(1), hint=hint) from error
