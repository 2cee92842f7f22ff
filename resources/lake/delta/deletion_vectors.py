"""Marks rows of a Delta table as deleted: writes deletion vectors, and the commit that adds them to the table.

A deletion vector lists the rows of a file that are deleted, although they are still in the file.

In: the log of a table, and for each file the rows to delete.
Out: one commit. It gives each file a deletion vector with these rows, and with the rows that were marked before.

delta-rs reads deletion vectors, but does not write them. So this module writes the log entry itself (Delta protocol,
Deletion Vectors; Deletion Vector Format; Add File and Remove File). If this process writes a vector, the vector is
durable before the entry is written. The vectors that tasks of a runner (Spark or threads) write become durable as
data files do (`LakeAccess.make_durable`). If a commit fails, VACUUM later removes its vectors.
Raises OSError, CommitFailedError if another writer was faster, and UnmarkableError.

    deletion_vector_<uuid>.bin    1 | size, bytes, CRC | size, bytes, CRC | ...
                                      ^ offset in the descriptor of a file's vector

    bytes: the magic number, then the numbers of the rows as a 64-bit Roaring bitmap in its portable format
"""

import base64
import json
import uuid
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgsieve.decoding.binary.roaring import deserialize, serialize
from pgsieve.resources.lake.delta.log import Action, Log, UnmarkableError
from pgsieve.resources.lake.stores.store import Store, join_path

#: Numbers of rows: their positions in a file, from 0.
RowNumbers = npt.NDArray[np.int64]

#: Tables of these writer versions have no list of features. The versions imply these ones (Delta protocol, Writer Version
#: Requirements). Version 6 implies identity columns, which pgsieve does not write.
_FEATURES_OF_VERSION_4 = (
    "appendOnly",
    "invariants",
    "checkConstraints",
    "changeDataFeed",
    "generatedColumns",
)
FEATURES_BY_WRITER_VERSION = {
    1: ("appendOnly", "invariants"),
    2: ("appendOnly", "invariants"),
    3: ("appendOnly", "invariants", "checkConstraints"),
    4: _FEATURES_OF_VERSION_4,
    5: (*_FEATURES_OF_VERSION_4, "columnMapping"),
}

VECTORS_FEATURE, VECTORS_PROPERTY = "deletionVectors", "delta.enableDeletionVectors"

_VERSION, _MAGIC = 1, 1681511377
#: The digits of base 85, as Python uses them (RFC 1924) and as Delta uses them (Z85 of ZeroMQ).
_RFC_1924 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

#: The fields of `add` actions that are read from a checkpoint.
_ADD_FIELDS = frozenset(
    {"path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector"}
)
#: Together, these fields of an action say which file it is about, and which rows of the file are marked.
_IDENTITY_FIELDS = ("path", "partitionValues", "size", "deletionVector")


@dataclass(frozen=True)
class MarkedFile:
    """A file of a table: its last `add` action, and the numbers of all its deleted rows, in ascending order.

    If a task has already written the deletion vector of these rows, `row_numbers` is None, and `vector` is the descriptor
    of the vector.
    """

    add_action: Action
    row_numbers: RowNumbers | None
    vector: Action | None = None

    @classmethod
    def removed(cls, add_action: Action) -> "MarkedFile":
        """The file with all its rows deleted, which removes it from the table."""
        return cls(add_action, np.arange(count_rows(add_action)))

    @property
    def is_fully_deleted(self) -> bool:
        """True if all rows of the file are deleted."""
        return self._deleted_count == count_rows(self.add_action)

    @property
    def _deleted_count(self) -> int:
        return (
            int((self.vector or {}).get("cardinality", 0))
            if self.row_numbers is None
            else len(self.row_numbers)
        )


def count_rows(add_action: Action) -> int:
    """The number of rows in the file of an `add` action. Rows that are marked as deleted are counted, too."""
    return int(json.loads(add_action["stats"])["numRecords"])


def find_vectors_setting(properties: Mapping[str, str]) -> bool | None:
    """True if these properties of a table allow writers to mark rows in deletion vectors. None if they do not say."""
    setting = properties.get(VECTORS_PROPERTY)
    return None if setting is None else setting.lower() == "true"


def is_vector_file(name: str) -> bool:
    """True if a file in the folder of a table contains deletion vectors."""
    return name.startswith("deletion_vector_") and name.endswith(".bin")


