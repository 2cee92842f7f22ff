"""Windows: a window is the part of a slice that is transformed (decoded and filtered) in one go.

Mostly it is the whole slice.

A slice is the changes from one position of the slot to another. It is divided before a transaction that has to be
skipped, and before one that fails.

In: the slice, and a range of commit LSNs
Out: the tables, their relation versions (a Relation message, and the changes that it describes) and TRUNCATEs, and the
     messages
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.changes import TruncateOrder
from pgsieve.assets.steps.update_transformation.messages import (
    FIRST_ORDINAL,
    MessageFilter,
    Messages,
    open_messages,
)
from pgsieve.assets.steps.update_transformation.slice_contents import (
    PublishedVersion,
    SliceContents,
    published_versions,
    read_slice_contents,
    table_truncates,
)
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class Window:
    """The transactions of a slice with begin <= commit LSN < end, except the one at `skipped_lsn`.

    `slice_end` is the LSN at which the slice ends. A commit with the changes of the window has the position `end`
    (the LSN up to which a table has all changes).
    """

    slice_end: int
    begin: int
    end: int
    skipped_lsn: int | None = None

    @property
    def message_filter(self) -> MessageFilter:
        """Selects the messages of these transactions."""
        end_order = (self.end, FIRST_ORDINAL) if self.end < self.slice_end else None
        return MessageFilter(
            after_order=(self.begin, FIRST_ORDINAL), before_order=end_order, excluded_lsn=self.skipped_lsn
        )

    def contains(self, commit_lsn: int) -> bool:
        """True if a transaction is in the window."""
        return self.begin <= commit_lsn < self.end and commit_lsn != self.skipped_lsn


def next_window(skip_lsn: int | None, begin: int, end: int) -> Window:
    """The next window of the slice that ends at `end`. Everything before `begin` has been transformed.

    `skip_lsn` is the commit LSN of the transaction to skip, if there is one.
    """
    if skip_lsn is None or not begin <= skip_lsn < end:
        return Window(end, begin, end)
    if begin < skip_lsn:
        return Window(end, begin, skip_lsn)
    return Window(end, begin, end, skip_lsn)


@dataclass(frozen=True)
class TableWork:
    """What has to be transformed in a window for one table.

    `contents.size` is the number of bytes of the messages that are read: those of the whole slice, or, if the table has
    few changes, approximately those of the table.
    """

    state: TableState
    contents: SliceContents
    messages: Messages
    relation_versions: Sequence[PublishedVersion]
    truncates: Sequence[TruncateOrder]


@dataclass(frozen=True)
class WindowWork:
    """What has to be transformed in a window.

    - `state_by_table`: maps tables to their states
    - `relation_versions_by_table`: maps tables to their relation versions
    - `truncates_by_table`: maps tables to their TRUNCATEs
    - `messages`: the messages of all tables
    """

    contents: SliceContents
    state_by_table: Mapping[Name, TableState]
    relation_versions_by_table: Mapping[Name, Sequence[PublishedVersion]]
    truncates_by_table: Mapping[Name, Sequence[TruncateOrder]]
    messages: Messages
    #: In a large window, some tables may have few changes. `bytes_by_small_table` maps these tables to their approximate
    #: number of bytes, and `small_tables_messages` has the messages of all these tables, read into memory.
    bytes_by_small_table: Mapping[Name, int]
    small_tables_messages: Messages | None

    def make_table_work(self, name: Name, messages: Messages) -> TableWork:
        """The work for one table. It reads `messages`, or `small_tables_messages` if the table has few changes."""
        contents = self.contents
        if self.small_tables_messages is not None and name in self.bytes_by_small_table:
            messages, contents = (
                self.small_tables_messages,
                replace(contents, size=self.bytes_by_small_table[name]),
            )
        relation_versions, truncates = (
            self.relation_versions_by_table.get(name, ()),
            self.truncates_by_table.get(name, ()),
        )
        return TableWork(self.state_by_table[name], contents, messages, relation_versions, truncates)


@dataclass(frozen=True)
class SliceReader:
    """Reads slices for a subscription. The row filters and column lists in `catalog` decide which changes it gets."""

    subscription: Subscription
    lake: Lake
    catalog: Catalog

    def read_work(self, window: Window) -> WindowWork:
        """Find what has to be transformed in a window, for those tables that need its changes.

        If a slice is lost, the tables that need its changes are set aside: they get no more changes until they are copied
        again.
        """
        subscription, lake = self.subscription, self.lake
        contents = read_slice_contents(lake, subscription.slot_stream, window.slice_end)
        truncates = [(order, truncate) for order, truncate in contents.truncates if window.contains(order[0])]
        contents = replace(contents, end=window.end, truncates=truncates)
        relation_versions_by_table = published_versions(subscription, contents, self.catalog)
        truncates_by_table = table_truncates(subscription, contents, self.catalog)
        states = TableStates(lake, subscription.name)
        while True:
            transformed_tables = {
                name: state
                for name, state in states.read_newest().items()
                if state.is_transformed and state.lsn < window.end
            }
            changed_names = relation_versions_by_table.keys() | truncates_by_table.keys()
            tables = {
                name: transformed_tables[name] for name in sorted(changed_names & transformed_tables.keys())
            }
            # If no table has changes, no file is read. In that case it does not matter if a file is lost.
            slice_ends = [window.slice_end] if tables else []
            try:
                messages = open_messages(
                    lake, ChangeLog(lake, subscription.slot_stream).path, slice_ends, contents.size
                )
                break
            except DamagedTableError as error:
                problem = error.message
            states.append([state.with_problem(subscription.name, problem) for state in tables.values()])
        messages = messages.apply_filter(window.message_filter)
        truncated_names = tables.keys() & truncates_by_table.keys()
        times = messages.read_truncate_times() if truncated_names else {}
        truncates_with_time = {
            name: [(*order, times.get(order[0])) for order in truncates_by_table[name]]
            for name in truncated_names
        }
        return WindowWork(
            contents,
            tables,
            relation_versions_by_table,
            truncates_with_time,
            messages,
            *_read_small_tables(lake, contents, messages, relation_versions_by_table),
        )


def _read_small_tables(
    lake: Lake,
    contents: SliceContents,
    messages: Messages,
    relation_versions_by_table: Mapping[Name, Sequence[PublishedVersion]],
) -> tuple[Mapping[Name, int], Messages | None]:
    """Find the tables of a large window that together have few changes.

    Returns a dictionary that maps these tables to their approximate number of bytes; and the messages of all these tables,
    read into memory.
    """
    if len(relation_versions_by_table) < 2 and contents.changed_oids <= {
        published_version.version.relation.relation_id
        for versions in relation_versions_by_table.values()
        for published_version in versions
    }:
        # All changes of the slice are of one table, so no table has only a small part of them.
        return {}, None
    change_counts = messages.count_changes()
    relations_of_table = {
        name: frozenset(published_version.version.relation.relation_id for published_version in versions)
        for name, versions in relation_versions_by_table.items()
    }
    bytes_by_table = {
        name: contents.size
        * sum(change_counts.get(relation_id, 0) for relation_id in relations)
        // max(1, sum(change_counts.values()))
        for name, relations in relations_of_table.items()
        if change_counts
    }
    bytes_by_small_table, total = dict[Name, int](), 0
    for name in sorted(bytes_by_table, key=lambda table: bytes_by_table[table]):
        total += bytes_by_table[name]
        if not lake.policy.is_small(total):
            break
        bytes_by_small_table[name] = bytes_by_table[name]
    small_tables_messages = (
        messages.read_few(
            frozenset().union(*(relations_of_table[name] for name in bytes_by_small_table)),
            lake.policy.is_small,
        )
        if bytes_by_small_table
        else None
    )
    return (bytes_by_small_table, small_tables_messages) if small_tables_messages is not None else ({}, None)
