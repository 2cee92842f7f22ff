"""Changes decoded column by column equal the messages decoded one by one."""

from __future__ import annotations

import itertools
import re
import struct as layout
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import PgsieveError, ProtocolError, ValueNotRepresentableError
from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.decoding.protocol.messages import (
    NULL,
    UNCHANGED,
    Begin,
    Binary,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    OldKey,
    OldRow,
    Origin,
    Relation,
    StreamStart,
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

INT4, TEXT, BYTEA, BOOL, DATE = 23, 25, 17, 16, 1082
RELATION = 0x87654321
COLUMNS = RelationColumns(
    ("id", "note", "raw", "flag"), tuple(column_type(oid, -1) for oid in (INT4, TEXT, BYTEA, BOOL))
)

CELLS = (
    st.integers(-(2**31), 2**31 - 1),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
    st.binary(max_size=12),
    st.booleans(),
)


def printed(value: object) -> Text:
    if isinstance(value, bool):
        return Text(b"t" if value else b"f")
    if isinstance(value, bytes):
        return Text(b"\\x" + value.hex().encode())
    return Text(str(value).encode())


def sent(value: object) -> Binary:
    """The result of the type's send function."""
    if isinstance(value, str):
        return Binary(value.encode())
    return Binary(
        value if isinstance(value, bytes) else layout.pack(">?" if isinstance(value, bool) else ">i", value)
    )


def row(*others: st.SearchStrategy) -> st.SearchStrategy:
    """Cells in text and in binary format, mixed."""
    return st.tuples(
        *(st.one_of(cell.map(printed), cell.map(sent), st.just(NULL), *others) for cell in CELLS)
    )


OLD = row().map(OldKey) | row().map(OldRow)
CHANGES = st.one_of(
    st.builds(Insert, relation_id=st.just(RELATION), new=row()),
    st.builds(Update, relation_id=st.just(RELATION), old=st.none() | OLD, new=row(st.just(UNCHANGED))),
    st.builds(Delete, relation_id=st.just(RELATION), old=OLD),
)


def raw(content: bytes) -> bytes:
    """bytea in either output format. With a damaged prefix, a text in hex format is a value in escape format."""
    if content.startswith(b"\\x"):
        return bytes.fromhex(content[2:].decode())
    return re.sub(rb"\\(?:(\\)|([0-3][0-7]{2}))", lambda m: m[1] or bytes([int(m[2], 8)]), content)


def value(cell: object, column: int) -> object:
    if not isinstance(cell, Text | Binary):
        return None
    content = cell.content
    if isinstance(cell, Binary):
        of_binary = [lambda c: layout.unpack(">i", c)[0], bytes.decode, bytes, lambda c: c != b"\0"]
        return of_binary[column](content)
    return [int, bytes.decode, raw, lambda c: c == b"t"][column](content)


def struct(cells: tuple | None, chosen: set[str] | None = None) -> dict | None:
    if cells is None:
        return None
    return {
        name: value(cell, column)
        for column, (name, cell) in enumerate(zip(COLUMNS.names, cells, strict=True))
        if chosen is None or name in chosen
    }


def check(changes, decoded, old_columns=None, new_columns=None):
    """Compare with the messages decoded one by one."""
    old = [getattr(change, "old", None) for change in changes]
    new = [getattr(change, "new", None) for change in changes]
    assert decoded.operation.to_pylist() == [chr(change.tag) for change in changes]
    assert decoded.old_kind.to_pylist() == [
        "" if o is None else "K" if isinstance(o, OldKey) else "O" for o in old
    ]
    assert decoded.old.to_pylist() == [struct(o and o.columns, old_columns) for o in old]
    assert decoded.new.to_pylist() == [struct(n, new_columns) for n in new]
    unsent = [
        [
            c
            for c, v in zip(COLUMNS.names, n or (), strict=n is not None)
            if v == UNCHANGED and (new_columns is None or c in new_columns)
        ]
        for n in new
    ]
    assert decoded.unchanged.to_pylist() == [names or None for names in unsent]
    for array in (decoded.operation, decoded.old_kind, decoded.old, decoded.new, decoded.unchanged):
        array.validate(full=True)
        assert len(array) == len(changes)


def array(changes, kind=None):
    return pa.array([encode(change) for change in changes], kind or pa.binary())


SOME = st.none() | st.sets(st.sampled_from(COLUMNS.names))


@given(st.lists(CHANGES, max_size=20), st.sampled_from([pa.binary(), pa.large_binary()]), SOME, SOME)
def test_columns_equal_the_messages_values(changes, kind, old_columns, new_columns):
    decoded = decode_changes(array(changes, kind), COLUMNS, old_columns=old_columns, new_columns=new_columns)
    check(changes, decoded, old_columns, new_columns)


@given(st.lists(CHANGES, min_size=2, max_size=10), st.data())
def test_slices_of_a_batch(changes, data):
    start = data.draw(st.integers(0, len(changes) - 1))
    count = data.draw(st.integers(0, len(changes) - start))
    check(changes[start : start + count], decode_changes(array(changes).slice(start, count), COLUMNS))


@settings(max_examples=8)
@given(st.lists(CHANGES, min_size=1, max_size=4), st.integers(8191, 8195))
def test_batches_longer_than_a_walk(changes, count):
    changes = (changes * count)[:count]
    check(changes, decode_changes(array(changes), COLUMNS))


@given(st.lists(CHANGES, min_size=1, max_size=4), st.data())
def test_damaged_messages_are_protocol_errors(changes, data):
    """Bytes that the message decoder refuses are refused, and bytes that it accepts give the same values."""
    messages = [encode(change) for change in changes]
    at = data.draw(st.integers(0, len(messages) - 1))
    place = data.draw(st.integers(0, len(messages[at]) - 1))
    damage = data.draw(st.sampled_from(["cut", "append", "flip", "insert"]))
    octet = bytes([data.draw(st.integers(0, 255))])
    message = messages[at]
    messages[at] = {
        "cut": message[:place],
        "append": message + octet,
        "flip": message[:place] + octet + message[place + 1 :],
        "insert": message[:place] + octet + message[place:],
    }[damage]
    try:
        read = [decode(message) for message in messages]
    except ProtocolError:
        with pytest.raises(PgsieveError) as caught:
            decode_changes(pa.array(messages, pa.binary()), COLUMNS)
        assert isinstance(caught.value, ProtocolError)
        return
    same_relation = {getattr(r, "relation_id", None) for r in read} <= {getattr(read[0], "relation_id", None)}
    changes_only = all(isinstance(r, Insert | Update | Delete) for r in read)
    widths = {len(image) for r in read for image in images(r)}
    old_unchanged = any(UNCHANGED in r.old.columns for r in read if getattr(r, "old", None))
    if not (same_relation and changes_only) or widths - {len(COLUMNS.names)} or old_unchanged:
        with pytest.raises(ProtocolError):
            decode_changes(pa.array(messages, pa.binary()), COLUMNS)
        return
    misshapen = any(
        isinstance(cell, Binary) and len(cell.content) != size
        for r in read
        for image in images(r)
        for cell, size in ((image[0], 4), (image[3], 1))
    )
    try:
        decoded = decode_changes(pa.array(messages, pa.binary()), COLUMNS)
    except (ProtocolError, ValueNotRepresentableError) as error:
        flipped = damage == "flip" and isinstance(error, ValueNotRepresentableError)
        assert misshapen or flipped
        return
    assert not misshapen
    check(read, decoded)


def images(message):
    old, new = getattr(message, "old", None), getattr(message, "new", None)
    return [image for image in (old and old.columns, new) if image is not None]


def test_a_lie_about_columns_or_lengths_allocates_nothing_beyond_the_batch():
    wide = RelationColumns(tuple(map(str, range(1600))), (column_type(TEXT, -1),) * 1600)
    header = encode(Insert(RELATION, ()))[:-2]
    for content in (b"", b"t\x7f\xff\xff\xff", b"n" * 100):
        messages = pa.array([header + (1600).to_bytes(2, "big") + content] * 5_000, pa.binary())
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                decode_changes(messages, wide)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 32 * messages.nbytes


def test_batches_without_messages_and_relations_without_columns():
    check([], decode_changes(pa.array([], pa.binary()), COLUMNS))
    nothing = [Insert(RELATION, ()), Update(RELATION, OldRow(()), ()), Delete(RELATION, OldRow(()))]
    decoded = decode_changes(array(nothing), RelationColumns((), ()))
    assert decoded.new.to_pylist() == [{}, {}, None]
    assert decoded.old.to_pylist() == [None, {}, {}]


def test_values_that_do_not_fit_name_their_column():
    bad = (Text(b"12345678901"), NULL, NULL, NULL)
    with pytest.raises(ValueNotRepresentableError, match='"id"'):
        decode_changes(array([Insert(RELATION, bad)]), COLUMNS)
    # A value of a column that is not needed is not checked.
    assert decode_changes(array([Insert(RELATION, bad)]), COLUMNS, new_columns={"note"}).new.to_pylist() == [
        {"note": None}
    ]


@pytest.mark.parametrize(
    ("messages", "failure"),
    [
        (
            [encode(Insert(RELATION, (Binary(b"\0\0\1"), NULL, NULL, NULL)))],
            "binary format does not have 4 bytes",
        ),
        ([encode(Insert(RELATION, (NULL, NULL, NULL)))], "does not have 4 columns"),
        ([encode(Insert(RELATION, (NULL,) * 4)), encode(Insert(7, (NULL,) * 4))], "another relation"),
        ([encode(Truncate(cascade=False, restart_identity=False, relation_ids=(1,)))], "is no change"),
        ([encode(Delete(RELATION, OldKey((UNCHANGED, NULL, NULL, NULL))))], "unchanged"),
        ([encode(Insert(RELATION, (NULL,) * 4)).replace(b"N", b"K")], "its type allows"),
        ([encode(Delete(RELATION, OldKey((NULL,) * 4))).replace(b"K", b"N")], "its type allows"),
        ([b""], "is no change"),
        ([None], "NULL"),
    ],
)
def test_messages_that_are_not_changes_of_the_relation_are_refused(messages, failure):
    with pytest.raises(ProtocolError, match=failure):
        decode_changes(pa.array(messages, pa.binary()), COLUMNS)


# --- headers --------------------------------------------------------------------------------------------


def transaction(lsn, time, xid, *changes):
    return [Begin(lsn, time, xid), *changes, Commit(lsn, lsn + 48, time)]


ROW = Insert(RELATION, (Text(b"1"), NULL, NULL, NULL))
DESCRIPTION = Relation(RELATION, "public", "t", "d", ())
TRUNCATE = Truncate(cascade=True, restart_identity=False, relation_ids=(RELATION, 5))


def logical(transactional, lsn=900):
    return LogicalMessage(transactional=transactional, lsn=lsn, prefix="p", content=b"")


SESSION = [
    *transaction(100, 5, 7, DESCRIPTION, ROW, ROW, DESCRIPTION, ROW, TRUNCATE),
    *transaction(
        200, -6, 2**32 - 1, Origin(3, "o"), Type(17_000, "public", "mood"), logical(transactional=True), ROW
    ),
    logical(transactional=False),
    *transaction(2**63 - 100, 9, 9),
]
EXPECTED = [
    # type byte, relation, commit LSN, ordinal, time, xid, end LSN
    *[("B", 0, 100, 1, 5, 7, 0), ("R", RELATION, 100, 1, 5, 7, 0), ("I", RELATION, 100, 2, 5, 7, 0)],
    *[("I", RELATION, 100, 4, 5, 7, 0), ("R", RELATION, 100, 5, 5, 7, 0), ("I", RELATION, 100, 6, 5, 7, 0)],
    *[("T", 0, 100, 8, 5, 7, 0), ("C", 0, 100, 9, 5, 7, 148)],
    *[
        ("B", 0, 200, 1, -6, 2**32 - 1, 0),
        ("O", 0, 200, 1, -6, 2**32 - 1, 0),
        ("Y", 0, 200, 1, -6, 2**32 - 1, 0),
    ],
    *[
        ("M", 0, 200, 2, -6, 2**32 - 1, 0),
        ("I", RELATION, 200, 4, -6, 2**32 - 1, 0),
        ("C", 0, 200, 5, -6, 2**32 - 1, 248),
    ],
    ("M", 0, 900, 0, None, 0, 0),
    *[("B", 0, 2**63 - 100, 1, 9, 9, 0), ("C", 0, 2**63 - 100, 1, 9, 9, 2**63 - 52)],
]


def scanned(batches):
    scanner, rows = HeaderScanner(), []
    for batch in batches:
        headers = scanner.scan(pa.array([encode(message) for message in batch], pa.binary()))
        columns = (
            headers.relation_id,
            headers.commit_lsn,
            headers.ordinal,
            headers.commit_time,
            headers.xid,
            headers.end_lsn,
        )
        rows += zip(map(chr, headers.kind), *(column.tolist() for column in columns), strict=True)
    return rows, scanner.is_in_transaction


def with_unix_time(rows):
    return [(*row[:4], 0 if row[4] is None else timestamp_to_unix_micros(row[4]), *row[5:]) for row in rows]


def test_headers():
    assert scanned([SESSION]) == (with_unix_time(EXPECTED), False)


@given(st.lists(st.integers(0, len(SESSION))))
def test_headers_do_not_depend_on_batches(cuts):
    places = [0, *sorted(cuts), len(SESSION)]
    batches = [SESSION[start:end] for start, end in itertools.pairwise(places)]
    assert scanned(batches) == (with_unix_time(EXPECTED), False)
    assert scanned([SESSION[:3]])[1]


def test_order_keys_do_not_depend_on_the_places_of_relation_messages():
    def changes(*messages):
        return [row[2:4] for row in scanned([transaction(100, 5, 7, *messages)])[0] if row[0] == "I"]

    assert changes(ROW, ROW, ROW) == changes(DESCRIPTION, ROW, DESCRIPTION, DESCRIPTION, ROW, ROW)


@pytest.mark.parametrize(
    "messages",
    [
        [encode(ROW)],
        [encode(Commit(1, 2, 3))],
        [encode(Begin(1, 2, 3)), encode(Begin(2, 2, 3))],
        [encode(Begin(1, 2, 3)), encode(Commit(2, 2, 3))],
        [encode(Begin(1, 2, 3)), b"I\0\0\0"],
        [encode(Begin(1, 2, 3))[:-1]],
        [encode(Begin(1, 2, 3)), encode(Commit(1, 2, 3)) + b"\0"],
        [encode(Begin(1, 2, 3)), b"C\1" + encode(Commit(1, 2, 3))[2:]],
        [encode(StreamStart(7, first_segment=True))],
        [encode(logical(transactional=True))],
        [encode(logical(transactional=False))[:8]],
        [b"B" + b"\0" * 20],
        [b"x"],
        [b""],
        [None],
    ],
)
def test_headers_out_of_turn(messages):
    with pytest.raises(ProtocolError):
        HeaderScanner().scan(pa.array(messages, pa.binary()))
