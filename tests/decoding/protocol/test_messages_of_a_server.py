"""Every message that a real server sends is decoded completely, and encoded to the same bytes.

PostgreSQL is the oracle. One workload has every kind of message. It is read through SQL in each protocol version, in text and
binary format, and through a walsender for messages that are sent only while a transaction is in progress.
"""

from __future__ import annotations

import time
from collections import Counter

import psycopg
import pytest
from psycopg import sql

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.decoding.protocol.envelope import (
    PrimaryKeepalive,
    XLogData,
    decode_envelope,
    encode_envelope,
)
from pgsieve.decoding.protocol.messages import (
    NULL,
    UNCHANGED,
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
    OldKey,
    OldRow,
    Origin,
    Prepare,
    Relation,
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
    timestamp_to_unix_micros,
)
from tests.fixtures.servers import new_server
from tests.fixtures.walsender import Walsender

SCHEMA = """
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE SCHEMA "Größe";
    CREATE TABLE item (id int PRIMARY KEY, note text, mood mood, amount positive, at timestamptz, price numeric(12, 2));
    CREATE TABLE part (id serial PRIMARY KEY, item int REFERENCES item);
    CREATE TABLE "Größe"."t "" x" (a int, toasted text STORAGE EXTERNAL);
    ALTER TABLE "Größe"."t "" x" REPLICA IDENTITY FULL;
    CREATE TABLE indexed (a int NOT NULL, b int NOT NULL, c int);
    CREATE UNIQUE INDEX indexed_b ON indexed (b);
    ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_b;
    CREATE TABLE nothing ();
    CREATE TABLE wide (id int PRIMARY KEY, filler text);
    CREATE PUBLICATION everything FOR ALL TABLES;
    SELECT pg_create_logical_replication_slot('plain', 'pgoutput');
    SELECT pg_create_logical_replication_slot('prepared', 'pgoutput', false, true);
    SELECT pg_replication_origin_create('elsewhere');
"""
WORKLOAD = [
    "INSERT INTO item VALUES (1, 'é', 'happy', 1, '2020-01-01 00:00+00', 1.5), (2, NULL, NULL, NULL, NULL, NULL)",
    "UPDATE item SET note = 'b' WHERE id = 1",
    "UPDATE item SET id = 3 WHERE id = 1",
    "DELETE FROM item WHERE id = 2",
    """INSERT INTO "Größe"."t "" x" VALUES (1, repeat('0123456789', 1000))""",
    """UPDATE "Größe"."t "" x" SET a = 2""",
    """DELETE FROM "Größe"."t "" x" """,
    "INSERT INTO indexed VALUES (1, 2, 3)",
    "UPDATE indexed SET b = 4",
    "DELETE FROM indexed",
    "INSERT INTO nothing DEFAULT VALUES",
    "ALTER TABLE item RENAME COLUMN note TO remark",
    "INSERT INTO item VALUES (4, 'after the rename')",
    "TRUNCATE item, part RESTART IDENTITY CASCADE",
    "SELECT pg_logical_emit_message(true, 'pfx', 'hi')",
    "SELECT pg_logical_emit_message(false, 'at once', 'ü')",
    "BEGIN",
    "SELECT pg_replication_origin_session_setup('elsewhere')",
    "SELECT pg_replication_origin_xact_setup('0/AABB', '2020-01-01 00:00+00')",
    "INSERT INTO item VALUES (5)",
    "COMMIT",
    "SELECT pg_replication_origin_session_reset()",
    "BEGIN",
    "INSERT INTO item VALUES (6)",
    "PREPARE TRANSACTION 'gid-1'",
    "COMMIT PREPARED 'gid-1'",
    "BEGIN",
    "INSERT INTO item VALUES (7)",
    "PREPARE TRANSACTION 'gid-2'",
    "ROLLBACK PREPARED 'gid-2'",
    # Larger than logical_decoding_work_mem, so it is streamed from protocol version 2 on.
    "BEGIN",
    "SELECT pg_logical_emit_message(true, 'large', 'begins')",
    "INSERT INTO wide SELECT i, repeat('x', 100) FROM generate_series(1, 2000) i",
    "SAVEPOINT s",
    "UPDATE wide SET filler = 'y' WHERE id <= 1000",
    "ROLLBACK TO s",
    "DELETE FROM wide WHERE id > 1000",
    "TRUNCATE indexed",
    "COMMIT",
    "BEGIN",
    "INSERT INTO wide SELECT i, repeat('z', 100) FROM generate_series(5001, 7000) i",
    "PREPARE TRANSACTION 'gid-3'",
    "COMMIT PREPARED 'gid-3'",
]


