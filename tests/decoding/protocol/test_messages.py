"""pgoutput messages, PostgreSQL documentation, Logical Replication Message Formats.

VECTORS are bytes that PostgreSQL 15.18 sent, and some that follow its message formats. Each has the statement that caused it. The table is
`CREATE TABLE public.v (id int PRIMARY KEY, b text, e ve)` with the enum `ve`.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.messages import (
    NULL,
    UNCHANGED,
    AbortInfo,
    Begin,
    BeginPrepare,
    Binary,
    ChangeMessage,
    Commit,
    CommitPrepared,
    Decoder,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldKey,
    OldRow,
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
    Type,
    Update,
    decode,
    encode,
    timestamp_from_unix_micros,
    timestamp_to_unix_micros,
)

T0 = 0x000303C008883BDF  # 2026-11-21 03:50:41.882079 UTC


@dataclass(frozen=True)
class Vector:
    """The bytes of a message, its meaning, and the session's state that decoding needs."""

    meaning: str
    wire: str
    message: Message
    streaming: bool = False
    parallel: bool = False

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.wire)

    def decode(self, data: bytes) -> Message:
        return decode(data, streaming=self.streaming, parallel=self.parallel)


VECTORS = [
    Vector(
        "BEGIN; first change",
        "42 0000000001bf7b60 000303c008883bdf 0000047e",
        Begin(0x1BF7B60, T0, 1150),
    ),
    Vector(
        "COMMIT",
        "43 00 0000000001bf7b60 0000000001bf7b90 000303c008883bdf",
        Commit(0x1BF7B60, 0x1BF7B90, T0),
    ),
    Vector(
        "CREATE TYPE public.ve AS ENUM ..., before the first Relation that has it",
        "59 0000422a 7075626c696300 766500",
        Type(16938, "public", "ve"),
    ),
    Vector(
        "the table v, replica identity default",
        "52 0000422f 7075626c696300 7600 64 0003"
        "01 696400 00000017 ffffffff 00 6200 00000019 ffffffff 00 6500 0000422a ffffffff",
        Relation(
            16943,
            "public",
            "v",
            "d",
            (
                RelationColumn(is_key=True, name="id", type_oid=23, type_modifier=-1),
                RelationColumn(is_key=False, name="b", type_oid=25, type_modifier=-1),
                RelationColumn(is_key=False, name="e", type_oid=16938, type_modifier=-1),
            ),
        ),
    ),
    Vector(
        "INSERT INTO v VALUES (1, 'ab')",
        "49 0000422f 4e 0003 74 00000001 31 74 00000002 6162 6e",
        Insert(16943, (Text(b"1"), Text(b"ab"), NULL)),
    ),
    Vector(
        "UPDATE v SET b = 'é' WHERE id = 1: the key stays, no old tuple",
        "55 0000422f 4e 0003 74 00000001 31 74 00000002 c3a9 6e",
        Update(16943, None, (Text(b"1"), Text("é".encode()), NULL)),
    ),
    Vector(
        "UPDATE v SET id = 2 WHERE id = 1: the old key comes first",
        "55 0000422f 4b 0003 74 00000001 31 6e 6e 4e 0003 74 00000001 32 74 00000002 c3a9 6e",
        Update(16943, OldKey((Text(b"1"), NULL, NULL)), (Text(b"2"), Text("é".encode()), NULL)),
    ),
    Vector(
        "DELETE FROM v WHERE id = 2",
        "44 0000422f 4b 0003 74 00000001 32 6e 6e",
        Delete(16943, OldKey((Text(b"2"), NULL, NULL))),
    ),
    Vector(
        "TRUNCATE v RESTART IDENTITY CASCADE",
        "54 00000001 03 0000422f",
        Truncate((16943,), cascade=True, restart_identity=True),
    ),
    Vector(
        "SELECT pg_logical_emit_message(true, 'pfx', 'hi')",
        "4d 01 0000000001bf8a88 70667800 00000002 6869",
        LogicalMessage(transactional=True, lsn=0x1BF8A88, prefix="pfx", content=b"hi"),
    ),
    Vector(
        "pg_replication_origin_session_setup('orgA'), pg_replication_origin_xact_setup('0/AABB', now())",
        "4f 000000000000aabb 6f72674100",
        Origin(0xAABB, "orgA"),
    ),
    Vector(
        "BEGIN; ...; before PREPARE TRANSACTION 'gid-1'",
        "62 0000000001bf8c68 0000000001bf8d60 000303c008884bc3 00000485 6769642d3100",
        BeginPrepare(0x1BF8C68, 0x1BF8D60, 0x000303C008884BC3, 1157, "gid-1"),
    ),
    Vector(
        "PREPARE TRANSACTION 'gid-1'",
        "50 00 0000000001bf8c68 0000000001bf8d60 000303c008884bc3 00000485 6769642d3100",
        Prepare(0x1BF8C68, 0x1BF8D60, 0x000303C008884BC3, 1157, "gid-1"),
    ),
    Vector(
        "COMMIT PREPARED 'gid-1'",
        "4b 00 0000000001bf8d60 0000000001bf8d98 000303c008884cc5 00000485 6769642d3100",
        CommitPrepared(0x1BF8D60, 0x1BF8D98, 0x000303C008884CC5, 1157, "gid-1"),
    ),
    Vector(
        "ROLLBACK PREPARED 'gid-2'",
        "72 00 0000000001bf8f10 0000000001bf8f48 000303c008884dcc 000303c008884e73 00000486 6769642d3200",
        RollbackPrepared(0x1BF8F10, 0x1BF8F48, 0x000303C008884DCC, 0x000303C008884E73, 1158, "gid-2"),
    ),
    Vector(
        "the first block of a transaction beyond logical_decoding_work_mem",
        "53 00000487 01",
        StreamStart(1159, first_segment=True),
    ),
    Vector("its next block", "53 00000487 00", StreamStart(1159, first_segment=False)),
    Vector("the block's end", "45", StreamStop(), streaming=True),
    Vector("ROLLBACK TO SAVEPOINT in it", "41 00000487 00000488", StreamAbort(1159, 1160)),
    Vector(
        "the same with streaming = parallel (proto.c, logicalrep_write_stream_abort)",
        "41 00000487 00000488 0000000001c20040 000303c008898529",
        StreamAbort(1159, 1160, AbortInfo(0x1C20040, 0x000303C008898529)),
        parallel=True,
    ),
    Vector(
        "its COMMIT",
        "63 00000487 00 0000000001c20040 0000000001c201b8 000303c008898529",
        StreamCommit(1159, 0x1C20040, 0x1C201B8, 0x000303C008898529),
    ),
    Vector(
        "its PREPARE TRANSACTION 'gid-1' instead (as Prepare but for the type byte)",
        "70 00 0000000001bf8c68 0000000001bf8d60 000303c008884bc3 00000485 6769642d3100",
        StreamPrepare(0x1BF8C68, 0x1BF8D60, 0x000303C008884BC3, 1157, "gid-1"),
    ),
    Vector(
        "INSERT in a streamed block",
        "49 00000487 0000422f 4e 0003 74 00000004 31303030 74 00000001 78 6e",
        Insert(16943, (Text(b"1000"), Text(b"x"), NULL), xid=1159),
        streaming=True,
    ),
    Vector(
        "TRUNCATE in a streamed block",
        "54 00000489 00000001 00 0000422f",
        Truncate((16943,), cascade=False, restart_identity=False, xid=1161),
        streaming=True,
    ),
    Vector(
        "pg_logical_emit_message in a streamed block",
        "4d 00000487 01 0000000001c20040 70667800 00000002 6869",
        LogicalMessage(transactional=True, lsn=0x1C20040, prefix="pfx", content=b"hi", xid=1159),
        streaming=True,
    ),
    Vector(
        "binary = true: int 1, text 'x', numeric 1.5, timestamptz 2020-01-01 00:00 UTC",
        "49 0000422f 4e 0004 62 00000004 00000001 62 00000001 78"
        "62 0000000c 000200000000000100011388 62 00000008 00023e0786c26000",
        Insert(
            16943,
            (
                Binary(bytes.fromhex("00000001")),
                Binary(b"x"),
                Binary(bytes.fromhex("000200000000000100011388")),
                Binary(bytes.fromhex("00023e0786c26000")),
            ),
        ),
    ),
    Vector(
        "REPLICA IDENTITY FULL, a TOASTed value untouched: whole in the old row, unchanged in the new",
        "55 0000422f 4f 0002 74 00000001 31 74 00000003 616263 4e 0002 74 00000001 32 75",
        Update(16943, OldRow((Text(b"1"), Text(b"abc"))), (Text(b"2"), UNCHANGED)),
    ),
    Vector(
        "INSERT INTO nothing DEFAULT VALUES, a table without columns",
        "49 00004230 4e 0000",
        Insert(16944, ()),
    ),
]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.wire[:2]} {vector.meaning}")
class TestVectors:
    def test_is_decoded(self, vector):
        assert vector.decode(vector.data) == vector.message

    def test_is_decoded_from_a_view_alike(self, vector):
        assert vector.decode(memoryview(vector.data)) == vector.message
        assert vector.decode(bytearray(vector.data)) == vector.message

    def test_is_encoded(self, vector):
        assert encode(vector.message) == vector.data

    def test_every_strict_prefix_is_refused(self, vector):
        for size in range(len(vector.data)):
            with pytest.raises(ProtocolError, match=r"at offset \d+: expected"):
                vector.decode(vector.data[:size])

    @pytest.mark.parametrize("tail", [b"\0", b"\n", b"B", bytes(30)])
    def test_a_tail_is_refused(self, vector, tail):
        with pytest.raises(
            ProtocolError, match=f"at offset {len(vector.data)}: expected the end of the message"
        ):
            vector.decode(vector.data + tail)

    def test_is_immutable_and_hashable(self, vector):
        assert hash(vector.message) == hash(vector.decode(vector.data))
        with pytest.raises((FrozenInstanceError, TypeError)):
            vector.message.tag = 0
        assert not hasattr(vector.message, "__dict__")


