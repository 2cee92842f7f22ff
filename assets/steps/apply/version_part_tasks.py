"""The tasks that apply very many changes to the versions of rows (`history: scd2`), divided by their keys.

They have the three stages of `part_deciders`: `VersionReader`, `VersionDecider`, `VersionPartWriter`. Each task of a stage
is a receiver: it gets the messages with its number from the stage before. A version of a row is valid from one of the
publisher's commits to another. A present version has not ended yet. The place of a change is a
number that orders the changes of a batch, the changes that one commit applies.

In: row groups of a change history (the Delta table with all changes of a table), and files of the table of versions. Out:
rows that describe new files, and rows with a JSON text, such as the index of a changed file and its new deletion vector.
`versions_by_parts` starts the tasks, and commits what they have written. Raises OSError, and Arrow's errors.

    row groups of changes ──┐ keys, commits                       ┌─ places, commits ──► new versions
                            ├───────────────► the versions of a ──┤
    files of the versions ──┘ keys            part of the keys    └─ rows, commits ────► ended versions
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.key_reader import KeyReader
from pgsieve.assets.steps.apply.part_deciders import PartDecider, describe_lost_places, find_sources
from pgsieve.assets.steps.apply.part_messages import (
    ENDED_ROWS,
    ROWS,
    PartMatches,
    ReceivedChanges,
    pack,
    unpack_rows,
)
from pgsieve.assets.steps.apply.part_writer import PartWriter, describe_files
from pgsieve.assets.steps.apply.row_selection import Validity
from pgsieve.assets.steps.apply.unordered_changes import UnorderedChanges
from pgsieve.assets.steps.apply.version_outcome import VersionOutcome
from pgsieve.assets.steps.history.versions import EndingTask, FileWithEnds
from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.versions import IS_CURRENT, Commits
from pgsieve.resources.parts import Guard, Message, make_message


@dataclass(frozen=True)
class VersionReader(KeyReader):
    """Sends what `KeyReader` sends, and each change's commit LSN and time. From files it sends only present versions."""

    @property
    def _change_columns(self) -> Sequence[str]:
        return [*super()._change_columns, "commit_time"]

    @property
    def _row_columns(self) -> pa.Schema:
        return super()._row_columns.append(pa.field(IS_CURRENT, pa.bool_()))

    def extract_changes(self, table: pa.Table) -> UnorderedChanges:
        """Extract what `KeyReader.extract_changes` does, and the times of TRUNCATEs."""
        changes = super().extract_changes(table)
        if not changes.truncates.num_rows:
            return changes
        times = _find_times(table, np.asarray(changes.truncates["commit_lsn"]))
        return replace(changes, truncates=changes.truncates.append_column("commit_time", times))

    def _make_change_rows(self, table: pa.Table, changes: UnorderedChanges) -> pa.Table:
        rows = super()._make_change_rows(table, changes)
        if "lsn" not in rows.column_names:
            rows = rows.append_column("lsn", pa.array(changes.commit_lsns))
        return rows.append_column("time", _find_times(table, changes.commit_lsns))

    def _mask_sent_rows(self, rows: pa.RecordBatch) -> Mask:
        return np.asarray(rows.column(IS_CURRENT).fill_null(False))


def _find_times(changes: pa.Table, lsns: Numbers) -> pa.Array:
    """Find the time of the commit at each of these LSNs; `changes` has changes of these commits."""
    commits = Commits.from_changes(changes)
    return commits.times.take(pa.array(commits.find_numbers(lsns)))


