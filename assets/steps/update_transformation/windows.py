"""Windows: a window is the part of a slice that is transformed at once, mostly the whole slice.

A slice is divided at a transaction that has to be skipped, and before a transaction that fails. In: the slice and a
range of commit LSNs. Out: the tables, their relation versions and TRUNCATEs, and the messages.
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
    """The transactions of a slice with begin <= commit LSN < end, without the one at `skipped`.

    `slice` is the end of the slice. `end` becomes the position of the tables' changes.
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
        """Whether a transaction is in the window."""
        return self.begin <= commit_lsn < self.end and commit_lsn != self.skipped


def next_window(skip: int | None, begin: int, end: int) -> Window:
    """The next window of the slice that ends at `end`, where everything before `begin` has been transformed."""
    if skip is None or not begin <= skip < end:
        return Window(end, begin, end)
    if begin < skip:
        return Window(end, begin, skip)
    return Window(end, begin, end, skip)


@dataclass(frozen=True)
class TableWork:
    """The transformation work of a window for one table; `contents.size` is the table's share of the bytes, if known."""

    state: TableState
    contents: SliceContents
    messages: Messages
    parts: Sequence[PublishedVersion]
    truncates: Sequence[TruncateAt]


@dataclass(frozen=True)
class WindowWork:
    """The transformation work of a window: tables with their states, relation versions and TRUNCATEs; the messages."""

    contents: SliceContents
    tables: Mapping[Name, TableState]
    parts: Mapping[Name, Sequence[PublishedVersion]]
    emptied: Mapping[Name, Sequence[TruncateAt]]
    messages: Messages
    #: In a large window, the tables with few changes and the approximate bytes of each; and the messages of all these
    #: tables, read into memory.
    sizes: Mapping[Name, int]
    few: Messages | None

    def of_table(self, name: Name, messages: Messages) -> TableWork:
        """The work for a table. It reads `messages`, or `few` if the table has few changes."""
        contents = self.contents
        if self.few is not None and name in self.sizes:
            messages, contents = self.few, replace(contents, size=self.sizes[name])
        parts, truncates = self.parts.get(name, ()), self.emptied.get(name, ())
        return TableWork(self.tables[name], contents, messages, parts, truncates)


@dataclass(frozen=True)
class SliceReader:
    """A subscription, with the feed from which it reads a slice, and the catalog that decides the slice's changes."""

    subscription: Subscription
    lake: Lake
    catalog: Catalog

    def work(self, window: Window) -> WindowWork:
        """The work of a window, for the tables that take its changes. Sets tables aside whose changes are lost."""
        subscription, lake = self.subscription, self.lake
        contents = summarized_slice(lake, subscription.feed, window.slice)
        truncates = [(order, truncate) for order, truncate in contents.truncates if window.holds(order[0])]
        contents = replace(contents, end=window.end, truncates=truncates)
        parts = published_versions(subscription, contents, self.catalog)
        truncates_by_table = table_truncates(subscription, contents, self.catalog)
        states = TableStates(lake, subscription.name)
        while True:
            ready = {n: s for n, s in states.newest().items() if s.transforms and s.lsn < window.end}
            tables = {
                name: ready[name]
                for name in sorted((parts.keys() | truncates_by_table.keys()) & ready.keys())
            }
            # If no table has changes, no file is read, and a lost one does not matter.
            slice_ends = [window.slice] if tables else []
            try:
                messages = messages_of(
                    lake, ChangeLog(lake, subscription.feed).path, slice_ends, contents.size
                )
                break
            except DamagedTableError as error:
                problem = error.message
            states.append([s.with_problem(subscription.name, problem) for s in tables.values()])
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
    """The tables of a large window that together have few changes, with their shares of the bytes; and their messages."""
    numbers = messages.change_counts()
    relations_of_table = {
        name: frozenset(part.version.relation.relation_id for part in versions)
        for name, versions in parts.items()
    }
    shares = {
        name: contents.size * sum(numbers.get(each, 0) for each in relations) // max(1, sum(numbers.values()))
        for name, relations in relations_of_table.items()
        if numbers
    }
    sizes, total = dict[Name, int](), 0
    for name in sorted(shares, key=lambda each: shares[each]):
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