def test_every_message_has_a_vector():
    assert {type(vector.message) for vector in VECTORS} == set(get_args(Message))


def refused(wire, *, streaming=False, parallel=False):
    """The text of the error for invalid bytes."""
    with pytest.raises(ProtocolError) as caught:
        decode(bytes.fromhex(wire), streaming=streaming, parallel=parallel)
    assert caught.value.sqlstate == "08P01"
    return str(caught.value)


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        ("", "malformed message at offset 0: expected a message type byte"),
        ("7a", "malformed pgoutput message at offset 0: expected a message type byte of "),
        ("00", "not 0x00"),
        ("42", "malformed Begin message at offset 1: expected final LSN of 8 bytes, but 0 remain"),
        (
            "42 0000000000000000 000303c008883bdf 0000047e",
            "Begin message at offset 1: expected final LSN, not zero",
        ),
        (
            "43 01 0000000001bf7b60 0000000001bf7b90 000303c008883bdf",
            "Commit message at offset 1: expected flags",
        ),
        ("4f 000000000000aabb 6f726741", "Origin message at offset 9: expected origin name"),
        ("52 0000422f 00 7600 78 0000", "Relation message at offset 8: expected a replica identity of"),
        (
            "52 0000422f 00 7600 64 ffff",
            "offset 11: expected a number of columns that 0 bytes can hold, not -1",
        ),
        ("52 0000422f 00 7600 64 7fff" + "00" * 20, "a number of columns that 20 bytes can hold, not 32767"),
        ("52 0000422f 00 7600 64 0001 02 6900 00000017 ffffffff", "offset 11: expected column flags"),
        ("49 0000422f 4b 0000", "Insert message at offset 5: expected 'N', the mark of the new tuple"),
        ("49 0000422f 4e 0001 78", "Insert message at offset 8: expected 'n', 'u', 't' or 'b'"),
        ("49 0000422f 4e ffff 6e", "a number of columns that 1 bytes can hold, not -1"),
        (
            "49 0000422f 4e 0001 74 ffffffff",
            "Insert message at offset 13: expected value of -1 bytes, but 0 remain",
        ),
        ("49 0000422f 4e 0001 74 7fffffff 61", "expected value of 2147483647 bytes, but 1 remain"),
        ("49 0000422f 4e 0001 74 0000", "Insert message at offset 9: expected length of value of 4 bytes"),
        ("55 0000422f 58 0000", "Update message at offset 5: expected 'K', 'O' or 'N', the mark of a tuple"),
        (
            "55 0000422f 4b 0000 4f 0000",
            "Update message at offset 8: expected 'N', the mark of the new tuple",
        ),
        ("44 0000422f 4e 0000", "Delete message at offset 5: expected 'K' or 'O'"),
        ("54 00000001 04 0000422f", "Truncate message at offset 5: expected truncate options"),
        ("54 ffffffff 00", "expected a number of relations that 0 bytes can hold, not -1"),
        ("54 7fffffff 00 0000422f", "expected a number of relations that 4 bytes can hold, not 2147483647"),
        ("4d 02 0000000001bf8a88 00 00000000", "LogicalMessage message at offset 1: expected message flags"),
        ("4d 01 0000000001bf8a88 00 00000002 68", "expected message content of 2 bytes, but 1 remain"),
        ("53 00000000 01", "StreamStart message at offset 1: expected xid, not zero"),
        ("53 00000487 02", "StreamStart message at offset 5: expected first segment"),
        ("63 00000487 01" + "00" * 24, "StreamCommit message at offset 5: expected flags"),
        (
            "62 0000000000000000 0000000001bf8d60" + "00" * 13,
            "BeginPrepare message at offset 1: expected prepare LSN",
        ),
        (
            "62 0000000001bf8c68 0000000000000000" + "00" * 13,
            "BeginPrepare message at offset 9: expected end LSN",
        ),
        ("50 01" + "01" * 28 + "00", "Prepare message at offset 1: expected flags"),
        (
            "50 00 0000000000000000 0000000001bf8d60" + "00" * 13,
            "Prepare message at offset 2: expected prepare LSN",
        ),
        ("4b 80" + "01" * 28 + "00", "CommitPrepared message at offset 1: expected flags"),
        (
            "4b 00 0000000001bf8d60 0000000000000000" + "00" * 13,
            "CommitPrepared message at offset 10: expected end LSN",
        ),
        ("72 01" + "01" * 36 + "00", "RollbackPrepared message at offset 1: expected flags"),
        (
            "72 00 0000000000000000" + "01" * 28 + "00",
            "RollbackPrepared message at offset 2: expected prepare end LSN",
        ),
        ("72 00 0000000000000001 0000000000000000" + "00" * 21, "at offset 10: expected rollback end LSN"),
        ("70 02" + "01" * 28 + "00", "StreamPrepare message at offset 1: expected flags"),
        ("50 00" + "01" * 24 + "00" * 5, "Prepare message at offset 26: expected xid, not zero"),
        ("70 00" + "01" * 24 + "00" * 5, "StreamPrepare message at offset 26: expected xid, not zero"),
        (
            "41 00000487 00000488 0000000001c20040",
            "StreamAbort message at offset 9: expected the end of the message",
        ),
    ],
)
def test_malformed_bytes_name_message_offset_and_expectation(wire, expected):
    assert expected in refused(wire)


