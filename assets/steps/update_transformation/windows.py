"""Windows: a window is the part of a slice that is transformed (decoded and filtered) in one go.

Mostly it is the whole slice.

A slice is the changes from one position of the slot to another. It is divided before a transaction that has to be
skipped, and before one that fails.

In: the slice, and a range of commit LSNs
Out: the tables, their relation versions (a Relation message, and the changes that it describes) and TRUNCATEs, and the
     messages
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.changes import TruncateOrder
from pgsieve.assets.steps.update_transformation.messages import (
    FIRST_ORDINAL,
    MessageFilter,
    Messages,
    count_changes,
    open_messages,
    read_truncate_times,
)
from pgsieve.assets.steps.update_transformation.slice_contents import (
    PublishedVersion,
    SliceContents,
    find_published_versions,
    find_table_truncates,
    read_slice_contents,
)
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.lake import Lake

Result = TypeVar("Result")


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

    `contents.size` is about the number of bytes of the table's messages in the slice. `messages` may have messages of
    other tables, too.
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
    - `bytes_by_table`: maps tables to the bytes of their messages in the slice. A table whose bytes are not known is
      missing.
    """

    lake: Lake
    contents: SliceContents
    state_by_table: Mapping[Name, TableState]
    relation_versions_by_table: Mapping[Name, Sequence[PublishedVersion]]
    truncates_by_table: Mapping[Name, Sequence[TruncateOrder]]
    messages: Messages
    bytes_by_table: Mapping[Name, int]

    def map_tables(self, act: Callable[[Name, TableWork], Result]) -> list[Result]:
        """The results of `act` for the work of each table, in the order of `state_by_table`.

        In a large window, tables with few changes come first, in groups. The messages of one group at a time are in
        memory, so a table with few changes needs no Spark, however many such tables there are.
        """
        groups = (
            divide_into_groups(self.bytes_by_table, self.lake.policy.is_small)
            if self.messages.can_read_few
            else []
        )
        large_tables = self.state_by_table.keys() - set(chain.from_iterable(groups))
        if groups and large_tables:
            # The runner of the large tables starts while this process transforms the others.
            self.lake.policy.prepare_runner(max(map(self._get_size, large_tables)))
        results: dict[Name, Result] = {}
        for group in groups:
            few_messages = self.messages.read_few(
                frozenset(chain.from_iterable(map(self._get_relations, group))), self.lake.policy.is_small
            )
            results |= self._map_group(act, group, few_messages)
        is_read_repeatedly = len(large_tables) > 1 and not self.lake.policy.is_small(self.contents.size)
        with self.messages.persist() if is_read_repeatedly else nullcontext(self.messages) as messages:
            results |= self._map_group(
                act, [name for name in self.state_by_table if name in large_tables], messages
            )
        return [results[name] for name in self.state_by_table]

    def _map_group(
        self, act: Callable[[Name, TableWork], Result], names: Sequence[Name], messages: Messages
    ) -> dict[Name, Result]:
        """The results of `act` for some tables, whose messages are in `messages`."""
        results = self.lake.map_in_parallel(
            lambda name: act(name, self._make_table_work(name, messages)), names
        )
        return dict(zip(names, results, strict=True))

    def _make_table_work(self, name: Name, messages: Messages) -> TableWork:
        return TableWork(
            self.state_by_table[name],
            replace(self.contents, size=self._get_size(name)),
            messages,
            self.relation_versions_by_table.get(name, ()),
            self.truncates_by_table.get(name, ()),
        )

    def _get_size(self, name: Name) -> int:
        return self.bytes_by_table.get(name, self.contents.size)

    def _get_relations(self, name: Name) -> frozenset[int]:
        return get_relation_ids(self.relation_versions_by_table.get(name, ()))


def divide_into_groups(
    bytes_by_table: Mapping[Name, int], is_small: Callable[[int], bool]
) -> list[list[Name]]:
    """Divide the tables with few bytes into groups that have few bytes each, too. Other tables are left out."""
    groups, group_bytes = list[list[Name]](), 0
    for name, size in bytes_by_table.items():
        if not is_small(size):
            continue
        if not groups or not is_small(group_bytes + size):
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += size
    return groups


def get_relation_ids(versions: Iterable[PublishedVersion]) -> frozenset[int]:
    """The oids of the relations that some relation versions describe."""
    return frozenset(version.version.relation.relation_id for version in versions)


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
        relation_versions_by_table = find_published_versions(subscription, contents, self.catalog)
        truncates_by_table = find_table_truncates(subscription, contents, self.catalog)
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
        times = read_truncate_times(messages) if truncated_names else {}
        truncates_with_time = {
            name: [(*order, times.get(order[0])) for order in truncates_by_table[name]]
            for name in truncated_names
        }
        return WindowWork(
            lake,
            contents,
            tables,
            relation_versions_by_table,
            truncates_with_time,
            messages,
            _find_table_sizes(
                contents, messages, {name: relation_versions_by_table.get(name, ()) for name in tables}
            ),
        )


def _find_table_sizes(
    contents: SliceContents,
    messages: Messages,
    relation_versions_by_table: Mapping[Name, Sequence[PublishedVersion]],
) -> Mapping[Name, int]:
    """Map tables to the bytes of their messages in a slice.

    They are in the slice's summary. If the summary is of an earlier version of pgsieve, the changes of each table are
    counted, and their bytes are estimated. The result is empty if there are none.
    """
    bytes_by_relation = contents.bytes_by_relation
    if bytes_by_relation is None:
        change_counts = count_changes(messages)
        total = max(1, sum(change_counts.values()))
        bytes_by_relation = {
            relation: contents.size * count // total for relation, count in change_counts.items()
        }
        if not bytes_by_relation:
            return {}
    return {
        name: sum(bytes_by_relation.get(relation, 0) for relation in get_relation_ids(versions))
        for name, versions in relation_versions_by_table.items()
    }
