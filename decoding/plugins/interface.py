"""The interface of logical decoding output plugins, as Python callables.

An output plugin is a function without arguments that returns its `OutputPluginCallbacks`. This dataclass
corresponds to the struct that _PG_output_plugin_init fills, with None for NULL. Each callback gets the
`DecodingContext` and writes its output to it. Most callbacks also get the `Transaction`.
`pgsieve.decoding.plugins.driver` reads pgoutput's messages, and calls the callbacks in this order:

- startup, once at the beginning; shutdown, once at the end
- for a transaction: begin, (change | truncate | message)*, commit
- for a prepared transaction: begin_prepare, (change | truncate | message)*, prepare, and later
  commit_prepared or rollback_prepared
- for each block of a streamed transaction: stream_start, (stream_change | stream_truncate | stream_message)*,
  stream_stop. Blocks of several transactions can alternate. stream_abort of a subtransaction comes between blocks.
- after the last block of a streamed transaction: stream_commit, stream_prepare or stream_abort
- for a message that is not transactional: message, without a transaction
- filter_by_origin before a transaction begins, filter_prepare before a transaction is prepared

A plugin must have begin, change and commit. The callbacks for streaming and those for two-phase commit are two
groups. If a plugin has any callback of a group, the group is on. If the plugin lacks a callback that the group
requires, the error is raised only when the driver has to call it. All errors are subclasses of OutputPluginError, with
the server's messages and codes (src/backend/replication/logical/logical.c).

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
    """A plugin lacks a callback that every plugin of its kind needs."""


class OutputPluginOptionError(OutputPluginError):
    """A plugin does not have the option that a client set, or the option does not accept the value."""


class OutputNotAcceptedError(OutputPluginError):
    """A plugin wrote at a time when the interface does not allow it."""


class OutputTypeError(OutputPluginError):
    """A plugin writes binary output instead of text, or cannot print a value."""


class OutputType(Enum):
    """The type of a plugin's output: text in the encoding in which the values were sent, or any bytes."""

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

    - `final_lsn` is the position of the commit or prepare record, and `end_lsn` the position after this record.
    - Times are microseconds since 2000-01-01.
    - `toptxn` is the top-level transaction of a subtransaction.
    - `output_plugin_private` belongs to the plugin, which may keep its state of the transaction in it.
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
    """The bytes of one write of a plugin; `last` is false if the same callback will write again."""

    data: bytes
    last: bool


class DecodingContext:
    """The first argument of each callback: the plugin's options and its output (LogicalDecodingContext).

    - `output_plugin_options` has the names and values of the options that the client set.
    - `streaming` and `two_phase` say whether these groups of callbacks are on. The startup callback may turn them off.
    - `server_version` is a number like server_version_num. The plugin writes what a server of this version would
      write.
    - `out` has the bytes of the next write.
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
        self.can_write = False
        self._last_of_prepared_write: bool | None = None
        self._output: list[Output] = []

    def prepare_write(self, *, last: bool) -> None:
        """Empty `out`. The plugin then fills `out`, and calls `write` (OutputPluginPrepareWrite)."""
        if not self.can_write:
            raise OutputNotAcceptedError(
                "writes are only accepted in commit, begin and change callbacks", sqlstate="XX000"
            )
        self.out.clear()
        self._last_of_prepared_write = last

    def write(self, *, last: bool) -> None:
        """Write the contents of `out`; `last` must be the same as in `prepare_write` (OutputPluginWrite)."""
        if self._last_of_prepared_write is not last:
            raise OutputNotAcceptedError(
                "OutputPluginPrepareWrite needs to be called before OutputPluginWrite",
                hint="call prepare_write before each write, with the same `last`",
                sqlstate="XX000",
            )
        self._output.append(Output(bytes(self.out), last))
        self._last_of_prepared_write = None

    def take_output(self) -> list[Output]:
        """Return the output since the last call of this method, and remove it."""
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
    """The callbacks of a plugin, with the arguments that the typedefs in PostgreSQL's documentation have.

    - Where a typedef lists the parts of a message, the callback gets the message as one object.
    - `startup` gets a third argument, `is_init`. It is true while the slot is being created.
    - `filter_by_origin` gets the name of the origin, or None for local changes. It returns true to drop a
      transaction.
    - `filter_prepare` returns true to decode a prepared transaction only when the transaction commits.
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
        """Whether the plugin has a callback for streaming, and so gets transactions while they are in progress."""
        return any(getattr(self, name) is not None for name in _STREAMING_CALLBACKS)

    @property
    def two_phase(self) -> bool:
        """Whether the plugin has a callback for two-phase commit, and so gets transactions at PREPARE TRANSACTION."""
        return any(getattr(self, name) is not None for name in _TWO_PHASE_CALLBACKS)


OutputPluginInit: TypeAlias = Callable[[], OutputPluginCallbacks]