def has_deleted_rows(table: DeltaTable) -> bool:
    """True if rows of a table are marked as deleted. Raises DeltaError."""
    return bool(_read_masks(table))


def find_deleted_rows(table: DeltaTable) -> dict[str, RowNumbers]:
    """Maps the names of files to the numbers of their rows that are marked as deleted. Raises DeltaError.

    The names are relative to the table's folder.
    """
    if not (masks := _read_masks(table)):
        return {}
    names = {unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()}
    return {
        _find_file_name(path, names): np.asarray(pc.indices_nonzero(pc.invert(mask.values)).cast(pa.int64()))
        for path, mask in masks
    }


def _read_masks(table: DeltaTable) -> list[tuple[str, pa.ListScalar]]:
    """The paths of files with deletion vectors. Each has a mask, which is true for the rows that are not deleted.

    If a table lacks the feature of vectors, delta-rs is not asked, because it would look through all files of the table.
    """
    if VECTORS_FEATURE not in (table.protocol().reader_features or ()):
        return []
    vectors = pa.table(table.deletion_vectors().read_all())
    return list(zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True))


def _find_file_name(path: str, names: Collection[str]) -> str:
    """Find the name with which a path ends. delta-rs returns the path as an encoded URL."""
    parts = unquote(path).split("/")
    for first in range(len(parts) - 1, -1, -1):
        if (name := "/".join(parts[first:])) in names:
            return name
    raise DeltaError(f"the log has a deletion vector for {path}, but not the file")


def commit_marked_files(
    log: Log,
    version: int,
    marked_files: Sequence[MarkedFile],
    add_actions: Sequence[Action],
    other_actions: Sequence[Action],
    time_ms: int,
) -> None:
    """Commit the version after `version`.

    It marks rows, adds the files of the `add` actions `add_actions`, and contains `other_actions`.

    Raises CommitFailedError if another writer was faster.
    """
    partly_deleted_files = [file for file in marked_files if not file.is_fully_deleted]
    actions = [*other_actions, *({"add": action} for action in add_actions)]
    for file in marked_files:
        identity = {key: file.add_action[key] for key in _IDENTITY_FIELDS if key in file.add_action}
        actions.append(
            {
                "remove": {
                    **identity,
                    "deletionTimestamp": time_ms,
                    "dataChange": True,
                    "extendedFileMetadata": True,
                }
            }
        )
    vectors = iter(
        _write_vectors(
            log, [file.row_numbers for file in partly_deleted_files if file.row_numbers is not None]
        )
    )
    for file in partly_deleted_files:
        vector = file.vector if file.row_numbers is None else next(vectors)
        # The bounds still hold for the remaining rows, but may be wider than necessary.
        stats = json.dumps({**json.loads(file.add_action["stats"]), "tightBounds": False})
        actions.append(
            {"add": {**file.add_action, "dataChange": True, "stats": stats, "deletionVector": vector}}
        )
    log.commit(version + 1, actions)


def _write_vectors(log: Log, row_numbers_of_files: Sequence[RowNumbers]) -> list[Action]:
    """Write the deletion vectors of several files into one new file. Return the descriptor of each vector."""
    if not row_numbers_of_files:
        return []
    name, content, descriptors = _serialize_vectors(row_numbers_of_files)
    log.files.write(name, content)
    return descriptors


def write_vector(store: Store, path: str, row_numbers: RowNumbers) -> Action:
    """Write the deletion vector of a file of a table, on any machine. Return the descriptor of the vector."""
    name, content, (descriptor,) = _serialize_vectors([row_numbers])
    store.write(join_path(path, name), content)
    return descriptor


def _serialize_vectors(row_numbers_of_files: Sequence[RowNumbers]) -> tuple[str, bytes, list[Action]]:
    """A file with the deletion vectors of several files: its name, its content, and the descriptor of each vector."""
    identity, descriptors = uuid.uuid4(), list[Action]()
    digits = base64.b85encode(identity.bytes).translate(bytes.maketrans(_RFC_1924, _Z85)).decode()
    content = bytearray([_VERSION])
    for row_numbers in row_numbers_of_files:
        octets = _MAGIC.to_bytes(4, "little") + serialize(row_numbers)
        descriptors.append(
            {
                "storageType": "u",
                "pathOrInlineDv": digits,
                "offset": len(content),
                "sizeInBytes": len(octets),
                "cardinality": len(row_numbers),
            }
        )
        content += len(octets).to_bytes(4, "big") + octets + zlib.crc32(octets).to_bytes(4, "big")
    return f"deletion_vector_{identity}.bin", bytes(content), descriptors


