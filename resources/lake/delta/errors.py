"""Errors of the lake: an engine's exception -> what is wrong with which table, and what caused it.

In: exceptions of delta-rs, Arrow, the operating system and Spark. Out: `LakeError` and its kinds, without a
cell value. A failure of one table sets that table aside. No table is the cause, and the run stops, where the
storage as a whole refuses (`LakeUnavailableError`), Spark loses what it computes with (`SparkLostError`), or
another writer does not let pgsieve commit (`ConcurrentWriteError`).
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
#: Those that may concern a single folder only.
_OF_A_FOLDER = {errno.EROFS, errno.EACCES, errno.EPERM}
#: The same in SQLite's words, for Dagster's records.
_SQLITE = {"database or disk is full": errno.ENOSPC, "attempt to write a readonly database": errno.EROFS}
_WORDS = "|".join(map(re.escape, [*_REFUSALS, *_SQLITE]))
#: How an engine marks a message of the system: delta-rs, Python and Arrow, the JVM, SQLite. Elsewhere it may
#: be a cell's text.
_QUOTED = re.compile(
    r"\(os error (?P<rust>\d+)\)|\[[Ee]rrno (?P<python>\d+)\]"
    rf"|(?:java\.(?:io|nio)\.[\w.]+: |sqlite3\.OperationalError\) )[^\n]*?(?P<words>{_WORDS})"
)
#: Errors of a row filter, in PostgreSQL's words and with its SQLSTATE (`raise_error` in
#: pgsieve.assets.steps), without values.
_OURS = re.compile(r"\[USER_RAISED_EXCEPTION\] (.+? \[[0-9A-Z]{5}\])")
#: Messages of Spark, classic or Connect, when a part of it is gone.
_LOST = re.compile(
    r"ExecutorLostFailure|Python worker exited unexpectedly|CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND|FetchFailed"
    r"|Master removed our application|SparkContext was shut down|StatusCode\.UNAVAILABLE"
)
#: Messages of Spark, of delta-rs, and of Arrow.
_MISSING_FILE = re.compile(r"(?:reading file|Object at location|open local file) '?(?:file:)?(\S+?\.parquet)")
_NOT_THERE = ("not found", "FILE_NOT_EXIST", "No such file or directory")
#: delta-rs's messages for a log that lacks an entry or a checkpoint, also for a moment while a log is cleaned
#: up.
_LACKING = re.compile(
    r"File not found[^\n]*/_delta_log/|Object at location \S*_delta_log/\S+ not found|Expected contiguous commit files"
    r"|didn't find any checkpoints|No (?:protocol|table metadata|table metadata or protocol) found"
)
#: The same for a log with entries that are not Delta's, and the beginning of such messages about the log that
#: is read.
_ILLEGIBLE = re.compile(r"Json error|Unexpected state: the newest version in the log")
_OF_THE_LOG = "Kernel error: "
#: delta-rs's messages for a file that is not or no longer a Parquet file; messages about a condition on its
#: rows are not among them.
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
#: Messages about a file that was not read at all. Where only its store has no bytes at a place, the file ends
#: before it.
_UNREAD = re.compile(
    r"Object Store error|Error performing [A-Z]+ |\(os error \d+\)|\[[Ee]rrno \d+\]|error sending request|Resources exhausted"
)
_ENDS_BEFORE = re.compile(r"Requested range was invalid|status code:? 416|object was only \d+ bytes")
#: The beginning of a store's error in delta-rs; lines with an arrow each describe the request and its end.
_OF_A_STORE = re.compile(r"(?:Kernel error -> )?Generic \w+ error\b")
_ARROW = re.compile(r"\s*(?:\x1b\[[0-9;]*m)?↳(?:\x1b\[[0-9;]*m)?\s*")
#: A request: after the server its address has names of objects, so values of cells, and perhaps a signature.
_REQUEST = re.compile(r"(Error performing [A-Z]+ \w+://[^/\s?]+)\S*(?: in [\d.]+\S+)?|(?<=\S)\?\S+")
_STATUS = re.compile(r"\d{3} [A-Z]")
#: An answer that follows in the line.
_BODY = re.compile(r"(status code: \d{3} [^:]*):.*", re.DOTALL)
_CODE = re.compile(r"<Code>(\w+)</Code>")

#: delta-rs raises this in the class of its conflicts although it is none: it never writes to such a table.
_REFUSED = re.compile(r"Unsupported table features|Table features must be specified|append-only")


class LakeError(PgsieveError):
    """The lake cannot be read or written."""


class ConcurrentWriteError(LakeError):
    """Another writer of the table committed first; the same write, done again, reads that commit."""


class OverrunError(ConcurrentWriteError):
    """Another process committed after this write was planned: only a new plan can decide what is still to be written."""

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
    """The lake's store answers with errors, or not at all, and may answer a moment later."""


class SparkLostError(LakeError):
    """Spark lost executors or their data too often, or it is gone. No table is the cause."""


class SparkUnavailableError(PgsieveError):
    """No Spark session: Java is missing, or the master does not answer."""


#: Errors that no table causes.
NO_TABLES_FAULT = (ConcurrentWriteError, LakeUnavailableError, SparkLostError, SparkUnavailableError)


class DamagedTableError(LakeError):
    """A Delta table has lost files, its log, or parts of them: it has to be made again."""


