"""The rules of the output plugin interface: callbacks and their output. Another module compares test_decoding with the server's."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

import pytest

from pgsieve.decoding.plugins import PLUGINS, find_plugin
from pgsieve.decoding.plugins.driver import PluginDriver, read_binary_changes, read_text_changes
from pgsieve.decoding.plugins.interface import (
    DecodingContext,
    MissingCallbackError,
    OutputNotAcceptedError,
    OutputPluginError,
    OutputPluginOptions,
    OutputTypeError,
    Transaction,
)
from pgsieve.decoding.protocol.messages import (
    BeginPrepare,
    Binary,
    CommitPrepared,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
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
    encode,
)
from tests.fixtures.noted_plugin import (
    BEGIN,
    BLOCK,
    COMMIT,
    OPTIONAL,
    PREPARED,
    REQUIRED,
    STREAM,
    TABLE,
    TWO_PHASE,
    calls,
    registered,
    row,
    startup,
    write,
)

# required, optional and group callbacks


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
    calls(registered(*names), [BEGIN, TABLE, row("x"), COMMIT])  # no error yet


@pytest.mark.parametrize("names", [STREAM, ()], ids=["stream", "plain"])
def test_an_abort_may_come_for_an_unsent_transaction(names: tuple[str, ...]) -> None:
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


def test_an_unread_prepare_is_an_error_for_a_plugin_that_needs_it() -> None:
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


def test_filter_prepare_delays_a_transaction_to_its_commit() -> None:
    messages = [BeginPrepare(*PREPARED), TABLE, row("x"), Prepare(*PREPARED), CommitPrepared(*PREPARED)]
    prepared = []

    def refuses(ctx: DecodingContext, xid: int, gid: str) -> bool:
        prepared.append((xid, gid))
        return True

    init = registered(*TWO_PHASE, filter_prepare=refuses)
    assert calls(init, messages) == ["begin 7", "change 7 x", "commit 7"]
    assert set(prepared) == {(7, "g")}


def test_changes_of_another_origin_can_be_left_out() -> None:
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
def test_a_write_must_be_prepared(prepared_with: bool | None) -> None:
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
        outputs = [output for message in (BEGIN, COMMIT) for output in driver.pass_message(encode(message))]
    assert [(output.data, output.last) for output in outputs] == [
        (b"x", False),
        (b"x", True),
        (b"commit 7", True),
    ]


def test_a_text_plugin_writes_text() -> None:
    with PluginDriver(registered(startup=None)) as driver:
        with pytest.raises(OutputTypeError, match="produces binary output") as refused:
            list(read_text_changes(driver, []))
        assert refused.value.sqlstate == "0A000"
        assert list(read_binary_changes(driver, map(encode, [BEGIN, COMMIT]))) == [b"begin 7", b"commit 7"]


def test_values_in_binary_format_are_refused_by_plugins_that_write_text() -> None:
    messages = [BEGIN, TABLE, Insert(1, (Binary(b"s3cr3t"),)), COMMIT]
    for name in ("json", "test_decoding"):
        with pytest.raises(
            OutputTypeError, match='column "a" of relation "t" is in binary format'
        ) as refused:
            calls(find_plugin(name), messages)
        assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("name", ["json", "test_decoding"])
def test_text_that_is_not_utf8_is_refused_without_showing_it(name: str) -> None:
    with pytest.raises(OutputTypeError) as refused:
        calls(find_plugin(name), [BEGIN, TABLE, Insert(1, (Text(b"s3cr3t\xff"),)), COMMIT])
    assert (refused.value.sqlstate, refused.value.__cause__) == ("22021", None)
    assert "s3cr3t" not in str(refused.value)


def test_an_unknown_plugin_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(OutputPluginError, match='output plugin "wal2json" does not exist') as refused:
        find_plugin("wal2json")
    assert refused.value.hint == f"plugins: {', '.join(PLUGINS)}"


def test_a_description_in_a_stream_is_only_the_streams_until_it_commits() -> None:
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
    with PluginDriver(find_plugin("test_decoding"), options, server_version=version) as driver:
        lines = list(read_text_changes(driver, map(encode, [BEGIN, emitted, COMMIT, *block])))
    message = "message: transactional: 1 prefix: p, sz: 2"
    begun = ["BEGIN 7", f"{message} content:hi", "COMMIT 7"]
    opened = [
        "opening a streamed block for transaction TXN 7",
        f"streaming {message}",
        "closing a streamed block for transaction TXN 7",
        "committing streamed transaction TXN 7",
    ]
    assert lines == ([*begun, *opened] if framed else [begun[1], opened[1]])


def test_a_name_that_is_not_utf_8_is_written_as_the_server_sent_it_or_refused() -> None:
    messages = [BEGIN, replace(TABLE, name="caf\udce9"), row("s3cr3t"), COMMIT]
    with PluginDriver(find_plugin("test_decoding")) as driver:
        lines = list(read_binary_changes(driver, map(encode, messages)))
    assert b"table public.\"caf\xe9\": INSERT: a[text]:'s3cr3t'" in lines
    with pytest.raises(OutputTypeError, match="not UTF-8") as caught:
        calls(find_plugin("json"), messages)
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
