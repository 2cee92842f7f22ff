"""Repairs the tables of a lake after a power cut: rolls the log of each table back to its last complete version.

In: - the lake's folder
    - a time: later writes may not have reached the disk
Out: each Delta log ends before its first incomplete version.

A version is incomplete if its log entry is incomplete, or if a file is incomplete that the entry adds. All checksums
and the incomplete checkpoints written since this time are removed. A log without any version is deleted.
pgsieve acts on a commit only after it is on disk. So the commits that are removed here are commits that pgsieve never
acted on. Raises OSError.

Writers give log entries and files their names only once they are complete. So neither a killed process nor a running
one makes a version look incomplete by what it writes. But a running process may remove a file while this module checks
the file. So if a version seems to be incomplete, it is checked a second time.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pgsieve.resources.lake.delta.complete_entries import find_defect
from pgsieve.resources.lake.delta.deletion_vectors import parse_vector_file

_LOGGER = logging.getLogger(__name__)

_ENTRY = re.compile(r"(\d{20})\.json")
#: The name of a checkpoint, or of a part of one. It is a Parquet file, or since Delta's V2 checkpoints a file of JSON.
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\..*")
_LAST_CHECKPOINT = "_last_checkpoint"
#: The bytes with which a Parquet file begins and ends, and the size of the smallest possible Parquet file.
_MAGIC, _MIN_PARQUET_BYTES = b"PAR1", 12
#: How exact the times of files are. The time of a file may be up to two seconds before the time at which it was
#: written.
_CLOCK_RESOLUTION_NS = 2_000_000_000

#: The changes of a log entry: the names of the files that it removes, and a mapping from the names of the files that it
#: adds to their sizes in bytes.
_FileChanges = tuple[set[str], dict[str, int]]


def roll_back_tables(lake: Path, since_ns: int) -> None:
    """Roll every table of a lake back to its last complete version."""
    since_ns -= _CLOCK_RESOLUTION_NS
    for folder, folders, files in os.walk(lake, followlinks=True):
        for path in (Path(folder) / name for name in files):
            # After a power cut a checksum file of Hadoop may be wrong, and Hadoop would then refuse the file that it
            # belongs to. Hadoop reads a file that has no checksum. A partitioned table has such files in many folders.
            if path.name.startswith(".") and path.suffix == ".crc" and _is_written_since(path, since_ns):
                path.unlink(missing_ok=True)
        if "_delta_log" in folders:
            _roll_back_table(Path(folder), since_ns)


def _roll_back_table(table: Path, since_ns: int) -> None:
    """Remove the first incomplete version of a table, and all later versions, from its log."""
    log_folder = table / "_delta_log"
    for path in log_folder.iterdir():
        is_doubtful = path.suffix == ".crc" or (
            _CHECKPOINT.fullmatch(path.name) and not _is_complete_checkpoint(path)
        )
        if is_doubtful and _is_written_since(path, since_ns):
            path.unlink(missing_ok=True)
    first_incomplete_version = _find_first_incomplete_version(table, since_ns)
    if first_incomplete_version is not None and first_incomplete_version == _find_first_incomplete_version(
        table, since_ns
    ):
        entry_path_by_version = _map_entries(log_folder.iterdir())
        for version in sorted(
            (number for number in entry_path_by_version if number >= first_incomplete_version), reverse=True
        ):
            entry_path_by_version[version].unlink()
        for path in log_folder.iterdir():
            if (match := _CHECKPOINT.fullmatch(path.name)) and int(match[1]) >= first_incomplete_version:
                path.unlink()
        _LOGGER.warning(
            "%s is rolled back to before version %d, which is incomplete", table, first_incomplete_version
        )
        if not any(
            _ENTRY.fullmatch(path.name) or _CHECKPOINT.fullmatch(path.name) for path in log_folder.iterdir()
        ):
            shutil.rmtree(log_folder)
            return
    _remove_wrong_hint(log_folder)


def _remove_wrong_hint(log_folder: Path) -> None:
    """Remove `_last_checkpoint` if it is incomplete, or names a checkpoint that does not exist.

    Readers do not need this file.
    """
    hint_path = log_folder / _LAST_CHECKPOINT
    try:
        version = int(json.loads(hint_path.read_bytes())["version"])
    except FileNotFoundError:
        return
    except (ValueError, TypeError, LookupError):
        version = -1
    if not any(
        int(match[1]) == version
        for path in log_folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name))
    ):
        hint_path.unlink(missing_ok=True)


def _map_entries(log_paths: Iterable[Path]) -> dict[int, Path]:
    """Find the log entries among the files of a log. Map each version to the path of its entry."""
    return {int(match[1]): path for path in log_paths if (match := _ENTRY.fullmatch(path.name))}


def _find_first_incomplete_version(table: Path, since_ns: int) -> int | None:
    """The first version since `since_ns` that is incomplete, or comes after a missing version.

    None if there is no such version. A version does not count as missing if a checkpoint makes its entry unnecessary.
    """
    log_paths = list((table / "_delta_log").iterdir())
    all_versions, covered_version = _map_entries(log_paths), _find_newest_checkpoint(log_paths)
    entry_path_by_version = {
        version: path for version, path in sorted(all_versions.items()) if _is_written_since(path, since_ns)
    }
    changes_by_version = dict[int, _FileChanges]()
    for version, path in entry_path_by_version.items():
        if version - 1 > covered_version and version - 1 not in all_versions:
            break
        if find_defect(content := _read_from_disk(path)) is not None:
            break
        changes_by_version[version] = _parse_changes(content)
    while (incomplete_version := _find_first_with_incomplete_file(table, changes_by_version)) is not None:
        # This entry and all later ones will be removed. Files that they took out of the table belong to it again. So
        # check the earlier entries once more, including these files.
        changes_by_version = {
            version: changes
            for version, changes in changes_by_version.items()
            if version < incomplete_version
        }
    return next((version for version in entry_path_by_version if version not in changes_by_version), None)


def _find_newest_checkpoint(log_paths: Iterable[Path]) -> int:
    """The version of the newest checkpoint; -1 if there is none. Readers need no entry up to this version."""
    matches = (_CHECKPOINT.fullmatch(path.name) for path in log_paths)
    return max((int(match[1]) for match in matches if match), default=-1)


def _parse_changes(content: bytes) -> _FileChanges:
    """The files that a log entry removes and adds."""
    removed_names, size_by_added_name = set[str](), dict[str, int]()
    actions: Iterator[dict[str, Any]] = (json.loads(line) for line in content.splitlines() if line.strip())
    for action in actions:
        if (remove := action.get("remove")) is not None:
            removed_names.add(unquote(remove["path"]))
        if (add := action.get("add")) is not None:
            size_by_added_name[unquote(add["path"])] = int(add["size"])
            if (vector_name_and_size := parse_vector_file(add.get("deletionVector"))) is not None:
                name, size = vector_name_and_size
                size_by_added_name[name] = max(size, size_by_added_name.get(name, 0))
    # If an entry removes and adds the same file, it gives the file another deletion vector. The file stays.
    return removed_names - size_by_added_name.keys(), size_by_added_name


def _find_first_with_incomplete_file(
    table: Path, changes_by_version: Mapping[int, _FileChanges]
) -> int | None:
    """The first version that adds an incomplete file which no later version removes. None if there is no such version."""
    later_removed_names, first_version = set[str](), None
    for version in sorted(changes_by_version, reverse=True):
        entry_removes, entry_adds = changes_by_version[version]
        if any(
            name not in later_removed_names and not _is_complete(table / name, size)
            for name, size in entry_adds.items()
        ):
            first_version = version
        later_removed_names |= entry_removes
    return first_version


def _is_complete(path: Path, size: int) -> bool:
    """True if a file has at least this size, and is a Parquet file if its name ends in .parquet."""
    try:
        return path.stat().st_size >= size and (path.suffix != ".parquet" or _is_parquet(path))
    except FileNotFoundError:
        return False


def _is_complete_checkpoint(path: Path) -> bool:
    """True if a checkpoint is a Parquet file, or lines of JSON."""
    if path.suffix != ".json":
        return _is_parquet(path)
    lines = _read_from_disk(path).splitlines()
    try:
        return bool(lines and all(isinstance(json.loads(line), dict) for line in lines))
    except ValueError:
        return False


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        _drop_page_cache(file.fileno())
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        first_bytes = file.read(len(_MAGIC))
        file.seek(max(0, size - len(_MAGIC)))
        return size >= _MIN_PARQUET_BYTES and first_bytes == file.read(len(_MAGIC)) == _MAGIC


def _read_from_disk(path: Path) -> bytes:
    with path.open("rb") as file:
        _drop_page_cache(file.fileno())
        return file.read()


def _drop_page_cache(file: int) -> None:
    """Make the next read of a file come from the disk. The page cache may have data that could not be written to disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_written_since(path: Path, since_ns: int) -> bool:
    """True if a file was written at or after this time. False if it does not exist."""
    try:
        return path.stat().st_mtime_ns >= since_ns
    except FileNotFoundError:
        return False