@pytest.fixture(scope="module", params=[16, 18])
def server(request):
    settings = {"logical_decoding_work_mem": "64kB", "fsync": "off"}
    with new_server(request.param, settings) as running:
        with connect(running) as connection:
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
            for statement in WORKLOAD:
                connection.execute(statement)
        yield running


def connect(server):
    return psycopg.connect(server.conninfo(client_encoding="UTF8"), autocommit=True)


def peek(server, slot, **options):
    """All waiting messages of the slot, as (lsn, xid, message). Each was encoded to its own bytes."""
    flat = [text for item in {"publication_names": '"everything"', **options}.items() for text in item]
    marks = sql.SQL(", ").join([sql.Placeholder()] * len(flat))
    query = sql.SQL("SELECT lsn, xid, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, {})")
    with connect(server) as connection:
        rows = connection.execute(query.format(marks), [slot, *flat]).fetchall()
    assert rows
    decoder = Decoder(parallel=options.get("streaming") == "parallel")
    messages = []
    for lsn, xid, data in rows:
        message = decoder.decode(data)
        assert encode(message) == data
        messages.append((parse_lsn(lsn), int(xid), message))
    return messages


def kinds(messages):
    return Counter(type(message) for _, _, message in messages)


VERSION_1 = {Begin, Commit, Origin, Relation, Type, Insert, Update, Delete, Truncate}
STREAMED = {StreamStart, StreamStop, StreamCommit}
TWO_PHASE = {BeginPrepare, Prepare, CommitPrepared, RollbackPrepared}