class RefusedTableError(LakeError):
    """An engine cannot read or write a Delta table because of a property of this table."""


#: The problem of a table whose newest entries are gone.
PUT_BACK = "it was put back to an earlier version"


def damaged(path: str, what: str) -> DamagedTableError:
    """The error of a table that has lost something, with what to do."""
    return DamagedTableError(
        f'Delta table "{path}": {what}',
        hint="restore it from a backup, or have it made again: `pgsieve resync`, with the name of its subscription and no table"
        ' (pgsieve\'s documentation, "A damaged lake")',
    )


def damaged_log(path: str, what: str) -> DamagedTableError:
    """The error of a table whose log is not as it was written."""
    return damaged(path, f"its log cannot be read: {what}")


class ExecutorError(PgsieveError):
    """An error of pgsieve that was raised on a Spark executor; `kind` is its class."""

    def __init__(self, message: str, *, kind: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


def is_arrows(error: BaseException) -> bool:
    """Whether delta-rs passes on an error of Arrow, such as of a cast, without a class of its own."""
    return type(error) is Exception


def is_conflict(error: BaseException) -> bool:
    """Whether delta-rs, or another committer here, did not commit because another writer was faster."""
    return isinstance(error, CommitFailedError) and not _REFUSED.search(str(error))


_WAIT, _STOP = wait_random_exponential(0.1, max=5), stop_after_attempt(6)
#: Repeats something a few times where a concurrent writer was faster, such as a compaction.
again_after_conflict = retry(
    retry=retry_if_exception(lambda error: isinstance(error, ConcurrentWriteError) or is_conflict(error)),
    wait=_WAIT,
    stop=_STOP,
    reraise=True,
)
#: Repeats a commit that needs no new plan.
commit_again = retry(retry=retry_if_exception(is_conflict), wait=_WAIT, stop=_STOP, reraise=True)


def refusal(error: BaseException) -> int | None:
    """The errno with which the storage refused, from an error or one of its causes; None for any other error."""
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
    """Whether Spark failed without a task's fault: it lost an executor, or its driver is gone."""
    return any(
        isinstance(each, Py4JNetworkError)
        or _no_jvm_answers(each)
        or ("SQLSTATE: 22" not in str(each) and _LOST.search(str(each)))
        for each in causes(error)
    )


def _no_jvm_answers(error: BaseException) -> bool:
    """Whether Py4J opened another connection to a JVM that is gone: it passes the system's error on as it is."""
    return isinstance(error, ConnectionError) and any(
        frame.f_globals.get("__name__", "").startswith("py4j.") for frame, _ in walk_tb(error.__traceback__)
    )


def spark_lost() -> SparkLostError:
    """The error of a Spark that is lost."""
    return SparkLostError(
        "Spark lost executors, or is gone",
        hint="see Spark's log, above or of its server; `pgsieve run` goes on from the last commit",
    )


def of_one_folder(code: int) -> bool:
    """Whether a refusal may concern one folder only."""
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
    """Whether delta-rs did not find a file of a table's log that the log should have."""
    return isinstance(error, DeltaError) and _LACKING.search(str(error)) is not None


def is_illegible(error: BaseException) -> bool:
    """Whether delta-rs cannot read an entry or a checkpoint of a table's log."""
    if not isinstance(error, DeltaError):
        return False
    text = str(error)
    return _ILLEGIBLE.search(text) is not None or (text.startswith(_OF_THE_LOG) and _is_no_parquet(text))


def illegible_file(error: BaseException) -> str | None:
    """The Parquet file that an engine cannot read: it is empty, cut off, or has other bytes than were written.

    "" where the engine does not name it, None for any other error.
    """
    for each in causes(error):
        text = str(each)
        if not isinstance(each, PgsieveError) and "SQLSTATE: 22" not in text and _is_no_parquet(text):
            named = re.search(r"[^\s'\"/\\]+\.parquet", text)
            return named[0] if named else ""
    return None


def _is_no_parquet(text: str) -> bool:
    """Whether an engine reports that a file is not a Parquet file, and not that it could not read it."""
    return _NO_PARQUET.search(text) is not None and (
        _UNREAD.search(text) is None or _ENDS_BEFORE.search(text) is not None
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes; an error that is raised again may be a cause of its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an engine's message, without its stack.

    For a data exception only its name, as such messages show cells.

    For a store's error that line is not enough: the end of the request is added, and the code of the answer.
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
    """Spark's message of an error, without a value: for an error in the data only its condition, or PostgreSQL's words."""
    if isinstance(error, AnalysisException):
        return first_line(error)
    ours = _OURS.search(str(error))
    if ours:
        return concealed(ours.group(1))
    match = re.search(r"\[([A-Z][A-Z0-9_.]*_[A-Z0-9_.]*)\] ", str(error))
    return f"Spark's error {match.group(1)}" if match else f"Spark's {type(error).__name__}"


def raise_ours(error: BaseException) -> None:
    """Raise the pgsieve error that an executor raised, when a Spark error carries one."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line, after in reversed(list(zip(lines, [*lines[1:], ""], strict=True))):
        match = re.match(r"pgsieve\.[\w.]*\.(\w+): (.*)", line)
        if match:
            hint = after.removeprefix("hint: ") if after.startswith("hint: ") else None
            raise ExecutorError(match.group(2), kind=match.group(1), hint=hint) from error
