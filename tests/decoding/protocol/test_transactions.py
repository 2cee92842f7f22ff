"""A slot gives the same transactions in the same order, whatever options it is read with.

PostgreSQL is the oracle: the slot's messages in protocol version 1, without streaming and two_phase. Several sessions work at
once, with savepoints, prepared transactions, and changes of the schema and the publication.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.decoding.protocol.messages import (
    AbortInfo,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Insert,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Text,
    Truncate,
    decode,
    encode,
)
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.spool import FileSpool
from tests.fixtures.concurrent_sessions import SETTINGS, STEPS, TABLES, Workload, connect, flushed_lsn
from tests.fixtures.servers import new_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[16, 18, 19])
def server(request):
    with new_server(request.param, SETTINGS) as running:
        with connect(running) as connection:
            connection.execute(TABLES)
        yield running


def peek(server: EmbeddedServer, slot: str, upto: str | None = None, **options: str) -> list[bytes]:
    flat = [text for item in {"publication_names": '"pub"', **options}.items() for text in item]
    marks = ", ".join(["%s"] * len(flat))
    with connect(server) as connection:
        rows = connection.execute(
            f"SELECT data FROM pg_logical_slot_peek_binary_changes(%s, %s, NULL, {marks})",
            [slot, upto, *flat],
        ).fetchall()
    return [data for (data,) in rows]


def advance(server: EmbeddedServer, slot: str, lsn: str) -> None:
    with connect(server) as connection:
        connection.execute("SELECT pg_replication_slot_advance(%s, %s)", [slot, lsn])


def in_batches(messages: list[bytes], seed: int) -> Iterator[pa.Array]:
    """The messages in arrays of random lengths."""
    draw, at = random.Random(seed), 0
    while at < len(messages):
        length = draw.randint(1, 40)
        yield pa.array(messages[at : at + length], pa.binary())
        at += length


class Reader:
    """Reads protocol version 1: each change with its order key, and its relation as described at that point."""

    def __init__(self) -> None:
        self.scanner = HeaderScanner()
        self.relations: dict[int, Relation] = {}
        self.changes: list[tuple] = []

    def begin_slice(self) -> None:
        """Begin the next slice, without the descriptions of this one."""
        self.relations = {}

    def read(self, data: pa.Array) -> None:
        headers = self.scanner.scan(data)
        for at, raw in enumerate(data.to_pylist()):
            message = decode(raw)
            if isinstance(message, Relation):
                self.relations[message.relation_id] = message
            elif chr(headers.kind[at]) in "IUDT":
                ids = getattr(message, "relation_ids", None) or (message.relation_id,)
                described = tuple(self.relations[i] for i in ids)
                order = int(headers.commit_lsn[at]), int(headers.ordinal[at])
                self.changes.append((*order, int(headers.xid[at]), described, message))


def expected(messages: list[bytes]) -> list[tuple]:
    reader = Reader()
    reader.read(pa.array(messages, pa.binary()))
    return reader.changes


def slots(connection: psycopg.Connection) -> None:
    for slot, two_phase in (("plain", False), ("prepared", True), ("parts", True)):
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)", [slot, two_phase]
        )


OPTIONS = [
    ("plain", {"proto_version": "2", "streaming": "on"}),
    ("plain", {"proto_version": "4", "streaming": "parallel"}),
    ("prepared", {"proto_version": "3"}),
    ("prepared", {"proto_version": "4", "streaming": "parallel"}),
]


@pytest.mark.drawn
@settings(
    max_examples=12,
    suppress_health_check=list(HealthCheck),
)
@given(phases=st.lists(st.lists(STEPS, min_size=5, max_size=30), min_size=1, max_size=3), seed=st.integers(0))
def test_every_way_to_read_a_slot_gives_the_same_transactions(server, phases, seed):
    """It may take long: hypothesis draws many workloads, and each is read in many ways."""
    with connect(server) as connection:
        slots(connection)
        workload = Workload(server)
        stops = []
        try:
            for steps in phases:
                workload.run(steps)
                stops.append(format_lsn(flushed_lsn(connection)))
            workload.end()
            stops.append(format_lsn(flushed_lsn(connection)))
            wanted = expected(peek(server, "plain", proto_version="1"))
            for slot, options in OPTIONS:
                assert assembled_at_once(server, slot, options, seed) == wanted, options
            assert assembled_in_slices(server, OPTIONS[-1][1], seed) == wanted
            assert assembled_in_sessions(server, stops, OPTIONS[-1][1], seed) == wanted
        finally:
            workload.end()
            workload.close()
            connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            connection.execute("DROP TABLE a, b; DROP PUBLICATION pub; DROP TYPE mood")
            connection.execute(TABLES)


def assembled_at_once(server: EmbeddedServer, slot: str, options: dict[str, str], seed: int) -> list[tuple]:
    reader = Reader()
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool, parallel=options.get("streaming") == "parallel")
        for data in in_batches(peek(server, slot, **options), seed):
            for whole in assembler.assemble(data):
                reader.read(whole)
        assert not assembler.prepared_transactions
        assert not assembler.is_in_block
    return reader.changes


def assembled_in_slices(server: EmbeddedServer, options: dict[str, str], seed: int) -> list[tuple]:
    """One session whose messages are divided at commits. Each slice is read separately."""
    reader, draw = Reader(), random.Random(seed)
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool, parallel=True)
        for data in in_batches(peek(server, "prepared", **options), seed):
            for whole in assembler.assemble(data):
                reader.read(whole)
            if not reader.scanner.is_in_transaction and not assembler.is_in_block and draw.random() < 0.5:
                reader.begin_slice()
                assembler.begin_slice()
    return reader.changes


def assembled_in_sessions(
    server: EmbeddedServer, stops: list[str], options: dict[str, str], seed: int
) -> list[tuple]:
    """A session for each phase. Between sessions everything is confirmed, and only prepared transactions are kept."""
    reader = Reader()
    prepared: list[tuple[Prepare, list[pa.RecordBatch]]] = []
    for stop in stops:
        reader.begin_slice()
        with FileSpool() as spool:
            assembler = TransactionAssembler(spool, parallel=True)
            for prepare, messages in prepared:
                assembler.restore(prepare, messages)
            for data in in_batches(peek(server, "parts", stop, **options), seed):
                for whole in assembler.assemble(data):
                    reader.read(whole)
            prepared = [
                (p, list(assembler.read_prepared_messages(p))) for p in assembler.prepared_transactions
            ]
        advance(server, "parts", stop)
    return reader.changes


ORIGIN = Origin(1, "elsewhere")
RELATION = Relation(7, "public", "t", "d", (RelationColumn(True, "id", 23, -1),), xid=5)
INSERT = Insert(7, (Text(b"1"),), xid=5)
PREPARE = Prepare(10, 20, 0, 9, "gid")
ANYTHING = st.sampled_from(
    [
        Begin(30, 0, 4),
        Commit(30, 40, 0),
        ORIGIN,
        RELATION,
        replace(RELATION, xid=None),
        INSERT,
        replace(INSERT, xid=None),
        replace(INSERT, xid=6),
        Truncate((7,), cascade=False, restart_identity=False),
        StreamStart(5, first_segment=True),
        StreamStart(5, first_segment=False),
        StreamStop(),
        StreamAbort(5, 5, AbortInfo(1, 2)),
        StreamAbort(5, 6, AbortInfo(1, 2)),
        StreamCommit(5, 30, 40, 0),
        StreamPrepare(10, 20, 0, 5, "gid"),
        BeginPrepare(10, 20, 0, 9, "gid"),
        PREPARE,
        CommitPrepared(30, 40, 0, 9, "gid"),
        RollbackPrepared(20, 50, 0, 0, 9, "gid"),
    ]
)


def test_descriptions_of_a_streamed_prepared_transaction_are_repeated_for_later_ones():
    """Since 19 the server does not repeat the description after the transaction is prepared, whether it commits or not."""
    begin, commit = Begin(30, 0, 4), Commit(30, 40, 0)
    change = replace(INSERT, xid=None)
    sent = [
        StreamStart(5, first_segment=True),
        RELATION,
        INSERT,
        StreamStop(),
        StreamPrepare(10, 20, 0, 5, "gid"),
    ]
    described = replace(RELATION, xid=None)
    for rolled_back in (False, True):
        inner = [StreamAbort(5, 6)] if rolled_back else []
        with FileSpool() as spool:
            assembler = TransactionAssembler(spool)
            stream = [*sent[:4], *inner, sent[4], begin, change, commit]
            passed = [
                m
                for array in assembler.assemble(pa.array(map(encode, stream), pa.binary()))
                for m in array.to_pylist()
            ]
        assert passed == [encode(m) for m in (begin, described, change, commit)]


@settings(max_examples=1000)
@given(st.lists(ANYTHING, max_size=12), st.integers(0))
def test_messages_in_any_order_are_assembled_or_refused(messages, seed):
    with FileSpool() as spool:
        assembler, scanner = TransactionAssembler(spool, parallel=True), HeaderScanner()
        with suppress(ProtocolError):
            for data in in_batches([encode(message) for message in messages], seed):
                for whole in assembler.assemble(data):
                    scanner.scan(whole)


STREAM_OF_5 = [StreamStart(5, first_segment=True), RELATION, INSERT, replace(INSERT, xid=6), StreamStop()]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([StreamStop()], "unexpected StreamStop message outside a streamed block"),
        ([StreamStart(5, first_segment=False)], "first block was never received"),
        ([*STREAM_OF_5, StreamStart(5, first_segment=True)], "is streamed already"),
        ([STREAM_OF_5[0], Begin(30, 0, 4)], "does not belong in a streamed block"),
        ([STREAM_OF_5[0], STREAM_OF_5[0]], "unexpected StreamStart message inside a streamed block"),
        ([StreamCommit(5, 30, 40, 0)], "first block was never received"),
        ([BeginPrepare(10, 20, 0, 8, "gid"), PREPARE], "of another transaction than its Begin Prepare"),
        ([BeginPrepare(10, 20, 0, 9, "gid"), StreamStop()], "inside a transaction that is being prepared"),
    ],
)
def test_messages_that_no_server_sends_are_refused(messages, expected):
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool, parallel=True)
        with pytest.raises(ProtocolError, match=expected):
            list(assembler.assemble(pa.array([encode(m) for m in messages], pa.binary())))


def test_a_subtransaction_that_was_rolled_back_is_left_out():
    messages = [*STREAM_OF_5, StreamAbort(5, 6, AbortInfo(1, 2)), StreamCommit(5, 30, 40, 0)]
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool, parallel=True)
        assembled = assembler.assemble(pa.array([encode(m) for m in messages], pa.binary()))
        decoded = [decode(raw) for data in assembled for raw in data.to_pylist()]
    assert decoded == [
        Begin(30, 0, 5),
        replace(RELATION, xid=None),
        replace(INSERT, xid=None),
        Commit(30, 40, 0),
    ]


def test_a_rollback_of_another_prepare_under_the_same_gid_is_ignored():
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool)
        assembler.restore(PREPARE, [])
        for end, waiting in ((19, (PREPARE,)), (20, ())):
            message = encode(RollbackPrepared(end, 50, 0, 0, 9, "gid"))
            assert not list(assembler.assemble(pa.array([message], pa.binary())))
            assert assembler.prepared_transactions == waiting
