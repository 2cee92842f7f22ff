"""The interface of logical decoding output plugins, as Python callables.

An output plugin is a function without arguments that returns its `OutputPluginCallbacks`. This dataclass
corresponds to the struct that _PG_output_plugin_init fills, with None for NULL. Each callback gets the
`DecodingContext`, to which it writes; most callbacks also get the `Transaction`.
`pgsieve.decoding.plugins.driver` calls them in this order:

- startup, once; shutdown, once at the end;
- for a transaction: begin, (change | truncate | message)*, commit;
- for a prepared transaction: begin_prepare, (change | truncate | message)*, prepare, and later
  commit_prepared or rollback_prepared;
- for a streamed transaction: blocks of stream_start, (stream_change | stream_truncate | stream_message)*,
  stream_stop, and after the last block stream_commit, stream_prepare or stream_abort. Blocks of several
  transactions can alternate; stream_abort of a subtransaction comes between blocks;
- message without a transaction, for a message that is not transactional;
- filter_by_origin before a transaction begins, filter_prepare before it is prepared.

A plugin must have begin, change and commit. A plugin with any callback of the streaming group, or of the two-phase
group, turns this group on; then it needs the group's required callbacks when they are called. Raises
subclasses of OutputPluginError, with the server's messages and codes
(src/backend/replication/logical/logical.c).

PostgreSQL documentation, Logical Decoding Output Plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.protocol.messages import Delete, Insert, LogicalMessage, Truncate, Update
from pgsieve.decoding.protocol.relations import PublishedRelation


class OutputPluginError(PgsieveError):
    """An output plugin cannot be loaded, or breaks a rule of the interface."""


class MissingCallbackError(OutputPluginError):
    """The plugin lacks a required callback."""


class OutputPluginOptionError(OutputPluginError):
    """The plugin does not have an option, or the option does not accept a value."""


class OutputNotAcceptedError(OutputPluginError):
    """A plugin wrote at a time when the interface does not allow it."""


class OutputTypeError(OutputPluginError):
    """A plugin writes binary output instead of text, or cannot print a value."""


class OutputType(Enum):
    """The type of a plugin's output: text in the encoding of the values, or any bytes."""

    BINARY = "binary"
    TEXT = "text"


@dataclass(slots=True)
class OutputPluginOptions:
    """The options that the startup callback may set.

    `receive_rewrites` has no effect, because pgoutput does not send rewrites of tables.
    """

    output_type: OutputType = OutputType.BINARY
    receive_rewrites: bool = False


@dataclass(slots=True)
class Transaction:
    """The properties of a transaction (ReorderBufferTXN); an LSN or time that is not known yet is 0.

    `final_lsn` is the position of the commit or prepare record, `end_lsn` the position after this record.
    Times are microseconds since 2000-01-01. The plugin may keep its state in `output_plugin_private`.
    `toptxn` is the top-level transaction of a subtransaction.
    """

    xid: int
    final_lsn: int = 0
    end_lsn: int = 0
    prepare_time: int = 0
    commit_time: int = 0
    abort_time: int = 0
    gid: str = ""
    origin: str | None = None
    origin_lsn: int = 0
    toptxn: Transaction | None = None
    output_plugin_private: Any = None


@dataclass(frozen=True, slots=True)
class Output:
    """One write of a plugin; `last` is false if the same callback will write more."""

    data: bytes
    last: bool


class DecodingContext:
    """The context of a plugin's calls (LogicalDecodingContext).

    `output_plugin_options` has the client's names and values. `streaming` and `two_phase` say whether these
    groups of callbacks are on; startup may turn them off. The plugin behaves as on a server of
    `server_version`, a number like server_version_num.
    """

    def __init__(
        self,
        output_plugin_options: Sequence[tuple[str, str | None]],
        *,
        streaming: bool,
        two_phase: bool,
        server_version: int,
    ) -> None:
        self.output_plugin_options = tuple(output_plugin_options)
        self.options = OutputPluginOptions()
        self.streaming = streaming
        self.two_phase = two_phase
        self.server_version = server_version
        self.out = bytearray()
        self.accept_writes = False
        self._prepared_write: bool | None = None
        self._output: list[Output] = []

    def prepare_write(self, *, last: bool) -> None:
        """Empty `out`; the plugin fills it and then calls `write` (OutputPluginPrepareWrite)."""
        if not self.accept_writes:
            raise OutputNotAcceptedError(
                "writes are only accepted in commit, begin and change callbacks", sqlstate="XX000"
            )
        self.out.clear()
        self._prepared_write = last

    def write(self, *, last: bool) -> None:
        """Write the contents of `out`; `last` is the same as in `prepare_write` (OutputPluginWrite)."""
        if self._prepared_write is not last:
            raise OutputNotAcceptedError(
                "OutputPluginPrepareWrite needs to be called before OutputPluginWrite",
                hint="call prepare_write before each write, with the same `last`",
                sqlstate="XX000",
            )
        self._output.append(Output(bytes(self.out), last))
        self._prepared_write = None

    def take_output(self) -> list[Output]:
        """Remove and return the output since the last call."""
        output, self._output = self._output, []
        return output


