"""The interface of logical decoding output plugins (PostgreSQL documentation 49.6), as Python callables.

An output plugin is a function without arguments that returns its `OutputPluginCallbacks`. The struct that
_PG_output_plugin_init fills is a frozen dataclass here, and its NULLs are None. Each callback gets the
`DecodingContext`, through which it writes, and most of them the `Transaction`.
`pgsieve.decoding.plugins.driver` calls them:

- startup, once; shutdown, once at the end;
- per transaction begin, (change | truncate | message)*, commit;
- or begin_prepare, (change | truncate | message)*, prepare, and later, alone, commit_prepared or
  rollback_prepared;
- or blocks of stream_start, (stream_change | stream_truncate | stream_message)*, stream_stop, which may
  alternate with those of other transactions, and after them stream_commit, stream_prepare or stream_abort;
  stream_abort of a subtransaction comes between blocks;
- message without a transaction, for a message that is not transactional;
- filter_by_origin before a transaction begins, filter_prepare before it is prepared.

begin, change and commit are required. Having any callback of the streaming or the two-phase group turns the
group on; then its required callbacks must exist when they are called. Raises OutputPluginError subclasses,
worded and coded as the server does (src/backend/replication/logical/logical.c).
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
    """An output plugin that cannot be loaded, or that does what the interface does not allow."""


class MissingCallbackError(OutputPluginError):
    """A callback that the plugin has to have."""


class OutputPluginOptionError(OutputPluginError):
    """An option that the plugin does not have, or a value that the option does not take."""


class OutputNotAcceptedError(OutputPluginError):
    """A write where the interface does not allow one."""


class OutputTypeError(OutputPluginError):
    """Binary output where text is expected, or values that a plugin cannot print."""


class OutputType(Enum):
    """Whether the output is text, in the encoding of the values, or any bytes."""

    BINARY = "binary"
    TEXT = "text"


@dataclass(slots=True)
class OutputPluginOptions:
    """The options that startup may set. pgoutput's stream has no rewrites, so `receive_rewrites` changes nothing."""

    output_type: OutputType = OutputType.BINARY
    receive_rewrites: bool = False


@dataclass(slots=True)
class Transaction:
    """The properties of a transaction (ReorderBufferTXN); LSNs and times that are not known yet are 0.

    `final_lsn` is the record of the commit or prepare, `end_lsn` the position after it. Times are
    microseconds since 2000-01-01. `output_plugin_private` is the plugin's. `toptxn` is set for a
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
    """One write of a plugin; `last` unless the same callback will write more."""

    data: bytes
    last: bool


class DecodingContext:
    """A plugin's context (LogicalDecodingContext).

    `output_plugin_options` are the client's names and values. `streaming` and `two_phase` say whether the
    groups of callbacks are on: startup may turn them off. `server_version` is that of the server whose
    behaviour is wanted, as in server_version_num.
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
        """Empty `out`, to be filled and then written (OutputPluginPrepareWrite)."""
        if not self.accept_writes:
            raise OutputNotAcceptedError(
                "writes are only accepted in commit, begin and change callbacks", sqlstate="XX000"
            )
        self.out.clear()
        self._prepared_write = last

    def write(self, *, last: bool) -> None:
        """Hand over the contents of `out`, with the `last` that it was prepared with (OutputPluginWrite)."""
        if self._prepared_write is not last:
            raise OutputNotAcceptedError(
                "OutputPluginPrepareWrite needs to be called before OutputPluginWrite",
                hint="call prepare_write before each write, with the same `last`",
                sqlstate="XX000",
            )
        self._written.append(Output(bytes(self.out), last))
        self._prepared_write = None

    def take_written(self) -> list[Output]:
        """The output since the last call."""
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
    """The callbacks of a plugin; arguments are those of the manual's typedefs.

    Where those name a message's parts, the message itself is the argument. `filter_by_origin` gets the
    origin's name, None for local changes. It and `filter_prepare` return true for changes to leave out.
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
        """Whether the plugin streams transactions in progress: it has a callback of that group."""
        return any(getattr(self, name) is not None for name in _STREAMING)

    @property
    def two_phase(self) -> bool:
        """Whether the plugin decodes transactions when they are prepared."""
        return any(getattr(self, name) is not None for name in _TWO_PHASE)


OutputPluginInit: TypeAlias = Callable[[], OutputPluginCallbacks]