def read_vector(store: Store, path: str, descriptor: Action | None) -> RowNumbers:
    """The rows that a deletion vector marks, in ascending order.

    There are none without a vector, or if the vector is not in a file of the table's folder.

    Raises OSError and ValueError.
    """
    if (name_and_end := parse_vector_file(descriptor)) is None or descriptor is None:
        return np.empty(0, np.int64)
    name, end = name_and_end
    # The vector's size comes before the vector, and a checksum after it. The vector begins with the magic number.
    begin = int(descriptor.get("offset") or 0) + 4
    octets = store.read_part(join_path(path, name), begin, end - 4 - begin)
    if int.from_bytes(octets[:4], "little") != _MAGIC:
        raise ValueError(f"{name} has no deletion vector at {begin}")
    return deserialize(octets[4:])


def find_add_actions(log: Log, version: int, names: Collection[str]) -> dict[str, Action]:
    """Maps the names of some files of a version to their last `add` actions. The names are relative to the table's folder.

    Raises UnmarkableError if an action is missing, or has no statistics.
    """
    action_by_name = dict[str, Action]()
    for actions in log.read_backwards(version, "add", _ADD_FIELDS):
        if action_by_name.keys() == set(names):
            break
        # A commit that changes the marked rows of a file removes and adds the file. Only its `add` action counts here.
        for action in actions:
            name = unquote(action["path"])
            if name in names:
                action_by_name.setdefault(name, action)
    if action_by_name.keys() != set(names) or any(
        not add_action.get("stats") for add_action in action_by_name.values()
    ):
        raise UnmarkableError(f"the log of {log.path} lacks the actions or statistics of some files")
    return action_by_name


def enable_vectors(log: Log, table: DeltaTable, commit_info: Action) -> None:
    """Enable deletion vectors in a table, by a commit that changes only its properties and features.

    `commit_info` is the commitInfo of the commit. delta-rs is not used, because it would also add the feature of
    variants, which many readers do not support. Raises OSError, CommitFailedError and UnmarkableError.
    """
    version, protocol = table.version(), table.protocol()
    newest_metadata = next(
        (action for actions in log.read_backwards(version, "metaData", None) for action in actions), None
    )
    if newest_metadata is None:
        raise UnmarkableError(f"the log of {log.path} lacks the table's metadata")
    configuration = {**dict(newest_metadata.get("configuration") or {}), VECTORS_PROPERTY: "true"}
    writer_features = set(
        protocol.writer_features or FEATURES_BY_WRITER_VERSION[protocol.min_writer_version]
    ) | {VECTORS_FEATURE}
    # Reader version 2 implies column mapping, whether or not the table uses it.
    reader_features = set(
        protocol.reader_features or (["columnMapping"] if protocol.min_reader_version == 2 else ())
    )
    features = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted({*reader_features, VECTORS_FEATURE}),
        "writerFeatures": sorted(writer_features),
    }
    actions = [
        {"commitInfo": commit_info},
        {"protocol": features},
        {"metaData": {**newest_metadata, "configuration": configuration}},
    ]
    log.commit(version + 1, actions)


def parse_vector_file(descriptor: Action | None) -> tuple[str, int] | None:
    """The file of a deletion vector, relative to the folder of its table, and the offset at which its checksum ends there.

    None if there is no vector, or if its file is not in this folder.
    """
    if descriptor is None or descriptor.get("storageType") != "u":
        return None
    *folder, digits = descriptor["pathOrInlineDv"][:-20], descriptor["pathOrInlineDv"][-20:]
    octets = base64.b85decode(digits.encode().translate(bytes.maketrans(_Z85, _RFC_1924)))
    name = f"deletion_vector_{uuid.UUID(bytes=octets)}.bin"
    # Before the vector there are four bytes with its size, and after it there are four bytes with a checksum.
    end = int(descriptor.get("offset") or 0) + 4 + int(descriptor["sizeInBytes"]) + 4
    return "/".join([*filter(None, folder), name]), end
