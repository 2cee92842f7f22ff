"""Errors of the lake: what an engine raises -> what is wrong with which table, and whose fault it is.

In: exceptions of delta-rs, Arrow, the operating system and Spark. Out: `LakeError` and its kinds, without a cell
value. What fails one table sets that table aside; where the storage as a whole refuses (`LakeUnavailableError`),
Spark loses what it computes with (`SparkLostError`) or another writer does not let pgsieve commit
(`ConcurrentWriteError`), no table is to blame: the run stops.
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

#: The operating system's words for a write that the storage refuses, whoever writes.
_REFUSALS = {
    os.strerror(code): code
    for code in (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENFILE, errno.EMFILE),
        *(errno.EROFS, errno.EACCES, errno.EPERM),
    )
}
#: Those that a single folder may cause.
_OF_A_FOLDER = {errno.EROFS, errno.EACCES, errno.EPERM}
#: The same in SQLite's words, where Dagster keeps its records.
_SQLITE = {"database or disk is full": errno.ENOSPC, "attempt to write a readonly database": errno.EROFS}
_WORDS = "|".join(map(re.escape, [*_REFUSALS, *_SQLITE]))
#: Where an engine quotes the system: delta-rs, Python and Arrow, the JVM, SQLite. Elsewhere it may be a cell's text.
_QUOTED = re.compile(
    r"\(os error (?P<rust>\d+)\)|\[[Ee]rrno (?P<python>\d+)\]"
    rf"|(?:java\.(?:io|nio)\.[\w.]+: |sqlite3\.OperationalError\) )[^\n]*?(?P<words>{_WORDS})"
)
#: What a row filter raises in PostgreSQL's words and with its SQLSTATE (`raise_error` in pgsieve.assets.steps), with no value.
_OURS = re.compile(r"\[USER_RAISED_EXCEPTION\] (.+? \[[0-9A-Z]{5}\])")
#: What Spark, classic or Connect, says where a part of it is gone.
_LOST = re.compile(
    r"ExecutorLostFailure|Python worker exited unexpectedly|CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND|FetchFailed"
    r"|Master removed our application|SparkContext was shut down|StatusCode\.UNAVAILABLE"
)
#: Spark's words, delta-rs's, and Arrow's.
_MISSING_FILE = re.compile(r"(?:reading file|Object at location|open local file) '?(?:file:)?(\S+?\.parquet)")
_NOT_THERE = ("not found", "FILE_NOT_EXIST", "No such file or directory")
#: delta-rs's words for a log that lacks an entry or a checkpoint, as it does for a moment where one is cleaned up.
_LACKING = re.compile(
    r"File not found[^\n]*/_delta_log/|Object at location \S*_delta_log/\S+ not found|Expected contiguous commit files"
    r"|didn't find any checkpoints|No (?:protocol|table metadata|table metadata or protocol) found"
)
#: The same for one whose entries are not what Delta writes, and what it begins with where it is the log that it reads.
_ILLEGIBLE = re.compile(r"Json error|Unexpected state: the newest version in the log")
_OF_THE_LOG = "Kernel error: "
#: delta-rs's words for a file that is no Parquet file, or none any more; what a condition on its rows says is not among them.
_NO_PARQUET = re.compile(
    r"Failed to fetch metadata for file |Invalid Parquet file|Parquet argument error: (?!Arrow: )"
    r"|Parquet error: (?:EOF: |Arrow: (?:Unable to |incompatible arrow schema))|Kernel error: Arrow error: (?:EOF|Parquet error): "
    # Arrow's, as it opens one, as it reads a page, and as it decodes one.
    r"|Could not open Parquet input source|Parquet file size is \d+ bytes|Parquet magic bytes not found|deserialize thrift"
    r"|Deserializing page header failed|decompression failed|Unexpected end of stream|[Cc]orrupt data page|corrupted bit_width"
    r"|truncated PLAIN-encoded|rep / def levels|Unknown encoding type|not in dictionary bounds|Invalid flatbuffers message"
    r"|Invalid base64 input"
    # Spark's and Hadoop's.
    r"|is not a Parquet file|the footer index is not within the file|CANNOT_READ_FILE_FOOTER"
    r"|ParquetDecodingException|can not read class org\.apache\.parquet"
)
#: What tells that a file was not read at all; where its store only has no bytes at a place, the file ends before it.
_UNREAD = re.compile(
    r"Object Store error|Error performing [A-Z]+ |\(os error \d+\)|\[[Ee]rrno \d+\]|error sending request|Resources exhausted"
)
_ENDS_BEFORE = re.compile(r"Requested range was invalid|status code:? 416|object was only \d+ bytes")
#: A store's error as delta-rs begins it; it tells of the request and of its end in lines with an arrow each.
_OF_A_STORE = re.compile(r"(?:Kernel error -> )?Generic \w+ error\b")
_ARROW = re.compile(r"\s*(?:\x1b\[[0-9;]*m)?↳(?:\x1b\[[0-9;]*m)?\s*")
#: A request: beyond the server its address has names of objects, so values of cells, and perhaps a signature.
_REQUEST = re.compile(r"(Error performing [A-Z]+ \w+://[^/\s?]+)\S*(?: in [\d.]+\S+)?|(?<=\S)\?\S+")
_STATUS = re.compile(r"\d{3} [A-Z]")
#: An answer that follows in the line.
_BODY = re.compile(r"(status code: \d{3} [^:]*):.*", re.DOTALL)
_CODE = re.compile(r"<Code>(\w+)</Code>")

#: What delta-rs says in the class of its conflicts, and is none: it does not write to such a table at all, whoever else does.
_REFUSED = re.compile(r"Unsupported table features|Table features must be specified|append-only")


class LakeError(PgsieveError):
    """The lake cannot be read or written."""


class ConcurrentWriteError(LakeError):
    """Another writer of the table committed first; the same write, done again, reads what that one left."""


class OverrunError(ConcurrentWriteError):
    """Another process committed after this write was planned: only a new plan can say what is still to be written."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f'Delta table "{path}": another process wrote to it meanwhile',
            hint="two runs work on the same tables: let one of them end; `pgsieve run` goes on from the last commit",
            sqlstate="40001",
        )


