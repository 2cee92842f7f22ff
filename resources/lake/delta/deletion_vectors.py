"""Rows of a Delta table marked as deleted by this process: deletion vectors, and the commit that has them.

In: a table in a folder, and which rows of which files go. Out: one commit, in which each file has a deletion vector that says so
beside the rows that it had marked before. Delta-rs reads deletion vectors but commits none; so the log's entry is written here, as
Delta's protocol has it (Deletion Vectors; Deletion Vector Format; Add File and Remove File). Raises OSError, CommitFailedError
where another writer was faster, and UnmarkableError.

    deletion_vector_<uuid>.bin    1 | size, bytes, CRC | size, bytes, CRC | ...
                                      ^ offset in the descriptor of a file's vector

    bytes: the magic number, then the numbers of the rows as a 64-bit Roaring bitmap in its portable format
"""

import base64
import errno
import json
import os
import re
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from pyroaring import BitMap64

#: The numbers of rows in a file.
Rows = npt.NDArray[np.int64]

FEATURE, PROPERTY = "deletionVectors", "delta.enableDeletionVectors"

_VERSION, _MAGIC = 1, 1681511377
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
#: The same 85 digits in the order of RFC 1924, as Python has them, and in that of ZeroMQ's Z85, as Delta has them.
_RFC_1924 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

#: What is read of a checkpoint's `add` actions; and what of any action is a map.
_ADDED = frozenset(
    {"path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector"}
)
_MAPS = frozenset({"partitionValues", "tags", "configuration", "options"})
#: What tells a file of the log from others, and from itself with other rows marked.
_IDENTITY = ("path", "partitionValues", "size", "deletionVector")

#: What file systems say that have no hard links.
_UNLINKABLE = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}

Action = dict[str, Any]


class UnmarkableError(Exception):
    """Rows of a table cannot be marked from here: its log does not tell how a file was added, or its folder takes no hard links."""


@dataclass(frozen=True)
class Marked:
    """A file of a table, as it was `added` to it last, and all of its rows that are deleted."""

    added: Action
    rows: Rows

    @property
    def whole(self) -> bool:
        """Whether the file has no other rows."""
        return len(self.rows) == int(json.loads(self.added["stats"])["numRecords"])


def deleted_rows(table: DeltaTable) -> dict[str, Rows]:
    """The rows that are marked as deleted, by the names of their files from the table's folder; raises DeltaError."""
    vectors = pa.table(table.deletion_vectors().read_all())
    if not vectors.num_rows:
        return {}
    names = {unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()}
    deleted = {}
    for path, stays in zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True):
        deleted[_named(path, names)] = np.flatnonzero(~np.asarray(stays.values)).astype(np.int64)
    return deleted


def _named(path: str, names: Collection[str]) -> str:
    """Which of some files, named from the table's folder, is at a path, which delta-rs encodes as a URL."""
    parts = unquote(path).split("/")
    for first in range(len(parts) - 1, -1, -1):
        if (name := "/".join(parts[first:])) in names:
            return name
    raise DeltaError(f"the log has a deletion vector for {path}, and no such file")


def commit_marked(
    folder: Path,
    version: int,
    marked: Sequence[Marked],
    added: Sequence[Action],
    others: Sequence[Action],
    time_ms: int,
) -> None:
    """Commit to the version `version` of a table in a folder: rows `marked`, files `added` (`add` actions), and `others`.

    Raises CommitFailedError where another writer was faster.
    """
    partly = [file for file in marked if not file.whole]
    actions = [*others, *({"add": each} for each in added)]
    for file in marked:
        kept = {key: file.added[key] for key in _IDENTITY if key in file.added}
        actions.append(
            {
                "remove": {
                    **kept,
                    "deletionTimestamp": time_ms,
                    "dataChange": True,
                    "extendedFileMetadata": True,
                }
            }
        )
    for file, vector in zip(partly, _written_vectors(folder, partly), strict=True):
        # What bounds the rows bounds those that are left, too.
        stats = json.dumps({**json.loads(file.added["stats"]), "tightBounds": False})
        actions.append({"add": {**file.added, "dataChange": True, "stats": stats, "deletionVector": vector}})
    _commit(folder, version + 1, actions)


def _written_vectors(folder: Path, marked: Sequence[Marked]) -> list[Action]:
    """Write the vectors of files into one file; a descriptor for each."""
    if not marked:
        return []
    identity, descriptors = uuid.uuid4(), list[Action]()
    digits = base64.b85encode(identity.bytes).translate(bytes.maketrans(_RFC_1924, _Z85)).decode()
    with (folder / f"deletion_vector_{identity}.bin").open("xb") as stream:
        stream.write(bytes([_VERSION]))
        for file in marked:
            octets = _MAGIC.to_bytes(4, "little") + BitMap64(file.rows.tolist()).serialize()
            descriptors.append(
                {
                    "storageType": "u",
                    "pathOrInlineDv": digits,
                    "offset": stream.tell(),
                    "sizeInBytes": len(octets),
                    "cardinality": len(file.rows),
                }
            )
            stream.write(len(octets).to_bytes(4, "big") + octets + zlib.crc32(octets).to_bytes(4, "big"))
        stream.flush()
        os.fsync(stream.fileno())
    return descriptors


