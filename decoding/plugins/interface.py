"""The interface of logical decoding output plugins (PostgreSQL documentation 49.6), as Python callables.

An output plugin is a function without arguments that returns its `OutputPluginCallbacks`. This frozen
dataclass stands for the struct that _PG_output_plugin_init fills, with None for NULL. Each callback gets the
`DecodingContext`, through which it writes; most callbacks also get the `Transaction`.
`pgsieve.decoding.plugins.driver` calls them in this order:

- startup, once; shutdown, once at the end;
- for a transaction: begin, (change | truncate | message)*, commit;
- for a prepared transaction: begin_prepare, (change | truncate | message)*, prepare, and later
  commit_prepared or rollback_prepared;
- for a streamed transaction: blocks of stream_start, (stream_change | stream_truncate | stream_message)*,
  stream_stop, and after the last block stream_commit, stream_prepare or stream_abort. Blocks of several
  transactions may alternate; stream_abort of a subtransaction comes between blocks;
- message without a transaction, for a message that is not transactional;
- filter_by_origin before a transaction begins, filter_prepare before it is prepared.

begin, change and commit are required. A plugin with any callback of the streaming or of the two-phase group
turns the group on; then the group's required callbacks must exist when they are called. Raises subclasses of
OutputPluginError, with the server's messages and codes (src/backend/replication/logical/logical.c).
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
    """An output plugin that cannot be loaded, or that breaks a rule of the interface."""


class MissingCallbackError(OutputPluginError):
    """A callback that the plugin has to have."""


class OutputPluginOptionError(OutputPluginError):
    """An option that the plugin does not have, or a value that the option does not take."""


class OutputNotAcceptedError(OutputPluginError):
    """A plugin wrote at a time when the interface does not allow it."""


class OutputTypeError(OutputPluginError):
    """Binary output instead of text, or values that a plugin cannot print."""


class OutputType(Enum):
    """The kind of output: text in the encoding of the values, or any bytes."""

    BINARY = "binary"
    TEXT = "text"


@dataclass(slots=True)
class OutputPluginOptions:
    """The options that startup may set.

    `receive_rewrites` has no effect, as pgoutput sends no rewrites of tables.
    """

    output_type: OutputType = OutputType.BINARY
    receive_rewrites: bool = False


@dataclass(slots=True)
class Transaction:
    """The properties of a transaction (ReorderBufferTXN); LSNs and times that are not known yet are 0.

    `final_lsn` is the record of the commit or prepare, `end_lsn` the position after it. Times are
    microseconds since 2000-01-01. `output_plugin_private` is for the plugin's own use. `toptxn` is set for a
    subtransaction.
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
    """A plugin's context (LogicalDecodingContext).

    `output_plugin_options` are the client's names and values. `streaming` and `two_phase` say whether these
    groups of callbacks are on; startup may turn them off. `server_version` is the version whose behaviour is
    wanted, as in server_version_num.
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
        self._written: list[Output] = []

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
        self._written.append(Output(bytes(self.out), last))
        self._prepared_write = None

    def take_written(self) -> list[Output]:
        """Return the output since the last call."""
        written, self._written = self._written, []
        return written


Change: TypeAlias = Insert | Update | Delete
Startup: TypeAlias = Callable[[DecodingContext, OutputPluginOptions, bool], None]
OfContext: TypeAlias = Callable[[DecodingContext], None]
OfTransaction: TypeAlias = Callable[[DecodingContext, Transaction], None]
AtLsn: TypeAlias = Callable[[DecodingContext, Transaction, int], None]
OfChange: TypeAlias = Callable[[DecodingContext, Transaction, PublishedRelation, Change], None]
OfTruncate: TypeAlias = Callable[[DecodingContext, Transaction, Sequence[PublishedRelation], Truncate], None]
OfMessage: TypeAlias = Callable[[DecodingContext, Transaction | None, LogicalMessage], None]
OfStreamedMessage: TypeAlias = Callable[[DecodingContext, Transaction, LogicalMessage], None]
FilterByOrigin: TypeAlias = Callable[[DecodingContext, str | None], bool]
FilterPrepare: TypeAlias = Callable[[DecodingContext, int, str], bool]
AtPrepareEnd: TypeAlias = Callable[[DecodingContext, Transaction, int, int], None]

_REQUIRED = ("begin", "change", "commit")
_STREAMING = (
    "stream_start",
    "stream_stop",
    "stream_abort",
    "stream_commit",
    "stream_change",
    "stream_message",
    "stream_truncate",
)
_TWO_PHASE = (
    "begin_prepare",
    "prepare",
    "commit_prepared",
    "rollback_prepared",
    "stream_prepare",
    "filter_prepare",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPluginCallbacks:
    """The callbacks of a plugin; their arguments are those of the manual's typedefs.

    If a typedef has the parts of a message, the callback gets the message instead. `filter_by_origin` gets
    the origin's name, or None for local changes. `filter_by_origin` and `filter_prepare` return true for
    changes to leave out.
    """

    begin: OfTransaction
    change: OfChange
    commit: AtLsn
    startup: Startup | None = None
    shutdown: OfContext | None = None
    truncate: OfTruncate | None = None
    message: OfMessage | None = None
    filter_by_origin: FilterByOrigin | None = None
    filter_prepare: FilterPrepare | None = None
    begin_prepare: OfTransaction | None = None
    prepare: AtLsn | None = None
    commit_prepared: AtLsn | None = None
    rollback_prepared: AtPrepareEnd | None = None
    stream_start: OfTransaction | None = None
    stream_stop: OfTransaction | None = None
    stream_abort: AtLsn | None = None
    stream_prepare: AtLsn | None = None
    stream_commit: AtLsn | None = None
    stream_change: OfChange | None = None
    stream_message: OfStreamedMessage | None = None
    stream_truncate: OfTruncate | None = None

    def __post_init__(self) -> None:
        for name in _REQUIRED:
            if getattr(self, name) is None:
                raise MissingCallbackError(
                    f"output plugins have to register a {name} callback", sqlstate="XX000"
                )

    @property
    def streaming(self) -> bool:
        """Whether the plugin streams transactions in progress: it has a callback of the streaming group."""
        return any(getattr(self, name) is not None for name in _STREAMING)

    @property
    def two_phase(self) -> bool:
        """Whether the plugin decodes transactions when they are prepared: it has a two-phase callback."""
        return any(getattr(self, name) is not None for name in _TWO_PHASE)


OutputPluginInit: TypeAlias = Callable[[], OutputPluginCallbacks]