class LakeUnavailableError(LakeError):
    """The storage refuses: a full disk, a read-only file system, missing rights, no bucket. No table can help it."""


class StoreUnavailableError(LakeUnavailableError):
    """The lake's store answers with errors, or not at all, and may answer a moment later."""


class SparkLostError(LakeError):
    """Spark lost executors, or what they held, more often than it tries again; or it is gone. No table can help it."""


class SparkUnavailableError(PgsieveError):
    """No Spark session: Java is missing, or the master does not answer."""


#: No table is to blame for these.
NO_TABLES_FAULT = (ConcurrentWriteError, LakeUnavailableError, SparkLostError, SparkUnavailableError)


class DamagedTableError(LakeError):
    """A Delta table has lost files or its log, or what they held: it has to be made again."""


class RefusedTableError(LakeError):
    """An engine does not read or write a Delta table, for a reason that it has with this one."""


#: What is wrong with a table whose newest entries are gone.
PUT_BACK = "it was put back to an earlier version"


def damaged(path: str, what: str) -> DamagedTableError:
    """The error of a table that has lost something, with the way out."""
    return DamagedTableError(
        f'Delta table "{path}": {what}',
        hint="restore it from a backup, or have it made again: `pgsieve resync`, with the name of its subscription and no table"
        ' (pgsieve\'s documentation, "A damaged lake")',
    )


def damaged_log(path: str, what: str) -> DamagedTableError:
    """The error of a table whose log is not what was written."""
    return damaged(path, f"its log cannot be read: {what}")


class ExecutorError(PgsieveError):
    """An error of pgsieve's that was raised on a Spark executor; `kind` is its class."""

    def __init__(self, message: str, *, kind: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


def is_arrows(error: BaseException) -> bool:
    """Whether delta-rs gives on an error of Arrow's, as of a cast, for which it has no class."""
    return type(error) is Exception


def is_conflict(error: BaseException) -> bool:
    """Whether delta-rs, or what commits beside it here, did not commit because another writer was faster."""
    return isinstance(error, CommitFailedError) and not _REFUSED.search(str(error))


_WAIT, _STOP = wait_random_exponential(0.1, max=5), stop_after_attempt(6)
#: Does something again, a few times, where a concurrent writer was faster: compaction beside an apply.
again_after_conflict = retry(
    retry=retry_if_exception(lambda error: isinstance(error, ConcurrentWriteError) or is_conflict(error)),
    wait=_WAIT,
    stop=_STOP,
    reraise=True,
)
#: Commits again what needs no new plan.
commit_again = retry(retry=retry_if_exception(is_conflict), wait=_WAIT, stop=_STOP, reraise=True)


def refusal(error: BaseException) -> int | None:
    """The errno with which the storage refused, from an error or one of its causes; None for any other error."""
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _REFUSALS.values():
            return each.errno
        text = str(each)
        if "SQLSTATE: 22" in text:  # a data exception shows a cell
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
    """Whether Py4J opened another connection to a JVM that is gone: what the system says of that it leaves as it is."""
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
    """Whether delta-rs cannot make out what stands in a table's log: in an entry, or in a checkpoint."""
    if not isinstance(error, DeltaError):
        return False
    text = str(error)
    return _ILLEGIBLE.search(text) is not None or (text.startswith(_OF_THE_LOG) and _is_no_parquet(text))


def illegible_file(error: BaseException) -> str | None:
    """The Parquet file in which an engine cannot make out anything: it is empty, cut off, or has other bytes than were written.

    "" where the engine does not name it, None for any other error.
    """
    for each in causes(error):
        text = str(each)
        if not isinstance(each, PgsieveError) and "SQLSTATE: 22" not in text and _is_no_parquet(text):
            named = re.search(r"[^\s'\"/\\]+\.parquet", text)
            return named[0] if named else ""
    return None


def _is_no_parquet(text: str) -> bool:
    """Whether an engine says that a file is no Parquet file, and not that it did not get to read it."""
    return _NO_PARQUET.search(text) is not None and (
        _UNREAD.search(text) is None or _ENDS_BEFORE.search(text) is not None
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from; an error that is raised again may be a cause of its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an engine's message: the rest is its stack. Of data exceptions only their name: they show cells.

    Of a store's error that line is not the telling one: how the request ended is added, and of the answer its code.
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
    """What delta-rs says of a request, without the store's answer: that shows what was signed."""
    words = [lines[0]]
    for line in lines[1:]:
        if not (arrow := _ARROW.match(line)) or "<" in line or _STATUS.match(words[-1]):
            break
        words.append(line[arrow.end() :])
    told = _REQUEST.sub(r"\1", ": ".join(word.partition("<")[0].strip().rstrip(":") for word in words))
    told = _BODY.sub(r"\1", told)
    code = _CODE.search("\n".join(lines))
    return told + (f" ({code[1]})" if code else "")


def told(error: BaseException) -> str:
    """What Spark says of an error, without a value: of one in the data only its condition, or PostgreSQL's words."""
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
