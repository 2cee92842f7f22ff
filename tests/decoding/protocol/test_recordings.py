"""Recorded streams of real servers (`tests/recordings/`): complete, truncated at every byte, and with additional bytes."""

from __future__ import annotations

import itertools
from typing import get_args

import pyarrow as pa
import pytest

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.envelope import XLogData, decode_envelope, encode_envelope
from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.decoding.protocol.messages import (
    NULL,
    UNCHANGED,
    Begin,
    Binary,
    ChangeMessage,
    Commit,
    Decoder,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldKey,
    OldRow,
    Origin,
    Relation,
    StreamAbort,
    StreamStart,
    StreamStop,
    Text,
    Truncate,
    Type,
    Update,
    decode,
    encode,
    timestamp_to_unix_micros,
)
from pgsieve.decoding.protocol.tuples import RelationColumns, decode_changes
from pgsieve.decoding.values.types import column_type
from tests.fixtures.recordings import FOLDER, WALSENDER, recordings

RECORDINGS = recordings()
VERSIONS = sorted(int(folder.name) for folder in FOLDER.glob("[0-9]*"))
FIRST_OWN_OID = 16_384  # FirstNormalObjectId: objects of users have no lower oid

each = pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)


def is_streamed(message):
    return isinstance(message, ChangeMessage) and message.xid is not None


def session_of(message):
    """The state of the session in which a message was sent."""
    return {
        "streaming": is_streamed(message) or isinstance(message, StreamStop),
        "parallel": isinstance(message, StreamAbort) and message.abort is not None,
    }


# --- whole ------------------------------------------------------------------------------------------------


@each
def test_a_stream_is_decoded_to_the_recorded_messages(recording):
    decoder = Decoder(parallel=recording.reading.parallel)
    assert [decoder.decode(sent.data) for sent in recording.sent if sent.data] == recording.messages
    assert not decoder.streaming


@each
def test_the_recorded_messages_are_encoded_to_the_servers_bytes(recording):
    for sent in recording.sent:
        if sent.message is not None:
            assert encode(sent.message) == sent.data
            assert decode(sent.data, **session_of(sent.message)) == sent.message


@pytest.mark.parametrize(
    "recording",
    [r for r in RECORDINGS if r.reading.transport == WALSENDER],
    ids=lambda recording: recording.name,
)
def test_envelopes(recording):
    kinds = set()
    for sent, following in itertools.zip_longest(recording.sent, recording.sent[1:]):
        assert decode_envelope(sent.envelope_data) == sent.envelope
        assert encode_envelope(sent.envelope) == sent.envelope_data
        kinds.add(type(sent.envelope))
        if isinstance(sent.envelope, XLogData):
            # Both are the LSN where the plugin wrote; they are zero unless it is the last write for one event.
            before_another = isinstance(following.message, Origin) or isinstance(
                sent.message, Type | Relation
            )
            assert sent.envelope.data_start == sent.envelope.wal_end
            assert (sent.envelope.wal_end == 0) == before_another
        # The content after XLogData's header is the plugin's, and a prefix of it is a valid envelope, too.
        for size in range(25 if isinstance(sent.envelope, XLogData) else len(sent.envelope_data)):
            with pytest.raises(ProtocolError):
                decode_envelope(sent.envelope_data[:size])
    assert len(kinds) == 2  # the last answer to a status update is recorded, too


# --- byte by byte, and with a tail ------------------------------------------------------------------------


@each
def test_no_proper_prefix_of_a_message_is_a_message(recording):
    for data, session in {
        sent.data: session_of(sent.message) for sent in recording.sent if sent.data
    }.items():
        for size in range(len(data)):
            with pytest.raises(ProtocolError):
                decode(data[:size], **session)


@each
def test_a_tail_is_refused_at_its_offset(recording):
    for data, session in {
        sent.data: session_of(sent.message) for sent in recording.sent if sent.data
    }.items():
        for tail in (b"\0", b"n", data):
            with pytest.raises(
                ProtocolError,
                match=f" at offset {len(data)}: expected the end of the message, but {len(tail)} ",
            ):
                decode(data + tail, **session)


# --- what servers send -----------------------------------------------------------------------------------