def test_a_streamed_change_has_a_transaction_id():
    assert "Insert message at offset 1: expected xid of the streamed transaction, not zero" in refused(
        "49 00000000 0000422f 4e 0000", streaming=True
    )
    with pytest.raises(ProtocolError, match="expected xid of the streamed transaction, not zero"):
        encode(Insert(16943, (), xid=0))


def test_a_parallel_session_needs_the_abort_info():
    expected = "StreamAbort message at offset 9: expected abort LSN of 8 bytes, but 0 remain"
    assert expected in refused("41 00000487 00000488", parallel=True)


def test_type_bytes_differ_by_case():
    assert decode(bytes.fromhex("45")) == StreamStop()
    assert "not 0x65" in refused("65")
    tags = {kind.tag for kind in get_args(Message)}
    assert len(tags) == 19
    assert {
        chr(tag).lower() for tag in tags if {ord(chr(tag).lower()), ord(chr(tag).upper())} <= tags
    } == set("bcrp")


def test_no_error_shows_a_value():
    row = encode(Insert(1, (Text(b"topsecret"), Binary(b"topsecret"))))
    for size in range(len(row)):
        assert "topsecret" not in refused(row[:size].hex())
    assert "topsecret" not in refused(row.hex() + "00")
    assert "topsecret" not in refused((row[:5] + b"?" + row[6:]).hex())


