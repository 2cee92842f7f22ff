"""Clones a version of a Delta table: creates a separate table with the same rows and the same properties.

In: - the path of the table, and one of its versions
    - the path of the clone
    - the stores of both paths
Out: at the path of the clone, the log from the last checkpoint up to the version, and the files of the version. So the
     clone also has the table's position, an LSN that the log stores.

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

from pgsieve.resources.lake.delta.deletion_vectors import VECTORS_FEATURE, is_vector_file
from pgsieve.resources.lake.delta.log import NO_LINK_ERRORS
from pgsieve.resources.lake.stores.store import Store, join_path

#: The name of a log entry, a checkpoint, or a part of a checkpoint. It begins with the version. It does not match a
#: file of compacted entries, which has two versions in its name.
_VERSIONED_FILE = re.compile(r"(\d{20})\.(?!\d{20}\.compacted)")


def list_files(table: DeltaTable) -> list[str]:
    """The files of a table's version. Their names are relative to the table's folder."""
    return [unquote(name) for name in pa.table(table.get_add_actions())["path"].to_pylist()]


def clone(table: DeltaTable, path: str, store: Store, target_path: str, target_store: Store) -> None:
    """Create a table at `target_path`. It is a clone of the table at `path`, in the version that `table` has open."""
    names = list_files(table)
    if VECTORS_FEATURE in (table.protocol().reader_features or ()):
        names += filter(is_vector_file, store.list_file_names(path))
    for name in names:
        _link_or_copy(join_path(path, name), store, join_path(target_path, name), target_store)
    log_path, version = join_path(path, "_delta_log"), table.version()
    version_by_name = {
        name: int(match[1])
        for name in store.list_file_names(log_path)
        if (match := _VERSIONED_FILE.match(name))
    }
    first_version = max(
        (number for name, number in version_by_name.items() if ".checkpoint" in name and number <= version),
        default=0,
    )
    # The log entries come after the files, ordered by version. So no reader can open a clone without its files.
    for name in sorted(
        name for name, number in version_by_name.items() if first_version <= number <= version
    ):
        _link_or_copy(
            join_path(log_path, name), store, join_path(target_path, f"_delta_log/{name}"), target_store
        )


def _link_or_copy(path: str, store: Store, target_path: str, target_store: Store) -> None:
    """Give a file a second name, or copy it if this is not possible."""
    (file_system, inner_path), (target_file_system, inner_target_path) = (
        store.find_file_system(path),
        target_store.find_file_system(target_path),
    )
    target_file_system.create_dir(inner_target_path.rpartition("/")[0])
    if isinstance(file_system, pafs.LocalFileSystem) and isinstance(target_file_system, pafs.LocalFileSystem):
        try:
            os.link(inner_path, inner_target_path)
        except OSError as error:
            if error.errno not in NO_LINK_ERRORS:
                raise
        else:
            return
    pafs.copy_files(
        inner_path,
        inner_target_path,
        source_filesystem=file_system,
        destination_filesystem=target_file_system,
    )
