"""Finds the values that rows lack after a move. It serves tasks that apply very many changes, divided by their keys.

A move is an UPDATE that changes the key of a row: a LEAVE of the old key, and an INSERT with the new one. The two keys may
be in different parts. A task that decides a part (`part_deciders`) finds out which rows the writers have to write. An
UPDATE does not send a TOASTed value that it leaves unchanged. So the decider of the new key lacks the value. The decider
of the old key knows where it is.

Tasks that bring the two together (`SourceResolver`) run in stages between the deciders and the writers. A place is a number
that orders the changes of a batch, the changes that one commit applies. The place of a move determines its resolver.

Deciders send a table of sources: for each row, where its values are. They may be in changes, or in a row of the replica.
They may also be in the row that a move took from its old key. Then the column `link` has the place of this move. A resolver
replaces a link by the sources of that row, which may have a link, too. The same stage also replaces the links of the rows
that moves took away. So each stage doubles the number of moves that a link skips, and n stages resolve 2**n - 1 moves:

    links of the row and of four moves    row ──► 4 ──► 3 ──► 2 ──► 1
    after one stage                       row ──► 3 ──► 1,  4 ──► 2,  and 2 has the sources of 1
    after two stages                      row ──► 1,  and 3 and 4 have the sources of 1
    after three stages                    the row has the sources of 1

In: messages of deciders to writers. Out: the same messages, without links. If there were too few stages, a report for the
driver says so.

    decider of key 2    INSERT by the move at place 7: sends body's source as a link ──┐
                                                                                       ├─► resolver of place 7 ──► writer
    decider of key 1    LEAVE by the move at place 7: body is in row 5 of a file ──────┘   body is in row 5 of a file

Raises Arrow's errors.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.key_reader import BatchParts
from pgsieve.assets.steps.apply.part_deciders import PartDecider
from pgsieve.assets.steps.apply.part_messages import ENDED_ROWS, LEFT_ROWS, ROWS, pack, unpack_rows
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.value_sources import ValueSources, mask_unsent
from pgsieve.resources.parts import Guard, Message, make_message

#: The kinds of messages to writers.
_WRITER_KINDS = (ROWS, ENDED_ROWS)
#: Each message to a resolver has a number. It is `_LINK_TARGETS` for the sources of rows that leave their keys. It is
#: `_LINKED_ROWS - kind` for sources with links: `kind` is one of `_WRITER_KINDS`, or `LEFT_ROWS` for rows that leave their
#: keys. All other messages are only passed on, and `_address` makes their number.
_LINK_TARGETS, _LINKED_ROWS = -1, -2


def _address(writer: int, kind: int) -> int:
    """Make the number of a message that resolvers pass on to a writer."""
    return writer * len(_WRITER_KINDS) + kind


@dataclass(frozen=True)
class _Router:
    """Sends messages through resolvers, of which there are `resolver_count`."""

    resolver_count: int

    def pass_on(self, address: int, content: bytes | pa.Buffer) -> pa.RecordBatch:
        """Send a message that needs no resolver. Any resolver can pass it on."""
        return make_message(address // len(_WRITER_KINDS) % self.resolver_count, address, content)

    def send_left_rows(self, sources: pa.Table) -> Iterator[pa.RecordBatch]:
        """Send the sources of rows that leave their keys to the resolvers of the moves.

        Sources with links are also sent to the resolvers of the links.
        """
        yield from self._divide(_LINK_TARGETS, np.asarray(sources["place"]), sources)
        linked_sources = sources.filter(_mask_linked(sources))
        yield from self._divide(_LINKED_ROWS - LEFT_ROWS, np.asarray(linked_sources["link"]), linked_sources)

    def send_linked_rows(self, kind: int, sources: pa.Table) -> Iterator[pa.RecordBatch]:
        """Send sources with links to the resolvers of these links. The column `writer` has the writer that needs them."""
        yield from self._divide(_LINKED_ROWS - kind, np.asarray(sources["link"]), sources)

    def _divide(self, number: int, places: Numbers, sources: pa.Table) -> Iterator[pa.RecordBatch]:
        resolvers = places % self.resolver_count
        for resolver in np.unique(resolvers).tolist():
            yield make_message(resolver, number, pack(sources.filter(pa.array(resolvers == resolver))))


@dataclass(frozen=True)
class DeciderWithLinks:
    """Runs a decider, and sends its messages to resolvers instead of writers."""

    decider: PartDecider
    resolver_count: int

    def __call__(self, part: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Decide the changes of a part."""
        router = _Router(self.resolver_count)
        for batch in self.decider(part, messages, guard):
            (writer,), (kind,) = (batch.column(name).to_pylist() for name in ("to", "of"))
            content = batch.column("content")[0].as_buffer()
            if kind == LEFT_ROWS:
                yield from router.send_left_rows(unpack_rows([(kind, content)], kind, "place"))
            elif writer < self.decider.batch_parts.change_part_count:
                yield from self._send_sources(router, writer, kind, content)
            else:
                yield router.pass_on(_address(writer, kind), content)

    def _send_sources(
        self, router: _Router, writer: int, kind: int, content: pa.Buffer
    ) -> Iterator[pa.RecordBatch]:
        """Send sources with links to resolvers, and the rest of a message on to its writer.

        A message with the metadata of deleted rows has no sources.
        """
        sources = unpack_rows([(kind, content)], kind, "place")
        if "link" not in sources.column_names:
            yield router.pass_on(_address(writer, kind), content)
            return
        is_linked = _mask_linked(sources)
        if len(unlinked_sources := sources.filter(pc.invert(is_linked))):
            yield router.pass_on(_address(writer, kind), pack(unlinked_sources))
        if len(linked_sources := sources.filter(is_linked)):
            writers = pa.array(np.full(len(linked_sources), writer, np.int64))
            yield from router.send_linked_rows(kind, linked_sources.append_column("writer", writers))