def test_counts_and_lengths_allocate_nothing_beyond_the_message():
    messages = [
        bytes.fromhex("54 7fffffff 00") + bytes(64),
        bytes.fromhex("49 0000422f 4e 7fff 74 7fffffff") + bytes(64),
        bytes.fromhex("52 0000422f 00 7600 64 7fff") + bytes(64),
        bytes.fromhex("4d 01 0000000001bf8a88 00 7fffffff") + bytes(64),
    ]
    tracemalloc.start()
    try:
        for data in messages:
            with pytest.raises(ProtocolError):
                decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "message",
    [
        Begin(0, 0, 1),
        Begin(1, 2**63, 1),
        Begin(1, 0, -1),
        Commit(-1, 0, 0),
        Origin(0, "a\0b"),
        Relation(1, "", "t", "x", ()),
        Relation(1, "", "t", "", ()),
        Relation(1, "", "t", "dn", ()),
        Relation(2**32, "", "t", "d", ()),
        Insert(1, (NULL,) * 32768),
        StreamStart(0, first_segment=True),
        BeginPrepare(0, 1, 0, 1, ""),
        Prepare(1, 0, 0, 1, ""),
        CommitPrepared(0, 1, 0, 1, ""),
        RollbackPrepared(1, 0, 0, 0, 1, ""),
        Prepare(1, 1, 0, 0, ""),
        StreamPrepare(1, 1, 0, 0, ""),
        StreamPrepare(1, 1, 0, 1, "\ud800"),
    ],
    ids=repr,
)
def test_messages_that_could_not_be_decoded_are_not_encoded(message):
    with pytest.raises(ProtocolError, match=f"cannot encode {type(message).__name__} message: expected"):
        encode(message)


