"""The fuzzed functions. Each takes arbitrary bytes, and raises if pgsieve mishandles them.

Each gives the bytes to one reader of a publisher's messages. A reader may refuse them with the documented error. It may accept them
if they are the same bytes when written back. Every other error is a finding. A target's first byte chooses options. In a sequence of
messages, two bytes of length precede each message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from pgsieve.decoding.errors import ProtocolError, ValueNotRepresentableError
from pgsieve.decoding.lsn import InvalidLsnError, format_lsn, parse_lsn
from pgsieve.decoding.protocol.envelope import decode_envelope, encode_envelope
from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.decoding.protocol.messages import Begin, Commit, Decoder, Delete, Insert, Update, decode, encode
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.decoding.protocol.tuples import RelationColumns, decode_changes
from pgsieve.decoding.values.types import column_type
from pgsieve.resources.spool import FileSpool
from tests.fixtures.recordings import Recording, recordings

_STREAMING, _PARALLEL = 1, 2
INT4, TEXT, BOOL, FLOAT8, BYTEA, DATE, TIMESTAMPTZ, JSONB, NUMERIC = (
    23,
    25,
    16,
    701,
    17,
    1082,
    1184,
    3802,
    1700,
)
_TYPES = (
    *(column_type(oid, -1) for oid in (INT4, TEXT, BOOL, FLOAT8, BYTEA, DATE, TIMESTAMPTZ, JSONB)),
    column_type(NUMERIC, (4 << 16 | 2) + 4),
)


def messages(data: bytes) -> None:
    """One message, in each state of a session."""
    options, message = data[0] if data else 0, data[1:]
    try:
        decoded = decode(message, streaming=bool(options & _STREAMING), parallel=bool(options & _PARALLEL))
    except ProtocolError:
        return
    assert encode(decoded) == message


def session(data: bytes) -> None:
    """A sequence of messages. The decoder must know which of them are streamed."""
    decoder = Decoder(parallel=data[:1] == bytes([_PARALLEL]))
    for message in unframed(data[1:]):
        try:
            decoded = decoder.decode(message)
        except ProtocolError:
            return
        assert encode(decoded) == message


def envelope(data: bytes) -> None:
    """One CopyData."""
    try:
        decoded = decode_envelope(data)
    except ProtocolError:
        return
    assert encode_envelope(decoded) == data


def headers(data: bytes) -> None:
    """The headers of a slot's messages, in two batches, and again in one."""
    received = list(unframed(data[1:]))
    first = data[0] % (len(received) + 1) if data else 0
    scanner = HeaderScanner()
    try:
        parts = [scanner.scan(pa.array(part, pa.binary())) for part in (received[:first], received[first:])]
    except ProtocolError:
        return
    whole = HeaderScanner().scan(pa.array(received, pa.binary()))
    for name in whole.__slots__:
        assert getattr(whole, name).tolist() == [v for part in parts for v in getattr(part, name).tolist()]
    for message, kind in zip(received, whole.kind, strict=True):
        assert message[0] == kind
        if message[:1] in {b"B", b"C"}:
            assert isinstance(decode(message), Begin | Commit)


def transactions(data: bytes) -> None:
    """The transactions of a session, in two batches, and again in one."""
    received = list(unframed(data[1:]))
    parallel, first = bool(data and data[0] & _PARALLEL), data[0] % (len(received) + 1) if data else 0
    assert _assembled([received], parallel) == _assembled([received[:first], received[first:]], parallel)


def _assembled(batches: list[list[bytes]], parallel: bool) -> list[bytes] | None:
    """Whole transactions, or None if the messages are refused."""
    with FileSpool() as spool:
        assembler, scanner = TransactionAssembler(spool, parallel=parallel), HeaderScanner()
        assembled: list[bytes] = []
        try:
            for batch in batches:
                for whole in assembler.assemble(pa.array(batch, pa.binary())):
                    scanner.scan(whole)
                    assembled += whole.to_pylist()
        except ProtocolError:
            return None
        return assembled


def columns(data: bytes) -> None:
    """Changes of a relation, decoded column by column. The first byte chooses the relation's columns."""
    width = data[0] % (len(_TYPES) + 1) if data else 0
    received = list(unframed(data[1:]))
    relation = RelationColumns(tuple(f"c{n}" for n in range(width)), _TYPES[:width])
    try:
        decoded = decode_changes(pa.array(received, pa.binary()), relation, fill_unsent=bool(len(data) % 2))
    except (ProtocolError, ValueNotRepresentableError):
        return
    for array in (decoded.operation, decoded.old_kind, decoded.old, decoded.new, decoded.unchanged):
        array.validate(full=True)
        assert len(array) == len(received)
    for message, old, new in zip(received, decoded.old, decoded.new, strict=True):
        change = decode(message)
        assert isinstance(change, Insert | Update | Delete)
        assert old.is_valid == (getattr(change, "old", None) is not None)
        assert new.is_valid == hasattr(change, "new")


def lsn(data: bytes) -> None:
    """The text of a pg_lsn."""
    try:
        parsed = parse_lsn(data.decode("utf-8", errors="replace"))
    except InvalidLsnError:
        return
    assert parse_lsn(format_lsn(parsed)) == parsed


def unframed(data: bytes) -> Iterator[bytes]:
    """Split a sequence of messages. The last one may be truncated."""
    while data:
        end = 2 + int.from_bytes(data[:2], "big")
        yield data[2:end]
        data = data[end:]


def framed(received: list[bytes]) -> bytes:
    """Join messages to a sequence that `unframed` splits."""
    return b"".join(len(message).to_bytes(2, "big") + message for message in received)


def seeds(name: str) -> Iterator[bytes]:
    """The first inputs: messages that servers sent."""
    if name == "lsn":
        yield from (b"0/0", b"16/B374D848", b"FFFFFFFF/ffffffff")
        return
    for recording in recordings():
        yield from _seeds_of(name, recording)


def _seeds_of(name: str, recording: Recording) -> Iterator[bytes]:
    received = [sent.data for sent in recording.sent if sent.data]
    changes = [
        (sent.data, len(image))
        for sent in recording.sent
        if isinstance(sent.message, Insert | Update | Delete) and sent.message.xid is None
        for image in [sent.message.old.columns if isinstance(sent.message, Delete) else sent.message.new]
    ]
    parallel = _PARALLEL if recording.reading.parallel else 0
    if name == "messages":
        for sent in recording.sent:
            streaming = _STREAMING if getattr(sent.message, "xid", None) else 0
            yield bytes([parallel | streaming]) + sent.data
    elif name == "session":
        yield bytes([parallel]) + framed(received)
    elif name == "envelope":
        yield from (sent.envelope_data for sent in recording.sent)
    elif name in {"headers", "transactions"}:
        yield bytes([len(received) // 2 & ~_PARALLEL | parallel]) + framed(received)
    elif name == "columns":
        yield from (bytes([width]) + framed([data]) for data, width in changes if width <= len(_TYPES))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (messages, session, envelope, headers, transactions, columns, lsn)
}