def _commit(folder: Path, version: int, actions: Sequence[Action]) -> None:
    """Make the entry of a version, whole or not at all; raises CommitFailedError where it is there."""
    log = folder / "_delta_log"
    entry, written = log / f"{version:020}.json", log / f"_commit_{uuid.uuid4()}.json.tmp"
    try:
        with written.open("x", encoding="utf-8") as stream:
            stream.writelines(json.dumps(action, separators=(",", ":")) + "\n" for action in actions)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            # Fails where the name is taken, as a rename would not.
            os.link(written, entry)
        except FileExistsError:
            raise CommitFailedError(
                f"version {version} of {folder} was committed by another writer"
            ) from None
    finally:
        written.unlink(missing_ok=True)


def added_files(folder: Path, version: int, wanted: Collection[str]) -> dict[str, Action]:
    """How some files of a version were added to it last (their `add` actions), by their names from the table's folder.

    Raises UnmarkableError.
    """
    found = dict[str, Action]()
    for actions in _backwards(folder, version, "add", _ADDED):
        if found.keys() == set(wanted):
            break
        # A file that is added with other rows marked is removed in the same commit, which says nothing of its place there.
        for added in actions:
            name = unquote(added["path"])
            if name in wanted:
                found.setdefault(name, added)
    if found.keys() != set(wanted) or any(not each.get("stats") for each in found.values()):
        raise UnmarkableError(f"the log of {folder} does not tell how its files were added")
    return found


def enable(folder: Path, table: DeltaTable, information: Action) -> None:
    """Let writers of a table mark rows: a commit that changes its properties and features, and nothing else.

    Not by delta-rs, which makes a table of such features one of variants, too, which many readers refuse. Raises as
    `commit_marked` does.
    """
    version, protocol = table.version(), table.protocol()
    newest = next((a for each in _backwards(folder, version, "metaData", None) for a in each), None)
    if newest is None:
        raise UnmarkableError(f"the log of {folder} does not tell the table's columns")
    configuration = {**dict(newest.get("configuration") or {}), PROPERTY: "true"}
    # What version 2 of the writers' protocol stands for (Writer Version Requirements).
    writers = set(protocol.writer_features or ("appendOnly", "invariants")) | {FEATURE}
    features = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted({*(protocol.reader_features or ()), FEATURE}),
        "writerFeatures": sorted(writers),
    }
    actions = [
        {"commitInfo": information},
        {"protocol": features},
        {"metaData": {**newest, "configuration": configuration}},
    ]
    _commit(folder, version + 1, actions)


def refuse_unlinkable(folder: Path) -> None:
    """Raise UnmarkableError where the log of a table takes no hard links, by which an entry is made once."""
    one, other = (folder / "_delta_log" / f"_link_{uuid.uuid4()}.tmp" for _ in range(2))
    try:
        one.touch()
        os.link(one, other)
    except OSError as error:
        if error.errno not in _UNLINKABLE:
            raise
        raise UnmarkableError(f"{folder}: {error.strerror}") from error
    finally:
        for each in (one, other):
            each.unlink(missing_ok=True)


def _backwards(
    folder: Path, version: int, kind: str, fields: Collection[str] | None
) -> Iterator[Iterable[Action]]:
    """The actions of one kind in each entry of the log from a version back, those of the last checkpoint at last.

    Of a checkpoint these `fields` are read. Raises UnmarkableError where there is neither an entry nor such a checkpoint.
    """
    log = folder / "_delta_log"
    checkpoints = (int(m[1]) for entry in log.iterdir() if (m := _CHECKPOINT.fullmatch(entry.name)))
    last = max((number for number in checkpoints if number <= version), default=-1)
    for number in range(version, last, -1):
        try:
            lines = (log / f"{number:020}.json").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise UnmarkableError(f"version {number} is missing in the log of {folder}") from None
        yield [action[kind] for line in lines if line.strip() and kind in (action := json.loads(line))]
    if last >= 0:
        yield _checkpointed(log / f"{last:020}.checkpoint.parquet", kind, fields)


def _checkpointed(checkpoint: Path, kind: str, fields: Collection[str] | None) -> Iterator[Action]:
    with pq.ParquetFile(checkpoint) as file:
        there = [field.name for field in file.schema_arrow.field(kind).type]
        columns = [f"{kind}.{name}" for name in there if fields is None or name in fields]
        for batch in file.iter_batches(columns=columns):
            actions = batch.column(kind)
            yield from map(_as_in_json, actions.filter(pc.is_valid(actions)).to_pylist())


def _as_in_json(action: Mapping[str, Any]) -> Action:
    """An action of a checkpoint as the log's entries have it: maps as objects, and nothing that is NULL."""
    plain = {key: value for key, value in action.items() if value is not None}
    for key, value in plain.items():
        if key in _MAPS:
            plain[key] = dict(value)
        elif isinstance(value, dict):
            plain[key] = {k: dict(v) if k in _MAPS else v for k, v in value.items() if v is not None}
    return plain
