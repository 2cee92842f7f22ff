"""The order of calls to output plugins, for random sessions and for messages in an order that no server sends.

Random sessions of pgoutput's messages, valid by construction, are fed to a plugin that records its calls. The expected calls, with
and without the streaming and the two-phase group, are built together with the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.messages import (
    NULL,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldKey,
    Origin,
    Prepare,
    RelationColumn,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Update,
)
from tests.fixtures.noted_plugin import (
    BEGIN,
    BLOCK,
    COMMIT,
    PREPARED,
    STREAM,
    TABLE,
    TWO_PHASE,
    calls,
    registered,
    row,
)


@dataclass
class Session:
    """Messages, and the expected lines of a plugin, by whether it streams and whether it decodes prepares."""

    messages: list[Message] = field(default_factory=list)
    lines: dict[tuple[bool, bool], list[str]] = field(
        default_factory=lambda: {each: [] for each in product([True, False], repeat=2)}
    )


@dataclass
class Unit:
    """Consecutive messages, and the expected lines."""

    messages: list[Message]
    lines: dict[tuple[bool, bool], list[str]]


def unit(messages: list[Message], lines: Callable[[bool, bool], list[str]]) -> Unit:
    return Unit(messages, {each: lines(*each) for each in product([True, False], repeat=2)})


def changes(xid: int, labels: list[str], prefix: str = "") -> list[str]:
    return [f"{prefix}change {xid} {label}" for label in labels]


def plain(xid: int, labels: list[str]) -> list[Unit]:
    messages = [Begin(xid, 0, xid), TABLE, *map(row, labels), Commit(xid, xid + 1, 0)]
    lines = [f"begin {xid}", *changes(xid, labels), f"commit {xid}"]
    return [unit(messages, lambda _s, _p: lines)]


def prepared(xid: int, labels: list[str], end: str) -> list[Unit]:
    gid = f"gid {xid}"
    fields = (xid, xid + 1, 0, xid, gid)
    one = [f"begin {xid}", *changes(xid, labels), f"commit {xid}"]
    two = [f"begin_prepare {xid}", *changes(xid, labels), f"prepare {xid}"]
    messages = [BeginPrepare(*fields), TABLE, *map(row, labels), Prepare(*fields)]
    units = [unit(messages, lambda _s, p: two if p else [])]
    if end == "commit":
        commit = CommitPrepared(*fields)
        units.append(unit([commit], lambda _s, p: [f"commit_prepared {xid}"] if p else one))
    elif end == "rollback":
        rollback = RollbackPrepared(xid, xid + 1, 0, 0, xid, gid)
        units.append(unit([rollback], lambda _s, p: [f"rollback_prepared {xid}"] if p else []))
    return units


@st.composite
def streamed(draw: st.DrawFn, xid: int, end: str) -> list[Unit]:
    """Blocks with subtransactions, some of which are rolled back between blocks."""
    units: list[Unit] = []
    left: list[str] = []
    open_subs: list[tuple[int, int]] = []  # each with the number of earlier changes
    number = 0
    for block in range(draw(st.integers(1, 4))):
        labels: list[tuple[str, int]] = []
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            step = draw(st.sampled_from(["change", "savepoint", "release"]))
            if step == "savepoint":
                open_subs.append((xid + number, len(left)))
            elif step == "release" and open_subs:
                open_subs.pop()
            label = f"{xid}.{number}"
            labels.append((label, open_subs[-1][0] if open_subs else xid))
            left.append(label)
        described = [replace(TABLE, xid=xid)] if block == 0 else []
        messages = [
            StreamStart(xid, first_segment=block == 0),
            *described,
            *(row(label, sub) for label, sub in labels),
            StreamStop(),
        ]
        called = changes(xid, [label for label, _ in labels], "stream_")
        lines = [f"stream_start {xid}", *called, f"stream_stop {xid}"]
        units.append(unit(messages, lambda s, _p, lines=lines: lines if s else []))  # type: ignore[misc]
        if open_subs and draw(st.booleans()):
            sub, before = open_subs.pop()
            del left[before:]
            abort = [f"stream_abort {sub}"]
            units.append(unit([StreamAbort(xid, sub)], lambda s, _p, abort=abort: abort if s else []))  # type: ignore[misc]
    whole = changes(xid, left)
    one = [f"begin {xid}", *whole, f"commit {xid}"]
    gid = f"gid {xid}"
    if end == "commit":
        commit = StreamCommit(xid, xid, xid + 1, 0)
        units.append(unit([commit], lambda s, _p: [f"stream_commit {xid}"] if s else one))
    elif end == "abort":
        units.append(unit([StreamAbort(xid, xid)], lambda s, _p: [f"stream_abort {xid}"] if s else []))
    elif end.startswith("prepare"):
        two = [f"begin_prepare {xid}", *whole, f"prepare {xid}"]
        prepare = StreamPrepare(xid, xid + 1, 0, xid, gid)
        units.append(unit([prepare], lambda s, p: ([f"stream_prepare {xid}"] if s else two) if p else []))
        if end == "prepare, commit":
            units.append(
                unit(
                    [CommitPrepared(xid, xid + 1, 0, xid, gid)],
                    lambda s, p: [f"commit_prepared {xid}"] if p else [f"stream_commit {xid}"] if s else one,
                )
            )
        elif end == "prepare, rollback":
            units.append(
                unit(
                    [RollbackPrepared(xid, xid + 1, 0, 0, xid, gid)],
                    lambda s, p: [f"rollback_prepared {xid}"] if p else [f"stream_abort {xid}"] if s else [],
                )
            )
    return units


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """Transactions of all kinds whose units alternate. Some never end."""
    waiting: list[list[Unit]] = []
    for number in range(draw(st.integers(1, 5))):
        xid = 100 * (number + 1)
        labels = [f"{xid}.{each}" for each in range(draw(st.integers(0, 3)))]
        ends = ["commit", "abort", "open", "prepare", "prepare, commit", "prepare, rollback"]
        match draw(st.sampled_from(["plain", "prepared", "streamed", "streamed", "message"])):
            case "plain":
                waiting.append(plain(xid, labels))
            case "prepared":
                waiting.append(prepared(xid, labels, draw(st.sampled_from(["commit", "rollback", "open"]))))
            case "streamed":
                waiting.append(draw(streamed(xid, draw(st.sampled_from(ends)))))
            case _:
                message = LogicalMessage(False, 1, "p", b"content")
                waiting.append([unit([message], lambda _s, _p: ["message -"])])
    session = Session()
    while waiting := [units for units in waiting if units]:
        following = draw(st.sampled_from(waiting)).pop(0)
        session.messages += following.messages
        for each, lines in following.lines.items():
            session.lines[each] += lines
    return session


@settings(max_examples=100)
@given(sessions())
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("two_phase", [True, False])
def test_a_plugin_is_called_in_the_order_of_the_interface(
    streaming: bool, two_phase: bool, session: Session
) -> None:
    names = ["message", *(STREAM if streaming else ()), *(TWO_PHASE if two_phase else ())]
    if streaming and two_phase:
        names.append("stream_prepare")
    assert calls(registered(*names), session.messages) == session.lines[streaming, two_phase]


@settings(max_examples=200)
@given(sessions(), st.data())
def test_messages_in_another_order_are_decoded_or_refused(session: Session, draw: st.DataObject) -> None:
    messages = list(session.messages)
    for _ in range(draw.draw(st.integers(1, 3))):
        taken = messages.pop(draw.draw(st.integers(0, len(messages) - 1)))
        for _ in range(draw.draw(st.integers(0, 2))):
            messages.insert(draw.draw(st.integers(0, len(messages))), taken)
        if not messages:
            return
    init = registered(*STREAM, *TWO_PHASE, "stream_prepare")
    with suppress(ProtocolError):  # no other error
        calls(init, messages)


@pytest.mark.parametrize(
    "messages",
    [
        [COMMIT],
        [row("x")],
        [TABLE],
        [BEGIN, BEGIN],
        [BEGIN, Commit(6, 8, 0)],
        [BEGIN, Prepare(*PREPARED)],
        [BEGIN, LogicalMessage(False, 1, "p", b"")],
        [LogicalMessage(True, 1, "p", b"")],
        [BEGIN, TABLE, Insert(2, (NULL,))],
        [BEGIN, TABLE, Insert(1, (NULL, NULL))],
        [BEGIN, TABLE, Delete(1, OldKey(()))],
        [BEGIN, TABLE, Update(1, OldKey(()), (NULL,))],
        [BEGIN, Truncate((1,), False, False)],
        [BEGIN, replace(TABLE, columns=(RelationColumn(True, "a", 16400, -1),))],
        [BEGIN, TABLE, Origin(1, "o")],
        [Origin(1, "o")],
        [BeginPrepare(*PREPARED), COMMIT],
        [BeginPrepare(*PREPARED), Prepare(7, 8, 0, 7, "another")],
        [BeginPrepare(*PREPARED), CommitPrepared(*PREPARED)],
        [StreamStart(7, False)],
        [*BLOCK, StreamStart(7, True)],
        [*BLOCK, StreamStart(7, False), Origin(0, "o")],
        [StreamCommit(7, 7, 8, 0)],
        [StreamAbort(7, 7), StreamCommit(7, 7, 8, 0)],
        [*BLOCK, BEGIN],
        [*BLOCK, CommitPrepared(*PREPARED)],
        [BeginPrepare(*PREPARED), Prepare(*PREPARED), BEGIN],
        [Prepare(*PREPARED), Prepare(*PREPARED)],
        [*BLOCK, Prepare(*PREPARED)],
        [*BLOCK, StreamPrepare(*PREPARED), StreamStart(7, True)],
        [StreamPrepare(*PREPARED)],
        [*BLOCK, StreamCommit(7, 7, 8, 0), StreamCommit(7, 7, 8, 0)],
        [BEGIN, StreamCommit(7, 7, 8, 0)],
        [*BLOCK, StreamAbort(7, 7), BEGIN, row("x")],
    ],
    ids=lambda messages: " ".join(chr(message.tag) for message in messages),
)
@pytest.mark.parametrize("names", [(), (*STREAM, *TWO_PHASE, "stream_prepare")], ids=["plain", "all"])
def test_an_order_that_no_server_sends_is_refused(messages: list[Message], names: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError) as refused:
        calls(registered(*names), messages)
    assert refused.value.sqlstate == "08P01"
