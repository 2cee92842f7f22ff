"""Clones a version of a Delta table: creates a separate table with the same rows, the same position and properties.

In: - the path of the table, and one of its versions
    - the path of the clone
    - the stores of both paths
Out: at the path of the clone, the log up to the version, and the files of the version.

Within one file system, a file of the clone is a second name (a hard link) of the table's file. It needs no space,
and is safe because Delta never changes a file. Otherwise the file is copied. Raises OSError, and the error of
delta-rs if it cannot open the version.
"""

import os
import re
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgsieve.resources.lake.delta.deletion_vectors import FEATURE, is_vector_file
from pgsieve.resources.lake.delta.log import UNLINKABLE
from pgsieve.resources.lake.stores.store import Store, join_path

#: The name of a log entry, a checkpoint, or a part of a checkpoint. It begins with the version. Files with several
#: compacted entries do not match.
_VERSIONED_FILE = re.compile(r"(\d{20})\.(?!\d{20}\.compacted)")


def files_of(table: DeltaTable) -> list[str]:
    """The files of a table's version. Their names are relative to the table's folder."""
    return [unquote(name) for name in pa.table(table.get_add_actions())["path"].to_pylist()]


def clone(table: DeltaTable, path: str, store: Store, into: str, target: Store) -> None:
    """Create a table at `into`. It is a clone of the version of the table at `path` that `table` has open."""
    names = files_of(table)
    if FEATURE in (table.protocol().reader_features or ()):
        names += filter(is_vector_file, store.names(path))
    for name in names:
        _link_or_copy(join_path(path, name), store, join_path(into, name), target)
    log, version = join_path(path, "_delta_log"), table.version()
    entries = {name: int(match[1]) for name in store.names(log) if (match := _VERSIONED_FILE.match(name))}
    first_version = max(
        (number for name, number in entries.items() if ".checkpoint" in name and number <= version), default=0
    )
    # The log entries come after the files, ordered by version. So no reader can open a clone without its files.
    for name in sorted(name for name, number in entries.items() if first_version <= number <= version):
        _link_or_copy(join_path(log, name), store, join_path(into, f"_delta_log/{name}"), target)


def _link_or_copy(path: str, store: Store, into: str, target: Store) -> None:
    """Give a file a second name, or copy it if this is not possible."""
    (files, inner_path), (target_files, target_path) = store.system(path), target.system(into)
    target_files.create_dir(target_path.rpartition("/")[0])
    if isinstance(files, pafs.LocalFileSystem) and isinstance(target_files, pafs.LocalFileSystem):
        try:
            os.link(inner_path, target_path)
        except OSError as error:
            if error.errno not in UNLINKABLE:
                raise
        else:
            return
    pafs.copy_files(inner_path, target_path, source_filesystem=files, destination_filesystem=target_files)
