"""A version of a Delta table put at another place, as a table of its own: the same rows, position and properties.

In: the table's path, one of its versions, and the stores of both places. Out: the log up to that version, and the files that it names.
Within one file system a file gets a second name (a hard link), which costs no room: Delta writes no file twice. Elsewhere it is copied.
Raises OSError, and what delta-rs raises where the version cannot be opened.
"""

import os
import re
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgsieve.resources.lake.delta.deletion_vectors import FEATURE, is_vector_file
from pgsieve.resources.lake.delta.log import UNLINKABLE
from pgsieve.resources.lake.stores.store import Store, joined

#: An entry, a checkpoint or a part of one, by its version; not what has several entries in one file.
_OF_VERSION = re.compile(r"(\d{20})\.(?!\d{20}\.compacted)")


def files_of(table: DeltaTable) -> list[str]:
    """The files of a table's version, named from its folder."""
    return [unquote(name) for name in pa.table(table.get_add_actions())["path"].to_pylist()]


def clone(table: DeltaTable, path: str, store: Store, into: str, target: Store) -> None:
    """Make a table at `into` that is a table of `path` at the version that it is opened at."""
    names = files_of(table)
    if FEATURE in (table.protocol().reader_features or ()):
        names += filter(is_vector_file, store.names(path))
    for name in names:
        _put(joined(path, name), store, joined(into, name), target)
    log, version = joined(path, "_delta_log"), table.version()
    entries = {name: int(match[1]) for name in store.names(log) if (match := _OF_VERSION.match(name))}
    first = max((of for name, of in entries.items() if ".checkpoint" in name and of <= version), default=0)
    # At last, and in their order: before there is a log, there is no table.
    for name in sorted(name for name, of in entries.items() if first <= of <= version):
        _put(joined(log, name), store, joined(into, f"_delta_log/{name}"), target)


def _put(path: str, store: Store, into: str, target: Store) -> None:
    """Have a file under another name, too."""
    (files, inner), (others, outer) = store.system(path), target.system(into)
    others.create_dir(outer.rpartition("/")[0])
    if isinstance(files, pafs.LocalFileSystem) and isinstance(others, pafs.LocalFileSystem):
        try:
            os.link(inner, outer)
        except OSError as error:
            if error.errno not in UNLINKABLE:
                raise
        else:
            return
    pafs.copy_files(inner, outer, source_filesystem=files, destination_filesystem=others)