@each
def test_relations_are_described_before_they_change(recording):
    """A description within a stream belongs to that transaction until it commits."""
    session, streamed, types = {}, {}, set()
    transaction = 0
    for message in recording.messages:
        if isinstance(message, StreamStart):
            transaction = message.xid
        elif isinstance(message, Type):
            types.add(message.type_oid)
        elif isinstance(message, Relation):
            described = {message.relation_id: message}
            streamed.setdefault(transaction, {}).update(described) if message.xid else session.update(
                described
            )
            assert {c.type_oid for c in message.columns if c.type_oid >= FIRST_OWN_OID} <= types
        elif isinstance(message, Insert | Update | Delete):
            relations = streamed[transaction] if message.xid else session
            old, new = getattr(message, "old", None), getattr(message, "new", None)
            for image in (old and old.columns, new):
                assert image is None or len(image) == len(relations[message.relation_id].columns)


@each
def test_unstreamed_transactions_do_not_overlap(recording):
    begun = None
    for message in recording.messages:
        if isinstance(message, Begin):
            assert begun is None
            begun = message
        elif isinstance(message, Commit):
            assert (message.commit_lsn, message.commit_time) == (begun.final_lsn, begun.commit_time)
            assert message.commit_lsn < message.end_lsn
            begun = None
    assert begun is None


def images(message):
    old = getattr(message, "old", None)
    return [image for image in (getattr(message, "new", None), old and old.columns) if image is not None]