def test_timestamps_are_microseconds_since_2000():
    # SELECT extract(epoch FROM timestamptz '2020-01-01 00:00 UTC') is 1577836800
    assert timestamp_to_unix_micros(0x00023E0786C26000) == 1_577_836_800_000_000
    assert timestamp_to_unix_micros(0) == 946_684_800_000_000
    assert timestamp_from_unix_micros(timestamp_to_unix_micros(T0)) == T0


# --- sessions ------------------------------------------------------------------------------------


def test_a_decoder_knows_the_messages_in_a_streamed_block():
    session = [
        StreamStart(7, first_segment=True),
        Origin(0, "elsewhere"),
        Type(16938, "public", "ve", xid=7),
        Insert(1, (NULL,), xid=7),
        StreamStop(),
        Begin(1, 2, 8),
        Insert(1, (NULL,)),
        Commit(1, 2, 3),
        StreamStart(7, first_segment=False),
        Insert(1, (NULL,), xid=9),
        StreamStop(),
        StreamAbort(7, 9, AbortInfo(5, 6)),
        StreamCommit(7, 10, 11, 12),
    ]
    decoder = Decoder(parallel=True)
    assert [decoder.decode(encode(message)) for message in session] == session
    assert not decoder.streaming


@pytest.mark.parametrize(
    "message",
    [
        vector.message
        for vector in VECTORS
        if not isinstance(vector.message, ChangeMessage | Origin | StreamStop)
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_decoder_refuses_transactions_inside_of_a_streamed_block(message):
    decoder = Decoder(parallel=isinstance(message, StreamAbort) and message.abort is not None)
    decoder.decode(encode(StreamStart(7, first_segment=True)))
    with pytest.raises(
        ProtocolError, match=f"unexpected {type(message).__name__} message inside a streamed block"
    ):
        decoder.decode(encode(message))
    assert decoder.streaming


def test_a_decoder_refuses_the_end_of_a_block_without_a_begin():
    decoder = Decoder()
    with pytest.raises(ProtocolError, match="unexpected StreamStop message outside a streamed block"):
        decoder.decode(b"E")
    assert not decoder.streaming


# --- properties ----------------------------------------------------------------------------------

bits8, bits32, bits64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
xids = st.integers(1, 2**32 - 1)
valid_lsns = st.integers(1, 2**64 - 1)
times = st.integers(-(2**63), 2**63 - 1)
names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
contents = st.binary(max_size=24)
tuples = st.lists(
    st.just(NULL) | st.just(UNCHANGED) | st.builds(Text, contents) | st.builds(Binary, contents), max_size=6
).map(tuple)
old_images = st.builds(OldKey, tuples) | st.builds(OldRow, tuples)
columns = st.builds(RelationColumn, st.booleans(), names, bits32, st.integers(-(2**31), 2**31 - 1))
stream_xids = st.none() | xids
prepared = (valid_lsns, valid_lsns, times, xids, names)

messages = st.one_of(
    st.builds(Begin, valid_lsns, times, bits32),
    st.builds(Commit, bits64, bits64, times),
    st.builds(Origin, bits64, names),
    st.builds(
        Relation,
        bits32,
        names,
        names,
        st.sampled_from("dnfi"),
        st.lists(columns, max_size=4).map(tuple),
        stream_xids,
    ),
    st.builds(Type, bits32, names, names, stream_xids),
    st.builds(Insert, bits32, tuples, stream_xids),
    st.builds(Update, bits32, st.none() | old_images, tuples, stream_xids),
    st.builds(Delete, bits32, old_images, stream_xids),
    st.builds(Truncate, st.lists(bits32, max_size=4).map(tuple), st.booleans(), st.booleans(), stream_xids),
    st.builds(LogicalMessage, st.booleans(), bits64, names, contents, stream_xids),
    st.builds(StreamStart, xids, st.booleans()),
    st.builds(StreamStop),
    st.builds(StreamCommit, bits32, bits64, bits64, times),
    st.builds(StreamAbort, bits32, bits32, st.none() | st.builds(AbortInfo, bits64, times)),
    st.builds(BeginPrepare, *prepared),
    st.builds(Prepare, *prepared),
    st.builds(CommitPrepared, *prepared),
    st.builds(RollbackPrepared, valid_lsns, valid_lsns, times, times, bits32, names),
    st.builds(StreamPrepare, *prepared),
)


def session_of(message):
    """The state of the session in which the message is sent."""
    return {
        "streaming": getattr(message, "xid", None) is not None and isinstance(message, ChangeMessage),
        "parallel": isinstance(message, StreamAbort) and message.abort is not None,
    }


@given(messages)
def test_every_message_round_trips(message):
    assert decode(encode(message), **session_of(message)) == message


@given(messages)
def test_no_strict_prefix_of_a_message_is_a_message(message):
    data = encode(message)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:size], **session_of(message))