@pytest.mark.parametrize(
    ("slot", "options", "expected"),
    [
        ("plain", {"proto_version": "1"}, VERSION_1),
        ("plain", {"proto_version": "1", "messages": "true"}, VERSION_1 | {LogicalMessage}),
        ("plain", {"proto_version": "2", "streaming": "on"}, VERSION_1 | STREAMED),
        ("prepared", {"proto_version": "3"}, VERSION_1 | TWO_PHASE),
        (
            "prepared",
            {"proto_version": "3", "streaming": "on"},
            VERSION_1 | TWO_PHASE | STREAMED | {StreamPrepare},
        ),
        ("plain", {"proto_version": "4", "binary": "true", "origin": "any"}, VERSION_1),
        (
            "prepared",
            {
                "proto_version": "4",
                "streaming": "parallel",
                "binary": "true",
                "messages": "true",
                "two_phase": "true",
            },
            VERSION_1 | TWO_PHASE | STREAMED | {StreamPrepare, LogicalMessage},
        ),
    ],
    ids=lambda value: (
        " ".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_every_message_of_every_protocol_version_round_trips(server, slot, options, expected):
    messages = peek(server, slot, **options)
    # A transaction that is aborted when it is read may have been streamed before, or not.
    assert set(kinds(messages)) - {StreamAbort} == expected


def test_decoded_messages_are_the_executed_statements(server):
    messages = [message for _, _, message in peek(server, "plain", proto_version="1", messages="true")]
    relations, changes = {}, []
    for message in messages:
        if isinstance(message, Relation):
            relations[message.relation_id] = message
        elif isinstance(message, Insert | Update | Delete):
            changes.append((relations[message.relation_id].name, message))

    def of(name):
        return [change for table, change in changes if table == name]

    inserted, second, updated, moved, deleted, *_ = of("item")
    happy = (
        Text(b"1"),
        Text("é".encode()),
        Text(b"happy"),
        Text(b"1"),
        Text(b"2020-01-01 00:00:00+00"),
        Text(b"1.50"),
    )
    assert inserted.new == happy
    assert second.new == (Text(b"2"), NULL, NULL, NULL, NULL, NULL)
    assert (updated.old, updated.new) == (None, (Text(b"1"), Text(b"b"), *happy[2:]))
    assert (moved.old, moved.new[0]) == (OldKey((Text(b"1"), *[NULL] * 5)), Text(b"3"))
    assert deleted.old == OldKey((Text(b"2"), *[NULL] * 5))

    _, full, gone = of('t " x')
    value = Text(b"0123456789" * 1000)
    assert (full.old, full.new) == (OldRow((Text(b"1"), value)), (Text(b"2"), UNCHANGED))
    assert gone.old == OldRow((Text(b"2"), value))
    _, by_index, _ = of("indexed")
    assert by_index.old == OldKey((NULL, Text(b"2"), NULL))
    assert [change.new for change in of("nothing")] == [()]

    assert {relation.name: relation.replica_identity for relation in relations.values()} == {
        "item": "d",
        "part": "d",
        't " x': "f",
        "indexed": "i",
        "nothing": "d",
        "wide": "d",
    }
    (item,) = [relation for relation in relations.values() if relation.name == "item"]
    assert [column.name for column in item.columns] == ["id", "remark", "mood", "amount", "at", "price"]
    assert [column.is_key for column in item.columns] == [True, False, False, False, False, False]
    assert [column.type_modifier for column in item.columns] == [-1, -1, -1, -1, -1, (12 << 16 | 2) + 4]
    assert next(relation.namespace for relation in relations.values() if relation.name == 't " x') == "Größe"

    types = {message.type_oid: message for message in messages if isinstance(message, Type)}
    assert (types[item.columns[2].type_oid].namespace, types[item.columns[2].type_oid].name) == (
        "public",
        "mood",
    )
    # A domain has its own oid, but the name of its base type. pg_catalog is sent as an empty namespace.
    assert (types[item.columns[3].type_oid].namespace, types[item.columns[3].type_oid].name) == ("", "int4")

    (truncated, _) = [message for message in messages if isinstance(message, Truncate)]
    assert {relations[relation_id].name for relation_id in truncated.relation_ids} == {"item", "part"}
    assert (truncated.cascade, truncated.restart_identity) == (True, True)

    emitted = {message.prefix: message for message in messages if isinstance(message, LogicalMessage)}
    assert (emitted["pfx"].transactional, emitted["pfx"].content) == (True, b"hi")
    assert (emitted["at once"].transactional, emitted["at once"].content) == (False, "ü".encode())
    assert [message for message in messages if isinstance(message, Origin)] == [Origin(0xAABB, "elsewhere")]


def test_xids_lsns_and_times_are_the_servers(server):
    open_transaction = None
    for lsn, xid, message in peek(server, "plain", proto_version="1"):
        if isinstance(message, Begin):
            open_transaction = message
            assert message.xid == xid
        if isinstance(message, Commit):
            assert message.commit_lsn == open_transaction.final_lsn
            assert message.commit_time == open_transaction.commit_time
            assert message.commit_lsn < message.end_lsn == lsn
            at = timestamp_to_unix_micros(message.commit_time) / 1e6
            # The transaction with an origin has the time that the origin gave it.
            assert time.time() - 600 < at <= time.time() or at == 1_577_836_800
            open_transaction = None
    assert open_transaction is None


def test_a_streamed_change_has_its_subtransactions_xid(server):
    messages = [message for _, _, message in peek(server, "plain", proto_version="2", streaming="on")]
    starts = [message for message in messages if isinstance(message, StreamStart)]
    for xid in {start.xid for start in starts}:
        segments = [start.first_segment for start in starts if start.xid == xid]
        assert segments == [True] + [False] * (len(segments) - 1)
    streamed = [
        message for message in messages if isinstance(message, ChangeMessage) and message.xid is not None
    ]
    assert sum(isinstance(message, Insert) for message in streamed) >= 4000
    assert {type(message) for message in streamed} >= {Relation, Insert, Delete, Truncate}
    deleted = {message.xid for message in streamed if isinstance(message, Delete)}
    assert len(deleted) == 1
    assert not deleted & {
        start.xid for start in starts
    }  # they come after the savepoint, so they have the subtransaction's id
    inserted = next(message for message in streamed if isinstance(message, Insert))
    assert inserted.xid == starts[0].xid
    with pytest.raises(ProtocolError, match="Insert message at offset 5: expected 'N'"):
        decode(encode(inserted))  # decoded as outside of a stream


def test_binary_values_are_the_results_of_send_functions(server):
    inserts = [
        m for _, _, m in peek(server, "plain", proto_version="4", binary="true") if isinstance(m, Insert)
    ]
    with connect(server) as connection:
        sent = connection.execute(
            """SELECT int4send(1), textsend('é'), int4send(1), timestamptz_send('2020-01-01 00:00+00'),
            numeric_send(1.5::numeric(12, 2))"""
        ).fetchone()
    number, text, mood, amount, at, price = inserts[0].new
    assert (number, text, amount, at, price) == tuple(Binary(value) for value in sent)
    assert mood == Binary(b"happy")


class Session:
    """The messages of a walsender, decoded as they arrive. Each was encoded to its own bytes."""

    def __init__(self, walsender, parallel):
        self.walsender = walsender
        self.decoder = Decoder(parallel=parallel)

    def until(self, stop):
        """The messages up to the first one for which `stop` is true."""
        messages = []
        while not messages or not stop(messages[-1]):
            data = self.walsender.receive()
            envelope = decode_envelope(data)
            assert encode_envelope(envelope) == data
            if isinstance(envelope, XLogData):
                messages.append(self.decoder.decode(envelope.data))
                assert encode(messages[-1]) == envelope.data
        return messages

    def keepalive(self):
        while not isinstance(envelope := decode_envelope(self.walsender.receive()), PrimaryKeepalive):
            pass
        return envelope


@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_a_walsender_streams_aborts_and_obeys_the_status_update(server, streaming):
    slot = f"walsender_{streaming}"
    with connect(server) as control:
        control.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        options = {"proto_version": "4", "publication_names": '"everything"', "streaming": streaming}
        conninfo = server.conninfo(replication="database", client_encoding="UTF8")
        with Walsender(conninfo, slot, options) as walsender:
            session = Session(walsender, parallel=streaming == "parallel")
            with connect(server) as writer:
                writer.execute("BEGIN")
                writer.execute(
                    "INSERT INTO wide SELECT i, repeat('a', 100) FROM generate_series(10001, 12000) i"
                )
                started = session.until(lambda message: isinstance(message, StreamStop))
                xid = started[0].xid
                assert started[0] == StreamStart(xid, first_segment=True)
                writer.execute("SAVEPOINT s")
                writer.execute("UPDATE wide SET filler = repeat('b', 100) WHERE id > 10000")
                of_savepoint = session.until(
                    lambda message: isinstance(message, Update) and message.xid != xid
                )
                subxid = of_savepoint[-1].xid
                session.until(lambda message: isinstance(message, StreamStop))
                writer.execute("ROLLBACK TO s")
                writer.execute("ROLLBACK")
            aborts = [
                message
                for message in session.until(
                    lambda message: isinstance(message, StreamAbort) and message.subxid == xid
                )
                if isinstance(message, StreamAbort)
            ]
            assert {(abort.xid, abort.subxid) for abort in aborts} == {(xid, subxid), (xid, xid)}
            for abort in aborts:
                assert (abort.abort is not None) == (streaming == "parallel")
            if streaming == "parallel":
                final = aborts[-1].abort
                assert time.time() - 600 < timestamp_to_unix_micros(final.time) / 1e6 <= time.time()
                assert (
                    0 < final.lsn <= parse_lsn(control.execute("SELECT pg_current_wal_lsn()").fetchone()[0])
                )

            control.execute("INSERT INTO nothing DEFAULT VALUES")
            commit = session.until(lambda message: isinstance(message, Commit))[-1]
            walsender.report(commit.end_lsn)
            assert session.keepalive().wal_end >= commit.end_lsn
            query = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:  # the keepalive may have been sent before
                (confirmed,) = control.execute(query, [slot]).fetchone()
                if confirmed == format_lsn(commit.end_lsn):
                    break
                time.sleep(0.02)
            assert confirmed == format_lsn(commit.end_lsn)