FEATURES = {
    "an update whose key stays": lambda m: isinstance(m, Update) and m.old is None,
    "an update with an old key": lambda m: isinstance(m, Update) and isinstance(m.old, OldKey),
    "an update with an old row": lambda m: isinstance(m, Update) and isinstance(m.old, OldRow),
    "a delete by key": lambda m: isinstance(m, Delete) and isinstance(m.old, OldKey),
    "a delete by row": lambda m: isinstance(m, Delete) and isinstance(m.old, OldRow),
    "a row without columns": lambda m: isinstance(m, Insert) and not m.new,
    **{
        name: lambda m, value=value: any(value in image for image in images(m))
        for name, value in {"NULL": NULL, "an unchanged value": UNCHANGED, "an empty text": Text(b"")}.items()
    },
    "text beside binary": lambda m: any(
        {Text, Binary} <= {type(value) for value in image} for image in images(m)
    ),
    **{
        f"truncate, cascade {cascade}, restart identity {restart}": lambda m, options=(cascade, restart): (
            isinstance(m, Truncate) and (m.cascade, m.restart_identity) == options
        )
        for cascade in (False, True)
        for restart in (False, True)
    },
    "a truncate of several": lambda m: isinstance(m, Truncate) and len(m.relation_ids) > 1,
    "a streamed truncate": lambda m: isinstance(m, Truncate) and m.xid,
    "a streamed type": lambda m: isinstance(m, Type) and m.xid,
    "a domain over a built-in type": lambda m: isinstance(m, Type) and m.namespace == "",
    "a transactional message": lambda m: isinstance(m, LogicalMessage) and m.transactional,
    "a message that is sent at once": lambda m: isinstance(m, LogicalMessage) and not m.transactional,
    "a streamed message": lambda m: isinstance(m, LogicalMessage) and m.xid,
    "an origin with its LSN": lambda m: isinstance(m, Origin) and m.commit_lsn,
    "an origin in a stream": lambda m: isinstance(m, Origin) and not m.commit_lsn,
    "an abort of a transaction": lambda m: isinstance(m, StreamAbort) and m.xid == m.subxid,
    "an abort of a subtransaction": lambda m: isinstance(m, StreamAbort) and m.xid != m.subxid,
    "an abort with its LSN and time": lambda m: isinstance(m, StreamAbort) and m.abort,
    "an abort without": lambda m: isinstance(m, StreamAbort) and not m.abort,
    **{
        f"replica identity {identity}": lambda m, identity=identity: (
            isinstance(m, Relation) and m.replica_identity == identity
        )
        for identity in "dnfi"
    },
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_recordings_of_a_version_have_every_message_and_feature(version):
    recorded = [recording for recording in RECORDINGS if recording.name.startswith(f"{version}/")]
    messages = [message for recording in recorded for message in recording.messages]
    assert {type(message) for message in messages} == set(get_args(Message))
    assert [name for name, holds in FEATURES.items() if not any(map(holds, messages))] == []
    pairs = [pair for r in recorded for pair in itertools.pairwise(r.messages)]
    assert any(isinstance(a, StreamStart) and isinstance(b, StreamStop) for a, b in pairs), "no empty block"
    protocols = {dict(recording.reading.options)["proto_version"] for recording in recorded}
    assert protocols == set("1234")


def test_streams_of_several_transactions_alternate():
    starts = [
        [message.xid for message in recording.messages if isinstance(message, StreamStart)]
        for recording in RECORDINGS
    ]
    assert any(a in xids[2:] and b != a for xids in starts for a, b in itertools.pairwise(xids))


# --- columns ---------------------------------------------------------------------------------------------

AT_COMMIT = pytest.mark.parametrize(
    "recording",
    [recording for recording in RECORDINGS if recording.reading.at_commit and recording.messages],
    ids=lambda recording: recording.name,
)


def expected_headers(messages):
    """Kind, relation, commit LSN, ordinal, commit time, xid and end LSN, determined message by message."""
    transaction, changes = None, 0
    for message in messages:
        if isinstance(message, Begin):
            transaction, changes = message, 0
        relation = getattr(message, "relation_id", 0)
        end_lsn = message.end_lsn if isinstance(message, Commit) else 0
        if transaction is None:
            yield message.tag, relation, message.lsn, 0, 0, 0, end_lsn
            continue
        is_change = isinstance(message, Insert | Update | Delete | Truncate | LogicalMessage)
        changes += is_change
        commit_time = timestamp_to_unix_micros(transaction.commit_time)
        ordinal = 2 * changes + (not is_change)
        yield message.tag, relation, transaction.final_lsn, ordinal, commit_time, transaction.xid, end_lsn
        if isinstance(message, Commit):
            transaction = None


@AT_COMMIT
@pytest.mark.parametrize("batch", [1, 3, 10**6])
def test_headers_are_those_of_the_messages(recording, batch):
    scanner, scanned = HeaderScanner(), []
    data = [sent.data for sent in recording.sent if sent.data]
    for first in range(0, len(data), batch):
        headers = scanner.scan(pa.array(data[first : first + batch], pa.binary()))
        fields = (getattr(headers, name).tolist() for name in headers.__slots__)
        scanned += zip(*fields, strict=True)
    assert not scanner.is_in_transaction
    assert scanned == list(expected_headers(recording.messages))


def texts(image, names):
    """A row as columns of PostgreSQL's text."""
    return image and {
        name: value.content.decode() if isinstance(value, Text) else None
        for name, value in zip(names, image, strict=True)
    }


@AT_COMMIT
def test_columns_are_those_of_the_messages(recording):
    versions = []  # a Relation message, and the changes that it describes
    current = {}
    for message in recording.messages:
        if isinstance(message, Relation):
            current[message.relation_id] = (message, [])
            versions.append(current[message.relation_id])
        elif isinstance(message, Insert | Update | Delete):
            current[message.relation_id][1].append(message)
    compared = 0
    for relation, changes in versions:
        names = tuple(column.name for column in relation.columns)
        columns = RelationColumns(names, (column_type(25, -1),) * len(names))
        decoded = decode_changes(pa.array([encode(change) for change in changes], pa.binary()), columns)
        old = [getattr(change, "old", None) for change in changes]
        new = [getattr(change, "new", None) for change in changes]
        assert decoded.operation.to_pylist() == [chr(change.tag) for change in changes]
        assert decoded.old.to_pylist() == [image and texts(image.columns, names) for image in old]
        assert decoded.new.to_pylist() == [
            None if image is None else texts(image, names) or {} for image in new
        ]
        unsent = [[n for n, v in zip(names, image or (), strict=False) if v == UNCHANGED] for image in new]
        assert decoded.unchanged.to_pylist() == [listed or None for listed in unsent]
        compared += len(changes)
    assert compared == sum(isinstance(m, Insert | Update | Delete) for m in recording.messages)
