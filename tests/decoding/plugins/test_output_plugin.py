"""The rules of the output plugin interface (contrib/test_decoding is compared with the server's elsewhere).

Random sessions of pgoutput's messages, legal by construction, are fed to a plugin that writes down its calls; what
it has to be called for, with and without the streaming and the two-phase group, is built beside the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.plugins import PLUGINS, plugin
from pgsieve.decoding.plugins.driver import PluginDriver, binary_changes, text_changes
from pgsieve.decoding.plugins.interface import (
    DecodingContext,
    MissingCallbackError,
    OutputNotAcceptedError,
    OutputPluginCallbacks,
    OutputPluginError,
    OutputPluginOptions,
    OutputType,
    OutputTypeError,
    Transaction,
)
from pgsieve.decoding.protocol.messages import (
    NULL,
    Begin,
    BeginPrepare,
    Binary,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldKey,
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
    encode,
)

TABLE = Relation(1, "public", "t", "d", (RelationColumn(True, "a", 25, -1),))
STREAM = ("stream_start", "stream_stop", "stream_abort", "stream_commit", "stream_change")
TWO_PHASE = ("begin_prepare", "prepare", "commit_prepared", "rollback_prepared")
OPTIONAL = ("truncate", "message", "stream_message", "stream_truncate", "stream_prepare")
REQUIRED = ("begin", "change", "commit")


def write(ctx: DecodingContext, line: str) -> None:
    ctx.prepare_write(last=True)
    ctx.out += line.encode()
    ctx.write(last=True)


def noted(name: str) -> Callable[..., None]:
    """A callback that writes its name, the transaction, and the change."""

    def callback(ctx: DecodingContext, txn: Transaction | None, *arguments: Any) -> None:
        shown = [name, "-" if txn is None else str(txn.xid)]
        inserted = [argument for argument in arguments if isinstance(argument, Insert)]
        shown += [each.new[0].content.decode() for each in inserted]  # type: ignore[union-attr]
        write(ctx, " ".join(shown))

    return callback


def startup(ctx: DecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
    assert not is_init
    options.output_type = OutputType.TEXT


def registered(*names: str, **more: Any) -> Callable[[], OutputPluginCallbacks]:
    """A plugin with the required callbacks and these."""
    callbacks = {name: noted(name) for name in (*REQUIRED, *names)}
    return lambda: OutputPluginCallbacks(**{"startup": startup, **callbacks, **more})


def calls(init: Callable[[], OutputPluginCallbacks], messages: list[Message]) -> list[str]:
    with PluginDriver(init, parallel=False) as driver:
        return list(text_changes(driver, map(encode, messages)))


# Random sessions


@dataclass
class Session:
    """Messages, and the lines that a plugin writes: by whether it streams and whether it decodes prepares."""

    messages: list[Message] = field(default_factory=list)
    lines: dict[tuple[bool, bool], list[str]] = field(
        default_factory=lambda: {each: [] for each in product([True, False], repeat=2)}
    )


@dataclass
class Unit:
    """Messages that nothing comes between, and their lines."""

    messages: list[Message]
    lines: dict[tuple[bool, bool], list[str]]


def unit(messages: list[Message], lines: Callable[[bool, bool], list[str]]) -> Unit:
    return Unit(messages, {each: lines(*each) for each in product([True, False], repeat=2)})


def changes(xid: int, labels: list[str], prefix: str = "") -> list[str]:
    return [f"{prefix}change {xid} {label}" for label in labels]


def row(label: str, xid: int | None = None) -> Insert:
    return Insert(1, (Text(label.encode()),), xid)


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
    """Blocks with subtransactions, some of them rolled back between blocks."""
    units: list[Unit] = []
    left: list[str] = []
    open_subs: list[tuple[int, int]] = []  # each with the number of changes before it
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
    """Transactions of all kinds, whose units alternate; some never end."""
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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
    with suppress(ProtocolError):  # and nothing else
        calls(init, messages)


PREPARED = (7, 8, 0, 7, "g")
BEGIN, COMMIT = Begin(7, 0, 7), Commit(7, 8, 0)
BLOCK = [StreamStart(7, True), replace(TABLE, xid=7), row("x", 7), StreamStop()]


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
def test_an_order_in_which_no_server_sends_is_refused(
    messages: list[Message], names: tuple[str, ...]
) -> None:
    with pytest.raises(ProtocolError) as refused:
        calls(registered(*names), messages)
    assert refused.value.sqlstate == "08P01"


# Required, optional and group callbacks


@pytest.mark.parametrize("name", REQUIRED)
def test_a_plugin_without_a_required_callback_is_not_loaded(name: str) -> None:
    with pytest.raises(MissingCallbackError, match=f"output plugins have to register a {name} callback"):
        calls(registered(**{name: None}), [])


ENDS: dict[str, list[Message]] = {
    "stream_commit": [StreamCommit(7, 7, 8, 0)],
    "stream_abort": [StreamAbort(7, 7)],
    "stream_prepare": [StreamPrepare(*PREPARED)],
    "begin_prepare": [BeginPrepare(*PREPARED), TABLE, row("x")],
    "prepare": [BeginPrepare(*PREPARED), Prepare(*PREPARED)],
    "commit_prepared": [CommitPrepared(*PREPARED)],
    "rollback_prepared": [RollbackPrepared(7, 8, 0, 0, 7, "g")],
}


@pytest.mark.parametrize("missing", [*STREAM, *TWO_PHASE, "stream_prepare"])
def test_a_group_needs_its_callbacks_when_they_are_called(missing: str) -> None:
    streams = missing.startswith("stream")
    names = [name for name in (*STREAM, *TWO_PHASE) if name != missing]
    what = "streaming" if streams else "replication at prepare time"
    if missing == "stream_prepare":
        what = "streaming at prepare time"
    with pytest.raises(MissingCallbackError, match=f"logical {what} requires a {missing}_cb") as refused:
        calls(registered(*names), [*(BLOCK if streams else []), *ENDS.get(missing, [])])
    assert refused.value.sqlstate == "55000"
    calls(registered(*names), [BEGIN, TABLE, row("x"), COMMIT])  # not before


@pytest.mark.parametrize("names", [STREAM, ()], ids=["stream", "plain"])
def test_an_abort_may_come_for_what_was_never_sent(names: tuple[str, ...]) -> None:
    messages = [StreamAbort(5, 6), StreamAbort(5, 5), *BLOCK, StreamAbort(7, 9), StreamCommit(7, 7, 8, 0)]
    lines = calls(registered(*names), messages)
    assert lines == (
        ["stream_start 7", "stream_change 7 x", "stream_stop 7", "stream_abort 9", "stream_commit 7"]
        if names
        else ["begin 7", "change 7 x", "commit 7"]
    )


def test_optional_callbacks_may_be_missing() -> None:
    emptied, emitted = Truncate((1,), False, False), LogicalMessage(True, 1, "p", b"")
    messages = [BEGIN, TABLE, emptied, emitted, COMMIT, LogicalMessage(False, 1, "p", b"")]
    assert calls(registered(), messages) == ["begin 7", "commit 7"]
    block = [*BLOCK[:2], replace(emptied, xid=7), replace(emitted, xid=7), StreamStop()]
    assert calls(registered(*STREAM), block) == ["stream_start 7", "stream_stop 7"]
    assert calls(registered(*STREAM, *OPTIONAL), block)[1:-1] == ["stream_truncate 7", "stream_message 7"]
    assert calls(registered(*OPTIONAL[:2]), messages)[1:3] == ["truncate 7", "message 7"]


def test_startup_turns_groups_off() -> None:
    def quiet(ctx: DecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        startup(ctx, options, is_init)
        ctx.streaming = ctx.two_phase = False

    init = registered(*STREAM, *TWO_PHASE, startup=quiet)
    messages = [*BLOCK, StreamPrepare(*PREPARED), CommitPrepared(*PREPARED)]
    assert calls(init, messages) == ["begin 7", "change 7 x", "commit 7"]


def test_a_prepare_that_was_not_read_is_an_error_for_a_plugin_that_needs_it() -> None:
    with pytest.raises(OutputPluginError, match="transaction 7 was prepared before") as refused:
        calls(registered(), [CommitPrepared(*PREPARED)])
    assert refused.value.sqlstate == "55000"
    assert calls(registered(*TWO_PHASE), [CommitPrepared(*PREPARED)]) == ["commit_prepared 7"]
    assert calls(registered(), [RollbackPrepared(7, 8, 0, 0, 7, "g")]) == []


def test_a_prepare_without_its_begin_is_an_empty_transaction() -> None:
    messages = [Prepare(*PREPARED), CommitPrepared(*PREPARED)]
    assert calls(registered(), messages) == ["begin 7", "commit 7"]
    assert calls(registered(*TWO_PHASE), messages) == ["begin_prepare 7", "prepare 7", "commit_prepared 7"]
    rolled_back = [Prepare(*PREPARED), RollbackPrepared(7, 8, 0, 0, 7, "g")]
    assert calls(registered(), rolled_back) == []


def test_filter_prepare_puts_a_transaction_off_to_its_commit() -> None:
    messages = [BeginPrepare(*PREPARED), TABLE, row("x"), Prepare(*PREPARED), CommitPrepared(*PREPARED)]
    prepared = []

    def refuses(ctx: DecodingContext, xid: int, gid: str) -> bool:
        prepared.append((xid, gid))
        return True

    init = registered(*TWO_PHASE, filter_prepare=refuses)
    assert calls(init, messages) == ["begin 7", "change 7 x", "commit 7"]
    assert set(prepared) == {(7, "g")}


def test_what_comes_from_elsewhere_can_be_left_out() -> None:
    origins: list[str | None] = []

    def refuses(ctx: DecodingContext, origin: str | None) -> bool:
        origins.append(origin)
        return origin is not None

    names = (*STREAM, *TWO_PHASE, "stream_prepare")
    far = Origin(1, "far")
    local = [BEGIN, TABLE, row("x"), COMMIT]
    for messages in (
        [BEGIN, far, TABLE, row("x"), COMMIT],
        [BeginPrepare(*PREPARED), far, TABLE, row("x"), Prepare(*PREPARED), CommitPrepared(*PREPARED)],
        [BeginPrepare(*PREPARED), far, Prepare(*PREPARED), RollbackPrepared(7, 8, 0, 0, 7, "g")],
        [BLOCK[0], far, *BLOCK[1:], StreamStart(7, False), row("y", 7), StreamStop(), StreamAbort(7, 7)],
        [BLOCK[0], far, *BLOCK[1:], StreamCommit(7, 7, 8, 0)],
        [BLOCK[0], far, *BLOCK[1:], StreamPrepare(*PREPARED), CommitPrepared(*PREPARED)],
    ):
        for init in (
            registered(*names, filter_by_origin=refuses),
            registered(filter_by_origin=refuses),
            registered(*TWO_PHASE, filter_by_origin=refuses),
        ):
            assert calls(init, [*messages, *local]) == ["begin 7", "change 7 x", "commit 7"]
    assert set(origins) == {"far", None}


# Output


def test_writes_are_accepted_in_callbacks_of_transactions_only() -> None:
    def writes(ctx: DecodingContext, *_: Any) -> bool:
        write(ctx, "x")
        return False

    for names in (
        {"startup": writes},
        {"filter_by_origin": writes},
        {"filter_prepare": writes},
        {"shutdown": writes},
    ):
        with pytest.raises(OutputNotAcceptedError, match="writes are only accepted in"):
            calls(
                registered(*TWO_PHASE, **names),
                [BEGIN, COMMIT, BeginPrepare(*PREPARED), Prepare(*PREPARED)],
            )


@pytest.mark.parametrize("prepared_with", [None, False])
def test_a_write_has_to_be_prepared(prepared_with: bool | None) -> None:
    def writes(ctx: DecodingContext, *_: Any) -> None:
        if prepared_with is not None:
            ctx.prepare_write(last=prepared_with)
        ctx.write(last=True)

    with pytest.raises(OutputNotAcceptedError, match="OutputPluginPrepareWrite needs to be called before"):
        calls(registered(begin=writes), [BEGIN, COMMIT])


def test_one_callback_may_write_several_times() -> None:
    def writes(ctx: DecodingContext, *_: Any) -> None:
        for last in (False, True):
            ctx.prepare_write(last=last)
            ctx.out += b"x"
            ctx.write(last=last)

    with PluginDriver(registered(begin=writes)) as driver:
        outputs = [output for message in (BEGIN, COMMIT) for output in driver.feed(encode(message))]
    assert [(output.data, output.last) for output in outputs] == [
        (b"x", False),
        (b"x", True),
        (b"commit 7", True),
    ]


def test_text_is_asked_of_a_plugin_that_writes_text() -> None:
    with PluginDriver(registered(startup=None)) as driver:
        with pytest.raises(OutputTypeError, match="produces binary output") as refused:
            list(text_changes(driver, []))
        assert refused.value.sqlstate == "0A000"
        assert list(binary_changes(driver, map(encode, [BEGIN, COMMIT]))) == [b"begin 7", b"commit 7"]


def test_values_in_binary_format_are_refused_by_plugins_that_write_text() -> None:
    messages = [BEGIN, TABLE, Insert(1, (Binary(b"s3cr3t"),)), COMMIT]
    for name in ("json", "test_decoding"):
        with pytest.raises(
            OutputTypeError, match='column "a" of relation "t" is in binary format'
        ) as refused:
            calls(plugin(name), messages)
        assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("name", ["json", "test_decoding"])
def test_text_that_is_not_utf8_is_refused_without_showing_it(name: str) -> None:
    with pytest.raises(OutputTypeError) as refused:
        calls(plugin(name), [BEGIN, TABLE, Insert(1, (Text(b"s3cr3t\xff"),)), COMMIT])
    assert (refused.value.sqlstate, refused.value.__cause__) == ("22021", None)
    assert "s3cr3t" not in str(refused.value)


def test_a_plugin_that_there_is_not_is_an_error_that_lists_those_that_there_are() -> None:
    with pytest.raises(OutputPluginError, match='output plugin "wal2json" does not exist') as refused:
        plugin("wal2json")
    assert refused.value.hint == f"plugins: {', '.join(PLUGINS)}"


def test_a_schema_of_a_stream_is_the_streams_until_it_commits() -> None:
    def named(ctx: DecodingContext, txn: Transaction, relation: Any, change: Any) -> None:
        write(ctx, f"{relation.message.name} {relation.type_names}")

    init = registered(*STREAM, change=named, stream_change=named)
    other = replace(TABLE, name="other", columns=(RelationColumn(True, "a", 16400, -1),), xid=9)
    typed = Type(16400, "s", "Mood", 9)
    block: list[Message] = [StreamStart(9, True), typed, other, row("x", 9), StreamStop()]
    begun: list[Message] = [BEGIN, TABLE, row("x"), COMMIT]
    for end, name in (
        (StreamCommit(9, 9, 10, 0), "other ('s.\"Mood\"',)"),
        (StreamAbort(9, 9), "t ('text',)"),
    ):
        messages = [*begun, *block, BEGIN, row("x"), COMMIT, end, BEGIN, row("x"), COMMIT]
        lines = [line for line in calls(init, messages) if line.endswith(")")]
        assert lines == ["t ('text',)", "other ('s.\"Mood\"',)", "t ('text',)", name]


@pytest.mark.parametrize(("version", "framed"), [(160000, False), (170000, True)])
def test_messages_count_as_changes_since_17(version: int, framed: bool) -> None:
    emitted = LogicalMessage(True, 1, "p", b"hi")
    block = [BLOCK[0], replace(emitted, xid=7), StreamStop(), StreamCommit(7, 7, 8, 0)]
    options = [("skip-empty-xacts", "on"), ("stream-changes", "on")]
    with PluginDriver(plugin("test_decoding"), options, server_version=version) as driver:
        lines = list(text_changes(driver, map(encode, [BEGIN, emitted, COMMIT, *block])))
    message = "message: transactional: 1 prefix: p, sz: 2"
    begun = ["BEGIN 7", f"{message} content:hi", "COMMIT 7"]
    opened = [
        "opening a streamed block for transaction TXN 7",
        f"streaming {message}",
        "closing a streamed block for transaction TXN 7",
        "committing streamed transaction TXN 7",
    ]
    assert lines == ([*begun, *opened] if framed else [begun[1], opened[1]])