@given(
    st.sampled_from([vector.message for vector in VECTORS if isinstance(vector.message, ChangeMessage)]), xids
)
def test_a_stream_only_adds_the_transaction_id(message, xid):
    outside, inside = encode(replace(message, xid=None)), encode(replace(message, xid=xid))
    assert inside == outside[:1] + xid.to_bytes(4, "big") + outside[1:]


def accepted_or_refused(data, *, streaming, parallel):
    """Random bytes give a message that has exactly these bytes, or a ProtocolError, and no other error."""
    try:
        message = decode(data, streaming=streaming, parallel=parallel)
    except ProtocolError:
        return
    assert encode(message) == data


@settings(max_examples=300)
@given(st.binary(max_size=80), st.booleans(), st.booleans())
def test_random_bytes_are_accepted_or_refused(data, streaming, parallel):
    accepted_or_refused(data, streaming=streaming, parallel=parallel)


@settings(max_examples=300)
@given(st.sampled_from(sorted(kind.tag for kind in get_args(Message))), st.binary(max_size=80), st.booleans())
def test_random_bytes_after_a_type_byte_are_accepted_or_refused(tag, data, flag):
    accepted_or_refused(bytes([tag]) + data, streaming=flag, parallel=flag)


@settings(max_examples=500)
@given(messages, st.booleans(), st.data())
def test_mutated_messages_are_accepted_or_refused(message, other_session, draw):
    data = bytearray(encode(message))
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data)))
        length = draw.draw(st.integers(0, 4))
        replacement = draw.draw(
            st.binary(max_size=5)
            | st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff", b"\0", b"N", b"K"])
        )
        data[at : at + length] = replacement
    session = session_of(message)
    if other_session:
        session = {name: not value for name, value in session.items()}
    accepted_or_refused(bytes(data), **session)