@dataclass(frozen=True)
class SourceResolver:
    """Gives each row with a link the sources of the row that the link points to.

    `is_last` is True in the last stage. Then the messages go to the writers.
    """

    batch_parts: BatchParts
    resolver_count: int
    is_last: bool

    def __call__(self, _: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Resolve the links to the moves of one resolver, and pass all other messages on."""
        yield from guard(self._resolve(messages))

    def _resolve(self, messages: Sequence[Message]) -> Iterator[pa.RecordBatch]:
        router = _Router(self.resolver_count)
        for number, content in messages:
            if number >= 0:
                yield self._pass_on(router, number, content)
        has_left_rows = any(number == _LINK_TARGETS for number, _ in messages)
        left_rows = unpack_rows(messages, _LINK_TARGETS, "place") if has_left_rows else None
        if left_rows is not None and not self.is_last:
            # Rows with links were also sent to the resolvers of their links, which send them on.
            yield from router.send_left_rows(left_rows.filter(pc.invert(_mask_linked(left_rows))))
        for kind in (*_WRITER_KINDS, *(() if self.is_last else (LEFT_ROWS,))):
            if any(number == _LINKED_ROWS - kind for number, _ in messages):
                sources = unpack_rows(messages, _LINKED_ROWS - kind, "place")
                if left_rows is not None:
                    sources = self._follow_links(sources, left_rows)
                if kind == LEFT_ROWS:
                    yield from router.send_left_rows(sources)
                else:
                    yield from self._send(router, kind, sources)

    def _pass_on(self, router: _Router, address: int, content: bytes | pa.Buffer) -> pa.RecordBatch:
        if self.is_last:
            return make_message(*divmod(address, len(_WRITER_KINDS)), content)
        return router.pass_on(address, content)

    def _follow_links(self, sources: pa.Table, left_rows: pa.Table) -> pa.Table:
        """Give each row the sources of the row that its link points to; `left_rows` is in the order of its places.

        If the decider of a part has refused the changes, there may be no such row.
        """
        left_places, links = np.asarray(left_rows["place"]), np.asarray(sources["link"])
        left_indices = np.minimum(np.searchsorted(left_places, links), len(left_places) - 1)
        linked_rows = np.flatnonzero(left_places[left_indices] == links)
        present_sources = self._extract_sources(sources).inherit(
            linked_rows, self._extract_sources(left_rows).take(left_indices[linked_rows])
        )
        is_unsent = mask_unsent(present_sources.changes_by_column, len(links))
        columns = {**present_sources.changes_by_column, **present_sources.origins}
        columns["link"] = np.where(is_unsent, columns["link"], NONE)
        for name, numbers in columns.items():
            sources = sources.set_column(sources.schema.get_field_index(name), name, pa.array(numbers))
        return sources

    def _extract_sources(self, rows: pa.Table) -> ValueSources:
        """Extract where the values of rows are from the columns that `find_sources` has made."""
        places_by_column = {
            f"sent{number}": np.asarray(rows[f"sent{number}"])
            for number in range(len(self.batch_parts.unsent_columns))
        }
        return ValueSources(
            places_by_column, {name: np.asarray(rows[name]) for name in ("file", "row", "link")}
        )

    def _send(self, router: _Router, kind: int, sources: pa.Table) -> Iterator[pa.RecordBatch]:
        """Send rows without a link to the writers, and the others to the next stage."""
        is_linked = _mask_linked(sources)
        resolved_sources, linked_sources = sources.filter(pc.invert(is_linked)), sources.filter(is_linked)
        writers = np.asarray(resolved_sources["writer"])
        for writer in np.unique(writers).tolist():
            rows = resolved_sources.filter(pa.array(writers == writer)).drop_columns("writer")
            yield self._pass_on(router, _address(writer, kind), pack(rows))
        if not linked_sources.num_rows:
            return
        if self.is_last:
            report = json.dumps({"counts": {"unresolved": linked_sources.num_rows}})
            yield make_message(self.batch_parts.writer_count - 1, ROWS, report.encode())
        else:
            yield from router.send_linked_rows(kind, linked_sources)


def _mask_linked(sources: pa.Table) -> pa.ChunkedArray:
    return pc.not_equal(sources["link"], NONE)
