"""Windows: a window is the part of a slice that is transformed at once. Mostly it is the whole slice.

A slice is the changes from one position of the slot to another. It is divided at a transaction that has to be skipped,
and before a transaction that fails.

In: the slice, and a range of commit LSNs
Out: the tables, their relation versions (a Relation message, and the changes that it describes) and TRUNCATEs, and the
     messages
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.changes import TruncateAt
from pgsieve.assets.steps.update_transformation.messages import FIRST, Choice, Messages, messages_of
from pgsieve.assets.steps.update_transformation.slice_contents import (
    PublishedVersion,
    SliceContents,
    published_versions,
    summarized_slice,
    table_truncates,
)
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class Window:
    """The transactions of a slice with begin <= commit LSN < end, except the one at `skipped`.

    `slice` is the LSN at which the slice ends. `end` becomes the position of the tables' changes.
    """

    slice: int
    begin: int
    end: int
    skipped: int | None = None

    @property
    def choice(self) -> Choice:
        """Selects the messages of these transactions."""
        end_order = (self.end, FIRST) if self.end < self.slice else None
        return Choice(after=(self.begin, FIRST), before=end_order, without=self.skipped)

    def holds(self, commit_lsn: int) -> bool:
        """True if a transaction is in the window."""
        return self.begin <= commit_lsn < self.end and commit_lsn != self.skipped


def next_window(skip: int | None, begin: int, end: int) -> Window:
    """The next window of the slice that ends at `end`. Everything before `begin` has been transformed.

    `skip` is the commit LSN of the transaction to skip, if there is one.
    """
    if skip is None or not begin <= skip < end:
        return Window(end, begin, end)
    if begin < skip:
        return Window(end, begin, skip)
    return Window(end, begin, end, skip)


@dataclass(frozen=True)
class TableWork:
    """What has to be transformed in a window for one table.

    If it is known how many bytes belong to the table, `contents.size` is that number.
    """

    state: TableState
    contents: SliceContents
    messages: Messages
    parts: Sequence[PublishedVersion]
    truncates: Sequence[TruncateAt]


@dataclass(frozen=True)
class WindowWork:
    """What has to be transformed in a window.

    - `tables`: maps tables to their states
    - `parts`: maps tables to their relation versions
    - `emptied`: maps tables to their TRUNCATEs
    - `messages`: the messages of all tables
    """

    contents: SliceContents
    tables: Mapping[Name, TableState]
    parts: Mapping[Name, Sequence[PublishedVersion]]
    emptied: Mapping[Name, Sequence[TruncateAt]]
    messages: Messages
    #: In a large window, some tables may have few changes. `sizes` maps these tables to their approximate number of
    #: bytes, and `few` has the messages of all these tables, read into memory.
    sizes: Mapping[Name, int]
    few: Messages | None

    def of_table(self, name: Name, messages: Messages) -> TableWork:
        """The work for one table. It reads `messages`, or `few` if the table has few changes."""
        contents = self.contents
        if self.few is not None and name in self.sizes:
            messages, contents = self.few, replace(contents, size=self.sizes[name])
        parts, truncates = self.parts.get(name, ()), self.emptied.get(name, ())
        return TableWork(self.tables[name], contents, messages, parts, truncates)


@dataclass(frozen=True)
class SliceReader:
    """Reads slices for a subscription. `catalog` is the catalog that decides how the changes of the slice are filtered."""

    subscription: Subscription
    lake: Lake
    catalog: Catalog

    def work(self, window: Window) -> WindowWork:
        """The work of a window, for those tables that need its changes.

        If a slice is lost, the tables that need its changes are set aside.
        """
        subscription, lake = self.subscription, self.lake
        contents = summarized_slice(lake, subscription.feed, window.slice)
        truncates = [(order, truncate) for order, truncate in contents.truncates if window.holds(order[0])]
        contents = replace(contents, end=window.end, truncates=truncates)
        parts = published_versions(subscription, contents, self.catalog)
        truncates_by_table = table_truncates(subscription, contents, self.catalog)
        states = TableStates(lake, subscription.name)
        while True:
            ready = {
                name: state
                for name, state in states.newest().items()
                if state.transforms and state.lsn < window.end
            }
            tables = {
                name: ready[name]
                for name in sorted((parts.keys() | truncates_by_table.keys()) & ready.keys())
            }
            # If no table has changes, no file is read. In that case it does not matter if a file is lost.
            slice_ends = [window.slice] if tables else []
            try:
                messages = messages_of(
                    lake, ChangeLog(lake, subscription.feed).path, slice_ends, contents.size
                )
                break
            except DamagedTableError as error:
                problem = error.message
            states.append([state.with_problem(subscription.name, problem) for state in tables.values()])
        messages = messages.chosen(window.choice)
        truncated_names = tables.keys() & truncates_by_table.keys()
        times = messages.truncate_times() if truncated_names else {}
        truncates_with_time = {
            name: [(*order, times.get(order[0])) for order in truncates_by_table[name]]
            for name in truncated_names
        }
        return WindowWork(
            contents,
            tables,
            parts,
            truncates_with_time,
            messages,
            *_few_changes(lake, contents, messages, parts),
        )


def _few_changes(
    lake: Lake, contents: SliceContents, messages: Messages, parts: Mapping[Name, Sequence[PublishedVersion]]
) -> tuple[Mapping[Name, int], Messages | None]:
    """Find the tables of a large window that together have few changes.

    Maps these tables to their approximate number of bytes; and returns their messages, read into memory.
    """
    if len(parts) < 2 and contents.changed <= {
        part.version.relation.relation_id for versions in parts.values() for part in versions
    }:
        return {}, None  # All changes of the slice are of one table, and they are not few.
    change_counts = messages.change_counts()
    relations_of_table = {
        name: frozenset(part.version.relation.relation_id for part in versions)
        for name, versions in parts.items()
    }
    shares = {
        name: contents.size
        * sum(change_counts.get(relation_id, 0) for relation_id in relations)
        // max(1, sum(change_counts.values()))
        for name, relations in relations_of_table.items()
        if change_counts
    }
    sizes, total = dict[Name, int](), 0
    for name in sorted(shares, key=lambda table: shares[table]):
        total += shares[name]
        if not lake.policy.is_small(total):
            break
        sizes[name] = shares[name]
    few_messages = (
        messages.read_few(
            frozenset().union(*(relations_of_table[name] for name in sizes)), lake.policy.is_small
        )
        if sizes
        else None
    )
    return (sizes, few_messages) if few_messages is not None else ({}, None)