Change: TypeAlias = Insert | Update | Delete
StartupCallback: TypeAlias = Callable[[DecodingContext, OutputPluginOptions, bool], None]
ContextCallback: TypeAlias = Callable[[DecodingContext], None]
TransactionCallback: TypeAlias = Callable[[DecodingContext, Transaction], None]
LsnCallback: TypeAlias = Callable[[DecodingContext, Transaction, int], None]
ChangeCallback: TypeAlias = Callable[[DecodingContext, Transaction, PublishedRelation, Change], None]
TruncateCallback: TypeAlias = Callable[
    [DecodingContext, Transaction, Sequence[PublishedRelation], Truncate], None
]
MessageCallback: TypeAlias = Callable[[DecodingContext, Transaction | None, LogicalMessage], None]
StreamedMessageCallback: TypeAlias = Callable[[DecodingContext, Transaction, LogicalMessage], None]
FilterByOriginCallback: TypeAlias = Callable[[DecodingContext, str | None], bool]
FilterPrepareCallback: TypeAlias = Callable[[DecodingContext, int, str], bool]
RollbackPreparedCallback: TypeAlias = Callable[[DecodingContext, Transaction, int, int], None]

_REQUIRED_CALLBACKS = ("begin", "change", "commit")
_STREAMING_CALLBACKS = (
    "stream_start",
    "stream_stop",
    "stream_abort",
    "stream_commit",
    "stream_change",
    "stream_message",
    "stream_truncate",
)
_TWO_PHASE_CALLBACKS = (
    "begin_prepare",
    "prepare",
    "commit_prepared",
    "rollback_prepared",
    "stream_prepare",
    "filter_prepare",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPluginCallbacks:
    """The callbacks of a plugin, with the arguments of the documentation's typedefs.

    A callback gets a message object where the typedef lists the message's parts. `filter_by_origin` gets the
    name of the origin, or None for local changes; it returns true to drop a transaction. `filter_prepare`
    returns true to decode a prepared transaction only when it commits.
    """

    begin: TransactionCallback
    change: ChangeCallback
    commit: LsnCallback
    startup: StartupCallback | None = None
    shutdown: ContextCallback | None = None
    truncate: TruncateCallback | None = None
    message: MessageCallback | None = None
    filter_by_origin: FilterByOriginCallback | None = None
    filter_prepare: FilterPrepareCallback | None = None
    begin_prepare: TransactionCallback | None = None
    prepare: LsnCallback | None = None
    commit_prepared: LsnCallback | None = None
    rollback_prepared: RollbackPreparedCallback | None = None
    stream_start: TransactionCallback | None = None
    stream_stop: TransactionCallback | None = None
    stream_abort: LsnCallback | None = None
    stream_prepare: LsnCallback | None = None
    stream_commit: LsnCallback | None = None
    stream_change: ChangeCallback | None = None
    stream_message: StreamedMessageCallback | None = None
    stream_truncate: TruncateCallback | None = None

    def __post_init__(self) -> None:
        for name in _REQUIRED_CALLBACKS:
            if getattr(self, name) is None:
                raise MissingCallbackError(
                    f"output plugins have to register a {name} callback", sqlstate="XX000"
                )

    @property
    def streaming(self) -> bool:
        """Whether the plugin has a streaming callback, and so receives transactions in progress."""
        return any(getattr(self, name) is not None for name in _STREAMING_CALLBACKS)

    @property
    def two_phase(self) -> bool:
        """Whether the plugin has a two-phase callback, and so decodes transactions when they are prepared."""
        return any(getattr(self, name) is not None for name in _TWO_PHASE_CALLBACKS)


OutputPluginInit: TypeAlias = Callable[[], OutputPluginCallbacks]
