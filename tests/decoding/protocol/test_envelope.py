"""CopyData messages of a replication connection, PostgreSQL documentation, Streaming Replication Protocol."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.envelope import (
    OtherEnvelope,
    PrimaryKeepalive,
    StandbyStatusUpdate,
    XLogData,
    decode_envelope,
    encode_envelope,
    xlog_data_columns,
)

T0 = 0x000303C008883BDF
VECTORS = {
    "77 0000000001bf7b60 0000000001bf7b90 000303c008883bdf 45": XLogData(0x1BF7B60, 0x1BF7B90, T0, b"E"),
    "6b 0000000001bf7b90 000303c008883bdf 01": PrimaryKeepalive(0x1BF7B90, T0, reply_requested=True),
    "72 0000000001bf7b91 0000000001bf7b90 0000000001bf7b8f 000303c008883bdf 00": StandbyStatusUpdate(
        0x1BF7B91, 0x1BF7B90, 0x1BF7B8F, T0, reply_requested=False
    ),
    "73 00": OtherEnvelope(ord("s"), b"\0"),  # 19's primary status update, which is skipped
}


@pytest.mark.parametrize(("wire", "envelope"), VECTORS.items(), ids=lambda item: type(item).__name__)
class TestVectors:
    def test_is_decoded_and_encoded(self, wire, envelope):
        data = bytes.fromhex(wire)
        assert decode_envelope(data) == envelope
        assert decode_envelope(memoryview(data)) == envelope
        assert encode_envelope(envelope) == data


@pytest.mark.parametrize("wire", [wire for wire in VECTORS if wire[:2] in {"6b", "72"}])
def test_prefixes_and_tails_are_refused(wire):
    data = bytes.fromhex(wire)
    for size in range(len(data)):
        with pytest.raises(ProtocolError, match="expected"):
            decode_envelope(data[:size])
    with pytest.raises(ProtocolError, match="expected the end of the message, but 1 bytes remain"):
        decode_envelope(data + b"\0")


@pytest.mark.parametrize("size", range(25))
def test_a_header_without_its_end_is_refused(size):
    with pytest.raises(ProtocolError, match="expected"):
        decode_envelope(bytes.fromhex(next(iter(VECTORS)))[:size])


@pytest.mark.parametrize("wire", ["6b" + "00" * 16 + "02", "72" + "00" * 32 + "ff"])
def test_a_reply_request_is_yes_or_no(wire):
    with pytest.raises(ProtocolError, match="expected reply request with no bit outside 0x01"):
        decode_envelope(bytes.fromhex(wire))


def test_an_unknown_envelope_cannot_have_a_known_type():
    with pytest.raises(ProtocolError, match="cannot encode OtherEnvelope message"):
        encode_envelope(OtherEnvelope(ord("w"), b""))


@given(
    st.binary(max_size=60)
    | st.tuples(st.sampled_from([b"w", b"k", b"r"]), st.binary(max_size=60)).map(b"".join)
)
def test_random_bytes_are_accepted_or_refused(data):
    try:
        envelope = decode_envelope(data)
    except ProtocolError:
        return
    assert encode_envelope(envelope) == data


LSNS, TIMES = st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1)


@given(
    st.lists(
        st.builds(XLogData, LSNS, LSNS, TIMES, st.binary(min_size=1, max_size=40))
        | st.builds(OtherEnvelope, st.just(ord("s")), st.binary(min_size=25, max_size=60))
    )
)
def test_columns_equal_single_messages(envelopes):
    encoded = [encode_envelope(envelope) for envelope in envelopes]
    lsns, data = xlog_data_columns(b"".join(encoded), np.array([len(e) for e in encoded], np.int32))
    xlog_data = [envelope for envelope in envelopes if isinstance(envelope, XLogData)]
    assert lsns.tolist() == [envelope.data_start for envelope in xlog_data]
    assert data.to_pylist() == [envelope.data for envelope in xlog_data]