class VersionDecider(PartDecider):
    """Decides which versions the changes of a part of the keys begin and end.

    Sends two kinds of messages to the receivers:
    - the places of the changes that begin versions, the commits that begin and end these versions, and where the values are
      that the changes did not send. Versions that the batch also ends are sent apart (`ENDED_ROWS`).
    - for each file, the numbers of the versions that end, and the commits that end them

    If UPDATEs that change the key find no row, it sends only the places of these UPDATEs.
    """

    def _has_work(self, received: ReceivedChanges) -> bool:
        # A TRUNCATE ends the versions of all keys.
        return bool(received.changes) or received.truncates.num_rows > 0

    def _decide(self, received: ReceivedChanges) -> Iterator[pa.RecordBatch]:
        commits = _join_commits(received)
        if not received.changes:
            first_truncate = commits.find_numbers(np.asarray(received.truncates["commit_lsn"])).min()
            yield from self._end_versions(received, {}, np.empty(0, np.int64), int(first_truncate), commits)
            return
        keyed_changes = received.join(self.batch_parts.unsent_columns)
        matches = received.find_matches(keyed_changes.keys)
        has_version = keyed_changes.mask_present_keys(match.key_numbers for match in matches.values())
        outcome = VersionOutcome.compute(keyed_changes, commits, has_version)
        if len(lost_places := self._find_new_places(outcome.lost_places)):
            yield self._make_report(describe_lost_places(lost_places))
            return
        for kind in (ROWS, ENDED_ROWS):
            rows, validity = outcome.select_new_versions(are_present=kind == ROWS)
            sources = _append_commits(
                find_sources(self.batch_parts, rows, matches), "begin", validity.begin_commits, commits
            )
            if kind == ENDED_ROWS:
                sources = _append_commits(sources, "end", validity.end_commits, commits)
            yield from received.make_place_messages(kind, rows.places, sources)
        if outcome.left_rows is not None:
            yield from self._send_left_rows(outcome.left_rows, matches)
        ends = outcome.versions.former_end_commits
        yield from self._end_versions(received, matches, ends, outcome.truncate_commit, commits)

    def _end_versions(
        self,
        received: ReceivedChanges,
        matches: Mapping[int, PartMatches],
        ends: Numbers,
        truncate_commit: int | None,
        commits: Commits,
    ) -> Iterator[pa.RecordBatch]:
        """Yield messages to the writers of files.

        `ends` has for each key the number of the commit that ends its present version, or `NONE`. `truncate_commit` ends the
        versions of the keys that have no change; None if no TRUNCATE does.
        """
        for number in received.rows_by_sender:
            if truncate_commit is None:
                match = matches[number]
                row_numbers, end_commits = match.row_numbers, ends[match.key_numbers]
                is_ended = end_commits != NONE
                row_numbers, end_commits = row_numbers[is_ended], end_commits[is_ended]
            else:
                row_numbers = np.sort(received.find_row_numbers(number))
                end_commits = np.full(len(row_numbers), truncate_commit, np.int64)
                if (match_of_keys := matches.get(number)) is not None:
                    indices = np.searchsorted(row_numbers, match_of_keys.row_numbers)
                    end_commits[indices] = ends[match_of_keys.key_numbers]
            if len(row_numbers):
                rows = _append_commits(pa.table({"row": row_numbers}), "end", end_commits, commits)
                yield make_message(number, ROWS, pack(rows))


def _join_commits(received: ReceivedChanges) -> Commits:
    """Join the commits of the changes and TRUNCATEs that a part has received."""
    names = ["commit_lsn", "commit_time"]
    tables = [table.select(["lsn", "time"]).rename_columns(names) for _, table in received.changes]
    if received.truncates.num_rows:
        tables.append(received.truncates.select(names))
    return Commits.from_changes(pa.concat_tables(tables))


def _append_commits(rows: pa.Table, label: str, numbers: Numbers, commits: Commits) -> pa.Table:
    """Append the LSN and the time of a commit to each row; `numbers` has the numbers of the commits."""
    indices = pa.array(numbers)
    rows = rows.append_column(f"{label}_lsn", commits.lsns.take(indices))
    return rows.append_column(f"{label}_time", commits.times.take(indices))


def _collect_commits(rows: pa.Table, labels: Sequence[str]) -> Commits:
    """Collect the commits that `_append_commits` has appended."""
    names = ["commit_lsn", "commit_time"]
    return Commits.from_changes(
        pa.concat_tables(
            rows.select([f"{label}_lsn", f"{label}_time"]).rename_columns(names) for label in labels
        )
    )


@dataclass(frozen=True)
class VersionPartWriter(PartWriter):
    """Writes what the `VersionDecider`s have sent to a receiver.

    The receiver of a part of the changes writes the new versions; those that the batch also ends get files of their own. The
    receiver of a file writes its ended versions into new files. The other versions of the file are written again, too, or a
    deletion vector marks the ended ones.
    """

    def _write_new_rows(
        self, change_part: int, messages: Sequence[Message], guard: Guard
    ) -> Iterator[pa.RecordBatch]:
        for kind in (ROWS, ENDED_ROWS):
            if not any(message_kind == kind for message_kind, _ in messages):
                continue
            labels = ["begin"] if kind == ROWS else ["begin", "end"]
            sources = unpack_rows(messages, kind, "place")
            commits, places = _collect_commits(sources, labels), np.asarray(sources["place"])
            numbers = [commits.find_numbers(np.asarray(sources[f"{label}_lsn"])) for label in labels]
            end_commits = np.full(len(places), NONE, np.int64) if kind == ROWS else numbers[1]
            selection = replace(
                self.files_task.row_selection,
                places=places,
                missing_values=self._find_missing_values(sources),
                added_columns=Validity(places, numbers[0], end_commits, commits),
            )
            yield from self._write_selection(change_part, selection, guard)

    def _change_file(
        self, file_index: int, messages: Sequence[Message], guard: Guard
    ) -> Iterator[pa.RecordBatch]:
        rows, task = unpack_rows(messages, ROWS, "row"), self.files_task
        commits, row_numbers = _collect_commits(rows, ["end"]), np.asarray(rows["row"])
        ending_commits = commits.find_numbers(np.asarray(rows["end_lsn"]))
        file = FileWithEnds(
            self.files[file_index].name, row_numbers, ending_commits, is_replaced=not self.can_mark_rows
        )
        ending_task = EndingTask(
            task.store,
            task.path,
            task.replica_schema,
            task.target_file_bytes,
            task.encodings or {},
            commits,
            [file],
        )
        yield from describe_files(ending_task(0, guard))
        yield self._finish_file(file_index, row_numbers)
